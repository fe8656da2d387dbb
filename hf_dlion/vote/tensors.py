"""The tensors of this rank as a step uses them: local parts, flat, in memory order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_dlion.vote.idle_rows import zero_rows
from hf_dlion.vote.message import Message, Shape, messages

# What ranks compare of a trainable parameter: name, shape, dtype, strides, device type, and whether
# its gradient is averaged ("full") or voted on ("vote").
Line = tuple[object, ...]

# The dtypes of parameters.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class Plan:
    """The layout of the trainable tensors, kept until parameters are added, frozen or unfrozen.

    Attributes:
        key: Properties of the parameters on which the plan depends.
        shapes: Shapes of all trainable tensors, in the order of the groups.
        messages: Messages of the tensors that are voted on.
        full: Messages of the tensors whose gradients are averaged instead.
        lines: One line per trainable tensor, for the comparison between ranks.
        full_set: Indices of the tensors in `full`.
        full_momenta_equal: Whether the momenta in `full` are known to be equal on all voters.
    """

    key: object = None
    shapes: Sequence[Shape] = ()
    messages: Sequence[Message] = ()
    full: Sequence[Message] = ()
    lines: Sequence[Line] = ()
    full_set: frozenset[int] = frozenset()
    full_momenta_equal: bool = False

    @classmethod
    def of(
        cls,
        key: object,
        shapes: Sequence[Shape],
        trainable: Sequence[tuple[str, Tensor]],
        full: Sequence[bool],
    ) -> Plan:
        """Makes the plan of the trainable tensors from the shapes of this rank's parts.

        `trainable` has the unsharded parameters, because shards may differ in size. `full` marks
        those whose gradients are averaged.
        """
        lines: list[Line] = [
            (
                name,
                tuple(p.shape),
                str(p.dtype),
                p.stride(),
                p.device.type,
                "full" if averaged else "vote",
            )
            for (name, p), averaged in zip(trainable, full, strict=True)
        ]
        voted = messages([_empty_if(f, s) for f, s in zip(full, shapes, strict=True)])
        averaged = [_empty_if(not f, s) for f, s in zip(full, shapes, strict=True)]
        return cls(
            key=key,
            shapes=shapes,
            messages=voted,
            full=messages(averaged, after=voted),
            lines=lines,
            full_set=frozenset(index for index, averaged in enumerate(full) if averaged),
        )


@dataclass
class Trainable:
    """The trainable parameters, in the order of the groups, and what a step needs of them.

    `params` are those of the model, DTensors with FSDP2. `flat` has this rank's part of each, a
    flat view in memory order. In a step, a flat gradient and its momentum are None if this rank's
    voter abstains. `zero_rows` marks the rows of each gradient that are zero, see `survey`.
    `present` tells whether this rank has a gradient, and `finite` whether all of its gradients are
    finite.
    """

    plan: Plan = field(default_factory=Plan)
    params: list[Tensor] = field(default_factory=list)
    flat: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)
    momenta: list[Tensor | None] = field(default_factory=list)
    zero_rows: list[Tensor | None] = field(default_factory=list)
    present: list[bool] = field(default_factory=list)
    finite: bool = True

    def abstain(self, finite: bool, present: Sequence[bool]) -> None:
        """Drops gradients and momenta of parameters on which the voter abstains.

        `finite` and `present` are those of all ranks that vote as one with this rank.
        """
        for k, has_gradient in enumerate(present):
            if not (finite and has_gradient):
                self.grads[k] = self.momenta[k] = None


def flat_view(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor's elements in memory order, shape (numel,).

    Raises:
        NotImplementedError: If the elements have gaps between them or overlap in memory.
    """
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        raise NotImplementedError(
            f"a parameter of shape {tuple(tensor.shape)} with strides {tensor.stride()} has gaps "
            f"in memory: pass parameters without gaps, such as torch.nn.Parameter(x.contiguous())"
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def flat_gradient(name: str, grad: Tensor, param: Tensor) -> Tensor:
    """Returns a gradient's elements in the memory order of its parameter, shape (numel,).

    The result is a view if the strides are equal, and a copy otherwise.

    Raises:
        NotImplementedError: If the gradient is sparse.
        RuntimeError: If the gradient has another shape than the parameter.
    """
    if grad.layout != torch.strided:
        raise NotImplementedError(
            f"the gradient of {name!r} must be dense (got {grad.layout}): use "
            f"nn.Embedding(sparse=False)"
        )
    if grad.shape != param.shape:
        raise RuntimeError(
            f"the gradient of {name!r} must have the shape of its parameter, {tuple(param.shape)} "
            f"(got {tuple(grad.shape)})"
        )
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return flat_view(grad)


def survey(
    grads: Sequence[Tensor | None], shapes: Sequence[Shape]
) -> tuple[bool, list[Tensor | None]]:
    """Returns whether gradients hold no NaN and no Inf, and which of their rows are zero.

    Rows are marked per gradient, bool, shape (R,), or None if no row is zero. On a CPU this sums
    each gradient, which writes no temporary tensor. A sum of finite elements may overflow, so a
    gradient whose sum isn't finite is checked element by element. On other devices it computes the
    largest magnitude of each row. There the host waits once per device, and once more if a row is
    zero.
    """
    zero: list[Tensor | None] = [None] * len(grads)
    by_device: dict[torch.device, list[int]] = {}
    for k, grad in enumerate(grads):
        if grad is None or not grad.numel():
            continue
        if grad.device.type != "cpu":
            by_device.setdefault(grad.device, []).append(k)
            continue
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        if not math.isfinite(grad.sum(dtype=wide).item()) and not grad.isfinite().all():
            return False, zero
        zero[k] = zero_rows(grad, shapes[k].row)
    for found in by_device.values():
        magnitudes = [largest(grads[k], shapes[k].row) for k in found]  # type: ignore[arg-type]
        joined = torch.cat(magnitudes)
        finite, some_zero = torch.stack([joined.isfinite().all(), joined.eq(0).any()]).tolist()
        if not finite:
            return False, zero
        if some_zero:
            marks = [of_rows.eq(0) for of_rows in magnitudes]
            has_zero = torch.stack([mark.any() for mark in marks]).tolist()
            for k, mark, needed in zip(found, marks, has_zero, strict=True):
                zero[k] = mark if needed else None
    return True, zero


def largest(grad: Tensor, row: int) -> Tensor:
    """Returns the largest magnitude in each row of a flat gradient, shape (R,)."""
    rows = grad.view(-1, row or grad.numel())
    magnitudes: Tensor = torch.linalg.vector_norm(rows, math.inf, dim=1)
    return magnitudes


def _empty_if(left_out: bool, shape: Shape) -> Shape:
    """Returns the shape, or an empty one, which the layout of messages skips."""
    return Shape(0, 0, shape.group, shape.dtype, shape.device) if left_out else shape
