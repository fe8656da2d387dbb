"""What our comm hook does on one DDP wrapper: gradients stay local, or are averaged in a node."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes.

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.options.warn_once import warn_once
from hf_dlion.step.early import EarlyVotes
from hf_dlion.step.engine import Hooks
from hf_dlion.step.presence import Presence
from hf_dlion.step.voters import ONE_RANK, Voters


class Owner(Protocol):
    """What hooks see of an optimizer: its `Engine`, which they hold weakly.

    Attributes:
        presence: Hears of forward passes, and which gradients a wrapper averaged in the node.
        early: Hears of forward passes.
        hooks: Watch the gradients of parameters.
    """

    presence: Presence
    early: EarlyVotes
    hooks: Hooks

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""

    @property
    def alive(self) -> bool:
        """Whether the optimizer still exists."""

    @property
    def world_size(self) -> int:
        """Number of ranks that the optimizer exchanges votes with."""

    @property
    def joins(self) -> bool:
        """Whether the optimizer is inside a `Join`."""

    def group(self) -> dist.ProcessGroup | None:
        """Returns the process group that the optimizer exchanges votes in."""

    def voters(self) -> Voters:
        """Returns who votes as one; found on all ranks together."""


class Attachment:
    """The state of our comm hook on one DDP wrapper.

    Attributes:
        params: ids of the wrapper's parameters.
        used_for: ids of the owners that made no step since the wrapper ran forward.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        """Belongs to no optimizer yet."""
        self.params = {id(param) for param in ddp.module.parameters()}
        self.used_for: set[int] = set()
        self._skips_buckets = _can_skip_buckets(ddp)
        self._sync_is_off = False
        self._group = ddp.process_group
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._in_order: list[weakref.ref[Any]] = []
        self._expected = 0
        self._voters: Voters = ONE_RANK

    def __reduce__(self) -> tuple[Callable[[], "Attachment"], tuple[()]]:
        """Gives a copied or saved wrapper an attachment of nobody: its parameters are others."""
        return _of_nobody, ()

    def belongs_to(self, owners: Iterable[Owner]) -> None:
        """Sets the optimizers that own the wrapper's trainable parameters, held weakly."""
        owners = list(owners)
        self._owners = weakref.WeakSet(owners)
        self._in_order = [weakref.ref(owner) for owner in owners]
        self._expected = len(self._owners)

    def note_forward(self, module: Any, args: Any) -> None:
        """Forward pre-hook of the wrapper.

        Raises:
            RuntimeError: If a rank that joins early could not shadow this wrapper's collectives, or
                owners see different nodes.
        """
        if not torch.is_grad_enabled() or not self._owners:
            return
        self.used_for = {id(owner) for owner in self._owners}
        self._check_join(module)
        for owner in self._owners:
            owner.early.note_forward(module.require_backward_grad_sync)
            owner.presence.batches.note_forward(module.require_backward_grad_sync)
        self._voters = self._found_voters()
        # The buckets are how gradients are averaged among ranks that share a vote.
        skips = self._skips_buckets and not self._voters.averages
        if skips and module.require_backward_grad_sync and self._alive():
            # For this forward only, as under no_sync(): backward does what forward prepared.
            module.require_backward_grad_sync = False
            self._sync_is_off = True

    def _check_join(self, module: Any) -> None:
        """Refuses a `Join` in which a rank without data would miss what the wrapper sends."""
        if _joins(module):
            raise RuntimeError(
                "DistributedLion does not work inside join() of a DDP wrapper: a rank that has run "
                "out of data would average gradients instead of taking part in steps. Give Join "
                "the optimizer alone, `with torch.distributed.algorithms.Join([optimizer]):`, or "
                "give every rank as many batches"
            )
        if not any(owner.joins for owner in self._owners):
            return
        if module.broadcast_buffers and module.modules_buffers:
            raise RuntimeError(
                "this DDP wrapper broadcasts buffers at every forward, and a rank that has run out "
                "of data makes none: inside Join([optimizer]) make the wrapper with "
                "broadcast_buffers=False, or give every rank as many batches"
            )
        if not self._skips_buckets:
            raise RuntimeError(
                "inside Join([optimizer]) make the DDP wrapper without gradient_as_bucket_view, "
                "static_graph and mixed_precision, whose buckets take part of every rank, or give "
                "every rank as many batches"
            )

    def after_forward(self, module: Any, args: Any, output: Any) -> None:
        """Forward hook of the wrapper: leaves it as a forward outside of no_sync() would."""
        if self._sync_is_off:
            self._sync_is_off = False
            module.require_backward_grad_sync = True
            # Buffers (BatchNorm's averages) go on being broadcast before the next forward.
            module.require_forward_param_sync = True

    def _found_voters(self) -> Voters:
        """Returns who votes as one; asked of the owners in one order on every rank."""
        found = [owner.voters() for ref in self._in_order if (owner := ref()) is not None]
        if len({voters.members for voters in found}) > 1:
            raise RuntimeError(
                "the optimizers of this DDP wrapper have different local_group: a wrapper averages "
                "all its gradients over the same ranks, so pass the same local_group to all of them"
            )
        return found[0] if found else ONE_RANK

    def _alive(self) -> bool:
        return sum(bool(owner.alive) for owner in self._owners) >= self._expected

    def reduced(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor] | None:
        """Starts averaging in the node, or DDP's own if an owner is gone, or returns None."""
        if self._alive():
            if not self._voters.averages:
                return None
            params = bucket.parameters()
            for owner in self._owners:
                owner.presence.note_averaged(params)
            return self._voters.start_average(bucket.buffer())
        warn_once(
            "reduced",
            "a DistributedLion of this DDP wrapper no longer exists: the wrapper averages "
            "gradients again",
        )
        return allreduce_hook(self._group, bucket)


def _of_nobody() -> Attachment:
    """Returns one whose hooks do nothing. DDP lists them in a copy, but its reducer has none."""
    attachment = Attachment.__new__(Attachment)
    attachment._owners, attachment._sync_is_off = weakref.WeakSet(), False
    return attachment


def _joins(ddp: Any) -> bool:
    """Returns whether a wrapper is inside a `Join`."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def _can_skip_buckets(ddp: DistributedDataParallel) -> bool:
    """Returns whether gradients may stay out of DDP's buckets altogether.

    Nothing is reduced, so the copies into the buckets and back are lost time (a tenth of a
    step on a CPU). But where gradients are views of the buckets, these are their only memory, and
    a static graph and DDP's own mixed precision are prepared in the reducer.
    """
    return not (ddp.gradient_as_bucket_view or ddp.static_graph or ddp.mixed_precision)


def local_gradients(
    state: Attachment,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """DDP comm hook that leaves every rank, or every node, its local gradients.

    Nothing is sent, but for the average inside a node that votes as one (`local_group`).

    A hook cannot be taken back: once an optimizer of the wrapper is gone, whatever follows it needs
    the average that DDP stands for, and gets it.

    Args:
        state: Knows whether the optimizers still live.
        bucket: DDP's bucket of gradients; not changed.
    """
    reduced = state.reduced(bucket)
    if reduced is not None:
        return reduced
    buffer = bucket.buffer()
    devices = None if buffer.device.type == "cpu" else [buffer.device]
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future
