"""A node's messages in waves, whose rows that the node's shards cut are completed together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.codec.layout import MessageLayout, shards_of
from hf_dlion.exchange import Exchange
from hf_dlion.exchange.node import NodeExchange, RowEdges
from hf_dlion.exchange.staged import Staged
from hf_dlion.options import Options
from hf_dlion.ranks.node import Node
from hf_dlion.step.delivery import Wave
from hf_dlion.step.message import Message, Room

# The parameters and the layout of a message.
Group = tuple[Sequence[tuple[int, Tensor]], MessageLayout]

# A step's messages leave in so many waves. Before each one the ranks of a node tell one another of
# rows, which takes a collective; while one is on its way, the next one is encoded.
WAVES = 4


def waves_of(groups: Sequence[Group], node: Node, name: str, options: Options) -> list[Wave]:
    """Returns the messages of a step in the order in which they leave.

    Args:
        groups: The parameters and the layout of each message.
        node: This rank's.
        name: Of the strategy between nodes.
        options: Give what a vote and a verdict hold.
    """
    waves: list[list[Group]] = []
    most = -(-len(groups) // WAVES)
    for group in groups:
        # A wave is of one device, and the order is that of the messages, which all ranks share.
        if not waves or len(waves[-1]) == most or _device(waves[-1]) != _device([group]):
            waves.append([])
        waves[-1].append(group)
    builders: dict[torch.device, _Builder] = {}
    for device in dict.fromkeys(map(_device, waves)):
        own = [wave for wave in waves if _device(wave) == device]
        builders[device] = _Builder(own, node, name, options, device)
    return [builders[_device(wave)].wave(wave) for wave in waves]


def _device(groups: Sequence[Group]) -> torch.device:
    return groups[0][0][0][1].device


class _Builder:
    """Makes the waves of one device, which take turns in the same memory."""

    def __init__(
        self,
        waves: Sequence[Sequence[Group]],
        node: Node,
        name: str,
        options: Options,
        device: torch.device,
    ) -> None:
        self._node, self._name, self._options, self._device = node, name, options, device
        parts = [[self._part(layout) for _, layout in wave] for wave in waves]
        words = options.bits * max(sum(part.words for part in wave) for wave in parts)
        rows = max(sum(part.rows for part in wave) for wave in parts)
        self._room = Room(words, rows, device)

    def wave(self, groups: Sequence[Group]) -> Wave:
        """Returns some messages that leave together."""
        node, bits, device = self._node, self._options.bits, self._device
        layouts = [layout for _, layout in groups]
        parts = [self._part(layout) for layout in layouts]
        sizes = [bits * part.words for part in parts], [part.rows for part in parts]
        words, active = self._room.words(sum(sizes[0])), self._room.active(sum(sizes[1]))
        edges = RowEdges(layouts, node.local, words, active, bits)
        votes = zip(torch.split(words, sizes[0]), torch.split(active, sizes[1]), strict=True)
        messages: list[Message] = []
        for (params, layout), part, own in zip(groups, parts, votes, strict=True):
            exchange, codec = self._exchange(layout, part), codec_for(device)
            # The first of a wave is rehearsed with what completes the rows of all of them.
            beside = None if messages else edges.rehearse
            message = Message(
                params, layout, exchange, codec, own[0].view(1, -1), own[1], bits, part, beside
            )
            messages.append(message)
        return Wave(messages, edges.complete)

    def _part(self, layout: MessageLayout) -> MessageLayout:
        """Returns the shard of a message that this rank encodes."""
        local = self._node.local
        return layout.part(shards_of(layout, local.world_size)[local.rank])

    def _exchange(self, layout: MessageLayout, part: MessageLayout) -> Exchange:
        node, options = self._node, self._options
        place = node.local.device_for(self._device)
        exchange = NodeExchange(self._name, layout, node.peers, node.local, place, options)
        if place == self._device:
            return exchange
        return Staged(exchange, part, layout.words, options.bits, self._device)
