"""By how much a loop scales gradients between backward and step, seen from a few elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.codec.codec import Magnitudes

# Scaling rounds every element; below float32 by up to half a percent.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
NARROW_TOLERANCE = 2e-2


class GradientScale:
    """Finds out by how much gradients are scaled between backward and step (clipping, unscaling).

    Attributes:
        scale: The factor, a float32 number; 1 until it is known.
        rescaled_oddly: ids of the parameters whose gradients were changed otherwise since (a mask,
            noise, clipping by layer, a sign, a NaN replaced), as far as the elements looked at can
            tell.
    """

    def __init__(self) -> None:
        """Starts with a factor of 1."""
        self.scale = 1.0
        self.rescaled_oddly: set[int] = set()
        # By the ids of the parameters: of several backward passes the last counts.
        self._before: dict[tuple[int, ...], tuple[list[Tensor], Tensor]] = {}

    def before(self, params: Sequence[Tensor], magnitudes: Magnitudes) -> None:
        """Takes what was seen of some parameters' gradients as backward leaves them."""
        for places, sums in magnitudes:
            seen = [params[place] for place in places]
            self._before[tuple(map(id, seen))] = seen, sums

    def before_one(self, param: Tensor) -> None:
        """Looks at a parameter's gradient as backward leaves it."""
        if _can_be_seen(param, param.device):
            self.before([param], codec_for(param.device).magnitudes([cast(Tensor, param.grad)]))

    def compare(self) -> float:
        """Compares the same gradients as the loop leaves them, and forgets what was seen before.

        Waits for each device once; where nothing was seen since the last time, for none.

        Returns:
            The ratio of their magnitudes to those before, NaN where none was seen. It becomes the
            scale unless some gradient is odd.
        """
        # A gradient that was dropped says nothing of the others.
        both = self._both()
        self._before.clear()
        if not both:
            return math.nan
        # Nor does one that is not finite: unless it was mended, its rank abstains anyway.
        mended = {id(param) for param, old, new in both if math.isfinite(new) > math.isfinite(old)}
        seen = [
            (param, old, new)
            for param, old, new in both
            if math.isfinite(old) and math.isfinite(new)
        ]
        total = math.fsum(old for _, old, _ in seen)
        ratio = math.fsum(new for *_, new in seen) / total if total else math.nan
        self.rescaled_oddly = mended | {
            id(param)
            for param, old, new in seen
            if not abs(new - ratio * old) <= TOLERANCE.get(param.dtype, NARROW_TOLERANCE) * new
        }
        if not self.rescaled_oddly and math.isfinite(ratio) and ratio > 0.0:
            self.scale = float(torch.tensor(ratio, dtype=torch.float32))
        return ratio if len(seen) == len(both) else math.nan

    def _both(self) -> list[tuple[Tensor, float, float]]:
        """Returns parameters that still have a gradient, and what was seen of it then and now."""
        by_device: dict[torch.device, list[tuple[list[Tensor], Tensor]]] = {}
        for params, sums in self._before.values():
            by_device.setdefault(sums.device, []).append((params, sums))
        both: list[tuple[Tensor, float, float]] = []
        for device, seen in by_device.items():
            params = [param for own, _ in seen for param in own]
            left = [k for k, param in enumerate(params) if _can_be_seen(param, device)]
            if not left:
                continue
            now = codec_for(device).magnitudes([cast(Tensor, params[k].grad) for k in left])
            read = torch.cat([sums for _, sums in seen] + [sums for _, sums in now]).tolist()
            old, new = read[: len(params)], read[len(params) :]
            order = [left[place] for places, _ in now for place in places]
            both += [(params[k], old[k], value) for k, value in zip(order, new, strict=True)]
        return both


def _can_be_seen(param: Tensor, device: torch.device) -> bool:
    grad = param.grad
    if grad is None or grad.device != device:
        return False
    return grad.layout == torch.strided and grad.numel() > 0
