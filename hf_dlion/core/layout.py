"""The layout: which tensors travel together, and where each element is.

All trainable tensors of a rank are placed one after the other, each on a new 64-bit word:

    slots     | tensor 0       | tensor 1 .. | tensor 2                                  |
    messages  |            message 0         |     message 1        |     message 2      |
    pieces    |    piece 0               |   |  piece 0  |  piece 1 |  ...

A *slot* is a tensor with all that a step knows of it. A *message* is what one exchange sends, and
consists of complete rows. A *piece* is what one call of the codec takes, so small that its scratch
memory stays in a core's cache. Small tensors of one group and dtype share a piece, and a large
tensor has several. A *row* is a slice along the first dimension if its length is a multiple of 64.
Any other tensor is one row, padded to a multiple of 64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dlion.core.codec import WORD
from hf_dlion.core.flat import LOW_PRECISION, on_device
from hf_dlion.core.rounding import round_to
from hf_dlion.core.slot import NO_TENSOR, Field, Slot
from hf_dlion.core.votes import Rows

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


class Stretch(NamedTuple):
    """Elements `start` to `stop` - 1 of a slot, which are in a piece from element `at`."""

    slot: Slot
    start: int
    stop: int
    at: int


class Scratch:
    """Memory that is reused from piece to piece and from step to step."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns `size` uninitialized elements; calls with the same name share memory."""
        buffer = self._buffers.get(key := (name, dtype, device))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size]

    def release(self) -> None:
        """Frees what isn't on a CPU, where only memory that is reused is fast."""
        self._buffers = {key: own for key, own in self._buffers.items() if own.device.type == "cpu"}


@dataclass(eq=False)
class Piece:
    """Elements that one call of the codec takes, of slots of one group and one dtype.

    `stored` is the dtype of the parameters, and the computation is in `dtype`, float32 or float64.
    `first` is the number of the first element in the layout, `words` a slice of the message's
    words, and `size` the number of elements, padding included.
    """

    group: int
    stored: torch.dtype
    device: torch.device
    first: int
    words: slice
    size: int = 0
    stretches: list[Stretch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dtype = torch.float64 if self.stored == torch.float64 else torch.float32
        self.is_low = self.stored in LOW_PRECISION

    @functools.cached_property
    def is_padded(self) -> bool:
        """Whether the piece has elements of no slot."""
        return sum(stretch.stop - stretch.start for stretch in self.stretches) < self.size

    def head(self, words: int) -> Piece:
        """Returns the piece's first words, at most so many."""
        size = min(words * WORD, self.size)
        head_words = slice(self.words.start, self.words.start + size // WORD)
        head = Piece(self.group, self.stored, self.device, self.first, head_words, size)
        head.stretches = [
            stretch._replace(stop=min(stretch.stop, stretch.start + size - stretch.at))
            for stretch in self.stretches
            if stretch.at < size
        ]
        return head

    def has(self, field: Field) -> bool:
        """Returns whether at least one of the slots has the tensor."""
        return any([stretch.slot.get(field) is not None for stretch in self.stretches])

    def memory(self, name: str, scratch: Scratch) -> Tensor:
        """Returns scratch memory of the piece's size and dtype."""
        return scratch(name, self.size, self.dtype, self.device)

    def read(self, field: Field, scratch: Scratch) -> Tensor:
        """Returns one tensor of the slots in the piece's dtype: a view if possible, else scratch.

        Padding, and slots without the tensor, are zeros. A view, as of a large float32 tensor,
        shares the slot's memory: to change it is to change the tensor, and `write` does nothing.
        """
        if (tensor := self._whole(field)) is not None:
            return tensor[self.stretches[0].start : self.stretches[0].stop]
        flat = self.memory(field, scratch)
        tensors, places = self._pairs(field, flat)
        if self.is_padded or len(tensors) < len(self.stretches):
            flat.zero_()
        if tensors:
            torch._foreach_copy_(places, tensors)
        return flat

    def write(
        self,
        field: Field,
        flat: Tensor,
        random: Callable[[Piece], Tensor] | None,
        *,
        without_infs: bool = False,
    ) -> None:
        """Writes back what `read` returned and was changed, which it rounds in place.

        Does nothing if `read` returns a view, not even `without_infs`. Otherwise, `flat` may be
        other memory than what `read` returned. bfloat16 and float16 are rounded stochastically,
        with the random bits that `random` returns, or to nearest without it. `without_infs` then
        writes the largest number in the place of an Inf.
        """
        if self._whole(field) is not None:
            return
        tensors, places = self._pairs(field, flat)
        if not tensors:
            return
        if (dtype := tensors[0].dtype) in LOW_PRECISION:
            if self.dtype == torch.float64:  # Momenta of 16 bits of float64 parameters.
                tensors, places = self._pairs(field, flat := flat.float())
            if without_infs:
                flat.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
            if random is not None:
                round_to(flat, dtype, random(self))
        torch._foreach_copy_(tensors, places)

    def _whole(self, field: Field) -> Tensor | None:
        """Returns the tensor if the piece is a stretch of it, without padding or conversion."""
        if len(self.stretches) > 1 or self.is_padded:
            return None
        tensor = self.stretches[0].slot.get(field)
        return None if tensor is None or tensor.dtype != self.dtype else tensor

    def _pairs(self, field: Field, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns views of the slots' tensors, and of their places in `flat`."""
        tensors, places = [], []
        for slot, start, stop, at in self.stretches:
            if (tensor := slot.get(field)) is not None:
                tensors.append(tensor[start:stop])
                places.append(flat[at : at + stop - start])
        return tensors, places

    def by_word(self, numbers: Sequence[float | Tensor], like: Tensor) -> Tensor:
        """Returns the number of its stretch for each of the words, dtype of `like`, shape (W,).

        Tensors in `numbers` are 0-D and on one device, so a GPU gets one copy for all of them.
        """
        if len(numbers) == 1 and not isinstance(numbers[0], Tensor):  # Most pieces of an LLM.
            return like.new_full((self.size // WORD,), numbers[0])
        # Not on the default device, which a user may have set to a GPU.
        device = next((n.device for n in numbers if isinstance(n, Tensor)), torch.device("cpu"))
        values = torch.stack(
            [torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers]
        )
        words = [-(-(stop - start) // WORD) for _, start, stop, _ in self.stretches]
        counts = on_device(torch.tensor(words, device="cpu"), values.device)
        size = self.size // WORD
        return on_device(
            values.repeat_interleave(counts, output_size=size).to(like.dtype), like.device
        )


class Span(NamedTuple):
    """A slot's words in a message: the first, their number, and words per row."""

    slot: Slot
    first: int
    words: int
    row_words: int


@dataclass(eq=False)
class Message:
    """Rows whose votes travel together, in `words` words."""

    device: torch.device
    pieces: list[Piece] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    words: int = 0

    @functools.cached_property
    def rows(self) -> Rows:
        """The message's rows."""
        lengths = [(span.words // span.row_words, span.row_words) for span in self.spans]
        return Rows(lengths, self.device)

    @functools.cached_property
    def unpadded(self) -> Tensor:
        """Which words have no padding, bool, shape (W,)."""
        flags = torch.ones(self.words, dtype=torch.bool, device="cpu")
        flags[[s.first + s.words - 1 for s in self.spans if s.slot.size % WORD]] = False
        return flags.to(self.device)

    def rows_with(self, words: Tensor) -> Tensor:
        """Returns which rows have at least one set word, bool, shape (R,), from a flag per word."""
        count = torch.zeros(len(self.rows), dtype=torch.int32, device=self.device)
        return count.index_add_(0, self.rows.of_word, words.to(torch.int32)) > 0

    def add(self, slot: Slot, start: int, stop: int, first: int, piece_limit: int) -> int:
        """Adds a stretch of a slot and returns its words; a piece has up to so many elements.

        `first` is the number of the stretch's first element in the layout.
        """
        size, key = stop - start, (slot.group, slot.dtype)
        words = -(-size // WORD)
        piece = self.pieces[-1] if self.pieces else None
        if not piece or (piece.group, piece.stored) != key or piece.size + size > piece_limit:
            piece = Piece(*key, slot.device, first, slice(self.words, self.words))
            self.pieces.append(piece)
        piece.stretches.append(Stretch(slot, start, stop, at=piece.size))
        row_words = (slot.row_size or -(-slot.size // WORD) * WORD) // WORD
        span = Span(slot, self.words, 0, row_words)
        if self.spans and self.spans[-1].slot is slot:
            span = self.spans.pop()
        self.spans.append(span._replace(words=span.words + words))
        self.words += words
        piece.words = slice(piece.words.start, self.words)
        piece.size += words * WORD
        return words


def messages_of(slots: Sequence[Slot], after: Sequence[Message] = ()) -> list[Message]:
    """Returns the messages of slots, the same on every rank; empty ones are skipped.

    The elements of `after`, messages of other slots, come first in the layout.
    """
    messages: list[Message] = []
    number = sum(message.words for message in after)  # of the next word in the layout
    total = sum(slot.size for slot in slots)
    for slot in slots:
        piece_limit = PIECE.get(slot.device.type, PIECE_ELSEWHERE)
        message_limit = max(MESSAGE.get(slot.device.type, MESSAGE_ELSEWHERE), total // MESSAGES)
        row_size = slot.row_size or -(-slot.size // WORD) * WORD or WORD
        # Rows that are longer than a piece are cut between words.
        stride = piece_limit // row_size * row_size or piece_limit
        for start in range(0, slot.size, stride):
            last = messages[-1] if messages else None
            is_over = last and (last.device != slot.device or last.words * WORD >= message_limit)
            if last is None or (start % row_size == 0 and is_over):
                messages.append(last := Message(slot.device))
            stop = min(start + stride, slot.size)
            number += last.add(slot, start, stop, number * WORD, piece_limit)
    return messages


@dataclass(eq=False)
class Layout:
    """All trainable tensors, kept until parameters are added, frozen, unfrozen, or loaded.

    Attributes:
        key: Properties of the parameters on which the layout depends.
        slots: The tensors, in the order of the groups.
        messages: Messages of the tensors that are voted on.
        averaged_messages: Messages of the tensors of `full_precision`, which are averaged instead.
        signatures: What ranks compare of each tensor.
        device: Device of the first tensor.
    """

    key: object = None
    slots: Sequence[Slot] = ()

    def __post_init__(self) -> None:
        voted = [slot for slot in self.slots if not slot.full_precision]
        averaged = [slot for slot in self.slots if slot.full_precision]
        self.messages = messages_of(voted)
        self.averaged_messages = messages_of(averaged, after=self.messages)
        devices = list(dict.fromkeys(slot.device for slot in self.slots))
        self.device = devices[0] if devices else torch.device("cpu")
        self.signatures = [slot.signature(devices.index(slot.device)) for slot in self.slots]

    @property
    def all_messages(self) -> list[Message]:
        """The messages of all tensors."""
        return [*self.messages, *self.averaged_messages]

    def release(self) -> None:
        """Forgets tensors whose memory the user may free between two steps."""
        for slot in self.slots:
            slot.part = slot.p = NO_TENSOR
            slot.moves = False
            slot.grad = slot.momentum = slot.idle = slot.old = slot.local = slot.mean = None

    def drop_gradients(self, finite: bool, present: Sequence[bool]) -> None:
        """Drops gradients and momenta of tensors on which this rank's voter abstains.

        `finite` and `present` are those of all ranks that vote as one with this rank.
        """
        for slot, has_gradient in zip(self.slots, present, strict=True):
            if not (finite and has_gradient):
                slot.grad = slot.momentum = None
