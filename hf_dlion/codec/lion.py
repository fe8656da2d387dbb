"""Lion's arithmetic as pure functions on tensors (rule S1, S7).

Every formula here fixes every bit: products and sums are rounded one by one, never fused, so
a CPU, a GPU and the NumPy definition in `hf_dlion.codec.reference.votes` agree exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARAMETER_STREAM = 0  # the same rounding on every rank keeps replicas identical
COMMON_STREAM = 0xFFFFFFFF  # of momenta that all ranks round alike

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B


def momentum_stream(rank: int) -> int:
    """Returns the hash stream of a rank's momentum: ranks round independently of one another."""
    return 1 + rank


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a parameter of `dtype` is computed: float32, or float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def interpolate(old: Tensor, new: Tensor, beta: float, *, out: Tensor, scratch: Tensor) -> Tensor:
    """Returns fl(fl(beta * old) + fl((1 - beta) * new)) in `out` (rule S1).

    With beta1 this is Lion's direction, with beta2 its next momentum (Chen et al., 2023,
    arXiv 2302.06675, Algorithm 2).

    Args:
        old: Momentum, float32 or float64.
        new: Gradient, same shape and dtype.
        beta: Decay factor, rounded to the dtype of `old`.
        out: Receives the result; may be `old`.
        scratch: Overwritten; shape and dtype of `old`, and neither `old` nor `out`.
    """
    torch.mul(new, 1.0 - beta, out=scratch)
    torch.mul(old, beta, out=out)
    return out.add_(scratch)


def signed32(value: int) -> int:
    """Returns the int32 with the bits of the uint32 `value`: torch has no uint32 arithmetic."""
    value &= _MASK
    return value - (1 << 32) if value >> 31 else value


def mix(value: int) -> int:
    """Returns a uint32 in which every bit of the uint32 `value` matters ("lowbias32")."""
    value ^= value >> 16
    value = value * _MIX_1 & _MASK
    value ^= value >> 15
    value = value * _MIX_2 & _MASK
    return value ^ value >> 16


def rounding_key(seed: int, step: int, index: int, stream: int, high: int = 0) -> int:
    """Returns the uint32 key of one tensor's random bits in one step.

    Args:
        seed: The optimizer's seed, below 2**64.
        step: Number of the step, below 2**64.
        index: Position of the parameter in the flattened groups.
        stream: `PARAMETER_STREAM` or `momentum_stream(rank)`.
        high: Element index divided by 2**32.
    """
    return _extended(step_key(seed, step), index, stream, high)


def step_key(seed: int, step: int) -> int:
    """Returns the part of `rounding_key` that a step's tensors share."""
    return _extended(0, seed & _MASK, seed >> 32, step & _MASK, step >> 32)


def _extended(key: int, *words: int) -> int:
    for word in words:
        key = mix(((key ^ word) + _GOLDEN) & _MASK)
    return key


def random_bits(counter: Tensor, key: int, *, out: Tensor, scratch: Tensor) -> Tensor:
    """Returns mix(counter XOR key) in `out`, the uint32 hash of each element as int32.

    Args:
        counter: int32, the low 32 bits of each element's index in row-major order.
        key: The tensor's `rounding_key`.
        out: int32 of the same shape, receives the result.
        scratch: int32 of the same shape, overwritten.
    """
    torch.bitwise_xor(counter, signed32(key), out=out)
    for shift, factor in ((16, _MIX_1), (15, _MIX_2), (16, None)):
        # torch shifts int32 arithmetically; the mask drops the copies of the sign bit.
        torch.bitwise_right_shift(out, shift, out=scratch)
        out.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
        if factor is not None:
            out.mul_(signed32(factor))
    return out


def round_stochastically(x: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds float32 `x` in place to a number of bfloat16 or float16, up in proportion to the rest.

    A value that the dtype can hold is kept. NaN and Inf are kept. Above the largest finite number
    the next one on the grid (2**128, or 65536) is Inf; beyond it everything is.

    Args:
        x: float32, any shape; overwritten. A later conversion to `dtype` is exact, or Inf.
        bits: int32 hash of each element, same shape; overwritten. The low 16 bits are used (13 for
            a float16 of at least 2**-14).
        dtype: torch.bfloat16 or torch.float16.

    Returns:
        `x`.

    Raises:
        TypeError: If `dtype` is another one.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"stochastic rounding knows bfloat16 and float16, got {dtype}")
    nan = None
    # A NaN whose payload is all ones would carry into the sign and become zero. Looking for one
    # first is cheap on the CPU; elsewhere the host would wait for the answer.
    if x.device.type != "cpu" or not bool((x.sum() * 0.0).isfinite()):
        nan = x.isnan()
    small = subnormal = None
    if dtype == torch.float16:
        magnitude = x.abs()
        # Subnormal float16 numbers are the multiples of 2**-24; 16 more bits decide.
        small = magnitude < 2.0**-14
        fixed = torch.where(small, magnitude * 2.0**40, 0.0).to(torch.int32)
        subnormal = ((fixed + (bits & 0xFFFF)) >> 16).to(torch.float32) * 2.0**-24
        subnormal = torch.copysign(subnormal, x)
    dropped = 0xFFFF if dtype == torch.bfloat16 else 0x1FFF
    x.view(torch.int32).add_(bits.bitwise_and_(dropped)).bitwise_and_(~dropped)
    if small is not None and subnormal is not None:
        torch.where(small, subnormal, x, out=x)
    if nan is not None:
        x.masked_fill_(nan, torch.nan)
    return x


def saturate(momentum: Tensor, dtype: torch.dtype) -> Tensor:
    """Cuts `momentum`, in place, to the finite range of the narrower `dtype` that will hold it.

    A momentum that became Inf would stay so, and its element would vote one way for ever.
    """
    if momentum.dtype != dtype:
        limit = torch.finfo(dtype).max
        momentum.clamp_(-limit, limit)
    return momentum
