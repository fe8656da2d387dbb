"""All ranks gather all votes, and each counts them all: one round, for few ranks."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.codec.layout import WORD_BYTES, MessageLayout, words_for
from hf_dlion.codec.rule import MessageVerdict, StepRule, verdict_planes
from hf_dlion.codec.tally import Segments
from hf_dlion.exchange.pending import Pending
from hf_dlion.exchange.wire import Wire
from hf_dlion.options import Options


class Gather:
    """Exchanges one message by an all-gather of the packed votes.

        rank 0: votes of 0  ->  rank 0: votes of 0, votes of 1  ->  counts all  ->  verdict
        rank 1: votes of 1      rank 1: votes of 0, votes of 1  ->  counts all  ->  verdict

    The verdict takes the place of this rank's own votes, where it is one bit as they are. Bytes per
    rank: 8 * (N - 1) * (p * W + ceil(R / 64)) for W words of elements, p bits each, and R rows. See
    `hf_dlion.exchange.exchange` for who calls what.
    """

    rounds = 1
    waits = False

    def __init__(
        self,
        layout: MessageLayout,
        wire: Wire,
        device: torch.device,
        options: Options,
        down: Wire | None = None,
    ) -> None:
        """Makes the buffers; see `make_exchange`. There is no second round for `down`."""
        self._wire, self._bits = wire, options.bits
        self.bytes_per_rank = sum(self.wire_bytes(layout, wire.world_size, options))
        planes = verdict_planes(options.aggregation, options.ties, wire.world_size)
        # One segment: every rank counts all.
        segments = Segments.of(layout, 1, 0, options.bits, planes, wire.world_size)
        self._tally = codec_for(device).tally(segments, device)
        shape = (wire.world_size, segments.vote_words)
        self._received = torch.empty(shape, dtype=torch.int64, device=device)
        # This rank's votes are made where they would be received.
        self._send = self._received[wire.rank : wire.rank + 1]
        self.votes: Tensor | None = segments.votes_in(self._send)
        self._work: Pending | None = None
        self._rule: StepRule | None = None

    @staticmethod
    def wire_bytes(layout: MessageLayout, world_size: int, options: Options) -> tuple[int, int]:
        """See `Strategy.wire_bytes`; every rank counts for itself, so no verdict travels."""
        words = options.bits * layout.words + words_for(layout.rows)
        return WORD_BYTES * (world_size - 1) * words, 0

    def start(self, words: Tensor | None, active: Tensor) -> None:
        """See `Exchange.start`."""
        self._tally.pack(words, active, self._send)

    def leave(self) -> None:
        """See `Exchange.leave`."""
        self._work = self._wire.all_gather(self._received, self._send[0], "votes")

    def count(self, rule: StepRule) -> None:
        """Takes the rule: votes are counted where they are applied, while later ones travel."""
        # What was sent, whatever the options have become since: `discard` counts it too.
        self._rule = dataclasses.replace(rule, bits=self._bits)

    def verdict(self) -> MessageVerdict:
        """Waits for the votes and counts them; see `Exchange.verdict`."""
        assert self._work is not None, "verdict() follows leave()"
        assert self._rule is not None, "verdict() follows count()"
        self._work.wait()
        rule, self._rule, self._work = self._rule, None, None
        return self._counted(rule)

    def _counted(self, rule: StepRule) -> MessageVerdict:
        out = self.votes if self._bits == rule.planes == 1 else None
        return MessageVerdict.of(self._tally.count(self._received, rule, out))

    def rehearse(self, words: Tensor | None, active: Tensor, rule: StepRule) -> MessageVerdict:
        """See `Exchange.rehearse`."""
        self._tally.pack(words, active, self._send)
        return self._counted(rule)
