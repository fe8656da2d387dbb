"""Rows without a gradient: tokens that a batch doesn't have, experts that no token chose.

`survey` finds them, and a NaN or an Inf, which reading the gradients once finds as well.

sign(u) doesn't shrink with the momentum, so a row that was used once would move by the learning
rate in every later step. So a voter stops after h = round(1 / (1 - beta2)) updates of the momentum
without a gradient in the row, which is as long as the momentum remembers: u is then 0, and the row
abstains (docs/rule.md, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dlion.core.slot import Slot

# Integers with the bits of floats, by bytes per element.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Key in the optimizer's state: updates of the momentum since each row's last gradient other than
# zero, at most h, int32, shape (R,). A parameter has it while a row is without a gradient.
AGE = "row_age"


def memory_of(beta2: float) -> int:
    """Returns h, the number of updates for which a row without a gradient is voted on."""
    return min(round(1 / (1 - beta2)), 2**31 - 1)  # Ages are int32.


def zero_rows(grad: Tensor, row: int) -> Tensor | None:
    """Returns which rows of a gradient on a CPU are zero, bool, shape (R,); None if none is.

    `grad` is flat and not empty, and `row` is the number of elements of a row, 0 for a single one.
    """
    integers = grad.view(_INTEGERS[grad.element_size()]).numpy().reshape(-1, row or grad.numel())
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
            by_device.setdefault(grad.device, []).append((slot, largest(grad, slot.row)))
            continue
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        if not math.isfinite(grad.sum(dtype=wide).item()) and not grad.isfinite().all():
            return _none_is_idle(slots)
        slot.idle = zero_rows(grad, slot.row)
    for found in by_device.values():
        joined = torch.cat([magnitudes for _, magnitudes in found])
        finite, some_zero = torch.stack([joined.isfinite().all(), joined.eq(0).any()]).tolist()
        if not finite:
            return _none_is_idle(slots)
        if some_zero:
            rows, zero = [len(magnitudes) for _, magnitudes in found], joined.eq(0)
            marks, copies = (torch.split(own, rows) for own in (zero, zero.cpu()))
            for (slot, _), mark, copy in zip(found, marks, copies, strict=True):
                slot.idle = mark if copy.any() else None
    return True


def _none_is_idle(slots: Sequence[Slot]) -> bool:
    for slot in slots:
        slot.idle = None
    return False


def largest(grad: Tensor, row: int) -> Tensor:
    """Returns the largest magnitude in each row of a flat gradient, shape (R,)."""
    rows = grad.view(-1, row or grad.numel())
    magnitudes: Tensor = torch.linalg.vector_norm(rows, math.inf, dim=1)
    return magnitudes


def aged(state: dict[str, Any], idle: Tensor | None, beta2: float) -> Tensor | None:
    """Counts an update of a momentum; returns the rows with u = 0, bool, shape (R,); None if none.

    Call it once per step for each parameter with a gradient.

    Args:
        state: The optimizer's state of the parameter; `AGE` in it is changed.
        idle: Rows of the gradient that are zero, bool, shape (R,); None if none is.
        beta2: beta2 of the momentum.
    """
    age = state.pop(AGE, None)
    if idle is None:
        return None
    if age is None or age.shape != idle.shape:
        age = torch.zeros(idle.shape, dtype=torch.int32, device=idle.device)
    most = memory_of(beta2)
    state[AGE] = age = age.to(idle.device).add_(1).mul_(idle).clamp_(max=most)
    old: Tensor = age == most
    return old if old.device.type != "cpu" or old.any() else None


def silence(u: Tensor, start: int, old: Tensor, row: int) -> None:
    """Sets u to 0 in the rows that `old` marks.

    u has the elements of a tensor from number `start`, and a row has `row` elements.
    """
    stop = start + u.numel()
    first, last = start // row, -(-stop // row)
    if u.numel() == (last - first) * row and u.device.type == "cpu":
        # masked_fill_ would take 6 times as long (torch 2.13).
        u.view(-1, row).numpy()[old[first:last].numpy()] = 0.0
    elif u.numel() == (last - first) * row:
        u.view(-1, row).masked_fill_(old[first:last, None], 0.0)
    else:  # A part of one long row, or the end of one and the begin of the next.
        cut = (first + 1) * row - start
        u[:cut].masked_fill_(old[first], 0.0)
        u[cut:].masked_fill_(old[last - 1], 0.0)
