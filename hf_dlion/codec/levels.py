"""Votes of more than one bit in plain torch operations, for any device (rule S6).

`hf_dlion.codec.reference.levels` is the definition: what a level is, how its code is packed, and
the order in which magnitudes are added. That order is a tree over words of 64 elements, so any
aligned power of two of them is a subtree: whoever adds in chunks, threads or blocks gets the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dlion.codec.bits import pack_bits
from hf_dlion.codec.layout import WORD_BITS, Run, words_for
from hf_dlion.codec.lion import compute_dtype
from hf_dlion.codec.rule import StepRule, TensorRule


class Levels(NamedTuple):
    """The levels of a code: a code c stands for `spacing` * c - `largest`."""

    largest: int
    spacing: int


# Elements added up at a time, a multiple of 64; temporaries take about 20 bytes for each.
CHUNK = 1 << 16
DEVICE_CHUNK = 1 << 22

LEVELS = {2: Levels(3, 2), 4: Levels(7, 1), 8: Levels(127, 1)}


def magnitude_sums(u: Tensor) -> Tensor:
    """Returns the sum of |u| over each word of elements, float64 of shape (words,).

    Args:
        u: float32 or float64, shape (n,), zeros past the end.
    """
    padding = words_for(u.numel()) * WORD_BITS - u.numel()
    sums = torch.nn.functional.pad(u.abs().to(torch.float64), (0, padding)).view(-1, WORD_BITS)
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    return sums.view(-1)


def fold(sums: Tensor) -> Tensor:
    """Returns the sum of all, float64 of shape (1,), added in pairs of neighbours.

    Args:
        sums: float64, shape (n,), n at least 1.
    """
    while sums.numel() > 1:
        if sums.numel() % 2:
            sums = torch.nn.functional.pad(sums, (0, 1))
        sums = sums[0::2] + sums[1::2]
    return sums


def factor_of(total: Tensor, count: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Returns what a direction is multiplied by, or with 2 bits compared with.

    Args:
        total: float64, sums of |u|.
        count: Integers, same shape: the elements of active rows.
        bits: Of a vote.
        dtype: In which the direction is computed.

    Returns:
        `dtype`, same shape, on the same device.
    """
    mean = total / count.to(torch.float64)
    if bits == 2:
        return (1.5 * mean).to(dtype)
    half = torch.full_like(mean, LEVELS[bits].largest / 2)
    factor = (half / mean).clamp(max=torch.finfo(dtype).max)
    return torch.where(mean > 0, factor, 0.0).to(dtype)


def codes_of(u: Tensor, factor: Tensor, bits: int, phase: int) -> Tensor:
    """Returns the codes of active rows, uint8 of shape (n,).

    Args:
        u: The direction, shape (n,), from an even element on.
        factor: `factor_of` the tensor, of one element, or of each element's word, shape (n,).
        bits: Of a vote.
        phase: `StepRule.zero_phase`.
    """
    largest = LEVELS[bits].largest
    if bits == 2:
        negative = u < 0
        odd = slice(1 - phase, None, 2)
        negative[odd] |= u[odd] == 0
        far = (u.abs() > factor).to(torch.uint8)
        return torch.where(negative, 1 - far, 2 + far)
    scaled = u * factor
    # Comparisons, because a clamp would keep a NaN.
    scaled = torch.where(scaled < largest, scaled, largest)
    scaled = torch.where(scaled > -largest, scaled, -largest)
    return scaled.round_().add_(largest).to(torch.uint8)


def zero_codes(bits: int, phase: int, device: torch.device) -> Tensor:
    """Returns the codes of 64 exact zeros in active rows, int64 of shape (bits,).

    Args:
        bits: Of a vote.
        phase: `StepRule.zero_phase`.
        device: Where they are wanted.
    """
    zeros = torch.zeros(WORD_BITS, device=device)
    words = torch.empty(bits, dtype=torch.int64, device=device)
    pack_codes(codes_of(zeros, zeros, bits, phase), bits, words)
    return words


def factors_of_words(u: Tensor, bits: int) -> Tensor:
    """Returns for each element the `factor_of` its word, in the dtype of u, shape (n,).

    Args:
        u: The direction, shape (n,), from the first element of a word on.
        bits: Of a vote.
    """
    padding = words_for(u.numel()) * WORD_BITS - u.numel()
    nonzero = torch.nn.functional.pad(u != 0, (0, padding)).view(-1, WORD_BITS).sum(dim=1)
    factors = factor_of(magnitude_sums(u), nonzero, bits, u.dtype)
    return factors.repeat_interleave(WORD_BITS)[: u.numel()]


def pack_codes(codes: Tensor, bits: int, out: Tensor) -> None:
    """Packs codes into words.

    Args:
        codes: uint8, shape (n,).
        bits: Of a code.
        out: int64, shape (bits * ceil(n / 64),), receives them; codes past the end are 0.
    """
    padding = out.numel() // bits * WORD_BITS - codes.numel()
    parts = torch.nn.functional.pad(codes, (0, padding)).view(-1, 8 // bits, 8 * bits)
    octets = parts[:, 0]
    for place in range(1, 8 // bits):
        octets = octets | (parts[:, place] << bits * place)
    out.copy_(octets.reshape(-1).view(torch.int64))


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """Returns all codes in some words, uint8 of shape (64 * words / bits,).

    Args:
        words: int64, contiguous, shape (bits * n,).
        bits: Of a code.
    """
    octets: Tensor = words.view(torch.uint8).view(-1, 1, 8 * bits)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device).view(1, -1, 1)
    codes: Tensor = (octets >> shifts) & (2**bits - 1)
    return codes.view(-1)


def encode_levels(
    grad: Tensor,
    words: Tensor,
    active: Tensor,
    rule: TensorRule,
    run: Run,
    chunk_numel: int,
    foresee: Callable[[slice], Tensor],
    direct: Callable[[slice], Tensor],
) -> None:
    """Writes votes, as if all rows voted, and marks the rows that do.

    Where levels are relative to the tensor, it is read twice.

    Args:
        grad: Gradient, dense, not empty.
        words: int64, shape (bits * run.words,); receives the votes.
        active: bool, shape (run.rows,), those that vote become True.
        rule: The step's constants for this parameter.
        run: The whole parameter or, where levels are relative to words, a stretch of it.
        chunk_numel: Elements at a time, a multiple of 64.
        foresee: Returns the direction of some of the elements, and changes nothing.
        direct: Returns it again, for the last time.
    """
    bits, step, device = rule.step_rule.bits, rule.step_rule, grad.device
    votes = torch.zeros(run.rows, dtype=torch.uint8, device=device)
    of_tensor = None
    if step.level_scale == "tensor":
        sums = torch.zeros(run.words, dtype=torch.float64, device=device)
        for chunk in run.chunks(chunk_numel):
            direction = foresee(chunk)
            sums[_words_of(run, chunk, 1)] = magnitude_sums(direction)
            _mark_rows(votes, direction, run, chunk)
        count = votes.sum() * run.row_numel
        of_tensor = factor_of(fold(sums), count, bits, compute_dtype(grad.dtype))
    for chunk in run.chunks(chunk_numel):
        direction = direct(chunk)
        factor = of_tensor
        if factor is None:
            _mark_rows(votes, direction, run, chunk)
            factor = factors_of_words(direction, bits)
        codes = codes_of(direction, factor, bits, step.zero_phase)
        pack_codes(codes, bits, words[_words_of(run, chunk, bits)])
    active |= votes.to(torch.bool)


def clear_levels(words: Tensor, active: Tensor, bits: int, run: Run, chunk_numel: int) -> None:
    """Sets the codes of rows that abstain to 0.

    Args:
        words: int64, shape (bits * run.words,).
        active: bool, shape (run.rows,), which rows vote.
        bits: Of a vote.
        run: The elements.
        chunk_numel: As for `encode_levels`.
    """
    votes = active.to(torch.uint8)
    kept = torch.empty_like(words[: min(words.numel(), bits * chunk_numel // WORD_BITS)])
    for chunk in run.chunks(chunk_numel):
        part = words[_words_of(run, chunk, bits)]
        ones = votes[row_of(run, chunk, words.device)] * (2**bits - 1)
        pack_codes(ones, bits, kept[: part.numel()])
        part &= kept[: part.numel()]


def row_of(run: Run, chunk: slice, device: torch.device) -> Tensor:
    """Returns the row, among those of the stretch, of every element of a chunk, int64."""
    element = torch.arange(chunk.start, chunk.stop, device=device)
    return element.div_(run.row_numel, rounding_mode="floor").sub_(run.first_row)


def _words_of(run: Run, chunk: slice, bits: int) -> slice:
    """Returns where a chunk's words lie among those of a stretch."""
    here = run.within(chunk)
    return slice(bits * (here.start // WORD_BITS), bits * words_for(here.stop))


def _mark_rows(votes: Tensor, direction: Tensor, run: Run, chunk: slice) -> None:
    """Sets to 1 the votes, uint8 per row, of the rows of a chunk that are not 0."""
    nonzero = direction != 0
    if direction.device.type == "cpu" and bool(nonzero.all()):
        first, last = chunk.start // run.row_numel, (chunk.stop - 1) // run.row_numel
        votes[first - run.first_row : last + 1 - run.first_row] = 1
        return
    votes.scatter_reduce_(0, row_of(run, chunk, direction.device), nonzero.byte(), "amax")


def add_levels(
    votes: Tensor, voters: Tensor | None, out: Tensor, rule: StepRule
) -> tuple[Tensor, Tensor]:
    """Adds up votes of all ranks; see `hf_dlion.codec.count.CountingCodec.add_levels`.

    With L the largest level and s the spacing, a code c stands for the level s c - L. In rows that
    abstain it is 0, and stands for nothing, so there L is added back.
    """
    bits, (largest, spacing) = rule.bits, LEVELS[rule.bits]
    agreement = cast = torch.zeros((), dtype=torch.int64, device=votes.device)
    size = (CHUNK if votes.device.type == "cpu" else DEVICE_CHUNK) // WORD_BITS
    for start in range(0, out.shape[1], size):
        stop = min(start + size, out.shape[1])
        places = slice(WORD_BITS * start, WORD_BITS * stop)
        total = torch.zeros(places.stop - places.start, dtype=torch.int32, device=votes.device)
        for vote in votes[:, bits * start : bits * stop]:
            level = unpack_codes(vote, bits).to(torch.int32).mul_(spacing).sub_(largest)
            total += level
            cast = cast + level.abs_().sum(dtype=torch.int64)
        if voters is not None:
            total += largest * (rule.world_size - voters[places])
        agreement = agreement + total.abs().sum(dtype=torch.int64)
        negative, tied = pack_bits(total < 0), pack_bits(total == 0)
        if rule.tie.to_zero:
            out[1, start:stop] = ~tied
        negative |= tied & rule.tie.word
        if voters is not None:
            negative &= pack_bits(voters[places] > 0)
        out[0, start:stop] = negative
    return agreement, cast


def check_world_size(world_size: int, bits: int) -> None:
    """Refuses more ranks than can be added up: 64 sums of levels must fit 32 bits.

    Raises:
        ValueError: If there are more.
    """
    if bits == 1:
        return
    most = (2**31 - 1) // (2 * LEVELS[bits].largest * WORD_BITS)
    if world_size > most:
        raise ValueError(
            f"world_size={world_size} exceeds the limit of {most} for bits={bits}, whose votes are "
            f"added up in 32 bits; use fewer bits"
        )
