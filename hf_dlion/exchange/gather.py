"""All ranks gather all votes, and each counts them all: one round, for few ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dlion.codec.bits import pack_bits, unpack_bits
from hf_dlion.exchange.count import count_votes
from hf_dlion.exchange.pending import Pending
from hf_dlion.exchange.wire import Wire
from hf_dlion.layout import WORD_BYTES, MessageLayout, words_for
from hf_dlion.verdict import StepRule, Verdict


class Gather:
    """Exchanges one message by an all-gather of the packed votes.

        rank 0: votes of 0  ->  rank 0: votes of 0, votes of 1  ->  counts all  ->  verdict
        rank 1: votes of 1      rank 1: votes of 0, votes of 1  ->  counts all  ->  verdict

    Bytes per rank: 8 * (N - 1) * (W + ceil(R / 64)) for W words of signs and R rows. Every rank of
    the group must call the three methods in this order, with messages in the same order.
    """

    rounds = 1

    def __init__(self, layout: MessageLayout, wire: Wire, device: torch.device) -> None:
        """Makes the buffers.

        Args:
            layout: The message.
            wire: The process group.
            device: Where the votes are made and the verdict is wanted.
        """
        self._wire, self._layout, self._device = wire, layout, device
        words = layout.words + words_for(layout.rows)
        self.bytes_per_rank = WORD_BYTES * (wire.world_size - 1) * words
        place = wire.device_for(device)
        self._send = torch.empty(words, dtype=torch.int64, device=place)
        self._received = torch.empty((wire.world_size, words), dtype=torch.int64, device=place)
        self._shard = layout.shard(0, layout.words)
        self._row_numels = self._shard.row_numels(place)
        self._work: Pending | None = None
        self._verdict: Verdict | None = None
        self._free: Tensor | None = None

    @staticmethod
    def wire_bytes(layout: MessageLayout, world_size: int, planes: tuple[int, int]) -> int:
        """Returns the bytes that a rank sends for one message, and receives."""
        del planes  # every rank counts for itself: no verdict travels
        return WORD_BYTES * (world_size - 1) * (layout.words + words_for(layout.rows))

    def start(self, words: Tensor, active: Tensor) -> None:
        """Sends the votes: words int64 (W,), active bool (R,); `words` will hold the verdict."""
        self._free = words.view(1, -1)
        self._send[: self._layout.words] = words
        self._send[self._layout.words :] = pack_bits(active)
        self._work = self._wire.all_gather(self._received, self._send, "votes")

    def count(self, rule: StepRule) -> None:
        """Waits for the votes and counts them."""
        assert self._work is not None, "count() follows start()"
        self._work.wait()
        votes = self._received[:, : self._layout.words]
        rows = self._received[:, self._layout.words :]
        active = torch.stack([unpack_bits(row, self._layout.rows) for row in rows])
        out = self._free
        if out is None or rule.planes > 1 or out.device != votes.device:
            out = None
        self._verdict = count_votes(votes, active, self._shard, self._row_numels, rule, out)
        self._free = None

    def verdict(self) -> Verdict:
        """Returns the verdict on the whole message, on the message's device."""
        assert self._verdict is not None, "verdict() follows count()"
        found, self._verdict, self._work = self._verdict, None, None
        return Verdict(
            found.planes.to(self._device), found.counts.to(self._device), found.agreement
        )
