"""Every rank casts a vote of its own, on whole parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_dlion.codec import codec_for
from hf_dlion.codec.layout import MessageLayout
from hf_dlion.exchange import Wire, choose_exchange, make_exchange
from hf_dlion.momentum.store import MomentumStore
from hf_dlion.options import Options
from hf_dlion.step.delivery import InStep, Wave
from hf_dlion.step.message import Message, Room
from hf_dlion.step.voters.interface import Built, Params
from hf_dlion.step.voters.one_rank import OneRank


class EveryRank(OneRank):
    """The ranks of a process group, each of which votes for itself."""

    def __init__(self, wire: Wire) -> None:
        """Takes the wire of all ranks, at least two."""
        self.wire: Wire = wire
        self.between: Wire = wire
        self.twins: Wire = wire
        self.ranks = self.count = wire.world_size
        self.index = wire.rank
        self.alike = (range(wire.world_size),)

    def choose_exchange(self, layouts: Sequence[MessageLayout], options: Options) -> str:
        """Returns the strategy that the options ask for."""
        return choose_exchange(layouts, self.count, options)

    def build(
        self,
        params: Params,
        groups: Sequence[tuple[Params, MessageLayout]],
        name: str,
        options: Options,
        wires: tuple[Wire, Wire] | None,
    ) -> Built:
        """Returns messages of whole parameters."""
        up, down = wires or (self.between, self.between)
        bits, made = options.bits, []
        sizes: dict[torch.device, tuple[int, int]] = {}
        for group, layout in groups:
            device = group[0][1].device
            exchange = make_exchange(name, layout, up, device, options, down)
            made.append((group, layout, exchange, device))
            words, rows = sizes.get(device, (0, 0))
            copied = bits * layout.words if exchange.votes is None else 0
            sizes[device] = max(words, copied), max(rows, layout.rows)
        rooms = {device: Room(*size, device) for device, size in sizes.items()}
        messages = []
        for group, layout, exchange, device in made:
            room, votes = rooms[device], exchange.votes
            if votes is None:
                votes = room.words(bits * layout.words).view(1, -1)
            active, codec = room.active(layout.rows), codec_for(device)
            messages.append(Message(group, layout, exchange, codec, votes, active, bits))
        return Built(messages, InStep([Wave([message]) for message in messages]))

    def average_momenta(self, momenta: MomentumStore) -> None:
        """Replaces every momentum by the mean over the voters."""
        momenta.average(self.between)
