"""Counting votes: the part of a codec that turns all ranks' votes into a verdict.

Votes of one bit are counted on packed words, never one number per vote. A counter of 64 elements is
a few words: word b holds bit b of all 64 counts. Full adders turn three words of one weight into a
sum and a carry with five operations on words (a carry-save adder), so N votes of 64 elements take
about 5 N word operations, and two votes take two. Votes of more bits are added up as whole numbers.

Two cases are told apart. Mostly every rank votes on every row; where some abstain, each element
also needs the number of ranks that vote on it, bit-sliced (one bit) or as int32 (more bits).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_dlion.codec import levels
from hf_dlion.codec.bits import expand_rows, popcount
from hf_dlion.codec.codec import Codec
from hf_dlion.codec.edges import Edges, Ends, TorchEdges
from hf_dlion.codec.layout import WORD_BITS, Run, Shard, words_for
from hf_dlion.codec.levels import LEVELS
from hf_dlion.codec.rule import StepRule, Verdict
from hf_dlion.codec.tally import Segments, Tally, TorchTally, most_of

# Words counted at a time: the counters of 2**14 words stay in a core's cache. Elsewhere a chunk
# only bounds the temporaries: each costs the host a wait for its sums.
CHUNK_WORDS = 1 << 14
DEVICE_CHUNK_WORDS = 1 << 22


class CountingCodec(Codec):
    """Counts with torch operations, on any device; a backend replaces the three steps below.

    What a step returns are numbers, or int64 tensors of one element where the votes are, so the
    host waits for a device once.
    """

    def tally(self, segments: Segments, device: torch.device) -> Tally:
        """See `Codec.tally`."""
        return TorchTally(self, segments, device)

    def rehearse(self, work: Callable[[], None]) -> None:
        """Does nothing: torch has all that it needs."""
        return

    def edges(self, ends: Sequence[Ends], device: torch.device) -> Edges:
        """See `Codec.edges`."""
        return TorchEdges(ends, device)

    def count(
        self,
        votes: Tensor,
        active: Tensor,
        shard: Shard,
        row_numels: Tensor,
        rule: StepRule,
        out: Tensor | None = None,
    ) -> Verdict:
        """Returns the verdict on a shard (rule S3 to S6).

        Args:
            votes: int64, shape (N, bits * shard.words), rows contiguous: every rank's votes; 0 in
                a row that abstains.
            active: bool, shape (N, shard.rows), the rows on which each rank votes.
            shard: Which words and rows these are.
            row_numels: `shard.row_numels`.
            rule: The step's constants.
            out: int64, shape (planes, shard.words), receives the verdict's planes; else a new
                tensor.
        """
        counts = active.sum(dim=0, dtype=torch.int32)
        if out is None:
            out = torch.empty((rule.planes, shard.words), dtype=torch.int64, device=votes.device)
        voted = (counts * row_numels).sum()
        if rule.bits == 1:
            agreement = voted + self._count_all(votes, counts, shard, out, rule)
            most = most_of(counts, row_numels, rule.world_size)
        else:
            total, cast = self._add_all(votes, counts, shard, out, rule)
            # Where a rank abstains, and behind the last elements, the code 0 was taken for the
            # lowest level.
            absent = WORD_BITS * shard.words * rule.world_size - voted
            agreement, most = absent * 0 + total, cast - LEVELS[rule.bits].largest * absent
        if rule.aggregation == "majority":
            counts = counts.clamp_(max=1)
        return Verdict(out, counts, torch.stack([agreement, most]))

    def count_bits(
        self, votes: Tensor, totals: Tensor | None, out: Tensor, rule: StepRule
    ) -> int | Tensor:
        """Counts votes of one bit (rule S4, S5).

        Args:
            votes: int64, shape (N, words), rows contiguous.
            totals: int64, shape (digits of N, words), rows contiguous: how many ranks voted on
                each element, bit-sliced; None where all N did on all.
            out: int64, shape (planes, words), rows contiguous; receives the verdict's planes.
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

    def add_levels(
        self, votes: Tensor, voters: Tensor | None, out: Tensor, rule: StepRule
    ) -> tuple[int | Tensor, int | Tensor]:
        """Adds up votes of more than one bit (rule S6).

        Args:
            votes: int64, shape (N, bits * words), rows contiguous.
            voters: int32, shape (64 * words,): how many ranks vote on each element; None for all.
            out: int64, shape (planes, words), rows contiguous; receives the verdict's planes.
            rule: The step's constants.

        Returns:
            The sum over the elements of |sum of the levels|, and the sum over ranks too of |level|,
            an abstention and the padding taken for the lowest level.
        """
        return levels.add_levels(votes, voters, out, rule)

    def spread(self, counts: Tensor, runs: Sequence[Run], world_size: int) -> Tensor:
        """Returns the rows' counts as bit-sliced numbers per element of runs, 0 in the padding.

        Args:
            counts: int32, shape (rows,), of the shard.
            runs: Neighbours in the shard.
            world_size: The largest count, N.

        Returns:
            int64, shape (digits of N, words of the runs).
        """
        first = runs[0].word
        shape = (world_size.bit_length(), runs[-1].word + runs[-1].words - first)
        planes = torch.empty(shape, dtype=torch.int64, device=counts.device)
        for run in runs:
            rows = counts[run.row : run.row + run.rows]
            words = slice(run.word - first, run.word - first + run.words)
            for place, plane in enumerate(planes):
                expand_rows((rows >> place & 1).to(torch.bool), run, plane[words])
        return planes

    def _count_all(
        self, votes: Tensor, counts: Tensor, shard: Shard, out: Tensor, rule: StepRule
    ) -> int | Tensor:
        change: int | Tensor = 0
        for words, runs, everywhere in _stretches(counts, shard, rule.world_size):
            totals = None if everywhere else self.spread(counts, runs, rule.world_size)
            change = change + self.count_bits(votes[:, words], totals, out[:, words], rule)
        return change

    def _add_all(
        self, votes: Tensor, counts: Tensor, shard: Shard, out: Tensor, rule: StepRule
    ) -> tuple[int | Tensor, int | Tensor]:
        bits, ranks = rule.bits, rule.world_size
        agreement: int | Tensor = 0
        cast: int | Tensor = 0
        for words, runs, everywhere in _stretches(counts, shard, ranks):
            if everywhere:
                pieces: Iterator[tuple[slice, Tensor | None]] = iter([(words, None)])
                numel = sum(run.numel for run in runs)
                padding = WORD_BITS * (words.stop - words.start) - numel
                agreement = agreement - LEVELS[bits].largest * ranks * padding
            else:
                pieces = (piece for run in runs for piece in _voters(counts, run))
            for part, voters in pieces:
                of_part = votes[:, bits * part.start : bits * part.stop]
                found = self.add_levels(of_part, voters, out[:, part], rule)
                agreement, cast = agreement + found[0], cast + found[1]
        return agreement, cast


def _stretches(
    counts: Tensor, shard: Shard, world_size: int
) -> Iterator[tuple[slice, Sequence[Run], bool]]:
    """Yields the words of a shard in stretches, their runs, and whether every rank votes on all.

    That is the usual case, and the quick one. On the CPU parameters with other rows (an embedding
    with unseen tokens) are told apart; elsewhere that would cost a wait for the device.

    Args:
        counts: int32, shape (rows,): how many ranks vote on each row.
        shard: Which words and rows these are.
        world_size: Number of ranks.
    """
    runs = shard.runs
    if not runs:
        return
    if bool((counts == world_size).all()):
        yield slice(0, shard.words), runs, True
        return
    if counts.device.type != "cpu":
        yield slice(0, shard.words), runs, False
        return
    rows = np.array([run.row for run in runs])
    whole = np.minimum.reduceat(counts.numpy(), rows) == world_size
    for same, members in itertools.groupby(range(len(runs)), lambda k: bool(whole[k])):
        part = [runs[k] for k in members]
        yield slice(part[0].word, part[-1].word + part[-1].words), part, same


def _voters(counts: Tensor, run: Run) -> Iterator[tuple[slice, Tensor]]:
    """Yields the words of a run in pieces, with how many ranks vote on each element, padded by 0.

    Args:
        counts: int32, shape (rows,), of the shard.
        run: A run of the shard.
    """
    size = levels.CHUNK if counts.device.type == "cpu" else levels.DEVICE_CHUNK
    for first in range(0, run.numel, size):
        numel = min(size, run.numel - first)
        word, words = run.word + first // WORD_BITS, words_for(numel)
        element = torch.arange(numel, device=counts.device).add_(run.start + first)
        row = element.div_(run.row_numel, rounding_mode="floor").add_(run.row - run.first_row)
        padding = (0, WORD_BITS * words - numel)
        yield slice(word, word + words), torch.nn.functional.pad(counts[row], padding)


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
