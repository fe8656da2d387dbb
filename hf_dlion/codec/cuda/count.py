"""Counting packed votes with Triton kernels; `hf_dlion.codec.count` says what is counted."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dlion.codec.cuda.launch import Kernels, on_device, run
from hf_dlion.codec.cuda.tables import Entry, Kind, launches
from hf_dlion.codec.layout import Shard
from hf_dlion.codec.rule import StepRule

# Words per program of the counting kernel.
WORDS = 512


def count_votes(
    found: Kernels, votes: Tensor, counts: Tensor, shard: Shard, out: Tensor, rule: StepRule
) -> Tensor:
    """Counts packed votes (design S4, S5) in one launch, or two where some ranks abstain.

    Args:
        found: The kernels.
        votes: int64, shape (N, words), rows contiguous.
        counts: int32, shape (rows,): how many ranks voted on each row.
        shard: Which words and rows these are.
        out: int64, shape (planes, words), rows contiguous; receives the verdict's planes.
        rule: The step's constants.

    Returns:
        The sum of |n - 2 c| less the sum of n over all elements, c of n votes being negative:
        int64, shape (1,), on the device.
    """
    change = torch.zeros(1, dtype=torch.int64, device=votes.device)
    if not shard.words:
        return change
    digits = rule.world_size.bit_length()
    with on_device(votes.device):
        # The one wait for the device: where all voted, half of the memory's traffic is saved.
        everywhere = bool((counts == rule.world_size).all())
        totals = votes if everywhere else _spread(found, counts, shard, digits)
        run(
            found.count.count, -(-shard.words // WORDS),
            votes, votes.stride(0), rule.world_size, shard.words, totals, totals.stride(0),
            out, out.stride(0), rule.tie.word, change,
            DIGITS=digits, TOTALS=not everywhere, AVERAGE=rule.aggregation == "average",
            ZERO=rule.tie.to_zero, BLOCK=WORDS,
        )  # fmt: skip
    return change


def _spread(found: Kernels, counts: Tensor, shard: Shard, digits: int) -> Tensor:
    """Returns the rows' counts as bit-sliced numbers per element, 0 in the padding."""
    totals = torch.empty((digits, shard.words), dtype=torch.int64, device=counts.device)
    entries = [
        Entry(
            kind=Kind((), False, False),
            # Kernels take words of 32 bits.
            words=2 * part.word,
            stride=2 * shard.words,
            rows=part.row,
            numel=part.stop - part.start,
            row_numel=part.row_numel,
            skipped=part.start - part.first_row * part.row_numel,
        )
        for part in shard.runs
    ]
    for on in launches(entries, counts.device):
        planes = totals.view(torch.int32)
        run(found.count.spread, on.blocks, on.jobs, on.job_of, counts, planes, DIGITS=digits)
    return totals
