"""By how much a loop scales gradients between backward and step, seen from a few elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# So many elements of each gradient, evenly spaced, are looked at.
PROBED = 128
# Scaling rounds every element; below float32 by up to half a percent.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
NARROW_TOLERANCE = 2e-2


class GradientScale:
    """Finds out by how much gradients are scaled between backward and step (clipping, unscaling).

    Attributes:
        scale: The factor, a float32 number; 1 until it is known.
        rescaled_oddly: ids of the parameters whose gradients were changed otherwise since (a mask,
            noise, clipping by layer), as far as the elements looked at can tell.
    """

    def __init__(self) -> None:
        """Starts with a factor of 1."""
        self.scale = 1.0
        self.rescaled_oddly: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def before(self, param: Tensor) -> None:
        """Looks at a parameter's gradient as backward leaves it."""
        seen = _magnitude(param.grad)
        if seen is not None:
            self._before[id(param)] = (param, seen)

    def after(self) -> float:
        """Looks at the same gradients as the loop leaves them.

        Returns:
            The ratio of their magnitudes to those before, NaN where none was seen. It becomes the
            scale unless some gradient is odd.
        """
        # A gradient that was dropped says nothing of the others.
        both = [
            (param, old, new)
            for param, old in self._before.values()
            if (new := _magnitude(param.grad)) is not None
        ]
        self._before.clear()
        if not both:
            return math.nan
        before, after = _floats([old for _, old, _ in both]), _floats([new for *_, new in both])
        # Nor does one that is not finite: its rank abstains anyway.
        seen = [
            (param, old, new)
            for (param, _, _), old, new in zip(both, before, after, strict=True)
            if math.isfinite(old) and math.isfinite(new)
        ]
        total = math.fsum(old for _, old, _ in seen)
        ratio = math.fsum(new for *_, new in seen) / total if total else math.nan
        self.rescaled_oddly = {
            id(param)
            for param, old, new in seen
            if not abs(new - ratio * old) <= TOLERANCE.get(param.dtype, NARROW_TOLERANCE) * new
        }
        if not self.rescaled_oddly and math.isfinite(ratio) and ratio > 0.0:
            self.scale = float(torch.tensor(ratio, dtype=torch.float32))
        return ratio if len(seen) == len(both) else math.nan


def _magnitude(grad: Tensor | None) -> Tensor | None:
    """Returns the sum of the magnitudes of some elements of the gradient, 0-D float64."""
    if grad is None or grad.layout != torch.strided or not grad.is_contiguous():
        return None
    flat = grad.detach().view(-1)
    return flat[:: -(-flat.numel() // PROBED) or 1].abs().sum(dtype=torch.float64)


def _floats(values: Sequence[Tensor]) -> list[float]:
    """Returns 0-D tensors as numbers, with one wait per device."""
    places: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value.device, []).append(place)
    found = [0.0] * len(values)
    for own in places.values():
        for place, number in zip(own, torch.stack([values[k] for k in own]).tolist(), strict=True):
            found[place] = number
    return found
