"""How the optimizer finds the DDP wrappers of its parameters and keeps them from reducing.

A forward pre-hook for all modules (public torch API, nothing is patched) looks for DDP wrappers.
It costs about 3 us per module call and makes torch.compile warn, so it is there only while a
wrapper is yet to run forward, or an optimizer has parameters of which none has. Where a model is
trained without a wrapper, it stays. A hook for the registration of modules tells of every wrapper
that is made.

So when one is looked for follows from what the program does, as on all other ranks, and not from
which wrappers a rank's garbage collector has left.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hf_dlion.backward import claims
from hf_dlion.backward.claims import Claim
from hf_dlion.backward.ddp import Attachment, claims_on, local_gradients
from hf_dlion.backward.refused import refuse_delayed, refuse_python_reducer, refuse_replicated
from hf_dlion.options.groups import flat_params

_optimizers: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()
_attachments: weakref.WeakKeyDictionary[DistributedDataParallel, Attachment] = (
    weakref.WeakKeyDictionary()
)
# All that were made since this module was imported.
_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class _Search:
    """The forward pre-hook that looks for wrappers, there while an optimizer needs it."""

    def __init__(self) -> None:
        # Wrappers that have not run forward since they, or an optimizer, were made.
        self._new: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        # For each optimizer the ids of parameters of which no wrapper has run forward.
        self._for: weakref.WeakKeyDictionary[Claim, set[int]] = weakref.WeakKeyDictionary()
        self._handle: RemovableHandle | None = None

    @property
    def active(self) -> bool:
        return self._handle is not None

    def built(self, ddp: DistributedDataParallel) -> None:
        """Looks for a wrapper that has just been made."""
        _wrappers.add(ddp)
        self._new.add(ddp)
        self._settle()

    def start(self, claim: Claim) -> None:
        """Looks for the wrappers of all of an optimizer's parameters."""
        self._for[claim] = _ids_of(claim)
        self._new.update(ddp for ddp in list(_wrappers) if ddp not in _attachments)
        self._settle()

    def ran(self, ddp: DistributedDataParallel, params: set[int]) -> None:
        """Takes note that a wrapper of these parameters runs forward, and stops once all have."""
        self._new.discard(ddp)
        for claim, sought in list(self._for.items()):
            self._for[claim] = sought & _ids_of(claim) - params
        self._settle()

    def after_step(self, claim: Claim) -> None:
        """Gives up what no wrapper can be found for: one rank alone, and frozen parameters."""
        if claim.owner.world_size == 1:
            self._for.pop(claim, None)
        elif sought := self._for.get(claim):
            frozen = {id(p) for p in flat_params(claim.owner.groups) if not p.requires_grad}
            held = set[int]().union(*(found.params for found in _attachments.values()))
            self._for[claim] = sought - (frozen - held)
        self._settle()

    def _settle(self) -> None:
        """Puts the hook there where it is needed, and takes it away elsewhere."""
        needed = bool(_optimizers) and (bool(self._new) or any(self._for.values()))
        if needed and self._handle is None:
            # torch.compile warns that global hooks fire on its wrapper too: ours means to.
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there")
            register = nn.modules.module.register_module_forward_pre_hook
            self._handle = register(_before_forward)
        elif not needed and self._handle is not None:
            self._handle.remove()
            self._handle = None


def _ids_of(claim: Claim) -> set[int]:
    return {id(param) for param in flat_params(claim.owner.groups)}


_search = _Search()


def _note_registered(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if name == "module" and isinstance(module, DistributedDataParallel):
        _search.built(module)


nn.modules.module.register_module_module_registration_hook(_note_registered)


def watch(claim: Claim) -> None:
    """Attaches to every DDP wrapper of an optimizer's parameters, now and later.

    Args:
        claim: The optimizer's, held weakly.
    """
    _optimizers[claim.number] = claim
    _search.start(claim)


def unwrapped_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """Returns the DDP wrapper that `module` is, or that torch.compile wrapped in it, or None."""
    if isinstance(module, DistributedDataParallel):
        return module
    inner = module._modules.get("_orig_mod")
    return inner if isinstance(inner, DistributedDataParallel) else None


def _before_forward(module: nn.Module, args: Any) -> None:
    # This runs before every module's forward: the common answer must be quick.
    refuse_replicated(module)
    if not isinstance(module, DistributedDataParallel) and "_orig_mod" not in module._modules:
        return
    # One rank alone may evaluate: all find a wrapper in the same forward.
    if not torch.is_grad_enabled():
        return
    ddp = unwrapped_ddp(module)
    if ddp is None:
        return
    new = ddp not in _attachments
    attachment = attach(ddp)
    if attachment is not None and new:
        attachment.note_forward(ddp, args)  # this forward's own pre-hooks are listed already
    _search.ran(ddp, attachment.params if attachment else set())


def attach(ddp: DistributedDataParallel) -> Attachment | None:
    """Registers our comm hook with a DDP wrapper, or checks one that has it.

    Returns:
        The attachment, or None if no DistributedLion owns any parameter of `ddp`.

    Raises:
        RuntimeError: If `ddp` has another comm hook, another process group than the optimizer, or
            trainable parameters that no DistributedLion owns.
        NotImplementedError: If it takes no comm hook, or reduces beside it.
    """
    for claim in list(_optimizers.values()):
        if claim.active and claim.whole:  # Somebody may have put parameters into its groups.
            claim.take_free()
    refuse_delayed(ddp)
    attachment = _attachments.get(ddp)
    owners = claims_on(ddp)
    if attachment is None and not owners:
        return None
    for claim in owners:
        claim.owner.hooks.watch_gradients(flat_params(claim.owner.groups))
    attachment = attachment or _registered(ddp)
    attachment.belongs_to(owners)
    return attachment


def _registered(ddp: DistributedDataParallel) -> Attachment:
    refuse_python_reducer(ddp)
    # A copy of a wrapper that has ours lists it, too, but averages: DDP makes it a new reducer.
    hooks = [hook for hook, _ in ddp._comm_hooks if hook is not local_gradients]
    if hooks:
        foreign = getattr(hooks[0], "__qualname__", repr(hooks[0]))
        raise RuntimeError(
            f"DDP already has the comm hook {foreign!r}; DistributedLion replaces the gradient "
            f"all-reduce and needs its own: do not register another one"
        )
    attachment = Attachment(ddp)
    ddp.register_comm_hook(attachment, local_gradients)
    ddp.register_forward_pre_hook(attachment.note_forward)
    ddp.register_forward_hook(attachment.after_forward, always_call=True)
    claims.watch_other_optimizers()
    _attachments[ddp] = attachment
    return attachment


def after_step(claim: Claim) -> None:
    """Gives up what no wrapper can be found for.

    Args:
        claim: Of the optimizer that made the step.
    """
    _search.after_step(claim)
