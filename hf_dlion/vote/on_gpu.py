"""A step's work on messages whose tensors the kernels cover, in one launch for each of its parts.

It brings addresses and numbers to `kernels`, which have the bits of the functions in `step`,
`local_steps`, and `displacement`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_dlion.exchange import launches
from hf_dlion.exchange.codec import WORD
from hf_dlion.exchange.launches import (
    DTYPES,
    MOST_RANKS,
    Lines,
    Stretch,
    Table,
    abstain,
    addresses,
    refusal,
)
from hf_dlion.exchange.routes import Verdict, Votes
from hf_dlion.exchange.rule import Average, Rule
from hf_dlion.vote.context import StepContext
from hf_dlion.vote.layout import Message, Slot
from hf_dlion.vote.rounding import COMPENSATIONS, MOMENTA, PARAMETERS, key_of

# So many elements of the layout have one key of random bits.
_SAME_KEY = 1 << 33
# Groups of tensors by column.
_GRADIENTS = ("grad", "momentum")


def covers(message: Message, ranks: int = 1) -> bool:
    """Returns whether the kernels do the work of a message that so many voters exchange."""
    if message.device.type not in launches.DEVICES or ranks > MOST_RANKS:
        return False
    for slot in (span.slot for span in message.spans):
        tensors = slot.p, slot.grad, slot.momentum
        if not all([tensor is None or tensor.dtype in DTYPES for tensor in tensors]):
            return False
    return not refusal(message.device)


def each_device(
    messages: Iterable[Message], work: Callable[[list[Message]], None]
) -> list[Message]:
    """Does work on the covered messages of each device; returns the other messages."""
    covered, others = dict[torch.device, list[Message]](), list[Message]()
    for message in messages:
        if covers(message):
            covered.setdefault(message.device, []).append(message)
        else:
            others.append(message)
    for same in covered.values():
        work(same)
    return others


def moved_bytes(kind: str, dtype: torch.dtype) -> float:
    """Returns the bytes per element that a kind of work of `kernels.each_tile` reads and writes."""
    size, is_low = dtype.itemsize, dtype == torch.bfloat16
    # Elements that are read and written, and for each of them the bytes of words of bits.
    elements, others = {
        "encode": (3, 9 / 64), "move": (2, 1 / 8), "step": (5, 0),
        "local step": (7 if is_low else 5, 0),
        "exchange": (2, 5 / 8),  # A verdict of 4 bits and two ranks.
    }[kind]  # fmt: skip
    return elements * size + others


class Part(NamedTuple):
    """A stretch of a slot from element `start`; `number` is that of the element in the layout."""

    slot: Slot
    start: int
    number: int
    stretch: Stretch


def parts_of(message: Message) -> list[Part]:
    """Returns the parts of a message, each as long as possible."""
    begins: dict[Slot, tuple[int, int]] = {}
    stops: dict[Slot, int] = {}
    for piece in message.pieces:
        for slot, start, stop, at in piece.parts:
            begins.setdefault(slot, (start, piece.first + at))
            stops[slot] = stop
    found, row = [], 0
    for slot, word, words, row_words in message.spans:
        (start, number), skipped = begins[slot], 0
        while start < stops[slot]:
            size = min(stops[slot] - start, _SAME_KEY - number % _SAME_KEY)
            stretch = Stretch(size, word + skipped, row, skipped, row_words)
            found.append(Part(slot, start, number, stretch))
            start, number, skipped = start + size, number + size, skipped + size // WORD
        row += words // row_words
    return found


class Step:
    """A step by votes on one message; see `step.encode` and `step.move`."""

    def __init__(self, message: Message, context: StepContext) -> None:
        """Fills the table; votes of several bits are encoded by torch."""
        self._message, self._turn, table = message, context, Table(message.device)
        parts = parts_of(message)
        encodes = context.bits == 1
        voting = [part for part in parts if encodes and part.slot.grad is not None]
        moving = [part for part in parts if part.slot.target is not None]
        numbers = _numbers(context)
        keys = {"key_m": _key(context, MOMENTA + context.voter)}
        self._encode = _lines(table, voting, _GRADIENTS, numbers, keys)
        keys = {"key_p": _key(context, PARAMETERS)}
        self._move = _lines(table, moving, ("target",), numbers, keys)

    def encode(self) -> Votes:
        """Returns the votes, and updates the momenta."""
        return _votes("encode", self._message, self._encode, self._turn)

    def move(self, verdict: Verdict, rule: Rule) -> None:
        """Moves the parameters."""
        ranks = rule.ranks if isinstance(rule, Average) else 1
        _by_verdict("move", self._move, verdict, ranks=ranks, rule=rule.name)


def plain_lion(messages: Sequence[Message], context: StepContext) -> None:
    """Takes a step without votes on messages of one device; see `step.plain_lion`."""
    keys = {"key_m": _key(context, MOMENTA + context.voter), "key_p": _key(context, PARAMETERS)}
    parts = [part for message in messages for part in parts_of(message)]
    moving = [part for part in parts if part.slot.target is not None]
    table = Table(messages[0].device)
    each_tile("step", _lines(table, moving, (*_GRADIENTS, "target"), _numbers(context), keys))


def own_step(messages: Sequence[Message], context: StepContext) -> None:
    """Takes a local step on messages of one device; see `LocalSteps.step`."""
    parts = [part for message in messages for part in parts_of(message)]
    moving = [own for own in parts if own.slot.grad is not None]
    keys = {
        "key_m": _key(context, MOMENTA + context.voter),
        "key_c": _key(context, COMPENSATIONS + context.voter),
    }
    numbers = {**_numbers(context), "decay": lambda slot: 1.0}  # An exchange decays.
    table = Table(messages[0].device)
    each_tile("local step", _lines(table, moving, (*_GRADIENTS, "target", "c"), numbers, keys))


def end_period(
    message: Message, verdict: Verdict, rule: Average, unit: Callable[[Slot], float],
    context: StepContext,
) -> None:  # fmt: skip
    """Moves a message's parameters by an exchange of local steps; see `displacement`."""
    numbers = {"unit": unit, "decay": _decay}
    keys = {"key_p": _key(context, PARAMETERS)}
    moving = [part for part in parts_of(message) if part.slot.x is not None]
    lines = _lines(Table(message.device), moving, ("target", "x"), numbers, keys)
    _by_verdict("exchange", lines, verdict, ranks=rule.ranks, top=rule.top)


def _decay(slot: Slot) -> float:
    return 1.0 if slot.local is None else slot.local.decay


@functools.cache
def _kernels() -> Any:
    """Returns the module of the kernels for tiles; the first call imports triton."""
    import hf_dlion.vote.kernels as kernels

    return kernels


def each_tile(
    kind: str, lines: Iterable[Lines], *, planes: Tensor | None = None, stride: int = 0,
    rows: Tensor | None = None, phase: int = 0, ranks: int = 1, rule: str = "", top: int = 1,
) -> None:  # fmt: skip
    """Does one kind of work, with a launch for each combination of types; see `kernels`."""
    at, at_rows = addresses(planes, rows)
    for own in lines:
        launches.launch(
            _kernels().each_tile, own.table.device, own.programs, *own.arguments, at, stride,
            at_rows, phase % 2, kind, *own.types, ranks, rule, top,
        )  # fmt: skip


def _lines(
    table: Table,
    parts: Sequence[Part],
    tensors: Sequence[str],
    numbers: Mapping[str, Callable[[Slot], float]] = MappingProxyType({}),
    keys: Mapping[str, Callable[[int], int]] = MappingProxyType({}),
) -> list[Lines]:
    """Adds parts to a table, by the types of gradient, momentum, and parameter.

    `tensors` are names of a slot's tensors, and of columns. `numbers` and `keys` return the values
    of their columns for a slot, and for an element's number in the layout.
    """
    kernels, by_types = _kernels(), dict[tuple[Any, ...], list[Part]]()
    known = {torch.float32: kernels.tl.float32, torch.bfloat16: kernels.tl.bfloat16, None: None}
    for part in parts:
        own = [getattr(part.slot, name) if name in tensors else None for name in _TYPED]
        types = tuple(known[None if tensor is None else tensor.dtype] for tensor in own)
        by_types.setdefault(types, []).append(part)
    found = []
    for types, same in by_types.items():
        columns: dict[str, Any] = (
            {"old": [_old(part) for part in same]} if "grad" in tensors else {}
        )
        columns |= {name: [_address(part, name) for part in same] for name in tensors}
        columns |= {
            name: np.array([number(part.slot) for part in same], np.float32).view(np.int32)
            for name, number in numbers.items()
        }
        columns |= {name: [key(part.number) for part in same] for name, key in keys.items()}
        places = {getattr(kernels, name.upper()).value: own for name, own in columns.items()}
        if keys:  # The kernels write, which autograd sees by versions.
            torch.autograd.graph.increment_version(_written(same, tensors))
        found.append(table.add([part.stretch for part in same], types, places))
    return found


_TYPED = ("grad", "momentum", "target")


def _written(parts: Sequence[Part], names: Sequence[str]) -> list[Tensor]:
    tensors = [getattr(part.slot, name) for part in parts for name in names if name != "grad"]
    return [tensor for tensor in tensors if tensor is not None]


def _address(part: Part, name: str) -> int:
    tensor: Tensor | None = getattr(part.slot, name)
    return 0 if tensor is None else tensor.data_ptr() + part.start * tensor.element_size()


def _old(part: Part) -> int:
    """Returns the address of the old rows' flags, from the row in which the part begins."""
    old, (_, _, _, skipped, row_words) = part.slot.old, part.stretch
    return 0 if old is None else old.data_ptr() + (part.start // WORD - skipped) // row_words


def _votes(kind: str, message: Message, lines: list[Lines], context: StepContext) -> Votes:
    """Returns a message's votes on what `kind` encodes, packed for every route."""
    rows, words = message.rows, message.words
    flags = torch.zeros(rows.count, dtype=torch.int8, device=message.device)
    before = -(-rows.count // WORD)
    # After the votes there is room for the padding of `two_phase`.
    size = before + words + MOST_RANKS
    packed = torch.empty(size, dtype=torch.int64, device=message.device)
    planes = packed[before:]
    each_tile(kind, lines, planes=planes, rows=flags, phase=context.zero_phase)
    abstain(rows.lines, words, planes, flags, packed)
    return Votes(planes[:words].view(1, -1), flags.view(torch.bool), rows, packed)


def _by_verdict(kind: str, lines: list[Lines], verdict: Verdict, **given: Any) -> None:
    """Moves by a verdict, which may come from the other form."""
    planes, active = verdict.planes, verdict.active
    if not isinstance(planes, Tensor):
        planes = torch.stack(planes)
    assert active is not None, "only a CPU leaves it out"
    stride, rows = planes.stride(0), active.to(torch.int32)
    each_tile(kind, lines, planes=planes, stride=stride, rows=rows, **given)


def _numbers(context: StepContext) -> dict[str, Callable[[Slot], float]]:
    """Returns the columns of a step's numbers."""
    by_group: list[dict[str, float]] = []
    for group in context.groups:  # Once for each, because a rate may be a tensor on the GPU.
        (beta1, beta2), lr = map(float, group["betas"]), float(group["lr"])
        decay = 1 - lr * float(group["weight_decay"])
        by_group.append({"w1": 1 - beta1, "w2": 1 - beta2, "lr": lr, "decay": decay})

    def number(slot: Slot, *, name: str) -> float:
        return by_group[slot.group][name]

    return {name: functools.partial(number, name=name) for name in ("w1", "w2", "lr", "decay")}


def _key(context: StepContext, stream: int) -> Callable[[int], int]:
    return lambda number: key_of(number, context.step, context.options.seed, stream)
