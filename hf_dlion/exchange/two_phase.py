"""Each rank counts 1/N of the words for all: two rounds, for many ranks."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.codec.layout import WORD_BYTES, MessageLayout, shards_of
from hf_dlion.codec.rule import MessageVerdict, StepRule, verdict_planes
from hf_dlion.codec.tally import Segments, sizes_of
from hf_dlion.exchange.pending import Pending
from hf_dlion.exchange.verdict_gather import VerdictGather
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
    waits = False

    def __init__(
        self,
        layout: MessageLayout,
        wire: Wire,
        device: torch.device,
        options: Options,
        down: Wire | None = None,
    ) -> None:
        """Makes the buffers; see `make_exchange`. The verdicts travel on `down`."""
        self._wire, self._bits = wire, options.bits
        self.bytes_per_rank = sum(self.wire_bytes(layout, wire.world_size, options))
        ranks = wire.world_size
        planes = verdict_planes(options.aggregation, options.ties, ranks)
        segments = Segments.of(layout, ranks, wire.rank, options.bits, planes, ranks)
        self._tally = codec_for(device).tally(segments, device)
        up, verdict = segments.vote_words, segments.verdict_words
        # The verdict's round begins when that of the votes is over, so it has the same memory.
        # Zeros, because the ends of short shards are sent without ever being written.
        send = torch.zeros(max(ranks * up, verdict), dtype=torch.int64, device=device)
        received = torch.empty(ranks * max(up, verdict), dtype=torch.int64, device=device)
        self._send = send[: ranks * up].view(ranks, up)
        # A stretch of a tensor does not tell what its levels are relative to.
        cut = options.bits == 1 or options.level_scale == "word"
        self.votes = segments.votes_in(self._send) if cut else None
        self._received = received[: ranks * up].view(ranks, up)
        verdicts = received[: ranks * verdict].view(ranks, verdict)
        self._gather = VerdictGather(segments, self._tally, down or wire, send[:verdict], verdicts)
        self._work: Pending | None = None

    @staticmethod
    def wire_bytes(layout: MessageLayout, world_size: int, options: Options) -> tuple[int, int]:
        """See `Strategy.wire_bytes`."""
        shards = shards_of(layout, world_size)
        size, row_words = sizes_of(shards)
        planes = verdict_planes(options.aggregation, options.ties, world_size)
        up = WORD_BYTES * (world_size - 1) * (options.bits * size + row_words)
        return up, VerdictGather.wire_bytes(shards, planes, options.bits)

    def start(self, words: Tensor | None, active: Tensor) -> None:
        """See `Exchange.start`."""
        self._tally.pack(words, active, self._send)

    def leave(self) -> None:
        """See `Exchange.leave`."""
        self._work = self._wire.all_to_all(self._received, self._send, "votes")

    def count(self, rule: StepRule) -> None:
        """Waits for the votes on this rank's shard, counts them and sends the verdict."""
        assert self._work is not None, "count() follows leave()"
        self._work.wait()
        # What was sent, whatever the options have become since: `discard` counts it too.
        rule = dataclasses.replace(rule, bits=self._bits)
        self._gather.send(self._tally.count(self._received, rule, self._gather.planes))
        self._work = None

    def verdict(self) -> MessageVerdict:
        """See `Exchange.verdict`."""
        return self._gather.verdict()

    def rehearse(self, words: Tensor | None, active: Tensor, rule: StepRule) -> MessageVerdict:
        """See `Exchange.rehearse`."""
        self._tally.pack(words, active, self._send)
        found = self._tally.count(self._received, rule, self._gather.planes)
        return self._gather.rehearse(found)
