"""A node's ranks cast one vote: each encodes its share of every message.

gradients   averaged in full precision inside the node, by DDP's backward or in the step
momentum    shared out: each rank keeps the stretches that it encodes
votes       exchanged between the ranks with one place on all nodes
verdicts    gathered inside the node, so every rank applies the whole of them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.codec.layout import MessageLayout, shards_of
from hf_dlion.exchange import Wire
from hf_dlion.exchange.node import choose_node_exchange
from hf_dlion.momentum.shares import Range
from hf_dlion.momentum.store import MomentumStore
from hf_dlion.options import Options
from hf_dlion.ranks.header import Header, one_per_voter
from hf_dlion.ranks.node import Node
from hf_dlion.step.delivery import InStep
from hf_dlion.step.presence import Presence
from hf_dlion.step.voters.interface import Built, Params, Voters
from hf_dlion.step.voters.node_gradients import average_gradients
from hf_dlion.step.voters.node_move import LionInNode, SharedMove
from hf_dlion.step.voters.node_waves import waves_of


class NodeVoters(Voters):
    """The ranks of this rank's node, which vote as one."""

    averages = True

    def __init__(self, wire: Wire, node: Node) -> None:
        """Takes the wire of all ranks, and this rank's node."""
        self.wire = self.twins = wire
        self.ranks = wire.world_size
        self._node, self.members = node, node.members
        self.index, self.count = node.index, len(node.members)
        self.between = node.peers
        self.near = node.members[node.index]
        self.alike = node.places
        self.layout_key: tuple[object, ...] = (node.members,)

    def choose_exchange(self, layouts: Sequence[MessageLayout], options: Options) -> str:
        """Returns the strategy between nodes."""
        return choose_node_exchange(layouts, self.count, self._node.local.world_size, options)

    def build(
        self,
        params: Params,
        groups: Sequence[tuple[Params, MessageLayout]],
        name: str,
        options: Options,
        wires: tuple[Wire, Wire] | None,
    ) -> Built:
        """Returns messages of which this rank encodes one share, or moves where nobody votes."""
        node, size = self._node, self._node.local.world_size
        owners: list[dict[int, Range]] = [
            {index: (0, 0) for index, _ in params} for _ in range(size)
        ]
        moves: list[SharedMove] = []
        for group, layout in groups:
            parts = [layout.part(shard) for shard in shards_of(layout, size)]
            for owned, part in zip(owners, parts, strict=True):
                owned.update({slot.index: (slot.start, slot.stop) for slot in part.slots})
            if self.count == 1:
                moves.append(SharedMove(group, parts, node.local, codec_for(group[0][1].device)))
        own = owners[node.local.rank]
        if self.count == 1:
            return Built((), LionInNode(moves), owners, own)
        waves = waves_of(groups, node, name, options)
        messages = [message for wave in waves for message in wave.messages]
        return Built(messages, InStep(waves), owners, own)

    def heard(self, headers: Sequence[Header]) -> list[Header]:
        """Returns one header per node.

        A node is finite if all its ranks are, and has a parameter if any of them has.
        """
        return one_per_voter(headers, self.members)

    def settle(self, momenta: MomentumStore, owned: Mapping[int, Range]) -> bool:
        """Returns whether this rank lacks a part of the momenta that it must hold."""
        # At once: should all nodes abstain from their first step, nothing else is shared out in it.
        momenta.shares.members = momenta.shares.members or self.members
        return momenta.displaced(owned)

    def voting(
        self, presence: Presence, params: Sequence[Tensor], present: Sequence[bool]
    ) -> list[Tensor]:
        """Returns the parameters of which this rank, or by a wrapper its node, has a gradient."""
        return [
            param
            for param, has in zip(params, present, strict=True)
            # A wrapper gives the node's gradient also to a rank that did not use the parameter.
            if has or presence.averaged(param)
        ]

    def unaveraged(
        self, presence: Presence, params: Sequence[Tensor], present: Sequence[bool]
    ) -> list[bool]:
        """Returns, for each parameter, whether no wrapper has averaged its gradient."""
        return presence.unaveraged(params, present)

    def complete(
        self,
        momenta: MomentumStore,
        owners: Sequence[Mapping[int, Range]],
        params: Sequence[Tensor],
        unaveraged: Sequence[bool],
        mine: Header,
    ) -> None:
        """Shares out the node's momenta, and averages what no wrapper has averaged."""
        momenta.share_out(owners, self._node.local, self.members, mine.displaced)
        if mine.unaveraged and mine.finite:
            average_gradients(params, torch.tensor(unaveraged, dtype=torch.bool), self._node)

    def start_average(self, gradient: Tensor) -> torch.futures.Future[Tensor]:
        """Starts the averaging of a gradient over the node's ranks; see `Node.start_average`."""
        return self._node.start_average(gradient)

    def average_momenta(self, momenta: MomentumStore) -> None:
        """Replaces every momentum by the mean over the nodes, whole on every rank."""
        momenta.average(self._node.peers)
        momenta.make_whole(self._node.local)
