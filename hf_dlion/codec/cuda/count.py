"""Counting packed votes with Triton kernels; `hf_dlion.codec.count` says what is counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.codec.cuda.launch import Kernels, on_device, run
from hf_dlion.codec.cuda.tables import Entry, Kind, launches
from hf_dlion.codec.layout import Run
from hf_dlion.codec.rule import StepRule

# Words per program of the counting kernel.
WORDS = 512


def count_bits(
    found: Kernels, votes: Tensor, totals: Tensor | None, out: Tensor, rule: StepRule
) -> Tensor:
    """Counts as `CountingCodec.count_bits`; returns int64, shape (1,), without waiting for it."""
    change = torch.zeros(1, dtype=torch.int64, device=votes.device)
    # A pointer that is not read, where there are no totals.
    seen = votes if totals is None else totals
    with on_device(votes.device):
        run(
            found.count.count, -(-votes.shape[1] // WORDS),
            votes, votes.stride(0), rule.world_size, votes.shape[1], seen, seen.stride(0),
            out, out.stride(0), rule.tie.word, change,
            DIGITS=rule.world_size.bit_length(), TOTALS=totals is not None,
            AVERAGE=rule.aggregation == "average", ZERO=rule.tie.to_zero, BLOCK=WORDS,
        )  # fmt: skip
    return change


def spread(found: Kernels, counts: Tensor, runs: Sequence[Run], world_size: int) -> Tensor:
    """Returns what `CountingCodec.spread` does, in one launch."""
    first, digits = runs[0].word, world_size.bit_length()
    shape = (digits, runs[-1].word + runs[-1].words - first)
    totals = torch.empty(shape, dtype=torch.int64, device=counts.device)
    entries = [
        Entry(
            kind=Kind((), False, False),
            # Kernels take words of 32 bits.
            words=2 * (part.word - first),
            stride=2 * shape[1],
            rows=part.row,
            numel=part.stop - part.start,
            row_numel=part.row_numel,
            skipped=part.start - part.first_row * part.row_numel,
        )
        for part in runs
    ]
    with on_device(counts.device):
        for on in launches(entries, counts.device):
            planes = totals.view(torch.int32)
            run(found.count.spread, on.blocks, on.jobs, on.job_of, counts, planes, DIGITS=digits)
    return totals
