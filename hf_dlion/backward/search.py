"""How the optimizer finds the DDP wrappers of its parameters and keeps them from reducing.

A forward pre-hook for all modules (public torch API, nothing is patched) looks for DDP wrappers.
It costs about 3 us per module call and makes torch.compile warn, so it is there only while an
optimizer has parameters whose wrapper it does not know: it goes once a wrapper of each has run
forward, and comes back when one is gone, or for another one when a gradient came from elsewhere
than the wrappers in use.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hf_dlion.backward import claims
from hf_dlion.backward.claims import Claim
from hf_dlion.backward.ddp import Attachment, claims_on, local_gradients
from hf_dlion.backward.refused import refuse_python_reducer, refuse_replicated
from hf_dlion.options.groups import flat_params
from hf_dlion.options.warn_once import warn_once

_optimizers: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()
_attachments: weakref.WeakKeyDictionary[DistributedDataParallel, Attachment] = (
    weakref.WeakKeyDictionary()
)


class _Search:
    """The forward pre-hook that looks for new wrappers, there while an optimizer needs it."""

    def __init__(self) -> None:
        # For each optimizer the ids of parameters whose wrapper is looked for, and whether a step
        # went past it: then none will do that was known before.
        self._for: weakref.WeakKeyDictionary[Claim, dict[int, bool]] = weakref.WeakKeyDictionary()
        self._handle: RemovableHandle | None = None

    @property
    def active(self) -> bool:
        return self._handle is not None

    def start(self, claim: Claim, wanted: Iterable[int], *, missed: bool = False) -> None:
        """Looks for the wrappers of an optimizer's parameters, whose ids are `wanted`."""
        sought = self._for.setdefault(claim, {})
        for key in wanted:
            sought[key] = missed or sought.get(key, False)
        if self._handle is None:
            # torch.compile warns that global hooks fire on its wrapper too: ours means to.
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there")
            register = nn.modules.module.register_module_forward_pre_hook
            self._handle = register(_before_forward)

    def found(self, attachment: Attachment | None, *, new: bool) -> None:
        """Takes note of a wrapper that runs forward, and stops once all have."""
        covered = attachment.params if attachment is not None else set()
        for claim, sought in list(self._for.items()):
            mine = _ids_of(claim)
            gone = {key for key, missed in sought.items() if key in covered and (new or not missed)}
            if any(sought[key] for key in gone & mine):
                _warn_of_missed_step()
            self._for[claim] = {key: sought[key] for key in sought.keys() & mine - gone}
            if not self._for[claim]:
                self.stop(claim)

    def stop(self, claim: Claim) -> None:
        self._for.pop(claim, None)
        if not self._for and self._handle is not None:
            self._handle.remove()
            self._handle = None


def _warn_of_missed_step() -> None:
    warn_once(
        "missed",
        "a DDP wrapper was made around a model that has another, live one, and averaged "
        "the gradients of its first step in full; from now on it does not. Delete the old "
        "wrapper, or call optimizer.attach(new_wrapper), to save that step",
    )


def _ids_of(claim: Claim) -> set[int]:
    return {id(param) for param in flat_params(claim.owner.groups)}


_search = _Search()


def watch(claim: Claim) -> None:
    """Attaches to every DDP wrapper of an optimizer's parameters, now and later.

    Args:
        claim: The optimizer's, held weakly.
    """
    _optimizers[claim.number] = claim
    _search.start(claim, _ids_of(claim))


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
    ddp = unwrapped_ddp(module)
    if ddp is None:
        return
    new = ddp not in _attachments
    attachment = attach(ddp)
    if attachment is not None and new:
        attachment.note_forward(ddp, args)  # this forward's own pre-hooks are listed already
    # Only wrappers in use count: an old one may have a successor that is yet to come.
    if torch.is_grad_enabled():
        _search.found(attachment, new=new)


def attach(ddp: DistributedDataParallel) -> Attachment | None:
    """Registers our comm hook with a DDP wrapper, or checks one that has it.

    Returns:
        The attachment, or None if no DistributedLion owns any parameter of `ddp`.

    Raises:
        RuntimeError: If `ddp` has another comm hook, another process group than the optimizer, or
            trainable parameters that no DistributedLion owns.
        NotImplementedError: If it takes no comm hook.
    """
    for claim in list(_optimizers.values()):
        if claim.active:  # Somebody may have put parameters into its groups.
            claim.take_free()
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
    weakref.finalize(ddp, _wrapper_is_gone).atexit = False
    return attachment


def _wrapper_is_gone() -> None:
    for claim in list(_optimizers.values()):
        _search.start(claim, _ids_of(claim))


def after_step(claim: Claim, params: Iterable[Tensor]) -> None:
    """Searches on, or again, if a gradient came from elsewhere than the wrappers in use.

    Args:
        claim: Of the optimizer that made the step.
        params: Its parameters for which autograd saw a gradient.
    """
    if claim.owner.world_size == 1:
        _search.stop(claim)
        return
    elsewhere = {id(param) for param in params}
    for attachment in list(_attachments.values()):
        if claim in attachment.used_for:
            attachment.used_for.discard(claim)
            elsewhere -= attachment.params
    if elsewhere:
        _search.start(claim, elsewhere, missed=True)
