"""The code and the rule's rounding in NumPy: the definition.

Every other codec equals this one bit for bit. It is written to be read, element by element, and is
as slow as that is. NumPy has no bfloat16, so bfloat16 values are handled as their uint16 bit
patterns. Rule numbers (S1, S2, ...) are those of docs/rule.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Ballot: TypeAlias = tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]
"""What one rank sends for one parameter: the packed signs and one activity bit per row."""

WORD_BITS = 64


def row_count(shape: tuple[int, ...]) -> int:
    """Returns the number of rows, the slices that abstain as a whole (S3)."""
    if math.prod(shape) == 0:
        return 0
    return shape[0] if len(shape) >= 2 else 1


def row_of_element(shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Returns, for every element in row-major order, the number of its row."""
    size = math.prod(shape)
    return np.arange(size) * row_count(shape) // max(size, 1)


def direction(exp_avg: Array, grad: Array, beta1: float) -> Array:
    """Returns u = fl(fl(b1 m) + fl((1 - b1) g)) (S1).

    Args:
        exp_avg: The momentum before this step, float32 or float64.
        grad: The gradient, same shape and dtype.
        beta1: b1; it and 1 - b1 are rounded to the dtype of the arrays before they are used.
    """
    one = exp_avg.dtype.type
    u: Array = one(beta1) * exp_avg + one(1.0 - beta1) * grad
    return u


def updated_momentum(exp_avg: Array, grad: Array, beta2: float) -> Array:
    """Returns m = fl(fl(b2 m) + fl((1 - b2) g)), not yet rounded to the momentum's dtype (S1).

    The formula is that of `direction`, and takes the same arguments.
    """
    return direction(exp_avg, grad, beta2)


def saturated(momentum: Array, largest: float) -> Array:
    """Returns the momentum without what exceeds the largest finite number of its narrower dtype.

    Rounded to Inf, it would decide the element's vote for ever: Inf decays to Inf.

    Args:
        momentum: From `updated_momentum`, float32 or float64.
        largest: 65504 for float16, for example.
    """
    limit = momentum.dtype.type(largest)
    return np.clip(momentum, -limit, limit)


def pack_signs(u: Array, *, t: int, rank: int, world_size: int) -> Ballot:
    """Returns the packed signs of a direction and which of its rows are active (S2, S3).

    Bit k of word w is element 64 w + k in row-major order, 1 where u < 0. A row that is zero
    everywhere abstains: it is inactive and its bits are 0, as are the bits behind the last element.
    In an active row an exact zero of either sign is sent as +1 where
    k + t // 2 + (rank + t) % world_size is even (k: the element's number in row-major order), else
    as -1. NaN counts as +1 and makes its row active, although no rank ever sends one (S10).

    Args:
        u: The direction, any shape and floating dtype, contiguous or not.
        t: The number of the step being made.
        rank: The rank whose direction it is.
        world_size: The number of ranks.

    Returns:
        uint64 words, as many as hold a bit per element, and a bool per row.
    """
    flat = u.reshape(-1)
    row = row_of_element(u.shape)
    active = np.zeros(row_count(u.shape), dtype=np.bool_)
    np.logical_or.at(active, row, flat != 0)

    zero_is_negative = (np.arange(flat.size) + t // 2 + (rank + t) % world_size) % 2 == 1
    negative = np.where(flat == 0, zero_is_negative, flat < 0) & active[row]

    bits = np.zeros(_round_up(flat.size, WORD_BITS), dtype=np.bool_)
    bits[: flat.size] = negative
    return np.packbits(bits, bitorder="little").view("<u8").astype(np.uint64), active


def unpack_signs(ballot: Ballot, shape: tuple[int, ...]) -> npt.NDArray[np.int8]:
    """Returns the signs -1, 0 (the row abstains) or +1 that a ballot for `shape` holds."""
    words, active = ballot
    size = math.prod(shape)
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")[:size]
    signs = np.where(bits == 1, -1, 1) * active[row_of_element(shape)]
    return signs.astype(np.int8).reshape(shape)


def count_votes(ballots: Sequence[Ballot], shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Returns the sum of the signs of all ballots, per element."""
    total = np.zeros(shape, dtype=np.int64)
    for ballot in ballots:
        total += unpack_signs(ballot, shape)
    return total


def majority(
    ballots: Sequence[Ballot],
    shape: tuple[int, ...],
    *,
    t: int,
    ties: Literal["alternate", "zero"] = "alternate",
) -> npt.NDArray[np.int8]:
    """Returns the verdict of the majority of the ranks that are active in a row (S4).

    Where all abstain it is 0. A tie is 0 for `ties="zero"`; for `ties="alternate"` it is +1 where
    k + t is even (k: the element's number in row-major order), else -1.
    """
    voters: Any = sum((ballot[1].astype(np.int64) for ballot in ballots), np.int64(0))
    return decided(count_votes(ballots, shape), voters, t=t, ties=ties)


def decided(
    total: npt.NDArray[np.int64],
    voters: Array,
    *,
    t: int,
    ties: Literal["alternate", "zero"],
) -> npt.NDArray[np.int8]:
    """Returns the sign of a sum of votes, ties decided as `majority` says.

    Args:
        total: Per element.
        voters: How many ranks are active, per row, or one number for all.
        t: The number of the step being made.
        ties: "alternate" or "zero".
    """
    shape = total.shape
    verdict = np.sign(total).reshape(-1)
    if ties == "alternate":
        tied = (verdict == 0) & (
            np.broadcast_to(voters, row_count(shape))[row_of_element(shape)] > 0
        )
        coin = 1 - 2 * ((np.arange(verdict.size) + t) % 2)
        verdict = np.where(tied, coin, verdict)
    return verdict.astype(np.int8).reshape(shape)


def average(
    ballots: Sequence[Ballot],
    shape: tuple[int, ...],
    *,
    world_size: int,
    dtype: npt.DTypeLike = np.float32,
) -> Array:
    """Returns the verdict fl(sum of signs / world_size), 0 counting for those who abstain (S5)."""
    total = count_votes(ballots, shape).astype(dtype)
    result: Array = total / total.dtype.type(world_size)
    return result


def apply_verdict(param: Array, verdict: Array, lr: float, weight_decay: float) -> Array:
    """Returns p = fl(fl(p (1 - lr wd)) - fl(lr v)), not yet rounded to the parameter's dtype (S7).

    Args:
        param: The parameter, float32 or float64.
        verdict: The verdict, same shape, any dtype that holds it exactly.
        lr: The learning rate; it and 1 - lr wd are rounded to the dtype of `param` before use.
        weight_decay: wd.
    """
    one = param.dtype.type
    decayed = param * one(1.0 - lr * weight_decay)
    result: Array = decayed - one(lr) * verdict.astype(param.dtype)
    return result


def random_bits(
    seed: int, t: int, index: int, stream: int, count: int, start: int = 0
) -> npt.NDArray[np.uint32]:
    """Returns the random numbers of elements `start` to `start + count` of one parameter.

    All arithmetic is modulo 2^32. With mix the 32-bit finaliser below, element i has

        k = 0; for w in seed, seed >> 32, t, t >> 32, index, stream, i >> 32:
            k = mix((k ^ w) + 0x9e3779b9)
        random(i) = mix(i ^ k)

    Args:
        seed: The optimizer's seed, 64 bits.
        t: The number of the step being made, 64 bits.
        index: The parameter's index in the flattened groups.
        stream: 0 for the parameters (the same on every rank), 1 + rank for a rank's momentum.
        count: How many numbers.
        start: The first element, in row-major order; may exceed 32 bits.
    """
    elements = np.arange(start, start + count, dtype=np.uint64)
    high = elements >> np.uint64(32)
    keys = np.zeros(count, dtype=np.uint32)
    for value in np.unique(high):
        keys[high == value] = _key(seed, t, index, stream, int(value))
    return _mix(elements.astype(np.uint32) ^ keys)


def round_bfloat16(x: npt.NDArray[np.float32], random: Array | None) -> npt.NDArray[np.uint16]:
    """Returns x rounded to bfloat16, as bit patterns.

    Args:
        x: float32 of any shape.
        random: uint32 of the same shape; the low 16 bits are added to the bits of x and the low 16
            bits of the sum dropped, so rounding up is as probable as x is near. What exceeds
            the largest finite value becomes Inf. None rounds to the nearest, ties to even.

    Returns:
        uint16 of the same shape. Inf stays Inf, NaN stays NaN (which NaN is not part of the code).
    """
    flat = np.ascontiguousarray(x).reshape(-1)
    bits = flat.view(np.uint32)
    if random is None:
        added = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    else:
        added = random.reshape(-1) & np.uint32(0xFFFF)
    # Inf plus anything would be a NaN, and a NaN could wrap round to zero.
    rounded = np.where(np.isinf(flat), bits, bits + added) >> np.uint32(16)
    rounded = np.where(np.isnan(flat), 0x7FC0, rounded)
    return rounded.astype(np.uint16).reshape(x.shape)


def round_float16(x: npt.NDArray[np.float32], random: Array | None) -> npt.NDArray[np.uint16]:
    """Returns x rounded to float16, as bit patterns.

    Args:
        x: float32 of any shape.
        random: uint32 of the same shape. Where |x| >= 2^-14 the low 13 bits are added to the bits
            of x and the low 13 bits of the sum dropped; magnitudes of 2^16 and more are Inf, so
            65504 < |x| < 65536 becomes one of its neighbours 65504 and Inf. Below, where float16
            has the fixed step 2^-24, it is (trunc(|x| 2^40) + low 16 bits) >> 16 steps, with the
            sign of x. None rounds to the nearest, ties to even.

    Returns:
        uint16 of the same shape. Inf stays Inf, NaN stays NaN (which NaN is not part of the code).
    """
    flat = np.ascontiguousarray(x).reshape(-1)
    if random is None:
        with np.errstate(over="ignore"):
            return flat.astype(np.float16).view(np.uint16).reshape(x.shape)
    random = random.reshape(-1)
    bits = flat.view(np.uint32)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    magnitude = np.abs(flat)
    is_small = magnitude < 2.0**-14

    # A float32 exponent counts from -127, a float16 exponent from -15.
    normal = ((bits & np.uint32(0x7FFFFFFF)) + (random & np.uint32(0x1FFF))) >> np.uint32(13)
    normal = np.minimum(normal.astype(np.int64) - ((127 - 15) << 10), 0x7C00)

    small = np.where(is_small, magnitude, np.float32(0))
    steps = np.trunc(small * np.float32(2.0**40)).astype(np.int64)
    steps = (steps + (random & np.uint32(0xFFFF))) >> 16

    rounded = np.where(is_small, steps, normal)
    rounded = np.where(np.isinf(flat), 0x7C00, rounded) | sign
    rounded = np.where(np.isnan(flat), 0x7E00, rounded)
    return rounded.astype(np.uint16).reshape(x.shape)


def widen_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Returns the float32 values of bfloat16 bit patterns, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def widen_float16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Returns the float32 values of float16 bit patterns, exactly."""
    return bits.view(np.float16).astype(np.float32)


def _mix(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Returns x after the finaliser "lowbias32", a bijection of the 32-bit numbers."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _key(seed: int, t: int, index: int, stream: int, high: int) -> np.uint32:
    mask = 0xFFFFFFFF
    # An array of one element, because NumPy warns of overflow in scalars only.
    key = np.zeros(1, dtype=np.uint32)
    for word in (seed, seed >> 32, t, t >> 32, index, stream, high):
        key = _mix((key ^ np.uint32(word & mask)) + np.uint32(0x9E3779B9))
    return np.uint32(key[0])


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
