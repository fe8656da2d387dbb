"""Plain Lion inside the only node: nobody votes, each rank moves its share of the parameters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from hf_dlion.codec import AloneJob, Codec
from hf_dlion.codec.layout import MessageLayout, Slot
from hf_dlion.codec.rule import TensorRule
from hf_dlion.exchange import Wire, WireStats
from hf_dlion.step.delivery import Moving

Params = Sequence[tuple[int, Tensor]]


class SharedMove:
    """Parameters of the only node: each rank moves its share of them, then all get all.

        rank a: moves p0  ->  p0 p1        no vote: plain Lion on the node's gradient
        rank b: moves p1      p0 p1

    Bytes inside the node, per rank: L - 1 times those of the largest shard of the parameters that
    moved, each stretch rounded up to 8.
    """

    def __init__(
        self, params: Params, layouts: Sequence[MessageLayout], wire: Wire, codec: Codec
    ) -> None:
        """Remembers who owns what.

        Args:
            params: Pairs of parameter index and parameter, all on one device.
            layouts: The shard of each rank of the node.
            wire: The ranks of the node.
            codec: Moves the parameters.
        """
        self._shards = [_with_params(layout, params) for layout in layouts]
        self._wire, self._codec = wire, codec
        self._params = params

    def step(self, voting: Mapping[int, Tensor], rules: Mapping[int, TensorRule]) -> None:
        """Moves the parameters that have a rule; every rank of the node must call this.

        Args:
            voting: This rank's stretch of `exp_avg` of every such parameter, by index.
            rules: The step's constants by parameter index.
        """
        shards = [[(slot, p) for slot, p in shard if slot.index in rules] for shard in self._shards]
        size = max(sum(_bytes(slot, p) for slot, p in shard) for shard in shards)
        if size == 0:
            return
        place = self._wire.device_for(self._params[0][1].device)
        send = torch.zeros(size, dtype=torch.uint8, device=place)
        own = shards[self._wire.rank]
        jobs = [
            AloneJob(
                _stretch(param.detach(), slot),
                _stretch(cast(Tensor, param.grad), slot),
                voting[slot.index],
                rules[slot.index],
                slot.run(),
            )
            for slot, param in own
        ]
        self._codec.step_alone_all(jobs)
        start = 0
        for (slot, param), job in zip(own, jobs, strict=True):
            # Of a parameter with gaps in memory the stretch is a view that has them, too.
            stretch = job.param.contiguous().as_strided((slot.numel,), (1,))
            data = stretch.view(torch.uint8)
            send[start : start + data.numel()] = data
            start += _bytes(slot, param)
        received = torch.empty((self._wire.world_size, size), dtype=torch.uint8, device=place)
        self._wire.all_gather(received, send, "moved parameters").wait()
        self._take(shards, received)

    def _take(self, shards: Sequence[Sequence[tuple[Slot, Tensor]]], received: Tensor) -> None:
        """Writes all ranks' stretches into the parameters."""
        flat: dict[int, tuple[Tensor, Tensor]] = {}
        for row, shard in zip(received, shards, strict=True):
            start = 0
            for slot, param in shard:
                if slot.index not in flat:
                    flat[slot.index] = (param, param.detach().contiguous().view(-1))
                data = row[start : start + slot.numel * param.element_size()]
                flat[slot.index][1][slot.start : slot.stop] = data.view(param.dtype)
                start += _bytes(slot, param)
        for param, values in flat.values():
            if not param.is_contiguous():
                param.copy_(values.view(param.shape))


class LionInNode:
    """Plain Lion on the gradient of the only node: no votes, each rank moves its share."""

    def __init__(self, moves: Sequence[SharedMove]) -> None:
        """Takes the moves of all trainable parameters."""
        self._moves = moves

    def land(self, moving: Moving, stats: WireStats) -> None:
        """Moves the parameters; every rank of the node must call this."""
        begin = time.perf_counter()
        for move in self._moves:
            move.step(moving.voting, moving.rules)
        stats.apply_s += time.perf_counter() - begin

    def discard(self) -> None:
        """Does nothing: nothing has left."""


def _with_params(layout: MessageLayout, params: Params) -> list[tuple[Slot, Tensor]]:
    by_index = dict(params)
    return [(slot, by_index[slot.index]) for slot in layout.slots]


def _stretch(tensor: Tensor, slot: Slot) -> Tensor:
    """Returns a slot's elements, 1-D: a view where the tensor is contiguous."""
    return tensor.reshape(-1)[slot.start : slot.stop]


def _bytes(slot: Slot, param: Tensor) -> int:
    """Returns the room of a slot's elements, so the next one's are aligned."""
    return -(-slot.numel * param.element_size() // 8) * 8
