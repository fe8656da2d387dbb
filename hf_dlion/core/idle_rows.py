"""Rows without a gradient: tokens that a batch doesn't have, experts that no token chose.

`survey` finds them, and a NaN or an Inf, which reading the gradients once finds as well.

sign(u) doesn't shrink with the momentum, so a row that was used once would move by the learning
rate in every later step. So a voter stops after h = round(1 / (1 - beta2)) updates of the momentum
without a gradient in the row, which is as long as the momentum remembers: u is then 0, and the row
abstains (docs/rule.md, section 2).
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dlion.core.slot import Slot

# Integers with the bits of floats, by bytes per element.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def memory_of(beta2: float) -> int:
    """Returns h, the number of updates for which a row without a gradient is voted on."""
    return min(round(1 / (1 - beta2)), 2**31 - 1)  # Ages are int32.


def zero_rows(grad: Tensor, row_size: int) -> Tensor | None:
    """Returns which rows of a gradient on a CPU are zero, bool, shape (R,); None if none is.

    `grad` is flat and not empty, and a row has `row_size` elements, 0 for a single row.
    """
    integers = grad.view(_INTEGERS[grad.element_size()]).numpy()
    integers = integers.reshape(-1, row_size or grad.numel())
    if (integers[:, 0] << 1).all():  # Without the sign: -0.0 is zero, too.
        return None  # Almost always, and it reads one element per row.
    zero: np.ndarray[Any, Any] = np.bitwise_or.reduce(integers, axis=1) << 1 == 0
    return torch.from_numpy(zero) if zero.any() else None


def survey(slots: Sequence[Slot]) -> bool:
    """Notes which rows of the gradients are zero; returns whether they hold no NaN and no Inf.

    On a CPU this sums each gradient, which writes no temporary tensor. A sum of finite elements may
    overflow, so a gradient whose sum isn't finite is checked element by element. On other devices
    it computes the largest magnitude of each row. There the host waits once per device, and once
    more if a row is zero. If it returns False, no row is noted.
    """
    by_device: dict[torch.device, list[tuple[Slot, Tensor]]] = {}
    for slot in slots:
        slot.idle, grad = None, slot.grad
        if grad is None or not grad.numel():
            continue
        if grad.device.type != "cpu":
            by_device.setdefault(grad.device, []).append((slot, largest(grad, slot.row_size)))
            continue
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        if not math.isfinite(grad.sum(dtype=wide).item()) and not grad.isfinite().all():
            return _none_is_idle(slots)
        slot.idle = zero_rows(grad, slot.row_size)
    for slots_with_largest in by_device.values():
        joined = torch.cat([magnitudes for _, magnitudes in slots_with_largest])
        finite, some_zero = torch.stack([joined.isfinite().all(), joined.eq(0).any()]).tolist()
        if not finite:
            return _none_is_idle(slots)
        if some_zero:
            lengths, zero = [len(magnitudes) for _, magnitudes in slots_with_largest], joined.eq(0)
            by_slot, on_host = torch.split(zero, lengths), torch.split(zero.cpu(), lengths)
            for (slot, _), idle, copy in zip(slots_with_largest, by_slot, on_host, strict=True):
                slot.idle = idle if copy.any() else None
    return True


def _none_is_idle(slots: Sequence[Slot]) -> bool:
    for slot in slots:
        slot.idle = None
    return False


def largest(grad: Tensor, row_size: int) -> Tensor:
    """Returns the largest magnitude in each row of a flat gradient, shape (R,)."""
    rows = grad.view(-1, row_size or grad.numel())
    magnitudes: Tensor = torch.linalg.vector_norm(rows, math.inf, dim=1)
    return magnitudes


def update_age(
    ages: MutableMapping[Tensor, Tensor], param: Tensor, idle: Tensor | None, beta2: float
) -> Tensor | None:
    """Counts an update of a momentum; returns the old rows, in which u is 0.

    They are bool, shape (R,), and None if no row is old. Call it once per step for each parameter
    with a gradient.

    Args:
        ages: Updates of momenta since each row's last gradient other than zero, at most h, int32,
            shape (R,). It has those of `param` while one of its rows is without a gradient.
        param: The parameter.
        idle: Rows of the gradient that are zero, bool, shape (R,); None if none is.
        beta2: beta2 of the momentum.
    """
    age = ages.pop(param, None)
    if idle is None:
        return None
    if age is None or age.shape != idle.shape:
        age = torch.zeros(idle.shape, dtype=torch.int32, device=idle.device)
    most = memory_of(beta2)
    ages[param] = age = age.to(idle.device).add_(1).mul_(idle).clamp_(max=most)
    old = age == most
    return old if old.device.type != "cpu" or old.any() else None


def silence(u: Tensor, start: int, old: Tensor, row_size: int) -> None:
    """Sets u to 0 in the rows that `old` marks.

    u has the elements of a tensor from number `start`, and a row has `row_size` elements.
    """
    stop = start + u.numel()
    first, last = start // row_size, -(-stop // row_size)
    if u.numel() == (last - first) * row_size and u.device.type == "cpu":
        # masked_fill_ would take 6 times as long (torch 2.13).
        u.view(-1, row_size).numpy()[old[first:last].numpy()] = 0.0
    elif u.numel() == (last - first) * row_size:
        u.view(-1, row_size).masked_fill_(old[first:last, None], 0.0)
    else:  # A part of one long row, or the end of one and the begin of the next.
        cut = (first + 1) * row_size - start
        u[:cut].masked_fill_(old[first], 0.0)
        u[cut:].masked_fill_(old[last - 1], 0.0)
