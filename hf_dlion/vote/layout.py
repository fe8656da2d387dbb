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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_dlion.exchange.codec import WORD
from hf_dlion.exchange.launches import sent
from hf_dlion.exchange.routes import Rows
from hf_dlion.vote.rounding import round_to

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
# The dtypes of parameters, and those that are rounded stochastically.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LOW_PRECISION = (torch.bfloat16, torch.float16)
# Integers with the bits of floats, by bytes per element.
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# What ranks compare of a trainable parameter: name, shape, dtype, strides, device type, and whether
# its gradient is averaged ("full") or voted on ("vote").
Line = tuple[object, ...]

_NO_TENSOR = torch.empty(0)


@dataclass(eq=False, slots=True)
class LocalState:
    """What a period of local steps keeps of a parameter, with its shape and strides.

    Attributes:
        anchor: Weights with which the period began, equal on all ranks.
        compensation: What the rounding of a 16-bit parameter leaves out, in its dtype: this rank
            trains p + c. None for 32 and 64 bits.
        used: Whether this rank had a finite gradient of the parameter in the period.
        decay: Product D of 1 - lr * weight_decay over the period.
        path: Sum of lr over the period, how far the steps can have moved an element.
        own: This rank's weights while the model holds the anchor (`common_weights`), else None.
    """

    anchor: Tensor
    compensation: Tensor | None
    used: bool = False
    decay: float = 1.0
    path: float = 0.0
    own: Tensor | None = None

    @classmethod
    def of(cls, part: Tensor) -> LocalState:
        """Returns the state of a rank's part of a parameter with which a period begins."""
        is_low = part.dtype in LOW_PRECISION
        return cls(part.clone(), torch.zeros_like(part) if is_low else None)

    def leave(self, part: Tensor) -> None:
        """Puts the anchor into the parameter, unless the model shows it."""
        if self.own is None and self.anchor.shape == part.shape:
            part.copy_(self.anchor)

    def fit(self, name: str, part: Tensor) -> None:
        """Gives the tensors the parameter's device, dtype, and strides, which may have changed.

        Raises:
            RuntimeError: If the parameter has another shape.
        """
        if self.anchor.shape != part.shape:
            raise RuntimeError(
                f"{name!r} had shape {tuple(self.anchor.shape)} in the last local step, and has "
                f"{tuple(part.shape)} now: call optimizer.exchange_now() on every rank before you "
                f"resize parameters"
            )
        self.anchor = fitted(self.anchor, part, part.dtype)
        if part.dtype not in LOW_PRECISION:
            self.compensation = None
        elif self.compensation is None:
            self.compensation = torch.zeros_like(part)
        else:
            self.compensation = fitted(self.compensation, part, part.dtype)


@dataclass(eq=False, slots=True)
class Slot:
    """A trainable tensor of this rank. Its tensors are flat, in memory order, and local parts.

    The layout depends on the first attributes, which are equal on all voters. The others are those
    of the step.

    Attributes:
        size: Number of elements.
        row: Elements per row, 0 if the tensor is one row.
        group: Index of the parameter group.
        full: Whether its gradient is averaged instead of voted on.
        synced: Whether the voters average momenta of it that differ.
        param: The model's parameter, a DTensor with FSDP2.
        part: This rank's part of the parameter, with its shape.
        p: The weights in the model, `part` in memory order.
        target: `p` if they move; None otherwise.
        grad: Gradient, changed only by unscaling; None if this rank's voter abstains.
        momentum: Momentum of `grad`, changed in place.
        idle: Rows of `grad` that are zero, bool, shape (R,); None if none is.
        old: Rows in which u is 0, because they were idle for long (`idle_rows`); None if none is.
        local: What a period of local steps keeps of the parameter; None between two periods.
        scale: Magnitude a to which codes are relative, if it is that of the tensor.
        mean: Mean over the voters of what `full` averages.
    """

    size: int
    row: int
    group: int
    dtype: torch.dtype
    device: torch.device
    full: bool = False
    synced: bool = False
    name: str = ""
    param: Tensor = _NO_TENSOR
    part: Tensor = _NO_TENSOR
    p: Tensor = _NO_TENSOR
    target: Tensor | None = None
    grad: Tensor | None = None
    momentum: Tensor | None = None
    idle: Tensor | None = None
    old: Tensor | None = None
    local: LocalState | None = None
    scale: float | Tensor = 0.0
    mean: Tensor | None = None

    @classmethod
    def of(cls, part: Tensor, group: int) -> Slot:
        """Returns the slot of this rank's part of a parameter, without its tensors."""
        length = part.stride(0) if part.dim() and part.numel() else 0
        # If the first dimension isn't the outermost in memory, its slices aren't contiguous.
        outermost = length * part.shape[0] == part.numel() if length else False
        row = length if outermost and length % WORD == 0 else 0
        return cls(part.numel(), row, group, part.dtype, part.device)

    @property
    def x(self) -> Tensor | None:
        """The anchor of local steps, if the tensor moves."""
        return None if self.target is None or self.local is None else flat_view(self.local.anchor)

    @property
    def c(self) -> Tensor | None:
        """The compensation of a tensor of 16 bits, if it moves by local steps."""
        if self.target is None or self.local is None or self.local.compensation is None:
            return None
        return flat_view(self.local.compensation)

    @property
    def w(self) -> Tensor | None:
        """How far this rank's weights are from the anchor, x - p, or x - p - c in float32."""
        if (x := self.x) is None or (c := self.c) is None:
            return None if x is None else x - self.p
        return x.float().sub_(self.p).sub_(c)

    def line(self, place: int) -> Line:
        """What ranks compare: that of the complete parameter, because shards may differ in size.

        `place` is that of its device among the rank's devices, between which messages are cut.
        """
        p, how = self.param, "full" if self.full else "vote"
        device = f"{p.device.type} {place}" if place else p.device.type
        return self.name, tuple(p.shape), str(p.dtype), p.stride(), device, how


class Part(NamedTuple):
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
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dtype = torch.float64 if self.stored == torch.float64 else torch.float32
        self.is_low = self.stored in LOW_PRECISION

    @functools.cached_property
    def is_padded(self) -> bool:
        """Whether the piece has elements of no slot."""
        return sum(part.stop - part.start for part in self.parts) < self.size

    def head(self, words: int) -> Piece:
        """Returns the piece's first words, at most so many."""
        size = min(words * WORD, self.size)
        own = slice(self.words.start, self.words.start + size // WORD)
        head = Piece(self.group, self.stored, self.device, self.first, own, size)
        head.parts = [
            part._replace(stop=min(part.stop, part.start + size - part.at))
            for part in self.parts
            if part.at < size
        ]
        return head

    def has(self, name: str) -> bool:
        """Returns whether at least one of the slots has a tensor `name`."""
        return any([getattr(part.slot, name) is not None for part in self.parts])

    def memory(self, name: str, scratch: Scratch) -> Tensor:
        """Returns scratch memory of the piece's size and dtype."""
        return scratch(name, self.size, self.dtype, self.device)

    def read(self, name: str, scratch: Scratch) -> Tensor:
        """Returns the slots' tensors `name` in the piece's dtype: a view if possible, else scratch.

        Padding, and slots without the tensor, are zeros.
        """
        if (tensor := self._whole(name)) is not None:
            return tensor[self.parts[0].start : self.parts[0].stop]
        flat = self.memory(name, scratch)
        tensors, places = self._pairs(name, flat)
        if self.is_padded or len(tensors) < len(self.parts):
            flat.zero_()
        if tensors:
            torch._foreach_copy_(places, tensors)
        return flat

    def write(
        self,
        name: str,
        flat: Tensor,
        random: Callable[[Piece], Tensor] | None,
        *,
        without_infs: bool = False,
    ) -> None:
        """Writes back what `read` returned and was changed, which it rounds in place.

        bfloat16 and float16 are rounded stochastically, with the random bits that `random` returns,
        or to nearest without it. `without_infs` then writes the largest number in the place of an
        Inf.
        """
        if self._whole(name) is not None:
            return  # `flat` is a view of the tensor.
        tensors, places = self._pairs(name, flat)
        if not tensors:
            return
        if (dtype := tensors[0].dtype) in LOW_PRECISION:
            if self.dtype == torch.float64:  # Momenta of 16 bits of float64 parameters.
                tensors, places = self._pairs(name, flat := flat.float())
            if without_infs:
                flat.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
            if random is not None:
                round_to(flat, dtype, random(self))
        torch._foreach_copy_(tensors, places)

    def _whole(self, name: str) -> Tensor | None:
        """Returns the tensor if the piece is a stretch of it, without padding or conversion."""
        if len(self.parts) > 1 or self.is_padded:
            return None
        tensor: Tensor | None = getattr(self.parts[0].slot, name)
        return None if tensor is None or tensor.dtype != self.dtype else tensor

    def _pairs(self, name: str, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns views of the slots' tensors, and of their places in `flat`."""
        tensors, places = [], []
        for slot, start, stop, at in self.parts:
            if (tensor := getattr(slot, name)) is not None:
                tensors.append(tensor[start:stop])
                places.append(flat[at : at + stop - start])
        return tensors, places

    def by_word(self, numbers: Sequence[float | Tensor], like: Tensor) -> Tensor:
        """Returns the number of its part for each of the words, dtype of `like`, shape (W,).

        Tensors in `numbers` are 0-D and on one device, so a GPU gets one copy for all of them.
        """
        values = torch.stack([torch.as_tensor(n, dtype=torch.float64) for n in numbers])
        words = torch.tensor([-(-(part.stop - part.start) // WORD) for part in self.parts])
        counts, size = sent(words, values.device), self.size // WORD
        return sent(values.repeat_interleave(counts, output_size=size).to(like.dtype), like.device)


class Span(NamedTuple):
    """A slot's words in a message: the first, their number, and words per row."""

    slot: Slot
    first: int
    words: int
    row: int


@dataclass(eq=False)
class Message:
    """Rows whose votes travel together, in `words` words, of which `padded` end in padding."""

    device: torch.device
    pieces: list[Piece] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    padded: list[int] = field(default_factory=list)
    words: int = 0

    @functools.cached_property
    def rows(self) -> Rows:
        """The message's rows."""
        return Rows([(span.words // span.row, span.row) for span in self.spans], self.device)

    @functools.cached_property
    def whole(self) -> Tensor:
        """Which words have no padding, bool, shape (W,)."""
        flags = torch.ones(self.words, dtype=torch.bool)
        flags[self.padded] = False
        return flags.to(self.device)

    def rows_with(self, words: Tensor) -> Tensor:
        """Returns which rows have at least one set word, bool, shape (R,), from a flag per word."""
        count = torch.zeros(self.rows.count, dtype=torch.int32, device=self.device)
        return count.index_add_(0, self.rows.of_word, words.to(torch.int32)) > 0

    def add(self, slot: Slot, start: int, stop: int, first: int, limit: int) -> int:
        """Adds a stretch of a slot and returns its words; a piece has up to `limit` elements.

        `first` is the number of the stretch's first element in the layout.
        """
        words, key = -(-(stop - start) // WORD), (slot.group, slot.dtype)
        piece = self.pieces[-1] if self.pieces else None
        if not piece or (piece.group, piece.stored) != key or piece.size + stop - start > limit:
            piece = Piece(*key, slot.device, first, slice(self.words, self.words))
            self.pieces.append(piece)
        piece.parts.append(Part(slot, start, stop, at=piece.size))
        span = Span(slot, self.words, 0, (slot.row or -(-slot.size // WORD) * WORD) // WORD)
        if self.spans and self.spans[-1].slot is slot:
            span = self.spans.pop()
        self.spans.append(span._replace(words=span.words + words))
        self.words += words
        if (stop - start) % WORD:
            self.padded.append(self.words - 1)
        piece.words = slice(piece.words.start, self.words)
        piece.size += words * WORD
        return words


def messages(slots: Sequence[Slot], after: Sequence[Message] = ()) -> list[Message]:
    """Returns the messages of slots, the same on every rank; empty ones are skipped.

    The elements of `after`, messages of other slots, come first in the layout.
    """
    found: list[Message] = []
    number = sum(message.words for message in after)  # of the next word in the layout
    total = sum(slot.size for slot in slots)
    for slot in slots:
        limit = PIECE.get(slot.device.type, PIECE_ELSEWHERE)
        full = max(MESSAGE.get(slot.device.type, MESSAGE_ELSEWHERE), total // MESSAGES)
        row = slot.row or -(-slot.size // WORD) * WORD or WORD
        # Rows that are longer than a piece are cut between words.
        stride = limit // row * row or limit
        for start in range(0, slot.size, stride):
            last = found[-1] if found else None
            is_over = last and (last.device != slot.device or last.words * WORD >= full)
            if last is None or (start % row == 0 and is_over):
                found.append(last := Message(slot.device))
            stop = min(start + stride, slot.size)
            number += last.add(slot, start, stop, number * WORD, limit)
    return found


@dataclass(eq=False)
class Layout:
    """All trainable tensors, kept until parameters are added, frozen, unfrozen, or loaded.

    Attributes:
        key: Properties of the parameters on which the layout depends.
        slots: The tensors, in the order of the groups.
        messages: Messages of the tensors that are voted on.
        full: Messages of the tensors whose gradients are averaged instead.
        lines: One line per tensor, for the comparison between ranks.
        device: Device of the first tensor.
    """

    key: object = None
    slots: Sequence[Slot] = ()

    def __post_init__(self) -> None:
        self.messages = messages([slot for slot in self.slots if not slot.full])
        self.full = messages([slot for slot in self.slots if slot.full], after=self.messages)
        self.pieces = [piece for m in (*self.messages, *self.full) for piece in m.pieces]
        devices = list(dict.fromkeys(slot.device for slot in self.slots))
        self.device = devices[0] if devices else torch.device("cpu")
        self.lines = [slot.line(devices.index(slot.device)) for slot in self.slots]

    def release(self) -> None:
        """Forgets tensors whose memory the user may free between two steps."""
        for slot in self.slots:
            slot.part = slot.p = _NO_TENSOR
            slot.target = slot.grad = slot.momentum = None

    def abstain(self, finite: bool, present: Sequence[bool]) -> None:
        """Drops gradients and momenta of tensors on which this rank's voter abstains.

        `finite` and `present` are those of all ranks that vote as one with this rank.
        """
        for slot, has_gradient in zip(self.slots, present, strict=True):
            if not (finite and has_gradient):
                slot.grad = slot.momentum = None


def check_param(part: Tensor) -> None:
    """Refuses a parameter, given by this rank's part, that can't be voted on.

    Raises:
        TypeError: If it isn't a real float.
        NotImplementedError: If it has gaps in memory.
    """
    if part.dtype not in DTYPES:
        raise TypeError(
            f"parameters must be floats of 16, 32, or 64 bits (got {part.dtype}): "
            f"pass only those that train, without a quantized base"
        )
    flat_view(part)


def momentum_of(state: dict[str, Any], param: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns the momentum in a parameter's state, in the parameter's memory layout.

    It is created as zeros at the first call, and copied if its device, dtype, or strides differ.
    `dtype` is that of the momentum (default: the parameter's).

    Raises:
        RuntimeError: If it has another shape than the parameter.
    """
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
    momentum: Tensor = state["exp_avg"]
    if momentum.shape != param.shape:
        raise RuntimeError(
            f"a momentum of shape {tuple(momentum.shape)} does not fit its parameter of shape "
            f"{tuple(param.shape)}: load the optimizer state of this model, or "
            f"make a new optimizer after a parameter was resized"
        )
    momentum = state["exp_avg"] = fitted(momentum, param, dtype or param.dtype)
    return momentum


def fitted(tensor: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor with a parameter's device and strides: a copy only if something differs."""
    if (tensor.device, tensor.dtype, tensor.stride()) == (param.device, dtype, param.stride()):
        return tensor
    return torch.empty_like(param, dtype=dtype).copy_(tensor)


def flat_view(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor's elements in memory order, shape (numel,).

    Raises:
        NotImplementedError: If the elements have gaps between them or overlap in memory.
    """
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        raise NotImplementedError(
            f"a parameter of shape {tuple(tensor.shape)} with strides {tensor.stride()} has gaps "
            f"in memory: pass parameters without gaps, such as torch.nn.Parameter(x.contiguous())"
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def flat_gradient(name: str, grad: Tensor, param: Tensor) -> Tensor:
    """Returns a gradient's elements in the memory order of its parameter, shape (numel,).

    The result is a view if the strides are equal, and a copy otherwise.

    Raises:
        NotImplementedError: If the gradient is sparse.
        RuntimeError: If the gradient has another shape than the parameter.
    """
    if grad.layout != torch.strided:
        raise NotImplementedError(
            f"the gradient of {name!r} must be dense (got {grad.layout}): use "
            f"nn.Embedding(sparse=False)"
        )
    if grad.shape != param.shape:
        raise RuntimeError(
            f"the gradient of {name!r} must have the shape of its parameter, {tuple(param.shape)} "
            f"(got {tuple(grad.shape)})"
        )
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return flat_view(grad)


def unscale(grads: list[Tensor], scale: Tensor | None, found_inf: Tensor | None) -> bool:
    """Unscales gradients that GradScaler left scaled; returns False if it found an Inf.

    Raises:
        ValueError: If a gradient is float16.
    """
    if found_inf is not None and float(found_inf) > 0:
        return False
    if scale is not None and any(grad.dtype == torch.float16 for grad in grads):
        raise ValueError(
            "GradScaler scaled float16 gradients, which can't hold small numbers once they are "
            "unscaled: load the model with dtype=torch.float32 or torch.bfloat16"
        )
    if scale is not None and grads:
        torch._foreach_mul_(grads, 1.0 / float(scale))
    return True
