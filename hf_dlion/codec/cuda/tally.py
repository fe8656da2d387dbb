"""Packing, counting and unpacking a message with a Triton kernel each; no wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dlion.codec.cuda import tables
from hf_dlion.codec.cuda.launch import Kernels, on_device, run
from hf_dlion.codec.cuda.tables import Entry, Launch, table_of
from hf_dlion.codec.levels import LEVELS
from hf_dlion.codec.rule import MessageVerdict, StepRule, Verdict
from hf_dlion.codec.tally import Segments, sums_for


class TritonTally:
    """Implements `hf_dlion.codec.tally.Tally`; the tables go up once, when it is made."""

    def __init__(self, found: Kernels, segments: Segments, device: torch.device) -> None:
        """Takes the kernels, the places, and where the segments lie."""
        self._found, self._segments = found, segments
        self._block = tables.BLOCK
        shard = segments.shard
        runs = [
            Entry(
                # Kernels take words of 32 bits.
                words=2 * part.word,
                rows=part.row,
                numel=part.numel,
                row_numel=part.row_numel,
                skipped=part.start - part.first_row * part.row_numel,
            )
            for part in shard.runs
        ]
        self._runs = table_of(runs, device, self._block)
        size = segments.bits * segments.words
        self._vote_rows = self._rows_at(segments.vote_words, size, device)
        size = segments.planes[0] * segments.words
        self._verdict_rows = self._rows_at(segments.verdict_words, size, device)
        numels = [own.row_numels(torch.device("cpu")) for own in segments.shards]
        self._row_numels = torch.cat(numels).to(device)
        self._counts = torch.empty(shard.rows, dtype=torch.int32, device=device)
        self._all_counts = torch.empty(segments.layout.rows, dtype=torch.int32, device=device)
        # Of the shard's verdict, and of the message's.
        self._sums = torch.zeros((2, 2), dtype=torch.int64, device=device)

    def _rows_at(self, stride: int, size: int, device: torch.device) -> Launch:
        """Returns a table of the shards' rows; each lie `size` words into a segment."""
        entries, before = [], 0
        for place, shard in enumerate(self._segments.shards):
            if shard.rows:
                words = 2 * (place * stride + size)
                entry = Entry(words=words, rows=shard.first_row, numel=shard.rows, row_numel=before)
                entries.append(entry)
            before += shard.rows
        return table_of(entries, device, self._block)

    def _programs(self, count: int) -> int:
        return -(-count // self._block)

    def pack(self, words: Tensor | None, active: Tensor, out: Tensor) -> None:
        """See `Tally.pack`."""
        segments, rows = self._segments, self._vote_rows
        count = 0 if words is None else words.numel()
        # Without words none is copied, and `out` stands for them.
        copies = max(1, self._programs(count))
        with on_device(out.device):
            run(
                self._found.tally.pack_votes, copies + rows.blocks, rows.jobs, rows.job_of,
                out if words is None else words, active.view(torch.uint8), out, self._sums[0],
                copies, count, segments.bits * segments.words, segments.vote_words,
                BLOCK=self._block,
            )  # fmt: skip

    def count(self, received: Tensor, rule: StepRule, out: Tensor | None = None) -> Verdict:
        """See `Tally.count`."""
        segments, mine, on = self._segments, self._segments.shard, self._runs
        if out is None:
            shape = (segments.planes[0], mine.words)
            out = torch.empty(shape, dtype=torch.int64, device=received.device)
        if not mine.words:
            return Verdict(out, self._counts, self._sums[0])
        narrow, planes = received.view(torch.int32), out.view(torch.int32)
        common = (
            on.jobs, on.job_of, narrow.view(torch.uint32),
            narrow[:, 2 * segments.bits * segments.words :], narrow.stride(0), rule.world_size,
            self._counts, planes.view(torch.uint32), planes.stride(0), rule.tie.word, self._sums[0],
        )  # fmt: skip
        with on_device(received.device):
            if segments.bits == 1:
                run(
                    self._found.count.count, on.blocks, *common, BLOCK=self._block,
                    DIGITS=rule.world_size.bit_length(), AVERAGE=rule.aggregation == "average",
                    ZERO=rule.tie.to_zero,
                )  # fmt: skip
            else:
                largest, spacing = LEVELS[segments.bits]
                run(
                    self._found.levels.sum_levels, on.blocks, *common, BLOCK=self._block,
                    BITS=segments.bits, LARGEST=largest, SPACING=spacing, ZERO=rule.tie.to_zero,
                )  # fmt: skip
        return Verdict(out, self._counts, self._sums[0])

    def pack_verdict(self, found: Verdict | MessageVerdict, out: Tensor) -> None:
        """See `Tally.pack_verdict`."""
        segments, mine, planes = self._segments, self._segments.shard, found.planes
        elsewhere = isinstance(found, MessageVerdict)
        copies = max(1, self._programs(mine.words)) if elsewhere else 1
        # Of segments of a verdict: from plane to plane, from one to the next, and their length.
        places = (planes.stride(0), planes.stride(1), max(1, planes.shape[-1]))
        with on_device(out.device):
            run(
                self._found.tally.pack_verdict, copies + self._programs(mine.rows),
                planes, *places, found.counts, found.sums, out,
                self._sums[1], copies, mine.words, mine.rows, segments.words, segments.row_words,
                PLANES=segments.planes[0], DIGITS=segments.planes[1],
                SUMS=sums_for(segments.bits), COPY=elsewhere, BLOCK=self._block,
            )  # fmt: skip

    def unpack_verdict(self, received: Tensor) -> MessageVerdict:
        """See `Tally.unpack_verdict`."""
        segments, rows = self._segments, self._verdict_rows
        with on_device(received.device):
            run(
                self._found.tally.unpack_verdict, 1 + rows.blocks, rows.jobs, rows.job_of,
                received, self._all_counts, self._row_numels, self._sums[1],
                segments.row_words, segments.verdict_words, len(segments.shards), segments.voters,
                DIGITS=segments.planes[1], SUMS=sums_for(segments.bits), BLOCK=self._block,
            )  # fmt: skip
        planes = segments.planes_in(received).transpose(0, 1)
        return MessageVerdict(planes, self._all_counts, self._sums[1])
