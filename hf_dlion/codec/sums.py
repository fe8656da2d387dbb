"""Adding up votes of more than one bit (design S6): whole numbers, exact for any number of ranks.

With L the largest level and s the spacing, a code c stands for the level s c - L, and in rows that
abstain for nothing: it is 0 there. So the sum of the levels of the n ranks that vote on an element
is s * (sum of all codes) - L n.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_dlion.codec.bits import pack_bits
from hf_dlion.codec.cuda import levels as cuda_levels
from hf_dlion.codec.cuda.launch import kernels
from hf_dlion.codec.layout import WORD_BITS, Run, Shard, words_for
from hf_dlion.codec.levels import LEVELS, unpack_codes
from hf_dlion.codec.native import codec as native
from hf_dlion.codec.rule import StepRule
from hf_dlion.codec.stretches import stretches

# Numbers, or int64 tensors of shape () where the votes are, so that a device is waited for once.
Sums = tuple[int | Tensor, int | Tensor]

# Elements at a time, a multiple of 64; temporaries take about 20 bytes for each.
CHUNK = 1 << 16
DEVICE_CHUNK = 1 << 22


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


def sum_levels(
    votes: Tensor, counts: Tensor, shard: Shard, voted: int, out: Tensor, rule: StepRule
) -> tuple[int, int]:
    """Adds up packed levels and writes the verdict's planes.

    Args:
        votes: int64, shape (N, bits * words), rows contiguous.
        counts: int32, shape (rows,): how many ranks vote on each row.
        shard: Which words and rows these are.
        voted: The sum over the elements of how many ranks vote on each.
        out: int64, shape (planes, words), rows contiguous; receives the verdict's planes.
        rule: The step's constants.

    Returns:
        The sum over the elements of |sum of the levels|, and the sum over ranks too of |level|.
    """
    ranks, bits, largest = rule.world_size, rule.bits, LEVELS[rule.bits].largest
    agreement: int | Tensor = 0
    cast: int | Tensor = 0
    for words, runs, everywhere in stretches(counts, shard, ranks):
        if everywhere:
            pieces: Iterator[tuple[slice, Tensor | None]] = iter([(words, None)])
            padding = WORD_BITS * (words.stop - words.start) - sum(r.stop - r.start for r in runs)
            agreement -= largest * ranks * padding
        else:
            pieces = (piece for run in runs for piece in _voters(counts, run))
        for part, voters in pieces:
            of_part = votes[:, bits * part.start : bits * part.stop]
            sums = _sum(of_part, voters, out[:, part], rule)
            agreement, cast = agreement + sums[0], cast + sums[1]
    # Where a rank abstains, and behind the last elements, its code was taken for the lowest level.
    cast -= largest * (WORD_BITS * shard.words * ranks - voted)
    return int(agreement), int(cast)


def _voters(counts: Tensor, run: Run) -> Iterator[tuple[slice, Tensor]]:
    """Yields the words of a run in pieces, with how many ranks vote on each element, padded by 0.

    Args:
        counts: int32, shape (rows,), of the shard.
        run: A run of the shard.
    """
    size = CHUNK if counts.device.type == "cpu" else DEVICE_CHUNK
    for first in range(0, run.stop - run.start, size):
        numel = min(size, run.stop - run.start - first)
        word, words = run.word + first // WORD_BITS, words_for(numel)
        element = torch.arange(numel, device=counts.device).add_(run.start + first)
        row = element.div_(run.row_numel, rounding_mode="floor").add_(run.row - run.first_row)
        padding = (0, WORD_BITS * words - numel)
        yield slice(word, word + words), torch.nn.functional.pad(counts[row], padding)


def _sum(votes: Tensor, voters: Tensor | None, out: Tensor, rule: StepRule) -> Sums:
    """Adds up with whatever is fastest; as `_sum_in_chunks`."""
    kind = votes.device.type
    sums: Sums | None = None
    if kind == "cpu":
        sums = native.sum_levels(votes, voters, out, rule)
    elif kind == "cuda" and (found := kernels(votes.device)) is not None:
        sums = cuda_levels.sum_levels(found, votes, voters, out, rule)
    return _sum_in_chunks(votes, voters, out, rule) if sums is None else sums


def _sum_in_chunks(votes: Tensor, voters: Tensor | None, out: Tensor, rule: StepRule) -> Sums:
    """Adds up with torch operations.

    Args:
        votes: int64, shape (N, bits * words).
        voters: int32, shape (64 * words,): how many ranks vote on each element; None for all.
        out: int64, shape (planes, words); receives the verdict's planes.
        rule: The step's constants.

    Returns:
        As `sum_levels`, an abstention and the padding taken for levels of -largest.
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
