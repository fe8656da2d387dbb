"""The compressors of the study as a comm hook of DDP."""

# No `from __future__ import annotations` here: DDP compares the hooks' annotations with classes.

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.convergence.compressors import Compressor, Run, sent_bytes, sent_rounds


class HookState:
    """A rank's side of a compressor, and the buckets that wait for it.

    Made on every rank alike, for `ddp.register_comm_hook(state, compress_hook)`.

    Attributes:
        bytes_sent: Bytes that this rank has sent so far.
        rounds: Messages that waited for one another so far.

    Args:
        compressor: Whose worker this is.
        params: The trained parameters, in the order of the model.
        seed: As for `Compressor.start`.
        steps: As for `Compressor.start`.
        group: The process group; None for the default one.
    """

    def __init__(
        self,
        compressor: Compressor,
        params: Iterable[Tensor],
        *,
        seed: int,
        steps: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Makes the worker."""
        params = list(params)
        sizes = tuple(param.numel() for param in params)
        self.bytes_sent = self.rounds = 0
        self.worker = compressor.worker(
            Run(
                rank=dist.get_rank(group),
                world_size=dist.get_world_size(group),
                sizes=sizes,
                seed=seed,
                steps=steps,
            )
        )
        self._group = group
        self._gradient = torch.zeros(sum(sizes))
        # DDP's buckets hold parameters in another order, and another one after the first step.
        self._own = dict(zip(params, self._gradient.split_with_sizes(list(sizes)), strict=True))
        self._waiting: list[tuple[Tensor, list[Tensor], list[Tensor], Any]] = []

    def add(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Returns the future of a bucket, which is there when the last one has come."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        views, params = list(bucket.gradients()), list(bucket.parameters())
        self._waiting.append((bucket.buffer(), views, params, future))
        if bucket.is_last():
            self._exchange()
        return future

    def _exchange(self) -> None:
        # Buckets into one gradient in the order of the model.
        for _, views, params, _ in self._waiting:
            for view, param in zip(views, params, strict=True):
                self._own[param].copy_(view.flatten())
        # What `Compressor.compress` does with all workers, here with this one.
        scale = self.worker.scale(self._gradient)
        world_size = self.worker.run.world_size
        if scale.numel():
            dist.all_reduce(scale, dist.ReduceOp.MAX, group=self._group)
        message = self.worker.encode(self._gradient, scale)
        messages = [torch.empty_like(message) for _ in range(world_size)]
        dist.all_gather(messages, message, group=self._group)
        self.bytes_sent += sent_bytes(message, scale, world_size)
        self.rounds += sent_rounds(scale, world_size)
        self._gradient.copy_(self.worker.combine(messages, scale))
        # And back into the buckets.
        waiting, self._waiting = self._waiting, []
        for buffer, views, params, future in waiting:
            for view, param in zip(views, params, strict=True):
                view.copy_(self._own[param].view_as(view))
            future.set_result(buffer)


def compress_hook(
    state: HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Comm hook that exchanges the gradients of all buckets at once when the last has come.

    Clipping and thresholds concern the whole gradient, so nothing overlaps with backward: the hook
    is for comparing losses, not speed.
    """
    return state.add(bucket)
