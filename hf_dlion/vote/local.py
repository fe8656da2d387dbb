"""This rank's tensors as a step sees them: flat, in memory order, local."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_dlion.vote.groups import Groups, named
from hf_dlion.vote.message import Message, Shape, messages

# What ranks compare of a trainable parameter: name, shape, dtype, strides, device type, treatment.
Line = tuple[object, ...]


@dataclass
class Plan:
    """What doesn't change from step to step, until parameters are added, frozen or unfrozen.

    Attributes:
        shapes: Of all trainable tensors, in the order of the groups.
        messages: Of the tensors that vote.
        full: Of the tensors whose gradients are averaged instead.
        lines: A line per trainable tensor, for the comparison between ranks.
        full_set: Indices of the tensors in `full`.
        full_momenta_equal: Whether their momenta are known to be equal on all voters.
        identities: `id` of each parameter, since another one may have the same shape.
    """

    shapes: tuple[Shape, ...]
    messages: list[Message]
    full: list[Message]
    lines: list[Line]
    full_set: frozenset[int]
    full_momenta_equal: bool = False
    identities: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, params: Sequence[Tensor], groups: Groups, full: Sequence[bool]) -> Plan:
        """Makes the plan of this rank's trainable tensors.

        Args:
            params: Local trainable tensors.
            groups: The parameter groups, whose parameters these are.
            full: By tensor, whether its gradient is averaged.
        """
        shapes = shapes_of(params, groups)
        # What ranks compare are whole parameters: shards may differ in size.
        whole = [(name, p) for name, p in named(groups) if p.requires_grad]
        lines: list[Line] = [
            (
                name,
                tuple(p.shape),
                str(p.dtype),
                p.stride(),
                p.device.type,
                "full" if own else "vote",
            )
            for (name, p), own in zip(whole, full, strict=True)
        ]
        averaged = frozenset(i for i, own in enumerate(full) if own)
        return cls(
            shapes,
            messages([_empty_if(i in averaged, shape) for i, shape in enumerate(shapes)]),
            messages([_empty_if(i not in averaged, shape) for i, shape in enumerate(shapes)]),
            lines,
            averaged,
        )


@dataclass
class Tensors:
    """This rank's flat tensors in one step, by index of the trainable parameter.

    Attributes:
        params: Parameters.
        grads: Gradients; None where this rank's voter doesn't vote.
        momenta: Momenta; None where this rank's voter doesn't vote.
        present: Whether this rank has a gradient.
        finite: Whether all of its gradients are finite.
    """

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)
    momenta: list[Tensor | None] = field(default_factory=list)
    present: list[bool] = field(default_factory=list)
    finite: bool = True

    def abstain(self, finite: bool, present: Sequence[bool]) -> None:
        """Drops gradients and momenta of what this rank's voter doesn't vote on."""
        for k, here in enumerate(present):
            if not (finite and here):
                self.grads[k] = self.momenta[k] = None


def shapes_of(params: Sequence[Tensor], groups: Groups) -> tuple[Shape, ...]:
    """Returns the shapes of the trainable tensors, cheap enough for every step."""
    numbers = [g for g, group in enumerate(groups) for p in group["params"] if p.requires_grad]
    return tuple([Shape.of(p, number) for p, number in zip(params, numbers, strict=True)])


def flat_view(tensor: Tensor) -> Tensor:
    """Returns a tensor's elements in memory order, a view.

    Raises:
        NotImplementedError: If there are gaps between them, or two share memory.
    """
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        raise NotImplementedError(
            f"a parameter of shape {tuple(tensor.shape)} with strides {tensor.stride()} has gaps "
            f"in memory; pass parameters without gaps, such as torch.nn.Parameter(x.contiguous())"
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def flat_gradient(name: str, grad: Tensor, param: Tensor) -> Tensor:
    """Returns a gradient's elements in the memory order of its parameter: a view, or else a copy.

    Args:
        name: Of the parameter.
        grad: This rank's part of the gradient.
        param: This rank's part of the parameter.

    Raises:
        NotImplementedError: If it is sparse.
        RuntimeError: If its shape is not the parameter's.
    """
    if grad.layout != torch.strided:
        raise NotImplementedError(
            f"the gradient of {name!r} is {grad.layout}; DistributedLion needs dense ones: use "
            f"nn.Embedding(sparse=False)"
        )
    if grad.shape != param.shape:
        raise RuntimeError(
            f"the gradient of {name!r} has shape {tuple(grad.shape)}, its parameter "
            f"{tuple(param.shape)}"
        )
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return flat_view(grad)


def all_finite(grads: Sequence[Tensor]) -> bool:
    """Returns whether gradients hold no NaN and no Inf.

    On a CPU by their sums, which are read once and written nowhere; a sum may overflow by itself,
    so a tensor whose sum is not finite is looked at. Elsewhere by their largest magnitudes, so the
    host waits once per device.
    """
    rest: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        if grad.device.type != "cpu":
            rest.setdefault(grad.device, []).append(grad)
            continue
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        if not math.isfinite(grad.sum(dtype=wide).item()) and not grad.isfinite().all():
            return False
    return all(
        bool(torch.stack(torch._foreach_norm(own, math.inf)).isfinite().all())
        for own in rest.values()
    )


def _empty_if(left_out: bool, shape: Shape) -> Shape:
    return Shape(0, 0, shape.group, shape.dtype, shape.device) if left_out else shape
