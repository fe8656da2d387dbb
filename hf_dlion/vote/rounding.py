"""Stochastic rounding with random bits from a hash of seed, step, stream, and element number.

Every rank rounds a parameter with the same bits, so replicas stay equal. Rounding to nearest would
lose every move below half a unit in the last place, which is most moves in fine-tuning.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Streams of random bits. Voter r adds r to every stream except PARAMETERS.
PARAMETERS, MOMENTA = 0, 1
DISPLACEMENTS, OWN_WEIGHTS, EXCHANGED = 1 << 30, 1 << 31, (1 << 30) + (1 << 31)


def random_bits(count: int, first: int, step: int, seed: int, stream: int, out: Tensor) -> Tensor:
    """Returns 32 random bits for each of `count` elements, a counter-based hash.

        key = 0;  for w in seed, seed >> 32, step, step >> 32, stream, first >> 32:
            key = mix((key XOR w) + 0x9e3779b9)
        random(i) = mix(i XOR key)           all modulo 2^32; mix is "lowbias32"

    Args:
        count: Number of elements, below 2^31.
        first: Number of the first element in the layout.
        step: Number of the step.
        seed: Seed of the run.
        stream: Number of the stream, different for each tensor that is rounded in a step.
        out: Output, int32, shape (count,), overwritten.
    """
    low = first & _MASK
    if low + count > 1 << 32:
        cut = (1 << 32) - low
        random_bits(cut, first, step, seed, stream, out[:cut])
        random_bits(count - cut, first + cut, step, seed, stream, out[cut:])
        return out
    key = 0
    for word in (seed, seed >> 32, step, step >> 32, stream, first >> 32):
        key = _mix_number(((key ^ word) & _MASK) + 0x9E3779B9)
    torch.arange(count, dtype=torch.int32, out=out).add_(_signed(low))  # int32 wraps
    return _mix(out.bitwise_xor_(_signed(key)))


def round_to(x: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """Returns float32 numbers rounded stochastically to bfloat16 or float16.

    The probability of rounding up is the distance from the lower neighbor, as a share of the gap.
    An Inf stays an Inf, a NaN stays a NaN, and numbers above the largest finite one may become Inf.

    Args:
        x: Numbers to round, float32, flat, contiguous, overwritten.
        dtype: dtype of the result, torch.bfloat16 or torch.float16.
        random: Random bits, int32, shape of `x`, overwritten.
    """
    bits = x.view(torch.int32)
    if dtype == torch.bfloat16:
        finite = (bits & 0x7FFFFFFF) < 0x7F800000
        bits.add_(random.bitwise_and_(0xFFFF).mul_(finite)).bitwise_and_(-0x10000)
        return x.to(torch.bfloat16)
    # float16 keeps 10 bits of the mantissa; below 2^-14 its steps are 2^-24 wide.
    small = (x.abs() * 2.0**40).to(torch.int64, copy=True)
    small = ((small + (random & 0xFFFF)) >> 16).to(torch.float32) * 2.0**-24
    small = small.copysign(x)
    is_small, finite = x.abs() < 2.0**-14, (bits & 0x7FFFFFFF) < 0x7F800000
    bits.add_(random.bitwise_and_(0x1FFF).mul_(finite)).bitwise_and_(-0x2000)
    return torch.where(is_small, small, x).to(torch.float16)


_MASK = 0xFFFFFFFF


def _signed(word: int) -> int:
    """Returns the int32 number that has the bits of a 32-bit word."""
    return word - (1 << 32) if word >> 31 else word


def _mix_number(x: int) -> int:
    x &= _MASK
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    return x ^ x >> 16


def _mix(x: Tensor) -> Tensor:
    """Mixes int32 words in place. The masks turn arithmetic shifts into logical ones."""
    x.bitwise_xor_((x >> 16) & 0xFFFF).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15) & 0x1FFFF).mul_(_signed(0x846CA68B))
    return x.bitwise_xor_((x >> 16) & 0xFFFF)
