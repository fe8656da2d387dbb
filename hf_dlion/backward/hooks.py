"""The hooks of one optimizer: on its parameters, and through `search` on its DDP wrappers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from hf_dlion.backward import claims, search
from hf_dlion.backward.claims import Claim
from hf_dlion.step.engine import Engine


class OptimizerHooks:
    """Tells an optimizer's `Presence` what autograd does, and finds its wrappers."""

    def __init__(self, engine: Engine) -> None:
        """Watches nothing yet; the hooks go with the optimizer."""
        self._engine = engine
        self._claim = Claim(engine)
        self._handles: dict[int, RemovableHandle] = {}
        claims.lions.add(engine.owner)
        weakref.finalize(engine.owner, _let_go, engine, self._handles).atexit = False

    def search(self) -> None:
        """Attaches to every DDP wrapper of the optimizer's parameters, now and later."""
        search.watch(self._claim)

    def claim(self) -> None:
        """Takes the parameters' gradients, also from another DistributedLion."""
        self._claim.take()

    def claim_free(self) -> None:
        """Takes the gradients of those parameters that no DistributedLion has."""
        self._claim.take_free()

    def added(self, params: Iterable[Tensor]) -> None:
        """Watches parameters of a new group, and takes them if it has the others."""
        if self._claim.active:
            self._claim.take()
            self.search()
        self.watch_gradients(params)

    def release(self) -> None:
        """Gives the parameters' gradients back to their DDP wrappers."""
        self._claim.release()

    def watch_gradients(self, params: Iterable[Tensor]) -> None:
        """Watches those parameters that require a gradient and are not watched yet."""
        fresh = [param for param in params if param.requires_grad and not self._watched(param)]
        for param in fresh:
            hook = _AccumulatedHook(self._claim)
            handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._handles[id(param)] = handle
        if fresh and self._claim.whole:
            # Their wrapper may have run forward before they were this optimizer's.
            self.search()

    def _watched(self, param: Tensor) -> bool:
        handle = self._handles.get(id(param))
        # A parameter that is gone, with its hooks, may have had the same number.
        return handle is not None and handle.hooks_dict_ref() is not None

    def after_step(self) -> None:
        """Claims what another optimizer has taken, and looks after the wrappers."""
        if not self._claim.whole:
            self._claim.take()
            self.search()
        self._claim.stepped()
        search.after_step(self._claim)


class _AccumulatedHook:
    """What autograd calls once a parameter's gradient of a backward pass is there."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim

    # Traced, it would be compiled anew for every gradient, until torch gives up with a warning.
    @_disable_dynamo
    def __call__(self, param: Tensor) -> None:
        owner = self._claim.owner
        part = owner.parts.of(param)
        owner.presence.note_accumulated(part)
        # Votes of an optimizer that nobody is about to step would never be waited for.
        if claims.claim_of(param) is self._claim:
            owner.early.note_gradient(part)


def _let_go(engine: Engine, handles: dict[int, RemovableHandle]) -> None:
    engine.shed()
    for handle in handles.values():
        handle.remove()
