"""Counting votes on packed words: bit-sliced counters, never one number per vote.

A counter of 64 elements is a few words: word b holds bit b of all 64 counts. Full adders turn three
words of one weight into a sum and a carry with five operations on words (a carry-save adder), so
that N votes of 64 elements take about 5 N word operations, and two votes take two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.codec.bits import expand_rows, popcount
from hf_dlion.codec.cuda import count as cuda_count
from hf_dlion.codec.cuda.launch import kernels
from hf_dlion.codec.layout import Run, Shard
from hf_dlion.codec.native import codec as native
from hf_dlion.codec.rule import StepRule, Verdict
from hf_dlion.codec.stretches import stretches
from hf_dlion.codec.sums import sum_levels

# Words counted at a time: the counters of 2**14 words stay in a core's cache. Elsewhere a chunk
# only bounds the temporaries: each costs the host a wait for its sums.
CHUNK_WORDS = 1 << 14
DEVICE_CHUNK_WORDS = 1 << 22


def add_votes(votes: Tensor, planes: int) -> list[Tensor]:
    """Returns how many of the votes have each bit set, as bit-sliced counters.

    Args:
        votes: int64, shape (N, words); not changed.
        planes: Number of planes to return, at least the bit length of N.

    Returns:
        `planes` tensors, int64, shape (words,), lowest bit first.
    """
    weights: list[list[Tensor]] = [list(votes)]
    sums: list[Tensor] = []
    while len(sums) < planes:
        same, carries = weights.pop(0), []
        while len(same) >= 3:
            a, b, c = same.pop(), same.pop(), same.pop()
            half = a ^ b
            carries.append((a & b) | (half & c))
            same.append(half ^ c)
        if len(same) == 2:
            a, b = same.pop(), same.pop()
            carries.append(a & b)
            same.append(a ^ b)
        sums.append(same[0] if same else torch.zeros_like(votes[0]))
        weights.append(carries)
    return sums


def compare_with_constant(counters: list[Tensor], constant: int) -> tuple[Tensor, Tensor]:
    """Returns the words where the counter is greater than, and where it equals, the constant."""
    greater = torch.zeros_like(counters[0])
    equal = torch.full_like(counters[0], -1)
    for place in reversed(range(len(counters))):
        if constant >> place & 1:
            equal = equal & counters[place]
        else:
            greater = greater | (equal & counters[place])
            equal = equal & ~counters[place]
    return greater, equal


def compare_twice(counters: list[Tensor], totals: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the words where twice the counter is greater than, and where it equals, the total.

    Args:
        counters: Bit-sliced counters.
        totals: As many planes of bit-sliced numbers.
    """
    zero = torch.zeros_like(counters[0])
    doubled, padded = [zero, *counters], [*totals, zero]
    greater, equal = zero, torch.full_like(zero, -1)
    for twice, total in zip(reversed(doubled), reversed(padded), strict=True):
        greater = greater | (equal & twice & ~total)
        equal = equal & ~(twice ^ total)
    return greater, equal


def count_votes(
    votes: Tensor,
    active: Tensor,
    shard: Shard,
    row_numels: Tensor,
    rule: StepRule,
    out: Tensor | None = None,
) -> Verdict:
    """Returns the verdict on a shard (design S3 to S6).

    Args:
        votes: int64, shape (N, bits * shard.words), every rank's votes; 0 in a row that abstains.
        active: bool, shape (N, shard.rows), the rows on which each rank votes.
        shard: Which words and rows these are.
        row_numels: `shard.row_numels`.
        rule: The step's constants.
        out: int64, shape (planes, shard.words), receives the verdict's planes; else a new tensor.
    """
    counts = active.sum(dim=0, dtype=torch.int32)
    if out is None:
        out = torch.empty((rule.planes, shard.words), dtype=torch.int64, device=votes.device)
    most = (counts * row_numels).sum()
    if rule.bits > 1:
        sums = sum_levels(votes, counts, shard, int(most), out, rule)
        return Verdict(out, counts.clamp_(max=1), *sums)
    found_kernels = kernels(votes.device) if votes.device.type == "cuda" else None
    if found_kernels is not None:
        change = cuda_count.count_votes(found_kernels, votes, counts, shard, out, rule)
        agreement = int(most + change)
    else:
        agreement = int(most) + _count_in_stretches(votes, counts, shard, out, rule)
    if rule.aggregation == "majority":
        counts = counts.clamp_(max=1)
    return Verdict(out, counts, agreement)


def _count_in_stretches(
    votes: Tensor, counts: Tensor, shard: Shard, out: Tensor, rule: StepRule
) -> int:
    """Counts in C or with torch; returns as `cuda_count.count_votes` does."""
    change = 0
    for words, runs, everywhere in stretches(counts, shard, rule.world_size):
        totals = None if everywhere else _spread(counts, runs, rule.world_size)
        found = None
        if votes.device.type == "cpu":
            found = native.count_votes(votes[:, words], totals, out[:, words], rule)
        if found is None:
            found = _count_in_chunks(votes[:, words], totals, out[:, words], rule)
        change += found
    return change


def _count_in_chunks(votes: Tensor, totals: Tensor | None, out: Tensor, rule: StepRule) -> int:
    """Counts with torch's bitwise operations.

    Args:
        votes: int64, shape (N, words).
        totals: int64, shape (digits, words), how many ranks voted on each element, bit-sliced;
            None where all N did on all.
        out: int64, shape (planes, words); receives the verdict's planes.
        rule: The step's constants.

    Returns:
        The sum of |n - 2 c| less the sum of n over all elements, c of n votes being negative.
    """
    world_size = rule.world_size
    change = 0
    size = CHUNK_WORDS if votes.device.type == "cpu" else DEVICE_CHUNK_WORDS
    for start in range(0, votes.shape[1], size):
        part = slice(start, min(start + size, votes.shape[1]))
        counters = add_votes(votes[:, part], world_size.bit_length())
        voters = None if totals is None else list(totals[:, part])
        if voters is None:
            negative, tied = compare_with_constant(counters, world_size // 2)
            if world_size % 2:
                tied = torch.zeros_like(tied)
        else:
            negative, tied = compare_twice(counters, voters)
        change += _agreement_change(counters, negative, voters, world_size)
        _decide(out[:, part], counters, negative, tied, voters, rule)
    return change


def _decide(
    out: Tensor,
    counters: list[Tensor],
    negative: Tensor,
    tied: Tensor,
    totals: list[Tensor] | None,
    rule: StepRule,
) -> None:
    """Writes the verdict's planes for a chunk; words and rows nobody voted on become 0."""
    if rule.aggregation == "average":
        for plane, counter in zip(out, counters, strict=True):
            plane.copy_(counter)
        return
    negative = negative | (tied & rule.tie.word)
    voted = -1 if totals is None else _any(totals)
    out[0].copy_(negative & voted)
    if rule.tie.to_zero:
        out[1].copy_(~tied & voted)


def _any(totals: list[Tensor]) -> Tensor:
    """Returns the words where the bit-sliced totals are not 0."""
    union = totals[0]
    for plane in totals[1:]:
        union = union | plane
    return union


def _spread(counts: Tensor, runs: Sequence[Run], world_size: int) -> Tensor:
    """Returns the rows' counts as bit-sliced numbers per element of runs, 0 in the padding."""
    first = runs[0].word
    shape = (world_size.bit_length(), runs[-1].word + runs[-1].words - first)
    planes = torch.empty(shape, dtype=torch.int64, device=counts.device)
    for run in runs:
        rows = counts[run.row : run.row + run.rows]
        words = slice(run.word - first, run.word - first + run.words)
        for place, plane in enumerate(planes):
            expand_rows((rows >> place & 1).to(torch.bool), run, plane[words])
    return planes


def _agreement_change(
    counters: list[Tensor], negative: Tensor, totals: list[Tensor] | None, world_size: int
) -> int:
    """Returns the sum of |n - 2 c| less the sum of n, for a chunk with c of n votes negative.

    |n - 2 c| is n - 2 c where c is at most half of n, and 4 c - 2 n more than that elsewhere.
    """
    change = 0
    for place, plane in enumerate(counters):
        change += (4 * popcount(plane & negative) - 2 * popcount(plane)) << place
    if totals is None:
        return change - 2 * world_size * popcount(negative)
    return change - sum(
        2 * popcount(plane & negative) << place for place, plane in enumerate(totals)
    )
