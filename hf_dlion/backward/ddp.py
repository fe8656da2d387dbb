"""What our comm hook does on one DDP wrapper: gradients stay local, or are averaged in a node."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.backward import claims
from hf_dlion.backward.claims import Claim
from hf_dlion.step.voters import ONE_RANK, Voters


class Attachment:
    """The state of our comm hook on one DDP wrapper.

    Attributes:
        params: ids of the wrapper's parameters.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        """Belongs to no optimizer yet."""
        self._skips_buckets = _can_skip_buckets(ddp)
        self._copied = self._sync_is_off = False
        self._group = ddp.process_group
        self._claims: list[Claim] = []
        self._changes = -1
        self._params = list(ddp.module.parameters())
        self.params = {id(param) for param in self._params}
        self._trainable = self._found_trainable()
        self._voters: Voters = ONE_RANK

    def belongs_to(self, found: list[Claim]) -> None:
        """Sets the claims on the wrapper, just found."""
        self._changes, self._trainable = claims.changes(), self._found_trainable()
        self._claims = found

    def _found_trainable(self) -> list[bool]:
        """Returns which parameters are trainable; some loops freeze parts in turns."""
        return [param.requires_grad for param in self._params]

    def __reduce__(self) -> tuple[Callable[[], "Attachment"], tuple[()]]:
        """Gives a copied or saved wrapper an attachment of nobody: its parameters are others."""
        return _of_nobody, ()

    def note_forward(self, module: Any, args: Any) -> None:
        """Forward pre-hook of the wrapper.

        Raises:
            RuntimeError: If a rank that joins early could not shadow this wrapper's collectives, or
                owners see different nodes, or some trainable parameters have no owner any more.
        """
        if self._copied or not torch.is_grad_enabled():
            return
        # Backward does what forward prepared, so what changes between them waits.
        if self._changes != claims.changes() or self._trainable != self._found_trainable():
            self.belongs_to(claims_on(module))
        if not self._claims:
            return
        self._check_join(module)
        for claim in self._claims:
            claim.owner.early.note_forward(module.require_backward_grad_sync)
            claim.owner.presence.batches.note_forward(module.require_backward_grad_sync)
        self._voters = self._found_voters()
        if not module.require_backward_grad_sync:
            return
        for claim in self._claims:
            claim.kept_local |= dist.get_world_size(self._group) > 1
        # The buckets are how gradients are averaged among ranks that share a vote.
        if self._skips_buckets and not self._voters.averages:
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
        if not any(claim.owner.joins for claim in self._claims):
            return
        if module.broadcast_buffers and module.modules_buffers:
            raise RuntimeError(
                "this DDP wrapper broadcasts buffers at every forward, and a rank that has run out "
                "of data makes none: inside Join([optimizer]) make the wrapper with "
                "broadcast_buffers=False, or give every rank as many batches"
            )
        if not self._skips_buckets:
            raise RuntimeError(
                "inside Join([optimizer]) make the DDP wrapper without gradient_as_bucket_view "
                "and static_graph, whose buckets take part of every rank, and freeze nothing after "
                "that, or give every rank as many batches"
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
        found = [claim.owner.voters() for claim in self._claims]
        if len({voters.members for voters in found}) > 1:
            raise RuntimeError(
                "the optimizers of this DDP wrapper have different local_group: a wrapper averages "
                "all its gradients over the same ranks, so pass the same local_group to all of them"
            )
        return found[0] if found else ONE_RANK

    def reduced(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor] | None:
        """Starts averaging in the node, or DDP's own average if nobody owns the wrapper."""
        if not self._claims:
            return allreduce_hook(self._group, bucket)
        if not self._voters.averages:
            return None
        params = bucket.parameters()
        for claim in self._claims:
            claim.owner.presence.note_averaged(params)
        return self._voters.start_average(bucket.buffer())


def claims_on(ddp: DistributedDataParallel) -> list[Claim]:
    """Returns the claims on a wrapper's trainable parameters, in the order of these.

    Where all are frozen, those on all: a GAN freezes its critic in every other forward of its
    wrapper, and thaws it while no claim changes.

    Raises:
        RuntimeError: If `ddp` has another process group than an owner, or trainable parameters
            that no DistributedLion owns beside those that one does.
    """
    ignored = ddp.parameters_to_ignore
    reduced = {name: p for name, p in ddp.module.named_parameters() if name not in ignored}
    trainable = {name: p for name, p in reduced.items() if p.requires_grad}
    found = {name: claims.claim_of(param) for name, param in (trainable or reduced).items()}
    concerned = list(dict.fromkeys(claim for claim in found.values() if claim is not None))
    strangers = [name for name, claim in found.items() if claim is None and name in trainable]
    if concerned and strangers:
        raise RuntimeError(
            f"DDP would leave the gradients of {len(strangers)} trainable parameters local that "
            f"no DistributedLion owns, first {strangers[0]!r}: give them to the optimizer, freeze "
            f"them in the forward passes that train its parameters, or set requires_grad=False "
            f"before wrapping the model in DDP"
        )
    for claim in concerned:
        group = claim.owner.group()
        if group is not None and ddp.process_group is not group:
            raise RuntimeError(
                "DistributedDataParallel and DistributedLion use different process groups: pass "
                "the same process_group to both"
            )
    return concerned


def _of_nobody() -> Attachment:
    """Returns one whose hooks do nothing. DDP lists them in a copy, but its reducer has none."""
    attachment = Attachment.__new__(Attachment)
    attachment._copied, attachment._sync_is_off = True, False
    return attachment


def _joins(ddp: Any) -> bool:
    """Returns whether a wrapper is inside a `Join`."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def _can_skip_buckets(ddp: DistributedDataParallel) -> bool:
    """Returns whether gradients may stay out of DDP's buckets altogether.

    Nothing is reduced, so the copies into the buckets and back are lost time (a tenth of a
    step on a CPU). But where gradients are views of the buckets, these are their only memory, and
    a static graph is prepared in the reducer. Nor may they where something was frozen since, to be
    trained by another optimizer in turns: in the next turn, which it reduces, the reducer would
    take what it did not reduce in this one for used, and fail as it finds no gradient there.
    """
    trainable = sum(param.requires_grad for param in ddp.module.parameters())
    reduced = ddp._get_ddp_logging_data()["num_parameter_tensors"]  # type: ignore[no-untyped-call]
    in_turns = ddp.find_unused_parameters and reduced > trainable
    return not (ddp.gradient_as_bucket_view or ddp.static_graph or in_turns)


def local_gradients(
    state: Attachment,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """DDP comm hook that leaves every rank, or every node, its local gradients.

    Nothing is sent, but for the average inside a node that votes as one (`local_group`).

    A hook cannot be taken back: once nobody owns the wrapper, whatever trains it needs the average
    that DDP stands for, and gets it.

    Args:
        state: Knows who owns the wrapper.
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
