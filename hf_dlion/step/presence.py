"""Which parameters received a gradient: what autograd saw, not what `grad` holds (rule S11).

With find_unused_parameters DDP hands zeros to a rank that skipped a parameter, and without a
reduction its `grad` is None; both must train alike.

Two sources tell when a gradient is final: autograd's hook on the parameter
(`hf_dlion.backward.hooks`), and, where a node votes as one, DDP's bucket after it has been averaged
inside the node (`hf_dlion.backward.ddp`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hf_dlion.step.batches import Batches

Mark = tuple[int, int]


class Presence:
    """Remembers the parameters for which autograd accumulated a gradient since `clear`.

    Attributes:
        batches: Counts backward passes, and those whose gradients were dropped.
    """

    def __init__(self) -> None:
        """Starts before the first backward pass."""
        self.batches = Batches()
        # The parameters' hooks hold this, so it must not hold them.
        self._seen: dict[int, tuple[weakref.ref[Tensor], Mark]] = {}
        self._averaged: set[int] = set()
        # Averaged, and dropped by the optimizer's `zero_grad`.
        self._given_up: set[int] = set()
        self._zeros: dict[int, Mark] = {}
        self._pass = -1

    def note_accumulated(self, param: Tensor) -> None:
        """Remembers that autograd has just added to the parameter's gradient."""
        # Each call of backward() has a number of its own, and this tells which one runs.
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            if self._dropped_but(param):
                self._note_dropped()
            self.batches.note_pass()
        self._seen[id(param)] = weakref.ref(param), mark(param)
        # A wrapper averages after this, or, under no_sync(), not at all.
        self._averaged.discard(id(param))

    def _dropped_but(self, param: Tensor) -> bool:
        """Returns whether all gradients of before are gone, but for one that has just arrived.

        `model.zero_grad()` does not come by here as the optimizer's does.
        """
        others = [entry for key, entry in self._seen.items() if key != id(param)]
        return bool(others) and all(_dropped(*entry) for entry in others)

    def note_averaged(self, params: Iterable[Tensor]) -> None:
        """Remembers the parameters whose gradients a wrapper has just averaged in the node."""
        self._averaged.update(map(id, params))

    def note_reset(self, params: Iterable[Tensor]) -> None:
        """Takes note that the optimizer's `zero_grad` has reset the parameters' gradients."""
        self._given_up |= self._averaged
        self._note_dropped()
        # Those that are left hold nothing but the zeros just written.
        self._zeros = {id(p): mark(p) for p in params if p.grad is not None}

    def note_step(self) -> None:
        """Forgets what was seen: a step was taken with it."""
        self.batches.note_step()
        self._given_up.clear()
        self._forget()

    def _note_dropped(self) -> None:
        self.batches.note_dropped()
        self._forget()

    def _forget(self) -> None:
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
        if not self._seen and self._zeros.get(id(param)) != mark(param):
            return True
        # What is written through `.data` or NumPy leaves the mark of the zeros below it.
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
            not self.averaged(p) if has else self._lost(p)
            for p, has in zip(params, present, strict=True)
        ]

    def _lost(self, param: Tensor) -> bool:
        """Returns whether a wrapper's gradient was dropped, of a parameter that has none now."""
        if id(param) in self._given_up:
            return True
        return param.grad is None and id(param) in self._averaged


def mark(param: Tensor) -> Mark:
    """Returns what changes when a parameter's gradient is replaced or written to."""
    grad = param.grad
    if grad is None:
        return 0, 0
    # Of a tensor that was made in inference mode torch counts no changes.
    return id(grad), 0 if grad.is_inference() else grad._version


def _dropped(ref: weakref.ref[Tensor], before: Mark) -> bool:
    """Returns whether a parameter's gradient is gone, or zeros were written into it."""
    param = ref()
    if param is None or param.grad is None:
        return True
    # The elements are looked at only where something was written: on a GPU that waits.
    grad = param.grad
    return mark(param) != before and grad.layout == torch.strided and not bool(grad.any())
