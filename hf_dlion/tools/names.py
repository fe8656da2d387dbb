"""What benchmarks, predictions and pictures call the ways of training: rows of their tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

POWER_RANK = 4
NONE = "no communication, AdamW"
ALONE = "one host alone, Lion"
FP32 = "DDP fp32, AdamW"
BF16 = "DDP bf16 hook, AdamW"
POWER = f"PowerSGD rank {POWER_RANK}, AdamW"
DLION = "DistributedLion"


def name_of(bits: int, *, local_group: str | None = None, overlap: bool = False) -> str:
    """Returns the name of DistributedLion with some options in the tables."""
    parts = [DLION]
    parts += [f"{bits} bits"] if bits > 1 else []
    parts += ["a vote per node"] if local_group is not None else []
    return ", ".join(parts + ["overlap"] * overlap)


def power_numel(shape: Sequence[int]) -> int:
    """Returns the elements that PowerSGD reduces for a tensor: two factors, or all of it."""
    numel = math.prod(shape)
    # A tensor of more dimensions is a matrix with the first as rows; a vector is one row.
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape[1:] if len(shape) > 1 else shape)
    factors = (rows + columns) * min(rows, columns, POWER_RANK)
    return factors if factors * 2 < numel else numel
