"""How the optimizer finds the DDP wrappers of its parameters and keeps them from reducing.

A forward pre-hook for all modules (public torch API, nothing is patched) looks for DDP wrappers.
It costs about 3 us per module call and makes torch.compile warn, so it is there only while an
optimizer has parameters whose wrapper it does not know: it goes once a wrapper of each has run
forward, and comes back when one is gone, or for a newer one when a gradient came from elsewhere
than the wrappers in use: from the bare model, too, and then it stays.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

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


class _Sought(NamedTuple):
    """A parameter whose wrapper is looked for.

    Attributes:
        after: Number of the last attachment that was known when a gradient came from elsewhere:
            it takes a newer one. 0 where any will do.
        missed: Whether a wrapper beside a known one has averaged that gradient, it seems.
    """

    after: int
    missed: bool


class _Search:
    """The forward pre-hook that looks for new wrappers, there while an optimizer needs it."""

    def __init__(self) -> None:
        # For each optimizer the ids of parameters whose wrapper is looked for.
        self._for: weakref.WeakKeyDictionary[Claim, dict[int, _Sought]] = (
            weakref.WeakKeyDictionary()
        )
        self._handle: RemovableHandle | None = None

    @property
    def active(self) -> bool:
        return self._handle is not None

    def start(self, claim: Claim) -> None:
        """Looks for the wrappers of all of an optimizer's parameters."""
        if everyone := _ids_of(claim):
            self._for[claim] = dict.fromkeys(everyone, _Sought(0, missed=False))
            self._hook()

    def after_step(self, claim: Claim, elsewhere: set[int], held: set[int]) -> None:
        """Looks for wrappers that a step went past, and no longer where nobody will find one.

        Args:
            claim: The optimizer's.
            elsewhere: ids of its parameters whose gradients came from no wrapper that is known.
            held: ids of the parameters in wrappers that are.
        """
        newest = max((attachment.number for attachment in _attachments.values()), default=0)
        # What was looked for in this step in vain has no wrapper that averages.
        before = self._for.get(claim, {})
        sought = {key: _Sought(wanted.after, missed=False) for key, wanted in before.items()}
        for key in elsewhere - sought.keys():
            sought[key] = _Sought(newest, missed=key in held)
        self._for[claim] = sought
        frozen = (id(p) for p in flat_params(claim.owner.groups) if not p.requires_grad)
        for key in set(frozen) - held:
            sought.pop(key, None)
        if sought:
            self._hook()
        else:
            self.stop(claim)

    def _hook(self) -> None:
        if self._handle is None:
            # torch.compile warns that global hooks fire on its wrapper too: ours means to.
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there")
            register = nn.modules.module.register_module_forward_pre_hook
            self._handle = register(_before_forward)

    def found(self, attachment: Attachment | None) -> None:
        """Takes note of a wrapper that runs forward, and stops once all have."""
        params, number = (attachment.params, attachment.number) if attachment else (set(), 0)
        missed = False
        for claim, sought in list(self._for.items()):
            found = {k for k, wanted in sought.items() if k in params and number > wanted.after}
            missed = missed or any(sought[key].missed for key in found)
            self._for[claim] = {key: sought[key] for key in sought.keys() & _ids_of(claim) - found}
            if not self._for[claim]:
                self.stop(claim)
        if missed:
            warn_once(
                "missed",
                "a DDP wrapper was made around a model that has another, live one, and averaged "
                "the gradients of its first step in full; from now on it does not. Delete the old "
                "wrapper, or call optimizer.attach(new_wrapper), to save that step",
            )

    def stop(self, claim: Claim) -> None:
        self._for.pop(claim, None)
        if not self._for and self._handle is not None:
            self._handle.remove()
            self._handle = None


def _ids_of(claim: Claim) -> set[int]:
    return {id(param) for param in flat_params(claim.owner.groups)}


_search = _Search()


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
    # Only wrappers in use count: an old one may have a successor that is yet to come.
    _search.found(attachment)


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
        _search.start(claim)


def after_step(claim: Claim, params: Iterable[Tensor]) -> None:
    """Searches on, or again, if a gradient came from elsewhere than the wrappers in use.

    Args:
        claim: Of the optimizer that made the step.
        params: Its parameters for which a rank had a gradient, the same on all ranks.
    """
    if claim.owner.world_size == 1:
        _search.stop(claim)
        return
    elsewhere, held = {id(param) for param in params}, set[int]()
    for attachment in list(_attachments.values()):
        held |= attachment.params
        if claim in attachment.used_for:
            attachment.used_for.discard(claim)
            elsewhere -= attachment.params
    _search.after_step(claim, elsewhere, held)
