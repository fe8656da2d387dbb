"""Each rank counts 1/N of the words for all: two rounds, for many ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hf_dlion.codec.bits import pack_bits, unpack_bits
from hf_dlion.exchange.count import count_votes
from hf_dlion.exchange.wire import Wire
from hf_dlion.layout import WORD_BYTES, MessageLayout, Shard, words_for
from hf_dlion.verdict import StepRule, Verdict


def shards_of(layout: MessageLayout, world_size: int) -> list[Shard]:
    """Returns one shard per rank, of ceil(W / N) words each but for the last ones."""
    size = -(-layout.words // world_size)
    return [layout.shard(rank * size, (rank + 1) * size) for rank in range(world_size)]


class TwoPhase:
    """Exchanges one message by an all-to-all of the votes and an all-gather of the verdict.

        rank 0: votes a0 a1  ->  rank 0: a0 b0  ->  verdict v0  ->  rank 0: v0 v1
        rank 1: votes b0 b1      rank 1: a1 b1  ->  verdict v1      rank 1: v0 v1

    A shard is S = ceil(W / N) words of signs; the activity of the rows that a shard touches rides
    along in A words (the most that any shard needs). A verdict has P bits per parameter, Q per row
    and one word that carries the sum for `WireStats.agreement`. Bytes per rank:
    8 * (N - 1) * ((S + A) + (P * S + Q * A + 1)). Every rank of the group must call the three
    methods in this order, with messages in the same order.
    """

    rounds = 2

    def __init__(
        self,
        layout: MessageLayout,
        wire: Wire,
        device: torch.device,
        planes: tuple[int, int],
        down: Wire | None = None,
    ) -> None:
        """Makes the buffers.

        Args:
            layout: The message.
            wire: The process group.
            device: Where the votes are made and the verdict is wanted.
            planes: Bits per parameter and bits per row of a verdict (`verdict_planes`).
            down: Another process group of the same ranks for the verdicts: `count` may then be
                called on another thread than `start`.
        """
        self._down = down or wire
        self._wire, self._layout, self._device = wire, layout, device
        self._sign_planes, self._row_planes = planes
        self._shards = shards_of(layout, wire.world_size)
        self._mine = self._shards[wire.rank]
        self._size = -(-layout.words // wire.world_size)
        self._row_words = words_for(max(shard.rows for shard in self._shards))
        up_words = self._size + self._row_words
        down_words = self._sign_planes * self._size + self._row_planes * self._row_words + 1
        self.bytes_per_rank = WORD_BYTES * (wire.world_size - 1) * (up_words + down_words)
        place = wire.device_for(device)
        # Zeros, because the ends of short shards are sent without ever being written.
        self._send = torch.zeros((wire.world_size, up_words), dtype=torch.int64, device=place)
        self._received = torch.empty_like(self._send)
        self._found = torch.zeros(down_words, dtype=torch.int64, device=place)
        self._verdicts = torch.empty((wire.world_size, down_words), dtype=torch.int64, device=place)
        self._row_numels = self._mine.row_numels(place)
        self._work: dist.Work | None = None

    @staticmethod
    def wire_bytes(layout: MessageLayout, world_size: int, planes: tuple[int, int]) -> int:
        """Returns the bytes that a rank sends for one message, and receives."""
        size = -(-layout.words // world_size)
        row_words = words_for(max(shard.rows for shard in shards_of(layout, world_size)))
        up = size + row_words
        down = planes[0] * size + planes[1] * row_words + 1
        return WORD_BYTES * (world_size - 1) * (up + down)

    def start(self, words: Tensor, active: Tensor) -> None:
        """Sends the votes: words int64 (W,), active bool (R,); both are copied."""
        for segment, shard in zip(self._send, self._shards, strict=True):
            segment[: shard.words] = words[shard.first_word : shard.first_word + shard.words]
            rows = active[shard.first_row : shard.first_row + shard.rows]
            segment[self._size : self._size + words_for(shard.rows)] = pack_bits(rows)
        self._work = self._wire.all_to_all(self._received, self._send)

    def count(self, rule: StepRule) -> None:
        """Waits for the votes on this rank's shard, counts them and sends the verdict."""
        assert self._work is not None, "count() follows start()"
        self._work.wait()
        mine = self._mine
        votes = self._received[:, : mine.words]
        active = torch.stack([unpack_bits(row[self._size :], mine.rows) for row in self._received])
        found = count_votes(votes, active, mine, self._row_numels, rule)
        for place, plane in enumerate(found.planes):
            self._found[place * self._size :][: mine.words] = plane
        rows = self._found[self._sign_planes * self._size : -1].view(self._row_planes, -1)
        for place in range(self._row_planes):
            bits = (found.counts >> place & 1).to(torch.bool)
            pack_bits(bits, rows[place, : words_for(mine.rows)])
        self._found[-1] = found.agreement
        self._work = self._down.all_gather(self._verdicts, self._found)

    def verdict(self) -> Verdict:
        """Returns the verdict on the whole message, on the message's device."""
        assert self._work is not None, "verdict() follows count()"
        self._work.wait()
        self._work = None
        layout, place = self._layout, self._verdicts.device
        signs = self._verdicts[:, : self._sign_planes * self._size]
        signs = signs.view(self._wire.world_size, self._sign_planes, self._size)
        planes = signs.transpose(0, 1).reshape(self._sign_planes, -1)[:, : layout.words]
        # Shards of one word make reshape() return a view with gaps.
        planes = planes.contiguous()
        counts = torch.zeros(layout.rows, dtype=torch.int32, device=place)
        for segment, shard in zip(self._verdicts, self._shards, strict=True):
            rows = segment[self._sign_planes * self._size : -1].view(self._row_planes, -1)
            part = counts[shard.first_row : shard.first_row + shard.rows]
            found = torch.zeros_like(part)
            for digit in range(self._row_planes):
                found |= unpack_bits(rows[digit], shard.rows).to(torch.int32) << digit
            # A row that two shards share has the same count in both.
            part.copy_(found)
        agreement = int(self._verdicts[:, -1].sum())
        return Verdict(planes.to(self._device), counts.to(self._device), agreement)
