"""How the optimizer finds the DDP wrappers of its parameters and keeps them from reducing.

A forward pre-hook for all modules (public torch API, nothing is patched) looks for DDP wrappers.
It costs about 3 us per module call and makes torch.compile warn, so it is there only while an
optimizer has parameters whose wrapper it does not know: it goes once all are covered, and comes
back when a wrapper is gone, or when a gradient came from elsewhere than the wrappers in use.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

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
        self._for: weakref.WeakSet[Claim] = weakref.WeakSet()
        self._handle: RemovableHandle | None = None
        # A wrapper found after a step that went past it has averaged gradients in that step.
        self.missed_a_step = False

    @property
    def active(self) -> bool:
        return self._handle is not None

    def start(self, optimizers: Iterable[Claim]) -> None:
        self._for.update(optimizers)
        if self._for and self._handle is None:
            # torch.compile warns that global hooks fire on its wrapper too: ours means to.
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there")
            register = nn.modules.module.register_module_forward_pre_hook
            self._handle = register(_before_forward)

    def stop(self, claim: Claim) -> None:
        self._for.discard(claim)
        if not self._for and self._handle is not None:
            self._handle.remove()
            self._handle = None
            self.missed_a_step = False

    def warn_if_missed(self) -> None:
        if self.missed_a_step:
            warn_once(
                "missed",
                "a DDP wrapper was made around a model that has another, live one, and averaged "
                "the gradients of its first step in full; from now on it does not. Delete the old "
                "wrapper, or call optimizer.attach(new_wrapper), to save that step",
            )


_search = _Search()


def watch(claim: Claim) -> None:
    """Attaches to every DDP wrapper of an optimizer's parameters, now and later.

    Args:
        claim: The optimizer's, held weakly.
    """
    _optimizers[claim.number] = claim
    _search.start([claim])


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
        _search.warn_if_missed()
    for claim in list(_optimizers.values()):
        # Only wrappers in use count: an old one may have a successor that is yet to come.
        used, _ = _params_of_wrappers(claim)
        # Frozen ones must be covered, too: they may be thawed after this forward.
        if all(id(p) in used for p in flat_params(claim.owner.groups)):
            _search.stop(claim)


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
    _search.start(list(_optimizers.values()))


def after_step(claim: Claim, params: Iterable[Tensor]) -> None:
    """Searches on, or again, if a gradient came from elsewhere than the wrappers in use.

    Args:
        claim: Of the optimizer that made the step.
        params: Its parameters for which autograd saw a gradient.
    """
    used, unused = _params_of_wrappers(claim)
    for attachment in _attachments_of(claim):
        attachment.used_for.discard(claim)
    had = [id(param) for param in params]
    if not had:
        return
    elsewhere = set(had) - used
    if claim.owner.world_size == 1 or not elsewhere:
        _search.stop(claim)
        return
    if not _search.active and not unused.isdisjoint(elsewhere):
        _search.missed_a_step = True
    _search.start([claim])


def _attachments_of(claim: Claim) -> Iterator[Attachment]:
    """Yields the attachments of the live DDP wrappers around the optimizer's parameters."""
    mine = {id(param) for param in flat_params(claim.owner.groups)}
    for attachment in list(_attachments.values()):
        if not mine.isdisjoint(attachment.params):
            yield attachment


def _params_of_wrappers(claim: Claim) -> tuple[set[int], set[int]]:
    """Returns ids of the parameters in wrappers that ran since the last step, and in the others."""
    used: set[int] = set()
    unused: set[int] = set()
    for attachment in _attachments_of(claim):
        (used if claim in attachment.used_for else unused).update(attachment.params)
    return used, unused
