"""How the optimizer finds the DDP wrappers of its parameters and keeps them from reducing.

A forward pre-hook for all modules (public torch API, nothing is patched) looks for DDP wrappers.
It costs about 3 us per module call and makes torch.compile warn, so that it goes once every
optimizer has its wrapper, and comes back when that wrapper is gone or was not used in a step.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes.

import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


class Owner(Protocol):
    """What the hooks need to know of an optimizer."""

    param_groups: list[dict[str, Any]]

    def group(self) -> dist.ProcessGroup | None:
        """Returns the process group that the optimizer exchanges votes in."""

    def watch_gradients(self) -> None:
        """Begins to watch parameters that were frozen before."""


class Attachment:
    """The state of our comm hook on one DDP wrapper.

    Attributes:
        calls: How often DDP handed a bucket to the hook since the last step.
        used: Whether the wrapper ran forward with gradients since the last step.
    """

    def __init__(self) -> None:
        """Has seen nothing."""
        self.calls = 0
        self.used = False

    def note_forward(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the wrapper."""
        self.used = self.used or torch.is_grad_enabled()


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


class _Search:
    """The forward pre-hook that looks for new wrappers, while it is needed."""

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        # A wrapper found after a step that went past it has averaged gradients in that step.
        self.missed_a_step = False
        self._warned = False

    def start(self) -> None:
        if self._handle is None:
            # torch.compile warns that global hooks fire on its wrapper too: ours means to.
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there")
            register = nn.modules.module.register_module_forward_pre_hook
            self._handle = register(_before_forward)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self.missed_a_step = False

    def warn_if_missed(self) -> None:
        if self.missed_a_step and not self._warned:
            self._warned = True
            warnings.warn(
                "a DDP wrapper was made around a model that has another, live one, and averaged "
                "the gradients of its first step in full; from now on it does not. Delete the old "
                "wrapper, or call optimizer.attach(new_wrapper), to save that step",
                stacklevel=2,
            )


_search = _Search()


def watch(owner: Owner) -> None:
    """Attaches to every DDP wrapper of the owner's parameters, now and later.

    Args:
        owner: The optimizer, held weakly.
    """
    _owners.add(owner)
    _search.start()


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
    if ddp is None or ddp in _attachments:
        return
    attachment = attach(ddp)
    if attachment is not None:
        attachment.note_forward(ddp, args)  # this forward's own pre-hooks are listed already
        _search.warn_if_missed()
    if all(any(attachments_of(owner)) for owner in list(_owners)):
        _search.stop()


def attach(ddp: DistributedDataParallel) -> Attachment | None:
    """Registers our comm hook with a DDP wrapper, once.

    Returns:
        The attachment, or None if no DistributedLion owns any parameter of `ddp`.

    Raises:
        RuntimeError: If `ddp` has another comm hook, another process group than the optimizer, or
            trainable parameters that no DistributedLion owns.
    """
    owners = {id(param): owner for owner in list(_owners) for param in _params(owner)}
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
    return _registered(ddp) if attachment is None else attachment


def _registered(ddp: DistributedDataParallel) -> Attachment:
    if ddp._comm_hooks:
        foreign = getattr(ddp._comm_hooks[0][0], "__qualname__", repr(ddp._comm_hooks[0][0]))
        raise RuntimeError(
            f"DDP already has the comm hook {foreign!r}; DistributedLion replaces the gradient "
            f"all-reduce and needs its own: do not register another one"
        )
    attachment = Attachment()
    ddp.register_comm_hook(attachment, local_gradients)
    ddp.register_forward_pre_hook(attachment.note_forward)
    _attachments[ddp] = attachment
    weakref.finalize(ddp, _search.start).atexit = False
    return attachment


def attachments_of(owner: Owner) -> Iterator[Attachment]:
    """Yields the attachments of the live DDP wrappers around the owner's parameters."""
    mine = {id(param) for param in _params(owner)}
    for ddp, attachment in list(_attachments.items()):
        if any(id(param) in mine for param in ddp.module.parameters()):
            yield attachment


def after_step(owner: Owner) -> None:
    """Searches again if no wrapper that is known was used for the owner's step."""
    attachments = list(attachments_of(owner))
    if attachments and not any(attachment.used for attachment in attachments):
        _search.start()
        _search.missed_a_step = True
    for attachment in attachments:
        attachment.calls, attachment.used = 0, False


def _params(owner: Owner) -> Iterator[Tensor]:
    for group in owner.param_groups:
        yield from group["params"]
