"""How the optimizer finds the DDP wrappers of its parameters and keeps them from reducing.

One forward pre-hook of torch (public, for all modules) looks at DDP wrappers only. It stays: a
wrapper that is made later, around the same model, must not reduce even once.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes.

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Owner(Protocol):
    """What the hooks need to know of an optimizer."""

    param_groups: list[dict[str, Any]]

    def group(self) -> dist.ProcessGroup | None:
        """Returns the process group that the optimizer exchanges votes in."""

    def watch_gradients(self) -> None:
        """Begins to watch parameters that were frozen before."""


class Attachment:
    """What a DDP wrapper's comm hook has seen since the last step of its optimizers.

    Attributes:
        calls: How often DDP handed a bucket to the hook.
        expected: Whether a forward ran whose backward will hand over buckets.
    """

    def __init__(self) -> None:
        """Has seen nothing."""
        self.calls = 0
        self.expected = False


def local_gradients(
    state: Attachment,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """DDP comm hook that leaves every rank its local gradients: nothing is sent.

    Args:
        state: Counts the calls.
        bucket: DDP's bucket of gradients; not changed.
    """
    state.calls += 1
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_owners: "weakref.WeakSet[Any]" = weakref.WeakSet()
_attachments: "weakref.WeakKeyDictionary[DistributedDataParallel, Attachment]" = (
    weakref.WeakKeyDictionary()
)
_watching: list[Any] = []


def watch(owner: Owner) -> None:
    """Attaches to every DDP wrapper of the owner's parameters, now and later.

    Args:
        owner: The optimizer, held weakly.
    """
    _owners.add(owner)
    if not _watching:
        _watching.append(nn.modules.module.register_module_forward_pre_hook(_before_forward))


def unwrapped_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """Returns the DDP wrapper that `module` is, or that torch.compile wrapped in it, or None."""
    if isinstance(module, DistributedDataParallel):
        return module
    inner = module._modules.get("_orig_mod")
    return inner if isinstance(inner, DistributedDataParallel) else None


def _before_forward(module: nn.Module, args: Any) -> None:
    # This runs before every module's forward: the common answer must be quick.
    if not isinstance(module, DistributedDataParallel) and "_orig_mod" not in module._modules:
        return
    ddp = unwrapped_ddp(module)
    if ddp is None or not len(_owners):
        return
    attachment = _attachments.get(ddp) or attach(ddp)
    if attachment is not None and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
        attachment.expected = True


def attach(ddp: DistributedDataParallel) -> Attachment | None:
    """Registers our comm hook with a DDP wrapper, once.

    Returns:
        The attachment, or None if no DistributedLion owns any parameter of `ddp`.

    Raises:
        RuntimeError: If `ddp` has another comm hook, another process group than the optimizer, or
            trainable parameters that no DistributedLion owns.
    """
    owners = {id(p): owner for owner in list(_owners) for p in _params(owner)}
    reduced = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
    for name in ddp.parameters_to_ignore:
        reduced.pop(name, None)
    concerned = {id(owners[id(p)]): owners[id(p)] for p in reduced.values() if id(p) in owners}
    if not concerned:
        return None
    strangers = [name for name, p in reduced.items() if id(p) not in owners]
    if strangers:
        raise RuntimeError(
            f"DDP would no longer average the gradients of {len(strangers)} trainable parameters "
            f"that no DistributedLion owns, first {strangers[0]!r}: give them to the optimizer "
            f"or set requires_grad=False before wrapping the model in DDP"
        )
    for owner in concerned.values():
        owner.watch_gradients()
        group = owner.group()
        if group is not None and ddp.process_group is not group:
            raise RuntimeError(
                "DistributedDataParallel and DistributedLion use different process groups: pass "
                "the same process_group to both"
            )
    attachment = _attachments.get(ddp)
    if attachment is not None:
        return attachment
    if ddp._comm_hooks:
        foreign = getattr(ddp._comm_hooks[0][0], "__qualname__", repr(ddp._comm_hooks[0][0]))
        raise RuntimeError(
            f"DDP already has the comm hook {foreign!r}; DistributedLion replaces the gradient "
            f"all-reduce and needs its own: do not register another one"
        )
    attachment = Attachment()
    ddp.register_comm_hook(attachment, local_gradients)
    _attachments[ddp] = attachment
    return attachment


def attachments_of(owner: Owner) -> Iterator[Attachment]:
    """Yields the attachments of the live DDP wrappers around the owner's parameters."""
    mine = {id(p) for p in _params(owner)}
    for ddp, attachment in list(_attachments.items()):
        if any(id(p) in mine for p in ddp.module.parameters()):
            yield attachment


def check_called(owner: Owner) -> None:
    """Warns once if a DDP wrapper ran backward without our hook; then begins to count anew."""
    for attachment in attachments_of(owner):
        if attachment.expected and not attachment.calls:
            with contextlib.suppress(KeyError):
                _unused_warning.pop()
                warnings.warn(
                    "a DDP wrapper ran forward but did not hand its gradients to DistributedLion "
                    "before step(): another wrapper of the same model may have averaged them",
                    stacklevel=3,
                )
        attachment.calls, attachment.expected = 0, False


_unused_warning = {"one per process"}


def _params(owner: Owner) -> Iterator[Tensor]:
    for group in owner.param_groups:
        yield from group["params"]
