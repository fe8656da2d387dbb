"""Where every parameter's signs and rows lie in a message (rule S2, S3)."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

WORD_BITS = 64
WORD_BYTES = 8


def words_for(bits: int) -> int:
    """Returns the number of 64-bit words that hold `bits` bits."""
    return -(-bits // WORD_BITS)


@dataclass(frozen=True)
class Run:
    """A stretch of one parameter inside a shard.

    Attributes:
        start: First element, a multiple of 64.
        stop: One past the last element.
        row_numel: Elements per row of the parameter.
        first_row: Row, within the parameter, of element `start`.
        word: First word, relative to the shard.
        row: Position of `first_row` among the shard's rows.
        rows: Number of rows that the stretch touches.
    """

    start: int
    stop: int
    row_numel: int
    first_row: int
    word: int
    row: int
    rows: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def words(self) -> int:
        """Number of words that the stretch covers."""
        return words_for(self.numel)

    def row_numels(self) -> torch.Tensor:
        """Returns how many elements of each row lie in the stretch, int64 of shape (rows,)."""
        numels = torch.full((self.rows,), self.row_numel, dtype=torch.int64, device="cpu")
        # The first and the last row may lie only partly inside.
        numels[0] -= self.start - self.first_row * self.row_numel
        numels[-1] -= (self.first_row + self.rows) * self.row_numel - self.stop
        return numels

    def chunks(self, size: int) -> Iterator[slice]:
        """Yields the stretch in pieces of elements of the parameter, cut at multiples of `size`."""
        for begin in range(self.start - self.start % size, self.stop, size):
            yield slice(max(begin, self.start), min(begin + size, self.stop))

    def within(self, piece: slice) -> slice:
        """Returns where a piece of the parameter's elements lies, counted from `start`."""
        return slice(piece.start - self.start, piece.stop - self.start)


@dataclass(frozen=True)
class Slot:
    """The place of one parameter, or of a stretch of it, in a message.

    Attributes:
        index: Position of the parameter in the flattened groups.
        numel: Number of elements.
        rows: Number of rows: the first dimension, or 1 for a 0-D or 1-D tensor, or 0 if empty; of
            a stretch, the rows that it touches.
        row_numel: Elements per row.
        word: First word of the signs.
        row: First row of the activity.
        start: First element of the parameter that lies here, a multiple of 64.
        first_row: Row, within the parameter, of element `start`.
    """

    index: int
    numel: int
    rows: int
    row_numel: int
    word: int
    row: int
    start: int = 0
    first_row: int = 0

    @property
    def words(self) -> int:
        """Number of words of signs; every parameter starts a new word."""
        return words_for(self.numel)

    @property
    def stop(self) -> int:
        """One past the last element of the parameter that lies here."""
        return self.start + self.numel

    def run(self) -> Run:
        """Returns the slot as a stretch that is a shard of its own."""
        return Run(self.start, self.stop, self.row_numel, self.first_row, 0, 0, self.rows)


@dataclass(frozen=True)
class Shard:
    """A range of a message's words, with the rows that they touch.

    Attributes:
        first_word: First word in the message.
        words: Number of words that hold signs (the last shards may hold fewer, or none).
        first_row: First row in the message.
        rows: Number of rows that the words touch.
        runs: The parameters' stretches inside the shard.
    """

    first_word: int
    words: int
    first_row: int
    rows: int
    runs: tuple[Run, ...]

    def row_numels(self, device: torch.device) -> torch.Tensor:
        """Returns how many elements of each row lie in the shard, int64 of shape (rows,)."""
        numels = [torch.empty(0, dtype=torch.int64, device="cpu")]
        return torch.cat(numels + [run.row_numels() for run in self.runs]).to(device)


@dataclass(frozen=True)
class MessageLayout:
    """The parameters of one message, in order.

    Attributes:
        slots: One per parameter.
        words: Words of signs in total.
        rows: Rows in total.
    """

    slots: tuple[Slot, ...]
    words: int
    rows: int

    @staticmethod
    def of(shapes: Sequence[tuple[int, torch.Size]]) -> MessageLayout:
        """Lays out parameters one after another.

        Args:
            shapes: Pairs of parameter index and shape.
        """
        slots: list[Slot] = []
        word = row = 0
        for index, shape in shapes:
            numel = shape.numel()
            rows = 0 if numel == 0 else (shape[0] if len(shape) >= 2 else 1)
            slot = Slot(index, numel, rows, numel // rows if rows else 0, word, row)
            slots.append(slot)
            word += slot.words
            row += rows
        return MessageLayout(tuple(slots), word, row)

    def shard(self, first_word: int, stop_word: int) -> Shard:
        """Returns the shard of the words `first_word` to `stop_word`, cut at the message's end."""
        stop_word = min(stop_word, self.words)
        first_word = min(first_word, stop_word)
        if first_word == stop_word:
            return Shard(first_word, 0, 0, 0, ())
        filled = [slot for slot in self.slots if slot.numel]
        position = bisect_right([slot.word for slot in filled], first_word) - 1
        runs: list[Run] = []
        shard_row = -1
        rows = 0
        for slot in filled[position:]:
            if slot.word >= stop_word:
                break
            skipped = max(first_word - slot.word, 0)
            start = slot.start + skipped * WORD_BITS
            stop = min(slot.stop, slot.start + (stop_word - slot.word) * WORD_BITS)
            first_row = start // slot.row_numel
            touched = (stop - 1) // slot.row_numel - first_row + 1
            if shard_row < 0:
                shard_row = slot.row + first_row - slot.first_row
            word = slot.word + skipped - first_word
            runs.append(Run(start, stop, slot.row_numel, first_row, word, rows, touched))
            rows += touched
        return Shard(first_word, stop_word - first_word, shard_row, rows, tuple(runs))

    def part(self, shard: Shard) -> MessageLayout:
        """Returns a shard of this message as a message of its own."""
        slots: list[Slot] = []
        filled = [slot for slot in self.slots if slot.numel]
        words = [slot.word for slot in filled]
        for run in shard.runs:
            slot = filled[bisect_right(words, shard.first_word + run.word) - 1]
            numel = run.numel
            slots.append(
                Slot(
                    slot.index, numel, run.rows, run.row_numel, run.word, run.row,
                    run.start, run.first_row,
                )
            )  # fmt: skip
        return MessageLayout(tuple(slots), shard.words, shard.rows)


def shards_of(layout: MessageLayout, count: int) -> list[Shard]:
    """Returns `count` shards of ceil(W / count) words each but for the last ones."""
    size = -(-layout.words // count)
    return [layout.shard(k * size, (k + 1) * size) for k in range(count)]


@functools.lru_cache(maxsize=4096)
def whole_run(shape: torch.Size) -> Run:
    """Returns the stretch that is one whole parameter of `shape`, which is not empty."""
    layout = MessageLayout.of([(0, shape)])
    return layout.shard(0, layout.words).runs[0]
