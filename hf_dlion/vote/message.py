"""Which tensors travel together, and where each of their elements lies.

All trainable tensors of a rank are laid end to end, each begun on a new 64-bit word:

    layout    | tensor 0       | tensor 1 .. | tensor 2                                  |
    messages  |            message 0         |     message 1        |     message 2      |
    pieces    |    piece 0               |   |  piece 0  |  piece 1 |  ...

A *message* is what one exchange sends: whole rows. A *piece* is what one call of the codec takes,
small enough that its scratch stays in a core's cache; small tensors share one, a large tensor has
several. A *row* is a slice along the first dimension where its length is a multiple of 64, so a
row is whole words; any other tensor is one row, padded to 64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_dlion.exchange.routes import Rows
from hf_dlion.vote.codec import WORD

# Elements of a piece: scratch of a core's cache on a CPU, whole messages on a GPU.
PIECE = {"cpu": 1 << 17}
PIECE_ELSEWHERE = 1 << 26
# Elements of a message: enough that latency doesn't count, few enough that encoding one hides
# behind sending another.
MESSAGE = {"cpu": 1 << 20}
MESSAGE_ELSEWHERE = 1 << 26
MESSAGES = 16


@dataclass(frozen=True)
class Part:
    """A stretch of one tensor in a piece.

    Attributes:
        tensor: Index of the tensor in the layout.
        start: First element in the tensor.
        stop: One past the last element in the tensor.
        at: First element in the piece, a multiple of 64.
    """

    tensor: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Piece:
    """What one call of the codec takes.

    Attributes:
        parts: The stretches, in order.
        group: Index of the parameter group, the same for all parts.
        dtype: Of the computation, float32 or float64.
        first: Number of the first element in the whole layout.
        words: The piece's words in its message.
        device: Of the tensors.
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
        """Whether it is one stretch without padding, so no copy is needed."""
        return len(self.parts) == 1 and self.parts[0].stop - self.parts[0].start == self.size


@dataclass
class Message:
    """Rows whose votes travel together.

    Attributes:
        pieces: In order.
        device: Of the tensors.
        words: Number of words W.
        spans: By tensor: its index, its first word and number of words in this message, and the
            words of a row.
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
    """What the layout needs to know about a tensor; equal on all ranks.

    Attributes:
        size: Number of elements.
        row: Elements of a row; 0 if the whole tensor is one.
        group: Index of its parameter group.
        dtype: Of the tensor.
        device: Of the tensor.
    """

    size: int
    row: int
    group: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor, group: int) -> Shape:
        """Describes a local tensor."""
        length = tensor.stride(0) if tensor.dim() and tensor.numel() else 0
        # The first index must be the outermost in memory, or a row would be scattered.
        outermost = length * tensor.shape[0] == tensor.numel() if length else False
        row = length if outermost and length % WORD == 0 else 0
        return cls(tensor.numel(), row, group, tensor.dtype, tensor.device)


def messages(shapes: Sequence[Shape]) -> list[Message]:
    """Returns the messages of a layout, the same on every rank.

    Args:
        shapes: Of the trainable tensors, in the order of the groups; empty ones are left out.
    """
    return _Layout(shapes).messages


class _Layout:
    """Cuts tensors into pieces, and pieces into messages."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.messages: list[Message] = []
        self._number = 0  # of the next element in the layout
        self._open: list[Part] = []  # parts of the piece under way
        self._key: tuple[int, torch.dtype] | None = None
        self._start = 0  # word at which the piece under way begins
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

    def _new_message(self, device: torch.device, target: int) -> bool:
        """Begins a message if the last one is full or elsewhere; returns whether it did."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last.device == device and last.words * WORD < target:
            return False
        self._close_piece()
        self.messages.append(Message(device))
        self._start = 0
        return True

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
    """Adds words of a tensor to a message: to the span of the same tensor, if there is one."""
    first, before = message.words, 0
    if message.spans and message.spans[-1][0] == index:
        _, first, before, _ = message.spans.pop()
    message.spans.append((index, first, before + words, row))
    message.words += words
