"""Which parameters received a gradient: what autograd saw, not what `grad` holds (design S11).

With find_unused_parameters DDP hands zeros to a rank that skipped a parameter, and without a
reduction its `grad` is None; both must train alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Presence:
    """Remembers the parameters for which autograd accumulated a gradient since `clear`."""

    def __init__(self) -> None:
        """Watches nothing yet."""
        self._seen: set[int] = set()
        self._zeros: dict[int, tuple[int, int]] = {}
        self._handles: dict[int, RemovableHandle] = {}

    def watch(self, params: Iterable[Tensor]) -> None:
        """Watches those parameters that require a gradient and are not watched yet."""
        for param in params:
            if param.requires_grad and id(param) not in self._handles:
                hook = _Hook(self._seen, id(param))
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles[id(param)] = handle

    def of(self, params: list[Tensor]) -> list[bool]:
        """Returns, for each parameter, whether it has a gradient that autograd saw.

        Where autograd saw none at all, gradients were set by hand, and one that is there counts,
        unless it is still the zeros of `zero_grad(set_to_none=False)`.
        """
        if self._seen:
            # One that was thawed since the last step is not watched yet: its gradient counts.
            return [
                p.grad is not None and (id(p) in self._seen or id(p) not in self._handles)
                for p in params
            ]
        return [p.grad is not None and self._zeros.get(id(p)) != _mark(p.grad) for p in params]

    def note_zeros(self, params: list[Tensor]) -> None:
        """Remembers the gradients that hold nothing but the zeros just written."""
        self._zeros = {id(p): _mark(p.grad) for p in params if p.grad is not None}

    def clear(self) -> None:
        """Forgets what was seen."""
        self._seen.clear()

    def remove_with(self, owner: object) -> None:
        """Removes the hooks from the parameters once `owner` is gone."""
        weakref.finalize(owner, _remove, self._handles)


class _Hook:
    """The hook on a parameter; it keeps neither the optimizer nor the parameter alive."""

    def __init__(self, seen: set[int], key: int) -> None:
        self._seen, self._key = seen, key

    def __call__(self, param: Tensor) -> None:
        self._seen.add(self._key)


def _mark(grad: Tensor) -> tuple[int, int]:
    """Returns what changes when a gradient is replaced or written to."""
    return id(grad), grad._version


def _remove(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
