"""What the baselines send, in elements and bytes."""

from __future__ import annotations

from collections.abc import Sequence

POWER_RANK = 4


def ring_bytes(numel: int, size: int, ranks: int) -> int:
    """Returns the bytes that a rank sends in a ring all-reduce.

    Args:
        numel: Elements.
        size: Bytes per element.
        ranks: Number of ranks.
    """
    return 2 * (ranks - 1) * -(-numel // ranks) * size


def power_numel(shape: Sequence[int]) -> int:
    """Returns the elements that PowerSGD reduces for a tensor: two factors, or all of it."""
    rows, columns = matrix_of(shape)
    rank = min(rows, columns, POWER_RANK)
    factors = (rows + columns) * rank
    return factors if factors * 2 < rows * columns else rows * columns


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and the columns of a tensor seen as a matrix; a vector has one row."""
    if len(shape) < 2:
        return 1, shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0], columns
