"""The kinds of work that kernels do, each in one launch for all tensors of the same types.

They bring addresses and numbers to `kernels`, and have the bits of the functions in `core.lion` and
`core.votes`. `form` says which messages they take. Triton is imported and compiles at the first
launch, so `warm_up` launches all of them before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_dlion.core.codec import WORD, alternating_word
from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Message
from hf_dlion.core.lion import decay_of, direction, encode
from hf_dlion.core.rounding import COMPENSATIONS, MOMENTA, PARAMETERS, key_of
from hf_dlion.core.rule import Average, Rule
from hf_dlion.core.slot import Field, Slot
from hf_dlion.core.votes import Rows, Verdict, Votes
from hf_dlion.gpu.tables import (
    WORDS_OF_A_PROGRAM,
    Column,
    Line,
    Lines,
    Table,
    addresses,
    launch,
    lines_of,
)

# Most voters whose votes the kernels add.
MOST_VOTERS = 127
# So many elements of the layout have one key of random bits.
_SAME_KEY = 1 << 33


@functools.cache
def triton_kernels() -> Any:
    """Returns the module of the kernels; the first call imports triton."""
    import hf_dlion.gpu.kernels as kernels

    return kernels


def moved_bytes(kind: str, dtype: torch.dtype) -> float:
    """Returns the bytes per element that a kind of work of `kernels.each_tile` reads and writes."""
    size, is_low = dtype.itemsize, dtype == torch.bfloat16
    # Elements that are read and written, and for each of them the bytes of words of bits.
    elements, others = {
        "encode": (3, 9 / 64), "move": (2, 1 / 8), "step": (5, 0),
        "local step": (7 if is_low else 5, 0),
        "end of period": (2, 5 / 8),  # A verdict of 4 bits and two ranks.
    }[kind]  # fmt: skip
    return elements * size + others


class SlotLine(NamedTuple):
    """A line for elements of a slot from `start`.

    `number` is that of the first element in the layout, and `place` is where the message has them.
    """

    slot: Slot
    start: int
    number: int
    place: Line


def slot_lines(message: Message) -> list[SlotLine]:
    """Returns the lines of a message, each as long as possible."""
    begins: dict[Slot, tuple[int, int]] = {}
    stops: dict[Slot, int] = {}
    for piece in message.pieces:
        for slot, start, stop, at in piece.stretches:
            begins.setdefault(slot, (start, piece.first + at))
            stops[slot] = stop
    lines, row = [], 0
    for slot, word, words, row_words in message.spans:
        (start, number), skipped = begins[slot], 0
        while start < stops[slot]:
            size = min(stops[slot] - start, _SAME_KEY - number % _SAME_KEY)
            place = Line(size, word + skipped, row, skipped, row_words)
            lines.append(SlotLine(slot, start, number, place))
            start += size
            number += size
            skipped += size // WORD
        row += words // row_words
    return lines


class KernelVote:
    """A step by votes on a message; see `form.TorchVote`."""

    def __init__(self, message: Message, context: StepContext) -> None:
        """Fills one table for both launches."""
        self._message = message
        self._context = context
        table = Table(message.device)
        lines = slot_lines(message)
        is_encoded = context.bits == 1
        voting = [line for line in lines if is_encoded and line.slot.grad is not None]
        moving = [line for line in lines if line.slot.moves]
        numbers = _numbers(context)
        keys = {Column.KEY_MOMENTUM: _key(context, MOMENTA + context.voter)}
        self._encode = _add(table, voting, (Field.GRAD, Field.MOMENTUM), numbers, keys)
        keys = {Column.KEY_PARAM: _key(context, PARAMETERS)}
        self._move = _add(table, moving, (Field.MOVING,), numbers, keys)

    def encode(self) -> Votes:
        """Returns the votes, and updates the momenta."""
        message, context = self._message, self._context
        if context.bits > 1:  # Which torch operations encode.
            return encode(message, context, partial(direction, context=context), bits=context.bits)
        rows, words = message.rows, message.words
        row_flags = torch.zeros(len(rows), dtype=torch.int8, device=message.device)
        planes = torch.empty(words, dtype=torch.int64, device=message.device)
        phase = context.zero_phase
        each_tile("encode", self._encode, planes=planes, by_row=row_flags, phase=phase)
        abstain(rows, planes, row_flags)
        return Votes(planes.view(1, -1), row_flags.view(torch.bool), rows)

    def move(self, verdict: Verdict, rule: Rule) -> None:
        """Moves the parameters."""
        voters = rule.voters if isinstance(rule, Average) else 1
        _by_verdict("move", self._move, verdict, voters=voters, rule=rule.name)


def plain_lion(messages: Sequence[Message], context: StepContext) -> None:
    """Takes a step without votes on messages of one device; see `lion.plain_lion`."""
    lines = [line for message in messages for line in slot_lines(message)]
    moving = [line for line in lines if line.slot.moves]
    fields = Field.GRAD, Field.MOMENTUM, Field.MOVING
    keys = {
        Column.KEY_MOMENTUM: _key(context, MOMENTA + context.voter),
        Column.KEY_PARAM: _key(context, PARAMETERS),
    }
    table = Table(messages[0].device)
    each_tile("step", _add(table, moving, fields, _numbers(context), keys))


def local_step(messages: Sequence[Message], context: StepContext) -> None:
    """Takes a local step on messages of one device; see `lion.local_step`."""
    lines = [line for message in messages for line in slot_lines(message)]
    moving = [line for line in lines if line.slot.grad is not None]
    fields = Field.GRAD, Field.MOMENTUM, Field.MOVING, Field.COMPENSATION
    numbers = {**_numbers(context), Column.DECAY: lambda slot: 1.0}  # The end of the period decays.
    keys = {
        Column.KEY_MOMENTUM: _key(context, MOMENTA + context.voter),
        Column.KEY_COMPENSATION: _key(context, COMPENSATIONS + context.voter),
    }
    table = Table(messages[0].device)
    each_tile("local step", _add(table, moving, fields, numbers, keys))


def end_period(
    message: Message, verdict: Verdict, rule: Average, unit: Callable[[Slot], float],
    context: StepContext,
) -> None:  # fmt: skip
    """Moves a message's parameters from their anchors; see `lion.move_from_anchor`."""
    numbers = {Column.UNIT: unit, Column.DECAY: decay_of}
    keys = {Column.KEY_PARAM: _key(context, PARAMETERS)}
    moving = [line for line in slot_lines(message) if line.slot.anchor is not None]
    lines = _add(Table(message.device), moving, (Field.MOVING, Field.ANCHOR), numbers, keys)
    _by_verdict("end of period", lines, verdict, voters=rule.voters, top=rule.top)


def _by_verdict(kind: str, lines: list[Lines], verdict: Verdict, **given: Any) -> None:
    """Moves by a verdict, which may come from the other form."""
    planes, row_voters = verdict.planes, verdict.row_voters
    assert row_voters is not None, "only a CPU leaves it out"
    by_row = row_voters.to(torch.int32)
    each_tile(kind, lines, planes=planes, stride=planes.stride(0), by_row=by_row, **given)


def each_tile(
    kind: str, lines: Iterable[Lines], *, planes: Tensor | None = None, stride: int = 0,
    by_row: Tensor | None = None, phase: int = 0, voters: int = 1, rule: str = "", top: int = 1,
) -> None:  # fmt: skip
    """Does one kind of work, with a launch for each combination of types; see `kernels`."""
    planes_at, by_row_at = addresses(planes, by_row)
    for of_types in lines:
        launch(
            triton_kernels().each_tile, of_types.table.device, of_types.programs,
            *of_types.arguments, planes_at, stride, by_row_at, phase % 2, kind, *of_types.types,
            voters, rule, top,
        )  # fmt: skip


# Tensors whose types choose a kernel's variant.
_TYPED = (Field.GRAD, Field.MOMENTUM, Field.MOVING)


def _add(
    table: Table,
    lines: Sequence[SlotLine],
    fields: Sequence[Field],
    numbers: Mapping[Column, Callable[[Slot], float]],
    keys: Mapping[Column, Callable[[int], int]],
) -> list[Lines]:
    """Adds lines to a table, by the types of gradient, momentum, and parameter.

    `fields` are the tensors of a slot that the kernel gets. `numbers` and `keys` return the values
    of their columns for a slot, and for an element's number in the layout.
    """
    tl, by_types = triton_kernels().tl, dict[tuple[Any, ...], list[SlotLine]]()
    types_of = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, None: None}
    for line in lines:
        typed = [line.slot.get(field) if field in fields else None for field in _TYPED]
        types = tuple(types_of[None if tensor is None else tensor.dtype] for tensor in typed)
        by_types.setdefault(types, []).append(line)
    added = []
    for types, of_types in by_types.items():
        columns: dict[Column, Any] = {}
        if Field.GRAD in fields:
            columns[Column.OLD] = [_address_of_old(line) for line in of_types]
        for field in fields:
            tensors = [line.slot.get(field) for line in of_types]
            columns[Column[field.name]] = [
                0 if tensor is None else tensor.data_ptr() + line.start * tensor.element_size()
                for tensor, line in zip(tensors, of_types, strict=True)
            ]
            if field != Field.GRAD:  # The kernels write.
                torch.autograd.graph.increment_version([t for t in tensors if t is not None])
        for column, number in numbers.items():
            values = np.array([number(line.slot) for line in of_types], np.float32)
            columns[column] = values.view(np.int32)
        for column, key in keys.items():
            columns[column] = [key(line.number) for line in of_types]
        added.append(table.add([line.place for line in of_types], types, columns))
    return added


def _address_of_old(line: SlotLine) -> int:
    """Returns the address of the old rows' flags, from the row in which the line begins."""
    old, place = line.slot.old, line.place
    if old is None:
        return 0
    return old.data_ptr() + (line.start // WORD - place.skipped) // place.row_words


def _numbers(context: StepContext) -> dict[Column, Callable[[Slot], float]]:
    """Returns the columns of a step's numbers."""
    rates = context.rates
    return {
        Column.W1: lambda slot: 1 - rates[slot.group].beta1,
        Column.W2: lambda slot: 1 - rates[slot.group].beta2,
        Column.LR: lambda slot: rates[slot.group].lr,
        Column.DECAY: lambda slot: rates[slot.group].decay,
    }


def _key(context: StepContext, stream: int) -> Callable[[int], int]:
    return lambda number: key_of(number, context.number, context.options.seed, stream)


# Votes, word by word.


def abstain(rows: Rows, planes: Tensor, row_flags: Tensor) -> None:
    """Clears the votes in rows without a flag.

    Args:
        rows: The message's rows.
        planes: Votes, int64, one plane, shape (W,).
        row_flags: Whether this rank votes on a row, int8, shape (R,).
    """
    launch(
        triton_kernels().abstain, planes.device, -(-planes.numel() // WORDS_OF_A_PROGRAM),
        *lines_of(rows).arguments, *addresses(planes), planes.numel(), *addresses(row_flags),
    )  # fmt: skip


def count_votes(
    planes: Tensor, active: Tensor, rows: Rows, words: slice, rule: Rule, phase: int, size: int
) -> Verdict:
    """Returns the verdict of all ranks' votes of one bit; see `votes.count_votes`.

    It has planes of `size` words, with zeros after the slice.
    """
    verdict = planes.new_empty(rule.plane_count, size)
    row_voters = torch.empty(len(rows), dtype=torch.int32, device=planes.device)
    launch_count_votes(
        rows, planes[:, 0], active, verdict, row_voters, first=words.start,
        size=words.stop - words.start, tie=alternating_word(phase), rule=rule.name,
    )  # fmt: skip
    return Verdict(verdict, row_voters)


def launch_count_votes(
    rows: Rows, planes: Tensor, packed: Tensor, verdict: Tensor, row_voters: Tensor, *,
    first: int, size: int, tie: int, rule: str,
) -> None:  # fmt: skip
    """Counts votes of one bit on some words of a message, and decides.

    Args:
        rows: The message's rows.
        planes: Votes of each rank on these words, int64, shape (N, W) or longer.
        packed: One bit per row of the message and rank, int64, shape (N, ceil(R / 64)).
        verdict: Output, planes of the verdict, int64; zero after `size` words.
        row_voters: Output, number of voters of each of the message's rows, int32, shape (R,).
        first: The first of these words in the message.
        size: Number of words.
        tie: Word that decides ties.
        rule: "alternate", "zero", or "average".
    """
    plane_words = verdict.shape[1]
    programs = -(-max(plane_words, row_voters.numel()) // WORDS_OF_A_PROGRAM)
    launch(
        triton_kernels().count_votes, planes.device, programs, *lines_of(rows).arguments,
        *addresses(planes), planes.stride(0), first, size, *addresses(packed), packed.stride(0),
        row_voters.numel(), *addresses(verdict), plane_words, *addresses(row_voters), tie,
        planes.shape[0], rule,
    )  # fmt: skip
