"""Which parameters received a gradient: what autograd saw, not what `grad` holds (design S11).

With find_unused_parameters DDP hands zeros to a rank that skipped a parameter, and without a
reduction its `grad` is None; both must train alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Presence:
    """Remembers the parameters for which autograd accumulated a gradient since `clear`."""

    def __init__(self, listener: Callable[[Tensor], None] | None = None) -> None:
        """Watches nothing yet.

        Args:
            listener: Called with each parameter when its gradient of a backward pass is ready;
                must not keep the optimizer alive.
        """
        self._listener = listener
        self._seen: set[int] = set()
        self._reduced: set[int] = set()
        self._zeros: dict[int, tuple[int, int]] = {}
        self._handles: dict[int, RemovableHandle] = {}

    def watch(self, params: Iterable[Tensor]) -> None:
        """Watches those parameters that require a gradient and are not watched yet."""
        for param in params:
            if param.requires_grad and id(param) not in self._handles:
                hook = _Hook(self._seen, self._reduced, id(param), self._listener)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles[id(param)] = handle

    def of(self, params: list[Tensor]) -> list[bool]:
        """Returns, for each parameter, whether it has a gradient of this step.

        One that autograd saw counts. Another one was set by hand and counts too, unless it is all
        zeros, as DDP hands them to a rank that did not use the parameter. Where autograd saw none
        at all, zeros count as well, unless they are those of `zero_grad(set_to_none=False)`.
        """
        return [p.grad is not None and self._counts(p, p.grad) for p in params]

    def seen(self, params: list[Tensor]) -> list[Tensor]:
        """Returns those of the parameters for which autograd saw a gradient."""
        return [p for p in params if id(p) in self._seen]

    def note_reduced(self, params: Iterable[Tensor]) -> None:
        """Remembers the parameters whose gradients a wrapper has just averaged."""
        self._reduced.update(map(id, params))

    def reduced(self, param: Tensor) -> bool:
        """Returns whether a wrapper averaged the gradient after autograd last added to it."""
        return param.grad is not None and id(param) in self._reduced

    def unaveraged(self, params: list[Tensor], present: list[bool]) -> list[bool]:
        """Returns, for each parameter, whether its gradient is yet to be averaged in the node.

        So it is where a gradient came from elsewhere than a wrapper, and where somebody dropped
        the wrapper's: the other ranks still have theirs.
        """
        return [
            (has and not self.reduced(p)) or (p.grad is None and id(p) in self._reduced)
            for p, has in zip(params, present, strict=True)
        ]

    def _counts(self, param: Tensor, grad: Tensor) -> bool:
        if id(param) in self._seen:
            return True
        if not self._seen:
            return self._zeros.get(id(param)) != _mark(grad)
        return grad.layout != torch.strided or bool(grad.any())

    def note_zeros(self, params: list[Tensor]) -> None:
        """Remembers the gradients that hold nothing but the zeros just written."""
        self._zeros = {id(p): _mark(p.grad) for p in params if p.grad is not None}

    def clear(self) -> None:
        """Forgets what was seen."""
        self._seen.clear()
        self._reduced.clear()

    def remove_with(self, owner: object) -> None:
        """Removes the hooks from the parameters once `owner` is gone."""
        weakref.finalize(owner, _remove, self._handles)


class _Hook:
    """The hook on a parameter; it keeps neither the optimizer nor the parameter alive."""

    def __init__(
        self,
        seen: set[int],
        reduced: set[int],
        key: int,
        listener: Callable[[Tensor], None] | None,
    ) -> None:
        self._seen, self._reduced, self._key, self._listener = seen, reduced, key, listener

    def __call__(self, param: Tensor) -> None:
        self._seen.add(self._key)
        # A wrapper averages after this hook, or, under no_sync(), not at all.
        self._reduced.discard(self._key)
        if self._listener is not None:
            self._listener(param)


def _mark(grad: Tensor) -> tuple[int, int]:
    """Returns what changes when a gradient is replaced or written to."""
    return id(grad), grad._version


def _remove(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
