"""The hooks of one optimizer: on its parameters, and through `search` on its DDP wrappers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hf_dlion.backward import search
from hf_dlion.step.engine import Engine
from hf_dlion.step.presence import Presence


class OptimizerHooks:
    """Tells an optimizer's `Presence` what autograd does, and finds its wrappers."""

    def __init__(self, engine: Engine) -> None:
        """Watches nothing yet; `engine` is held weakly, and the hooks go with it."""
        self._engine = weakref.ref(engine)
        # Neither keeps the optimizer alive: early votes hold the engine weakly.
        self._presence, self._listener = engine.presence, engine.early.note_gradient
        self._handles: dict[int, RemovableHandle] = {}
        weakref.finalize(engine, _remove, self._handles)

    def search(self) -> None:
        """Attaches to every DDP wrapper of the optimizer's parameters, now and later."""
        if (engine := self._engine()) is not None:
            search.watch(engine)

    def watch_gradients(self, params: Iterable[Tensor]) -> None:
        """Watches those parameters that require a gradient and are not watched yet."""
        for param in params:
            if param.requires_grad and id(param) not in self._handles:
                hook = _AccumulatedHook(self._presence, self._listener)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles[id(param)] = handle

    def after_step(self, params: Sequence[Tensor]) -> None:
        """Searches on, or again, if a gradient came from elsewhere than the wrappers in use."""
        if (engine := self._engine()) is not None:
            search.after_step(engine, params)


class _AccumulatedHook:
    """What autograd calls once a parameter's gradient of a backward pass is there."""

    def __init__(self, presence: Presence, listener: Callable[[Tensor], None]) -> None:
        self._presence, self._listener = presence, listener

    def __call__(self, param: Tensor) -> None:
        self._presence.note_accumulated(param)
        self._listener(param)


def _remove(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
