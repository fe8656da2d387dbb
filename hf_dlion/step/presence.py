"""Which parameters received a gradient: what autograd saw, not what `grad` holds (rule S11).

With find_unused_parameters DDP hands zeros to a rank that skipped a parameter, and without a
reduction its `grad` is None; both must train alike.

Two sources tell when a gradient is final: autograd's hook on the parameter
(`hf_dlion.backward.hooks`), and, where a node votes as one, DDP's bucket after it has been averaged
inside the node (`hf_dlion.backward.ddp`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Presence:
    """Remembers the parameters for which autograd accumulated a gradient since `clear`."""

    def __init__(self) -> None:
        """Starts before the first backward pass."""
        self._seen: set[int] = set()
        self._averaged: set[int] = set()
        self._zeros: dict[int, tuple[int, int]] = {}

    def note_accumulated(self, param: Tensor) -> None:
        """Remembers that autograd has just added to the parameter's gradient."""
        self._seen.add(id(param))
        # A wrapper averages after this, or, under no_sync(), not at all.
        self._averaged.discard(id(param))

    def note_averaged(self, params: Iterable[Tensor]) -> None:
        """Remembers the parameters whose gradients a wrapper has just averaged in the node."""
        self._averaged.update(map(id, params))

    def note_zeros(self, params: Iterable[Tensor]) -> None:
        """Remembers the gradients that hold nothing but the zeros just written."""
        self._zeros = {id(p): mark(p) for p in params if p.grad is not None}

    def clear(self) -> None:
        """Forgets what was seen."""
        self._seen.clear()
        self._averaged.clear()

    def of(self, params: Sequence[Tensor]) -> list[bool]:
        """Returns, for each parameter, whether it has a gradient of this step.

        One that autograd saw counts. Another one was set by hand and counts too, unless it is all
        zeros, as DDP hands them to a rank that did not use the parameter. Where autograd saw none
        at all, zeros count as well, unless they are those of `zero_grad(set_to_none=False)`.
        """
        return [p.grad is not None and self._counts(p, p.grad) for p in params]

    def _counts(self, param: Tensor, grad: Tensor) -> bool:
        if id(param) in self._seen:
            return True
        if not self._seen:
            return self._zeros.get(id(param)) != mark(param)
        return grad.layout != torch.strided or bool(grad.any())

    def seen(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Returns those of the parameters for which autograd saw a gradient."""
        return [p for p in params if id(p) in self._seen]

    def averaged(self, param: Tensor) -> bool:
        """Returns whether a wrapper averaged the gradient after autograd last added to it."""
        return param.grad is not None and id(param) in self._averaged

    def unaveraged(self, params: Sequence[Tensor], present: Sequence[bool]) -> list[bool]:
        """Returns, for each parameter, whether its gradient is yet to be averaged in the node.

        So it is where a gradient came from elsewhere than a wrapper, and where somebody dropped
        the wrapper's: the other ranks still have theirs.
        """
        return [
            (has and not self.averaged(p)) or (p.grad is None and id(p) in self._averaged)
            for p, has in zip(params, present, strict=True)
        ]


def mark(param: Tensor) -> tuple[int, int]:
    """Returns what changes when a parameter's gradient is replaced or written to."""
    grad = param.grad
    return (0, 0) if grad is None else (id(grad), grad._version)
