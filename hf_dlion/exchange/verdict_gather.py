"""Verdicts on the shards of a message, each counted by one rank -> the verdict on all of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.codec.bits import pack_bits, unpack_bits
from hf_dlion.codec.layout import WORD_BYTES, MessageLayout, Shard, words_for
from hf_dlion.codec.rule import Verdict
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
        self,
        layout: MessageLayout,
        shards: Sequence[Shard],
        wire: Wire,
        device: torch.device,
        planes: tuple[int, int],
        bits: int = 1,
    ) -> None:
        """Makes the buffers.

        Args:
            layout: The message.
            shards: One per rank of the group; all but the last ones are equally long.
            wire: The process group.
            device: Where the verdicts lie, and can be sent from.
            planes: Bits per parameter and bits per row of a verdict (`verdict_planes`).
            bits: Of a vote.
        """
        self._wire, self._layout, self._shards = wire, layout, shards
        self._sign_planes, self._row_planes = planes
        self._size, self._row_words = sizes_of(shards)
        self._sums = sums_for(bits)
        down = self._sign_planes * self._size + self._row_planes * self._row_words + self._sums
        # Zeros, because the ends of short shards are sent without ever being written.
        self._found = torch.zeros(down, dtype=torch.int64, device=device)
        self._verdicts = torch.empty((wire.world_size, down), dtype=torch.int64, device=device)
        self._work: Pending | None = None

    @staticmethod
    def wire_bytes(shards: Sequence[Shard], planes: tuple[int, int], bits: int = 1) -> int:
        """Returns the bytes that a rank sends for one message, and receives."""
        size, row_words = sizes_of(shards)
        words = planes[0] * size + planes[1] * row_words + sums_for(bits)
        return WORD_BYTES * (len(shards) - 1) * words

    def start(self, found: Verdict) -> None:
        """Sends the verdict on this rank's shard; it is copied."""
        mine = self._shards[self._wire.rank]
        for place, plane in enumerate(found.planes):
            self._found[place * self._size :][: mine.words] = plane
        rows = self._found[self._sign_planes * self._size : -self._sums].view(self._row_planes, -1)
        for place in range(self._row_planes):
            bits = (found.counts >> place & 1).to(torch.bool)
            pack_bits(bits, rows[place, : words_for(mine.rows)])
        self._found[-self._sums] = found.agreement
        if self._sums == 2:
            self._found[-1] = found.cast
        self._work = self._wire.all_gather(self._verdicts, self._found, "a verdict")

    def verdict(self, out: Tensor | None = None) -> Verdict:
        """Waits for the verdict on the whole message and returns it, where it was received.

        Args:
            out: int64, shape (1, W), for the planes of a verdict that has one; overwritten.
        """
        assert self._work is not None, "verdict() follows start()"
        self._work.wait()
        self._work = None
        layout, place = self._layout, self._verdicts.device
        shape = (self._sign_planes, layout.words)
        if out is None or out.shape != shape or out.device != place:
            out = torch.empty(shape, dtype=torch.int64, device=place)
        for segment, shard in zip(self._verdicts, self._shards, strict=True):
            planes = segment[: self._sign_planes * self._size].view(self._sign_planes, -1)
            out[:, shard.first_word : shard.first_word + shard.words] = planes[:, : shard.words]
        counts = torch.zeros(layout.rows, dtype=torch.int32, device=place)
        for segment, shard in zip(self._verdicts, self._shards, strict=True):
            rows = segment[self._sign_planes * self._size : -self._sums].view(self._row_planes, -1)
            part = counts[shard.first_row : shard.first_row + shard.rows]
            found = torch.zeros_like(part)
            for digit in range(self._row_planes):
                found |= unpack_bits(rows[digit], shard.rows).to(torch.int32) << digit
            # A row that two shards share has the same count in both.
            part.copy_(found)
        sums = self._verdicts[:, -self._sums :].sum(dim=0).tolist()
        return Verdict(out, counts, *sums)


def sums_for(bits: int) -> int:
    """Returns the words that carry sums for `WireStats.agreement`."""
    return 1 if bits == 1 else 2


def sizes_of(shards: Sequence[Shard]) -> tuple[int, int]:
    """Returns the words of signs, and of row activity, that the largest of the shards needs."""
    words = max(shard.words for shard in shards)
    return words, words_for(max(shard.rows for shard in shards))
