"""By how much a loop scales gradients between backward and step, seen from a few elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.groups import Groups, flat_params

# So many elements of so many gradients are looked at.
PROBED, PROBED_PARAMS = 1024, 8


class ScaleProbes:
    """Finds out by how much gradients are scaled between backward and step (clipping, unscaling).

    Attributes:
        scale: The factor, a float32 number; 1 until it is known.
    """

    def __init__(self) -> None:
        """Has seen nothing."""
        self.scale = 1.0
        self._probed: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def before(self, param: Tensor, groups: Groups, grad: Tensor | None = None) -> None:
        """Looks at a gradient as backward leaves it.

        Args:
            param: Its gradient is ready.
            groups: The parameter groups, whose largest parameters are probed.
            grad: The gradient, where it is not in `param.grad` yet.
        """
        if not self._probed:
            params = [p for p in flat_params(groups) if p.requires_grad]
            largest = sorted(params, key=Tensor.numel, reverse=True)[:PROBED_PARAMS]
            self._probed = {id(p) for p in largest}
        if id(param) not in self._probed:
            return
        seen = _magnitude(param.grad if grad is None else grad)
        if seen is not None:
            self._before[id(param)] = (param, seen)

    def forget(self, param: Tensor) -> None:
        """Drops what was seen of a gradient: it is accumulated into once more."""
        self._before.pop(id(param), None)

    def after(self) -> float:
        """Looks at the same gradients as the loop leaves them.

        Returns:
            The ratio of their magnitudes to those before, NaN where none was seen.
        """
        pairs = [(old, _magnitude(param.grad)) for param, old in self._before.values()]
        self._before.clear()
        self._probed.clear()
        # A gradient that was dropped says nothing of the others.
        both = [(old, new) for old, new in pairs if new is not None]
        total = _sum([old for old, _ in both])
        ratio = _sum([new for _, new in both]) / total if total else math.nan
        if math.isfinite(ratio) and ratio > 0.0:
            self.scale = float(torch.tensor(ratio, dtype=torch.float32))
        return ratio


def _magnitude(grad: Tensor | None) -> Tensor | None:
    """Returns the sum of the magnitudes of some elements of the gradient, 0-D float64."""
    if grad is None or grad.layout != torch.strided or not grad.is_contiguous():
        return None
    return grad.detach().view(-1)[:PROBED].abs().sum(dtype=torch.float64)


def _sum(values: Sequence[Tensor]) -> float:
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in values:
        by_device.setdefault(value.device, []).append(value)
    return sum(float(torch.stack(found).sum()) for found in by_device.values())
