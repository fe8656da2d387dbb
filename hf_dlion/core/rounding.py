"""Stochastic rounding with random bits from a hash of seed, step, stream, and element number.

Every rank rounds a parameter with the same bits, so replicas stay equal. Rounding to nearest would
lose every move below half a unit in the last place, which is most moves in fine-tuning.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Streams of random bits, one for each kind of tensor. Voter r adds r to every stream except
# PARAMETERS, and to none in `full_precision`, whose momenta are equal on all voters.
PARAMETERS, MOMENTA = 0, 1
COMPENSATIONS, SYNCHRONIZED = 1 << 30, 1 << 31


def random_bits(count: int, first: int, step: int, seed: int, stream: int, out: Tensor) -> Tensor:
    """Returns 16 random bits for each of `count` elements, from a counter-based hash.

        key = 0;  for w in seed, seed >> 32, step, step >> 32, stream, first >> 33:
            key = mix((key XOR w) + 0x9e3779b9)
        word(j) = mix(0x9e3779b9 j + key)
        mix(x):  x ^= x >> 16,  x *= 0x7feb352d,  x ^= x >> 16,  x *= 0x846ca68b,  x ^= x >> 16

    All modulo 2^32. Element 2j has the low half of word(j), and element 2j + 1 the high half.

    Args:
        count: Number of elements, even, below 2^32.
        first: Number of the first element in the layout, even.
        step: Number of the step.
        seed: Seed of the run.
        stream: Number of the stream.
        out: Memory of the result, int32, shape (count / 2,), overwritten.

    Returns:
        View of `out`, uint16, shape (count,).
    """
    words, low = count // 2, first // 2 & _MASK
    if low + words > 1 << 32:
        cut = (1 << 32) - low
        random_bits(2 * cut, first, step, seed, stream, out[:cut])
        random_bits(count - 2 * cut, first + 2 * cut, step, seed, stream, out[cut:])
        return out.view(torch.uint16)
    torch.arange(words, dtype=torch.int32, device=out.device, out=out)
    out.mul_(_signed(_STEP)).add_(_signed(key_of(first, step, seed, stream)))  # int32 wraps
    # x ^= x >> 16 changes the low half of x, which comes first in memory.
    low_halves, high_halves = out.view(torch.int16)[::2], out.view(torch.int16)[1::2]
    low_halves.bitwise_xor_(high_halves)
    for factor in _FACTORS:
        out.mul_(_signed(factor))
        low_halves.bitwise_xor_(high_halves)
    return out.view(torch.uint16)


def key_of(first: int, step: int, seed: int, stream: int) -> int:
    """Returns what `random_bits` adds to every word's product, from 0 to 2^32 - 1."""
    return (_STEP * (first // 2) + _key(first >> 33, step, seed, stream)) & _MASK


def round_to(x: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """Rounds float32 numbers stochastically to numbers of bfloat16 or float16, in place.

    The probability of rounding up is the distance from the lower neighbor, as a share of the gap:
    exactly in bfloat16, and in float16 after numbers below 2^-14 are cut to multiples of 2^-40. An
    Inf stays an Inf, a quiet NaN stays a NaN, and numbers above the largest finite one may become
    Inf when they are converted.

    Args:
        x: Numbers to round, float32, flat, contiguous, changed in place.
        dtype: torch.bfloat16 or torch.float16.
        random: Random bits, uint16, shape of `x`.

    Returns:
        `x`, which converts to `dtype` without another rounding.
    """
    bits, added = x.view(torch.int32), random.to(torch.int32).mul_(x == x)  # A NaN stays.
    if dtype == torch.bfloat16:
        bits.add_(added).bitwise_and_(-0x10000)
        return x
    # float16 keeps 10 bits of the mantissa; below 2^-14 its steps are 2^-24 wide.
    size = x.abs()
    small = (((size * 2.0**40).to(torch.int64) + added) >> 16).to(torch.float32) * 2.0**-24
    small, is_small = small.copysign(x), size < 2.0**-14
    bits.add_(added >> 3).bitwise_and_(-0x2000)
    return x.copy_(torch.where(is_small, small, x))


_MASK = 0xFFFFFFFF
_STEP, _FACTORS = 0x9E3779B9, (0x7FEB352D, 0x846CA68B)


def _signed(word: int) -> int:
    """Returns the int32 number that has the bits of a 32-bit word."""
    return word - (1 << 32) if word >> 31 else word


@functools.lru_cache(maxsize=64)  # The elements of a step have few keys.
def _key(block: int, step: int, seed: int, stream: int) -> int:
    key = 0
    for word in (seed, seed >> 32, step, step >> 32, stream, block):
        key = _mix_number(((key ^ word) & _MASK) + _STEP)
    return key


def _mix_number(x: int) -> int:
    x &= _MASK
    for factor in _FACTORS:
        x = (x ^ x >> 16) * factor & _MASK
    return x ^ x >> 16
