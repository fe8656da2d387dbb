"""Votes as bit planes: encode a direction, count votes, decode a verdict.

All functions take flat tensors whose length is a multiple of 64. Bit k of word w stands for
element 64 * w + k. docs/rule.md defines the arithmetic, and tests compare every function with a
definition in NumPy, bit for bit.

A vote is a code c in 0..top that stands for the level 2c - top:

    bits  1   2   4    8
    top   1   3   14   254

Plane j of a message contains bit j of every code. Counting adds codes in bit-sliced counters: plane
j of a counter contains bit j of every element's sum, so one operation on a word adds 64 votes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

WORD = 64
TOP = {1: 1, 2: 3, 4: 14, 8: 254}
# A threshold below zero. An exact zero is above it but not above 0, so it votes both ways in turns.
BELOW_ZERO = -(2.0**-126)
# Elements per row of a comparison, long enough for vector instructions.
_ROW = 4096


def alternating_word(number: int) -> int:
    """Returns the int64 word whose bit k is set if k + number is even."""
    return -0x5555555555555556 if number % 2 else 0x5555555555555555


def sign_codes(u: Tensor, phase: int, out: Tensor) -> Tensor:
    """Returns u > z, where z is 0 for elements k with k + phase even, else -2^-126.

    Args:
        u: Direction, float32 or float64, shape (64 * W,).
        phase: `StepContext.zero_phase`, so a zero votes both ways over elements, steps, and ranks.
        out: Output, bool, shape of `u`, overwritten.
    """
    z = _thresholds(phase % 2, u.dtype, u.device)
    cut = u.numel() - u.numel() % _ROW
    _above(u[:cut].view(-1, _ROW), z, out[:cut].view(-1, _ROW))
    _above(u[cut:], z[: u.numel() - cut], out[cut:])
    return out


def _above(values: Tensor, limits: Tensor | float, out: Tensor) -> None:
    if values.device.type != "cpu":
        torch.gt(values, limits, out=out)
        return
    numbers = limits.numpy() if isinstance(limits, Tensor) else limits
    np.greater(values.numpy(), numbers, out=out.numpy())  # three times as fast as torch.gt


def level_codes(
    u: Tensor, magnitude: Tensor, bits: int, phase: int, out: Tensor, scratch: Tensor
) -> Tensor:
    """Returns the codes of votes of 2, 4, or 8 bits.

    Args:
        u: Direction, float32 or float64, shape (64 * W,).
        magnitude: What the levels are relative to, for each word, dtype of `u`, shape (W,): the
            mean of |u| in the word, or as in Lion Cub in the tensor.
        bits: Bits per vote: 2, 4, or 8.
        phase: `StepContext.zero_phase`, which decides the sign of an exact zero with 2 bits.
        out: Output, uint8, shape (2, 64 * W), overwritten; the first row is returned.
        scratch: Scratch memory, dtype and shape of `u`, overwritten.
    """
    words = scratch.view(-1, WORD)
    scale = magnitude.view(-1, 1)
    codes = out[0]
    if bits == 2:
        # Codes 0, 1, 2, 3 stand for the levels -3, -1, 1, 3.
        sign = sign_codes(u, phase, out[1].view(torch.bool)).view(torch.uint8)
        torch.abs(u, out=scratch)
        torch.sub(words, scale * 1.5, out=words)  # Above 0 if and only if |u| > 1.5 * scale.
        _above(scratch, 0.0, codes.view(torch.bool))
        # The low bit is set for large positive and for small negative numbers.
        low = codes.bitwise_xor_(sign).bitwise_xor_(1)
        return low.bitwise_or_(sign.bitwise_left_shift_(1))
    half = TOP[bits] // 2
    # torch divides a scalar by a tensor in two roundings, so the scalar becomes a tensor.
    factor = (scale.new_full((), half / 2) / scale).clamp_(max=torch.finfo(u.dtype).max)
    factor.masked_fill_(scale <= 0, 0.0)
    torch.mul(u.view(-1, WORD), factor, out=words)
    scratch.clamp_(-half, half).round_().add_(half)
    if u.device.type == "cpu":  # NumPy is six times as fast as torch's copy_ on a CPU.
        np.copyto(codes.numpy(), scratch.numpy(), casting="unsafe")
        return codes
    return codes.copy_(scratch)


def word_magnitudes(u: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each word's sum of |u| and its number of nonzero elements, dtype of u, shape (W,).

    Args:
        u: Direction, float32 or float64, shape (64 * W,).
        scratch: Scratch memory, dtype and shape of `u`, overwritten.
    """
    words = torch.abs(u, out=scratch).view(-1, WORD)
    if u.device.type == "cpu" and u.numel() and scratch.amin() > 0:
        counts = u.new_full((len(words),), WORD)
    else:
        counts = words.ne(0).sum(dim=1).to(u.dtype)
    return _sums(words), counts


def word_sums(u: Tensor, scratch: Tensor) -> Tensor:
    """Returns each word's sum of |u|, dtype of u, shape (W,); see `word_magnitudes`."""
    return _sums(torch.abs(u, out=scratch).view(-1, WORD))


def _sums(words: Tensor) -> Tensor:
    """Returns the sums of rows of 64: elements k and k + 32 first, then k and k + 16, and so on."""
    for half in (32, 16, 8):
        words[:, :half] += words[:, half : 2 * half]
    # From here on along columns, which are long. Always a copy, because `words` is reused.
    columns = words[:, :8].t().clone(memory_format=torch.contiguous_format)
    for half in (4, 2, 1):
        columns[:half] += columns[half : 2 * half]
    return columns[0]


def active_words(u: Tensor, votes: Tensor | None = None, phase: int = 0) -> Tensor | None:
    """Returns which words of u have a nonzero element, bool, shape (W,); None if all do.

    On devices other than a CPU it never returns None. On a CPU with one bit per vote it doesn't
    read u in most cases.

    Args:
        u: Direction, shape (64 * W,).
        votes: Plane of the 1-bit votes of u, int64, shape (W,) (default: None, for other bits).
        phase: `StepContext.zero_phase`, as for the `sign_codes` of these votes.
    """
    if u.device.type != "cpu":
        return u.view(-1, WORD).ne(0).any(dim=1)
    words = u.numpy().reshape(-1, WORD)
    if votes is None:
        suspects = words[:, 0] == 0
    else:  # A word of zeros votes both ways in turns, which other words rarely do.
        suspects = votes.numpy() == alternating_word(phase + 1)
    zeros = np.flatnonzero(suspects)
    if zeros.size:
        zeros = zeros[~words[zeros].any(axis=1)]
    if not zeros.size:
        return None
    active = torch.ones(len(words), dtype=torch.bool, device=u.device)
    active[torch.from_numpy(zeros)] = False
    return active


def pack(codes: Tensor, bit: int, out: Tensor, scratch: Tensor | None = None) -> None:
    """Packs one bit of every code, 64 to a word.

    Args:
        codes: Codes, bool or uint8, shape (64 * W,).
        bit: Number of the bit, 0 for the lowest.
        out: Output plane, int64, shape (W,), contiguous, overwritten.
        scratch: Scratch memory, shape and dtype of `codes`, overwritten (default: new memory).
    """
    if codes.device.type == "cpu":
        values = codes.numpy()
        if codes.dtype != torch.bool:
            masked = None if scratch is None else scratch.numpy()
            values = np.bitwise_and(values, np.uint8(1 << bit), out=masked)
        packed = np.packbits(values, bitorder="little")
        out.view(torch.uint8).numpy()[:] = packed
        return
    ones = codes.view(torch.uint8) if codes.dtype == torch.bool else (codes >> bit) & 1
    weighted = ones.view(-1, 8) << _shifts(codes.device)
    torch.sum(weighted, dim=1, dtype=torch.uint8, out=out.view(torch.uint8))


def unpack(plane: Tensor, low: float, high: float, out: Tensor) -> Tensor:
    """Returns `high` for every bit that is set, and `low` for the other bits.

    Args:
        plane: Plane of bits, int64, shape (W,), contiguous.
        low: Value of a bit of 0.
        high: Value of a bit of 1.
        out: Output, float32 or float64, shape (64 * W,), contiguous, overwritten.
    """
    octets = plane.view(torch.uint8)
    if plane.device.type == "cpu":
        table = _values_of_octets(low, high, out.dtype)
        np.take(table, octets.numpy(), axis=0, out=out.view(-1, 8).numpy(), mode="clip")
        return out
    bits = octets.view(-1, 1) & _masks(plane.device)
    # Exact for both values, unlike low + bit * (high - low). Python numbers would give float32, and
    # tensors on the CPU would make a GPU wait.
    of_one, of_zero = (out.new_full((), value) for value in (high, low))
    torch.where(bits.view(-1).bool(), of_one, of_zero, out=out)
    return out


def numbers_of(planes: Tensor, out: Tensor) -> Tensor:
    """Returns the numbers whose digits are in planes, the lowest in the first one.

    Args:
        planes: Planes of bits, at most 24, int64, shape (planes, W), each contiguous.
        out: Output, float32 or float64, shape (64 * W,), contiguous, overwritten.
    """
    if out.device.type == "cpu":
        unpack(planes[0], 0.0, 1.0, out)
        digit = torch.empty_like(out)
        for j, plane in enumerate(planes[1:], start=1):
            out.add_(unpack(plane, 0.0, 2.0**j, digit))
        return out
    # Bytes, if they hold the number, take a fraction of what floats read and write on a GPU.
    dtype = torch.uint8 if len(planes) <= 8 else torch.int32
    total = torch.zeros(out.numel(), dtype=dtype, device=out.device)
    for j, plane in enumerate(planes):
        digits = (plane.view(torch.uint8).view(-1, 1) >> _shifts(out.device)).bitwise_and_(1)
        total.add_(digits.view(-1), alpha=1 << j)
    return out.copy_(total)


def divided(x: Tensor, number: int) -> Tensor:
    """Divides x in place, rounded once: CUDA multiplies by 1 / number if it isn't a tensor."""
    return x.div_(x.new_full((), number))


def add(a: Sequence[Tensor], b: Sequence[Tensor], limit: int) -> list[Tensor]:
    """Returns the planes of a + b, at most `limit` of them; int64, shape (W,) each."""
    planes: list[Tensor] = []
    carry: Tensor | None = None
    for j in range(min(max(len(a), len(b)) + 1, limit)):
        digits = [number[j] for number in (a, b) if j < len(number)]
        if carry is not None:
            digits.append(carry)
        if len(digits) == 1:
            planes.append(digits[0])
            carry = None
        elif len(digits) == 2:
            planes.append(digits[0] ^ digits[1])
            carry = digits[0] & digits[1]
        elif len(digits) == 3:
            either = digits[0] ^ digits[1]
            planes.append(either ^ digits[2])
            carry = (digits[0] & digits[1]) | (either & digits[2])
    return planes


def tally(votes: Sequence[Sequence[Tensor]], bits: int) -> list[Tensor]:
    """Returns the planes of the sum of all ranks' codes.

    Args:
        votes: Planes of each rank's codes, int64, shape (W,) each; 0 if the rank abstains.
        bits: Bits per vote.

    Returns:
        Planes, int64, shape (W,) each, as many as N * top has bits. Ranks are added in pairs, so
        counters stay short.
    """
    limit = (len(votes) * TOP[bits]).bit_length()
    numbers = [list(planes) for planes in votes]
    while len(numbers) > 1:
        pairs = [add(a, b, limit) for a, b in zip(numbers[::2], numbers[1::2], strict=False)]
        numbers = pairs + numbers[len(pairs) * 2 :]
    return numbers[0]


def compare(planes: Sequence[Tensor], total: int | Tensor) -> tuple[Tensor, Tensor]:
    """Returns bit masks of the elements where 2 * sum > total and where 2 * sum == total.

    Args:
        planes: Planes of the sum, int64, shape (W,) each, at least as many as `total` has bits.
        total: One number, or one per word, int64, shape (W,).
    """
    # Words of ones where a bit of the total is 0. Bits of 2 * sum are one place further left.
    zeros = [(total >> j & 1) - 1 for j in range(len(planes) + 1)]
    greater, equal = torch.zeros_like(planes[0]), torch.full_like(planes[0], -1)
    for j in reversed(range(len(planes))):
        greater |= equal & planes[j] & zeros[j + 1]
        equal &= planes[j] ^ zeros[j + 1]
    return greater, equal & zeros[0]


@functools.lru_cache(maxsize=8)
def _thresholds(phase: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    z = torch.zeros(_ROW, dtype=dtype, device=device)
    z[1 - phase :: 2] = BELOW_ZERO
    return z


@functools.lru_cache(maxsize=8)
def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


@functools.lru_cache(maxsize=8)
def _masks(device: torch.device) -> Tensor:
    return torch.tensor([1 << k for k in range(8)], dtype=torch.uint8, device=device)


@functools.lru_cache(maxsize=32)
def _values_of_octets(low: float, high: float, dtype: torch.dtype) -> np.ndarray:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    kind = np.float64 if dtype == torch.float64 else np.float32
    return np.where(bits == 1, kind(high), kind(low))
