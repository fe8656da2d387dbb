"""Ways to vote, and the bytes that each sends, by the formulas of the documentation."""

from __future__ import annotations

import math
from typing import Any

import torch

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "gather": {"exchange": "gather", "momentum_dtype": torch.bfloat16},
    "two_phase": {"exchange": "two_phase", "momentum_dtype": torch.float32, "seed": 2**40 + 3},
    "gather-zero": {"exchange": "gather", "ties": "zero", "momentum_dtype": torch.float16},
    "two_phase-zero": {"exchange": "two_phase", "ties": "zero"},
    "gather-average": {"exchange": "gather", "aggregation": "average"},
    "two_phase-average": {
        "exchange": "two_phase",
        "aggregation": "average",
        "momentum_dtype": torch.float32,
    },
    "auto-average": {"aggregation": "average"},
    "gather-2-bits": {"exchange": "gather", "bits": 2},
    "two_phase-4-bits": {"exchange": "two_phase", "bits": 4},
    "two_phase-4-bits-tensor": {"exchange": "two_phase", "bits": 4, "level_scale": "tensor"},
    "two_phase-8-bits-zero": {
        "exchange": "two_phase",
        "bits": 8,
        "ties": "zero",
        "momentum_dtype": torch.bfloat16,
    },
    "nearest": {"stochastic_rounding": False, "momentum_dtype": torch.bfloat16},
}


def words_of(bits: int) -> int:
    return -(-bits // 64)


def rows_of_words(shapes: list[torch.Size]) -> list[set[tuple[int, int]]]:
    """The rows, as parameter and number, that each word of a message touches."""
    row_of_word: list[set[tuple[int, int]]] = []
    for index, shape in enumerate(shapes):
        rows = shape[0] if len(shape) >= 2 else 1
        for first in range(0, shape.numel(), 64):
            elements = range(first, min(first + 64, shape.numel()))
            row_of_word.append({(index, k * rows // shape.numel()) for k in elements})
    return row_of_word


def planes_of(world_size: int, aggregation: str, ties: str) -> tuple[int, int]:
    """Bits per element and per row of a verdict."""
    if aggregation == "average":
        digits = math.ceil(math.log2(world_size + 1))
        return digits, digits
    return (2, 1) if ties == "zero" else (1, 1)


def bytes_of_words(
    row_of_word: list[set[tuple[int, int]]],
    world_size: int,
    exchange: str,
    aggregation: str,
    ties: str,
    bits: int = 1,
) -> int:
    """The formulas in the docstrings of Gather and TwoPhase, for words that touch these rows."""
    words, rows = len(row_of_word), len(set().union(*row_of_word))
    if exchange == "gather":
        return 8 * (world_size - 1) * (bits * words + words_of(rows))
    per_element, per_row = planes_of(world_size, aggregation, ties)
    size = -(-words // world_size)
    shards = [row_of_word[k : k + size] for k in range(0, words, size)]
    activity = words_of(max(len(set().union(*shard)) for shard in shards))
    sums = 1 if bits == 1 else 2
    up, down = bits * size + activity, per_element * size + per_row * activity + sums
    return 8 * (world_size - 1) * (up + down)
