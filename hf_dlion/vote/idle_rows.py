"""Rows without a gradient: tokens that a batch doesn't have, experts that no token chose.

sign(u) doesn't shrink with the momentum, so a row that was used once would move by the learning
rate in every later step. So a voter stops after h = round(1 / (1 - beta2)) updates of the momentum
without a gradient in the row, which is as long as the momentum remembers: u is then 0, and the row
abstains (docs/rule.md, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dlion.vote.message import Part

# Key in the optimizer's state: updates of the momentum since each row's last gradient other than
# zero, at most h, int32, shape (R,). A parameter has it while a row is without a gradient.
AGE = "row_age"
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def memory_of(beta2: float) -> int:
    """Returns h, the number of updates for which a row without a gradient is voted on."""
    return round(1 / (1 - beta2))


def zero_rows(grad: Tensor, row: int) -> Tensor | None:
    """Returns which rows of a gradient on a CPU are zero, bool, shape (R,); None if none is.

    `grad` is flat and not empty, and `row` is the number of elements of a row, 0 for a single one.
    """
    rows = grad.view(-1, row or grad.numel())
    if rows[:, 0].all():
        return None  # Almost always, and it reads one element per row.
    integers = rows.view(_INTEGERS[grad.element_size()]).numpy()
    without_signs = np.bitwise_or.reduce(integers, axis=1) & np.iinfo(integers.dtype).max
    zero = torch.from_numpy(without_signs == 0)
    return zero if zero.any() else None


def old_rows(
    states: Sequence[dict[str, Any]],
    grads: Sequence[Tensor | None],
    zero: Sequence[Tensor | None],
    betas2: Sequence[float],
) -> list[Tensor | None]:
    """Counts an update of every momentum; returns which rows of each parameter get u = 0.

    Call it once per step. A parameter without a gradient isn't counted. Rows are marked per
    parameter, bool, shape (R,), or None if none is old. The list is empty if no row of all is.

    Args:
        states: The optimizer's state of each parameter; `AGE` in it is changed.
        grads: Flat gradients, None for a parameter on which this rank's voter abstains.
        zero: Rows of each gradient that are zero, bool, shape (R,); None if none is.
        betas2: beta2 of each parameter.
    """
    found = [
        None if grad is None else _aged(state, rows, beta2)
        for state, grad, rows, beta2 in zip(states, grads, zero, betas2, strict=True)
    ]
    return found if any([old is not None for old in found]) else []


def _aged(state: dict[str, Any], zero: Tensor | None, beta2: float) -> Tensor | None:
    age = state.pop(AGE, None)
    if zero is None:
        return None
    if age is None or age.shape != zero.shape:
        age = torch.zeros(zero.shape, dtype=torch.int32, device=zero.device)
    most = memory_of(beta2)
    state[AGE] = age = age.add_(1).mul_(zero).clamp_(max=most)
    old = age == most
    return old if old.device.type != "cpu" or old.any() else None


def silence(u: Tensor, part: Part, old: Tensor, row: int) -> None:
    """Sets u to 0 in the rows of a part that `old` marks; a row has `row` elements."""
    first, last = part.start // row, -(-part.stop // row)
    own = u[part.at : part.at + part.stop - part.start]
    if own.numel() == (last - first) * row:
        own.view(-1, row).masked_fill_(old[first:last, None], 0.0)
    else:  # A part of one long row, or the end of one and the begin of the next.
        cut = (first + 1) * row - part.start
        own[:cut].masked_fill_(old[first], 0.0)
        own[cut:].masked_fill_(old[last - 1], 0.0)
