"""The code of more than one bit in NumPy: the definition (S6). `reference` holds all the rest.

A rank sends a *level* q per element: its direction relative to the mean magnitude of its tensor, or
of its word, which is not sent. With L the largest level:

| bits | levels | L |
| --- | --- | --- |
| 2 | -3, -1, 1, 3 | 3 |
| 4 | -7 to 7 | 7 |
| 8 | -127 to 127 | 127 |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hf_dlion.codec.reference.votes import (
    WORD_BITS,
    Array,
    Ballot,
    decided,
    pack_signs,
    row_of_element,
)

LARGEST = {2: 3, 4: 7, 8: 127}
SPACING = {2: 2, 4: 1, 8: 1}


def mean_magnitude(u: Array, active: npt.NDArray[np.bool_]) -> float:
    """Returns a, the mean of |u| over the active rows, or NaN if there are none.

    The magnitudes are added in float64 and in one order, whatever the device and its threads. The
    elements are taken 64 at a time, in row-major order, zeros behind the last one; of each 64 the
    second half is added to the first, then the second quarter to the first, and so on. The sums of
    the 64s are added in pairs of neighbours, then the sums of pairs, and so on; a last one without
    a neighbour is kept.

    Args:
        u: The direction, any shape, float32 or float64.
        active: A bool per row.
    """
    flat = np.abs(u.reshape(-1)).astype(np.float64)
    words: Array = np.zeros((-(-flat.size // WORD_BITS), WORD_BITS))
    words.reshape(-1)[: flat.size] = flat
    with np.errstate(over="ignore"):
        while words.shape[1] > 1:
            half = words.shape[1] // 2
            words = words[:, :half] + words[:, half:]
        sums: Array = words.reshape(-1)
        while sums.size > 1:
            sums = np.append(sums, np.zeros(sums.size % 2))
            sums = sums[0::2] + sums[1::2]
    count = int(active[row_of_element(u.shape)].sum())
    return float(sums[0]) / count if count else float("nan")


def mean_magnitudes_of_words(u: Array) -> npt.NDArray[np.float64]:
    """Returns for each element the mean of |u| over the elements of its word that are not 0.

    A word is 64 elements in row-major order, whatever rows they are of. Its magnitudes are added as
    `mean_magnitude` adds those of 64 elements. NaN where all are 0.

    Args:
        u: The direction, any shape, float32 or float64.
    """
    words = np.zeros((-(-u.size // WORD_BITS), WORD_BITS))
    words.reshape(-1)[: u.size] = np.abs(u.reshape(-1))
    count = (words != 0).sum(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        while words.shape[1] > 1:
            half = words.shape[1] // 2
            words = words[:, :half] + words[:, half:]
        return np.repeat(words[:, 0] / count, WORD_BITS)[: u.size]


def levels(
    u: Array,
    *,
    bits: Literal[2, 4, 8],
    t: int,
    rank: int,
    world_size: int,
    scale: Literal["tensor", "word"] = "tensor",
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Returns the level of every element, and which rows are active; see `pack_levels` (S6).

    With a the mean magnitude of the tensor, or of the element's word, and fl the rounding to the
    dtype of u:

        bits = 4, 8:  q = round(clamp(fl(u * fl(min(L / 2 / a, largest finite number)))))
        bits = 2:     q = sign, or 3 * sign where |u| > fl(1.5 * a)

    The scalars in front of fl are computed in float64. clamp is to -L and L, NaN becomes L; round
    is to the nearest integer, to even halfway. Where a is not above 0 (a NaN: no rank sends one,
    S10) the factor is 0. The sign is that of `pack_signs`: with 2 bits, which have no level for it,
    an exact zero in an active row is -1 or +1. Rows that are zero everywhere abstain.
    """
    flat, one = u.reshape(-1), u.dtype.type
    words, active = pack_signs(u, t=t, rank=rank, world_size=world_size)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        a: Array = np.full(flat.size, mean_magnitude(u, active))
        if scale == "word":
            a = mean_magnitudes_of_words(u)
        largest = LARGEST[bits]
        if bits == 2:
            negative = np.unpackbits(words.view(np.uint8), bitorder="little")[: flat.size]
            q = np.where(negative == 1, -1, 1) * np.where(
                np.abs(flat) > (1.5 * a).astype(one), 3, 1
            )
        else:
            factor = np.where(a > 0, np.minimum(largest / 2 / a, np.finfo(u.dtype).max), 0.0)
            scaled = flat * factor.astype(one)
            scaled = np.where(scaled < largest, scaled, one(largest))
            scaled = np.where(scaled > -largest, scaled, one(-largest))
            q = np.rint(scaled).astype(np.int64)
    return (q * active[row_of_element(u.shape)]).reshape(u.shape), active


def pack_levels(
    u: Array,
    *,
    bits: Literal[2, 4, 8],
    t: int,
    rank: int,
    world_size: int,
    scale: Literal["tensor", "word"] = "tensor",
) -> Ballot:
    """Returns a direction's packed levels and which of its rows are active.

    A level travels as a code c of `bits` bits: q = s c - L with s = 2 for 2 bits, else 1. Elements
    of rows that abstain, and what lies behind the last element, have the code 0. The codes of 64
    elements take `bits` words, which are 8 * bits bytes: byte j holds the codes of the elements
    j, j + 8 bits, j + 16 bits, ..., the first one in its lowest bits.

    Args:
        u: The direction, any shape, float32 or float64, contiguous or not.
        bits: Per element.
        t: The number of the step being made.
        rank: The rank whose direction it is.
        world_size: The number of ranks.
        scale: Whose mean magnitude levels are relative to.

    Returns:
        uint64 words, `bits` for every 64 elements, and a bool per row.
    """
    q, active = levels(u, bits=bits, t=t, rank=rank, world_size=world_size, scale=scale)
    codes = np.zeros(-(-q.size // WORD_BITS) * WORD_BITS, dtype=np.uint8)
    codes[: q.size] = ((q + LARGEST[bits]) // SPACING[bits]).reshape(-1)
    codes[: q.size] *= active[row_of_element(u.shape)]
    parts = codes.reshape(-1, 8 // bits, 8 * bits)
    octets = np.zeros((len(parts), 8 * bits), dtype=np.uint8)
    for place in range(8 // bits):
        octets |= parts[:, place] << np.uint8(bits * place)
    return octets.reshape(-1).view("<u8").astype(np.uint64), active


def unpack_levels(
    ballot: Ballot, shape: tuple[int, ...], bits: Literal[2, 4, 8]
) -> npt.NDArray[np.int64]:
    """Returns the levels that a ballot for `shape` holds; 0 where the row abstains."""
    words, active = ballot
    octets = words.astype("<u8").view(np.uint8).reshape(-1, 1, 8 * bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, -1, 1)
    codes = ((octets >> shifts) & np.uint8(2**bits - 1)).reshape(-1).astype(np.int64)
    row = row_of_element(shape)
    q = SPACING[bits] * codes[: row.size] - LARGEST[bits]
    return (q * active[row]).reshape(shape)


def sum_levels(
    ballots: Sequence[Ballot], shape: tuple[int, ...], bits: Literal[2, 4, 8]
) -> npt.NDArray[np.int64]:
    """Returns the sum of the levels of all ballots, per element."""
    total = np.zeros(shape, dtype=np.int64)
    for ballot in ballots:
        total += unpack_levels(ballot, shape, bits)
    return total


def majority(
    ballots: Sequence[Ballot],
    shape: tuple[int, ...],
    *,
    bits: Literal[2, 4, 8],
    t: int,
    ties: Literal["alternate", "zero"] = "alternate",
) -> npt.NDArray[np.int8]:
    """Returns the sign of the sum of all levels; a sum of 0 in an active row is a tie (S4)."""
    voters: Any = sum((active.astype(np.int64) for _, active in ballots), np.int64(0))
    return decided(sum_levels(ballots, shape, bits), voters, t=t, ties=ties)
