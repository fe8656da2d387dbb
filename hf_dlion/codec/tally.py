"""A message's votes into what travels, all ranks' votes to a verdict, and verdicts back.

The shards of a message lie in segments, all equally long, S words of elements and A words of rows:

    votes      | bits * S: the shard's votes | A: which of its rows vote |
    verdict    | P * S: its planes | Q * A: the digits of its rows' counts | D: sums |

A tally knows these places, and is made once for each message. `TorchTally` works on any device;
`hf_dlion.codec.cuda.tally` has one of a few kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_dlion.codec.bits import pack_bits, unpack_bits
from hf_dlion.codec.layout import MessageLayout, Shard, shards_of, words_for
from hf_dlion.codec.rule import MessageVerdict, StepRule, Verdict


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The places of a message's shards, and what this rank does with them.

    Attributes:
        layout: The message.
        shards: One per segment; all but the last ones are equally long.
        mine: Number of the shard that this rank counts.
        bits: Of a vote.
        planes: Bits per parameter and bits per row of a verdict (`verdict_planes`).
        voters: How many ranks vote.
        words: Words of elements that the largest shard needs, the S above.
        row_words: Words of row activity that the largest shard needs, the A above.
    """

    layout: MessageLayout
    shards: tuple[Shard, ...]
    mine: int
    bits: int
    planes: tuple[int, int]
    voters: int
    words: int
    row_words: int

    @staticmethod
    def of(
        layout: MessageLayout, count: int, mine: int, bits: int, planes: tuple[int, int],
        voters: int,
    ) -> Segments:  # fmt: skip
        """Cuts a message into `count` segments; the other arguments are the attributes."""
        shards = tuple(shards_of(layout, count))
        words, row_words = sizes_of(shards)
        return Segments(
            layout=layout, shards=shards, mine=mine, bits=bits, planes=planes, voters=voters,
            words=words, row_words=row_words,
        )  # fmt: skip

    @property
    def shard(self) -> Shard:
        """The shard that this rank counts."""
        return self.shards[self.mine]

    @property
    def vote_words(self) -> int:
        """Length of a segment of votes."""
        return self.bits * self.words + self.row_words

    @property
    def verdict_words(self) -> int:
        """Length of a segment of verdict."""
        return self.planes[0] * self.words + self.planes[1] * self.row_words + sums_for(self.bits)

    def votes_in(self, votes: Tensor) -> Tensor:
        """Returns the votes on elements in segments of votes: int64, shape (segments, bits * S)."""
        return votes[:, : self.bits * self.words]

    def planes_in(self, verdicts: Tensor) -> Tensor:
        """Returns the planes in segments of verdict: int64, shape (segments, P, S)."""
        planes = self.planes[0]
        return verdicts[:, : planes * self.words].view(len(verdicts), planes, self.words)


class Tally(Protocol):
    """Packs, counts and unpacks one message again and again; nothing here waits for a device.

    What `count` and `unpack_verdict` return holds until the next `pack`, and only as long as the
    memory that they were given.
    """

    def pack(self, words: Tensor | None, active: Tensor, out: Tensor) -> None:
        """Writes this rank's votes into segments; the ends of short ones stay as they are.

        Args:
            words: int64, shape (bits * W,), contiguous; None if they lie in their places.
            active: bool, shape (R,), contiguous.
            out: int64, shape (number of segments, `Segments.vote_words`), contiguous.
        """

    def count(self, received: Tensor, rule: StepRule, out: Tensor | None = None) -> Verdict:
        """Returns the verdict on this rank's shard (rule S3 to S6).

        Args:
            received: int64, shape (N, `Segments.vote_words`), contiguous: every rank's segment.
            rule: The step's constants.
            out: int64, shape (P, words of the shard), rows contiguous; receives the planes. With
                one bit and one plane it may be any rank's votes.
        """

    def pack_verdict(self, found: Verdict | MessageVerdict, out: Tensor) -> None:
        """Writes the verdict on this rank's shard into a segment.

        Args:
            found: A `Verdict` lies in `Segments.planes_in` of `out` already; a `MessageVerdict` is
                one on the shard as a message of its own.
            out: int64, shape (`Segments.verdict_words`,), contiguous.
        """

    def unpack_verdict(self, received: Tensor) -> MessageVerdict:
        """Returns the verdict on the whole message, its planes where they were received.

        Args:
            received: int64, shape (number of segments, `Segments.verdict_words`), contiguous.
        """


class Counter(Protocol):
    """Counts votes that lie apart from their rows; see `hf_dlion.codec.count.CountingCodec`."""

    def count(
        self,
        votes: Tensor,
        active: Tensor,
        shard: Shard,
        row_numels: Tensor,
        rule: StepRule,
        out: Tensor | None = None,
    ) -> Verdict:
        """Returns the verdict on a shard."""


class TorchTally:
    """Implements `Tally` with torch operations, one segment after another."""

    def __init__(self, counter: Counter, segments: Segments, device: torch.device) -> None:
        """Takes who counts, the places, and where the segments lie."""
        self._counter, self._segments = counter, segments
        self._row_numels = segments.shard.row_numels(device)
        layout = segments.layout
        self._all_row_numels = layout.shard(0, layout.words).row_numels(device)

    def pack(self, words: Tensor | None, active: Tensor, out: Tensor) -> None:
        """See `Tally.pack`."""
        bits, size = self._segments.bits, self._segments.bits * self._segments.words
        for segment, shard in zip(out, self._segments.shards, strict=True):
            if words is not None:
                first, count = bits * shard.first_word, bits * shard.words
                segment[:count] = words[first : first + count]
            rows = active[shard.first_row : shard.first_row + shard.rows]
            pack_bits(rows, segment[size : size + words_for(shard.rows)])

    def count(self, received: Tensor, rule: StepRule, out: Tensor | None = None) -> Verdict:
        """See `Tally.count`."""
        segments, mine = self._segments, self._segments.shard
        rows = received[:, segments.bits * segments.words :]
        active = torch.stack([unpack_bits(row, mine.rows) for row in rows])
        votes = received[:, : segments.bits * mine.words]
        return self._counter.count(votes, active, mine, self._row_numels, rule, out)

    def pack_verdict(self, found: Verdict | MessageVerdict, out: Tensor) -> None:
        """See `Tally.pack_verdict`."""
        segments, mine = self._segments, self._segments.shard
        if isinstance(found, Verdict):
            place = out.data_ptr()
            assert not mine.words or found.planes.data_ptr() == place, "counted where it is sent"
        else:
            here = segments.planes_in(out.view(1, -1))[0, :, : mine.words]
            size = found.planes.shape[2]
            for place in range(-(-mine.words // size) if size else 0):
                part = here[:, place * size : (place + 1) * size]
                part.copy_(found.planes[:, place, : part.shape[1]])
        for place, digit in enumerate(self._rows(out)):
            bits = (found.counts >> place & 1).to(torch.bool)
            pack_bits(bits, digit[: words_for(mine.rows)])
        sums = sums_for(segments.bits)
        out[-sums:] = found.sums[:sums]

    def unpack_verdict(self, received: Tensor) -> MessageVerdict:
        """See `Tally.unpack_verdict`."""
        segments = self._segments
        counts = torch.zeros(segments.layout.rows, dtype=torch.int32, device=received.device)
        for segment, shard in zip(received, segments.shards, strict=True):
            part = counts[shard.first_row : shard.first_row + shard.rows]
            found = torch.zeros_like(part)
            for place_of, digit in enumerate(self._rows(segment)):
                found |= unpack_bits(digit, shard.rows).to(torch.int32) << place_of
            # A row that two shards share has the same count in both.
            part.copy_(found)
        sums = received[:, -sums_for(segments.bits) :].sum(dim=0)
        if segments.bits == 1:
            most = most_of(counts, self._all_row_numels, segments.voters)
            sums = torch.cat([sums, most.view(1)])
        return MessageVerdict(segments.planes_in(received).transpose(0, 1), counts, sums)

    def _rows(self, segment: Tensor) -> Tensor:
        """Returns the digits of the rows' counts in a segment: shape (Q, `row_words`)."""
        first, sums = self._segments.planes[0] * self._segments.words, sums_for(self._segments.bits)
        return segment[first:-sums].view(self._segments.planes[1], -1)


def most_of(counts: Tensor, row_numels: Tensor, voters: int) -> Tensor:
    """Returns the second of `Verdict.sums` of votes of one bit, int64, shape ().

    Each vote that can be cast counts as 1.

    Args:
        counts: int32, shape (rows,): how many ranks, or whether any, voted on each.
        row_numels: int64, same shape: the elements of each.
        voters: How many ranks there are.
    """
    return (row_numels * (counts > 0)).sum() * voters


def sums_for(bits: int) -> int:
    """Returns the words that carry sums for `WireStats.agreement`."""
    return 1 if bits == 1 else 2


def sizes_of(shards: Sequence[Shard]) -> tuple[int, int]:
    """Returns the words of signs, and of row activity, that the largest of the shards needs."""
    words = max(shard.words for shard in shards)
    return words, words_for(max(shard.rows for shard in shards))
