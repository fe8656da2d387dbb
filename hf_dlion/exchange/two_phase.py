"""Each rank counts 1/N of the words for all: two rounds, for many ranks."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.codec.bits import pack_bits, unpack_bits
from hf_dlion.codec.layout import WORD_BYTES, MessageLayout, shards_of, words_for
from hf_dlion.codec.rule import StepRule, Verdict, verdict_planes
from hf_dlion.exchange.pending import Pending
from hf_dlion.exchange.verdict_gather import VerdictGather, sizes_of
from hf_dlion.exchange.wire import Wire
from hf_dlion.options import Options


class TwoPhase:
    """Exchanges one message by an all-to-all of the votes and an all-gather of the verdict.

        rank 0: votes a0 a1  ->  rank 0: a0 b0  ->  verdict v0  ->  rank 0: v0 v1
        rank 1: votes b0 b1      rank 1: a1 b1  ->  verdict v1      rank 1: v0 v1

    A shard is S = ceil(W / N) words of elements, of which a vote takes p bits each; the activity of
    the rows that a shard touches rides along in A words (the most that any shard needs). A verdict
    has P bits per parameter, Q per row and D words for `WireStats.agreement`: one, or two if p > 1.
    Bytes per rank: 8 * (N - 1) * ((p * S + A) + (P * S + Q * A + D)). See
    `hf_dlion.exchange.exchange` for who calls what.
    """

    rounds = 2

    def __init__(
        self,
        layout: MessageLayout,
        wire: Wire,
        device: torch.device,
        options: Options,
        down: Wire | None = None,
    ) -> None:
        """Makes the buffers; see `make_exchange`. The verdicts travel on `down`."""
        self._wire, self._device = wire, device
        self._shards = shards_of(layout, wire.world_size)
        self._mine = self._shards[wire.rank]
        size, row_words = sizes_of(self._shards)
        self._bits, self._size = options.bits, options.bits * size
        self.bytes_per_rank = sum(self.wire_bytes(layout, wire.world_size, options))
        place = wire.device_for(device)
        self._codec = codec_for(place)
        # Zeros, because the ends of short shards are sent without ever being written.
        self._send = torch.zeros(
            (wire.world_size, self._size + row_words), dtype=torch.int64, device=place
        )
        self._received = torch.empty_like(self._send)
        self._row_numels = self._mine.row_numels(place)
        planes = verdict_planes(options.aggregation, options.ties, wire.world_size)
        self._gather = VerdictGather(
            layout, self._shards, down or wire, place, planes, options.bits
        )
        self._work: Pending | None = None
        self._free: Tensor | None = None

    @staticmethod
    def wire_bytes(layout: MessageLayout, world_size: int, options: Options) -> tuple[int, int]:
        """See `Strategy.wire_bytes`."""
        shards = shards_of(layout, world_size)
        size, row_words = sizes_of(shards)
        planes = verdict_planes(options.aggregation, options.ties, world_size)
        up = WORD_BYTES * (world_size - 1) * (options.bits * size + row_words)
        return up, VerdictGather.wire_bytes(shards, planes, options.bits)

    def start(self, words: Tensor, active: Tensor) -> None:
        """See `Exchange.start`."""
        bits = self._bits
        self._free = words[: words.numel() // bits].view(1, -1)
        for segment, shard in zip(self._send, self._shards, strict=True):
            first, count = bits * shard.first_word, bits * shard.words
            segment[:count] = words[first : first + count]
            rows = active[shard.first_row : shard.first_row + shard.rows]
            segment[self._size : self._size + words_for(shard.rows)] = pack_bits(rows)
        self._work = self._wire.all_to_all(self._received, self._send, "votes")

    def count(self, rule: StepRule) -> None:
        """Waits for the votes on this rank's shard, counts them and sends the verdict."""
        assert self._work is not None, "count() follows start()"
        self._work.wait()
        # What was sent, whatever the options have become since: `discard` counts it too.
        rule = dataclasses.replace(rule, bits=self._bits)
        mine = self._mine
        votes = self._received[:, : self._bits * mine.words]
        active = torch.stack([unpack_bits(row[self._size :], mine.rows) for row in self._received])
        found = self._codec.count(votes, active, mine, self._row_numels, rule)
        self._gather.start(found)
        self._work = None

    def verdict(self) -> Verdict:
        """See `Exchange.verdict`."""
        found = self._gather.verdict(self._free)
        self._free = None
        return found.to(self._device)
