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

from hf_dlion.exchange.codec import WORD
from hf_dlion.exchange.routes import Rows

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


@dataclass
class Piece:
    """Elements that one call of the codec takes, all of one parameter group.

    The computation is in `dtype`, float32 or float64. `first` is the number of the first element in
    the layout, `words` a slice of the message's words, and `size` the number of elements, padding
    included.
    """

    group: int
    dtype: torch.dtype
    device: torch.device
    first: int
    words: slice
    size: int = 0
    parts: list[Part] = field(default_factory=list)

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

    def is_over(self, size: int, device: torch.device) -> bool:
        """Whether elements on a device begin a new message of at least `size` elements."""
        return self.device != device or self.words * WORD >= size

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
    found: list[Message] = []
    number = WORD * sum(message.words for message in after)  # of the next element in the layout
    total = sum(shape.size for shape in shapes)
    for index, shape in enumerate(shapes):
        if not shape.size:
            continue
        limit = PIECE.get(shape.device.type, PIECE_ELSEWHERE)
        full = max(MESSAGE.get(shape.device.type, MESSAGE_ELSEWHERE), total // MESSAGES)
        dtype = torch.float64 if shape.dtype == torch.float64 else torch.float32
        row = shape.row or -(-shape.size // WORD) * WORD
        # Rows that are longer than a piece are cut between words.
        stride = limit // row * row or limit
        for start in range(0, shape.size, stride):
            stop = min(start + stride, shape.size)
            message = found[-1] if found else None
            if message is None or (start % row == 0 and message.is_over(full, shape.device)):
                message = Message(shape.device)
                found.append(message)
            piece = message.pieces[-1] if message.pieces else None
            key = shape.group, dtype
            if not piece or (piece.group, piece.dtype) != key or piece.size + stop - start > limit:
                piece = Piece(*key, shape.device, number, slice(message.words, message.words))
                message.pieces.append(piece)
            words = -(-(stop - start) // WORD)
            piece.parts.append(Part(index, start, stop, at=piece.size))
            _extend(message, index, words, row // WORD)
            piece.words = slice(piece.words.start, message.words)
            piece.size += words * WORD
            number += words * WORD
    return found


def _extend(message: Message, index: int, words: int, row: int) -> None:
    """Adds words of a tensor to a message, in one span with those of the same tensor."""
    first, before = message.words, 0
    if message.spans and message.spans[-1][0] == index:
        _, first, before, _ = message.spans.pop()
    message.spans.append((index, first, before + words, row))
    message.words += words
