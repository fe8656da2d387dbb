"""Verdicts on the shards of a message, each counted by one rank -> the verdict on all of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_dlion.codec.layout import WORD_BYTES, Shard
from hf_dlion.codec.rule import MessageVerdict, Verdict
from hf_dlion.codec.tally import Segments, Tally, sizes_of, sums_for
from hf_dlion.exchange.pending import Pending
from hf_dlion.exchange.wire import Wire


class VerdictGather:
    """Gathers one message's verdict from the ranks that counted its shards.

        rank 0: verdict v0  ->  rank 0: v0 v1
        rank 1: verdict v1      rank 1: v0 v1

    A segment has P bits per parameter of the largest shard (S words), Q per row (A words each) and
    D words that carry the sums for `WireStats.agreement`: one, or two where a vote has more than
    one bit. Bytes per rank: 8 * (N - 1) * (P * S + Q * A + D). Every rank of the group must call
    both methods.
    """

    def __init__(
        self, segments: Segments, tally: Tally, wire: Wire, found: Tensor, verdicts: Tensor
    ) -> None:
        """Takes the buffers.

        Args:
            segments: The places of the message's shards, one per rank of the group.
            tally: Packs and unpacks them.
            wire: The process group.
            found: int64, shape (`verdict_words` of the segments,): sent from. The ends of short
                shards are sent as they are.
            verdicts: int64, shape (N, `verdict_words`): received into.
        """
        self._segments, self._tally, self._wire = segments, tally, wire
        self._found, self._verdicts = found, verdicts
        self._work: Pending | None = None

    @staticmethod
    def wire_bytes(shards: Sequence[Shard], planes: tuple[int, int], bits: int = 1) -> int:
        """Returns the bytes that a rank sends for one message, and receives."""
        size, row_words = sizes_of(shards)
        words = planes[0] * size + planes[1] * row_words + sums_for(bits)
        return WORD_BYTES * (len(shards) - 1) * words

    @property
    def planes(self) -> Tensor:
        """Where the planes of this rank's shard are sent from: int64, rows contiguous."""
        words = self._segments.shard.words
        return self._segments.planes_in(self._found.view(1, -1))[0, :, :words]

    def send(self, found: Verdict | MessageVerdict) -> None:
        """Sends the verdict on this rank's shard: a `Verdict` that lies in `planes`, or another."""
        self._tally.pack_verdict(found, self._found)
        self._work = self._wire.all_gather(self._verdicts, self._found, "a verdict")

    def verdict(self) -> MessageVerdict:
        """Waits for the verdict on the whole message and returns it, where it was received."""
        assert self._work is not None, "verdict() follows send()"
        self._work.wait()
        self._work = None
        return self._tally.unpack_verdict(self._verdicts)

    def rehearse(self, found: Verdict | MessageVerdict) -> MessageVerdict:
        """Packs and unpacks without sending; see `Exchange.rehearse`."""
        self._tally.pack_verdict(found, self._found)
        return self._tally.unpack_verdict(self._verdicts)
