"""The layout: which tensors travel together, and where each element is.

All trainable tensors of a rank are placed one after the other, each on a new 64-bit word:

    layout    | tensor 0       | tensor 1 .. | tensor 2                                  |
    messages  |            message 0         |     message 1        |     message 2      |
    pieces    |    piece 0               |   |  piece 0  |  piece 1 |  ...

A *message* is what one exchange sends, and consists of complete rows. A *piece* is what one call of
the codec takes, so small that its scratch memory stays in a core's cache. Small tensors share a
piece, and a large tensor has several. A *row* is a slice along the first dimension if its length is
a multiple of 64. Any other tensor is one row, padded to a multiple of 64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_dlion.exchange.routes import Rows
from hf_dlion.vote.codec import WORD

# Elements of a piece: few enough for a core's cache on a CPU. On a GPU so many that launches don't
# matter, and so few that scratch memory, up to 40 bytes per element, takes less than 1 GB.
PIECE = {"cpu": 1 << 17}
PIECE_ELSEWHERE = 1 << 24
# Elements of a message: so many that latency doesn't matter, and so few that one message is encoded
# while another is sent.
MESSAGE = {"cpu": 1 << 20}
MESSAGE_ELSEWHERE = 1 << 26
# Largest number of messages, so large models have larger ones.
MESSAGES = 16


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` - 1 of a tensor, which are in a piece from element `at`.

    `tensor` is the tensor's index in the layout, and `at` a multiple of 64.
    """

    tensor: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Piece:
    """Elements that one call of the codec takes, all of one parameter group.

    The computation is in `dtype`, float32 or float64. `first` is the number of the first element in
    the layout, and `words` a slice of the message's words.
    """

    parts: tuple[Part, ...]
    group: int
    dtype: torch.dtype
    first: int
    words: slice
    device: torch.device

    @functools.cached_property
    def size(self) -> int:
        """Number of elements, padding included."""
        return int(self.words.stop - self.words.start) * WORD

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether the piece is one stretch without padding, so no copy is needed."""
        return len(self.parts) == 1 and self.parts[0].stop - self.parts[0].start == self.size


@dataclass
class Message:
    """Rows whose votes travel together, in `words` words.

    A span has a tensor's index, its first word in this message, its number of words here, and its
    words per row.
    """

    device: torch.device
    pieces: list[Piece] = field(default_factory=list)
    spans: list[tuple[int, int, int, int]] = field(default_factory=list)
    words: int = 0

    @functools.cached_property
    def rows(self) -> Rows:
        """The message's rows."""
        return Rows([(words // row, row) for _, _, words, row in self.spans], self.device)


@dataclass(frozen=True)
class Shape:
    """The properties of a tensor on which the layout depends, equal on all voters.

    `row` is the number of elements per row, 0 if the tensor is one row. `group` is the index of the
    parameter group.
    """

    size: int
    row: int
    group: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor, group: int) -> Shape:
        """Returns the shape of this rank's part of a parameter."""
        length = tensor.stride(0) if tensor.dim() and tensor.numel() else 0
        # If the first dimension isn't the outermost in memory, its slices aren't contiguous.
        outermost = length * tensor.shape[0] == tensor.numel() if length else False
        row = length if outermost and length % WORD == 0 else 0
        return cls(tensor.numel(), row, group, tensor.dtype, tensor.device)


def messages(shapes: Sequence[Shape], after: Sequence[Message] = ()) -> list[Message]:
    """Returns the messages of a layout, the same on every rank.

    The shapes are those of the trainable tensors in the order of the groups, and empty tensors are
    skipped. The elements of `after`, messages of other tensors, come first in the layout.
    """
    return _Layout(shapes, WORD * sum(message.words for message in after)).messages


class _Layout:
    """Cuts tensors into pieces, and pieces into messages."""

    def __init__(self, shapes: Sequence[Shape], first: int) -> None:
        self.messages: list[Message] = []
        self._number = first  # of the next element in the layout
        self._open: list[Part] = []  # parts of the open piece
        self._key: tuple[int, torch.dtype] | None = None  # group and dtype of the open piece
        self._start = 0  # first word of the open piece in its message
        total = sum(shape.size for shape in shapes)
        for index, shape in enumerate(shapes):
            if shape.size:
                self._add(index, shape, total)
        self._close_piece()

    def _add(self, index: int, shape: Shape, total: int) -> None:
        kind = shape.device.type
        limit = PIECE.get(kind, PIECE_ELSEWHERE)
        target = max(MESSAGE.get(kind, MESSAGE_ELSEWHERE), total // MESSAGES)
        dtype = torch.float64 if shape.dtype == torch.float64 else torch.float32
        row = shape.row or -(-shape.size // WORD) * WORD
        # Rows that are longer than a piece are cut between words.
        stride = max(limit // row, 1) * row if row <= limit else limit
        self._new_message(shape.device, target)
        for start in range(0, shape.size, stride):
            stop = min(start + stride, shape.size)
            if start and start % row == 0:
                self._new_message(shape.device, target)
            size = stop - start
            if self._key != (shape.group, dtype) or self._open_size() + size > limit:
                self._close_piece()
                self._key = (shape.group, dtype)
            message = self.messages[-1]
            words = -(-size // WORD)
            self._open.append(Part(index, start, stop, (message.words - self._start) * WORD))
            _extend(message, index, words, row // WORD)

    def _new_message(self, device: torch.device, target: int) -> None:
        """Begins a message if the last one is full or on another device."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.device != device or last.words * WORD >= target:
            self._close_piece()
            self.messages.append(Message(device))
            self._start = 0

    def _open_size(self) -> int:
        return (self.messages[-1].words - self._start) * WORD if self._open else 0

    def _close_piece(self) -> None:
        if self._open:
            message, (group, dtype) = self.messages[-1], self._key or (0, torch.float32)
            words = slice(self._start, message.words)
            message.pieces.append(
                Piece(tuple(self._open), group, dtype, self._number, words, message.device)
            )
            self._number += (words.stop - words.start) * WORD
            self._open = []
        self._start = self.messages[-1].words if self.messages else 0


def _extend(message: Message, index: int, words: int, row: int) -> None:
    """Adds words of a tensor to a message, in one span with those of the same tensor."""
    first, before = message.words, 0
    if message.spans and message.spans[-1][0] == index:
        _, first, before, _ = message.spans.pop()
    message.spans.append((index, first, before + words, row))
    message.words += words
