"""Lion on the pieces of a message, by torch operations, which kernels replace on a GPU.

Lion is Chen et al. 2023, arXiv 2302.06675, Algorithm 2. A rank sends sign(u), or a level:

    u = beta1 * m + (1 - beta1) * g
    m = beta2 * m + (1 - beta2) * g
    p = p * (1 - lr * weight_decay) - lr * v          v = sign(u) for one rank alone

`gpu.form` chooses between these functions and those of `gpu/kernels.py`, which have the same bits.
Nothing else moves weights, but `LocalState` puts anchors into the model and out of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_dlion.core import codec
from hf_dlion.core.codec import WORD
from hf_dlion.core.context import StepContext
from hf_dlion.core.idle_rows import silence
from hf_dlion.core.layout import Layout, Message, Piece
from hf_dlion.core.rounding import COMPENSATIONS, MOMENTA, PARAMETERS
from hf_dlion.core.rule import Rule
from hf_dlion.core.slot import Field, Slot
from hf_dlion.core.votes import Verdict, Votes

# Returns what a piece's votes encode, in scratch memory: its direction u, or its displacement w.
Source = Callable[[Piece], Tensor]


# What moves weights.


def apply_verdict(message: Message, verdict: Verdict, rule: Rule, context: StepContext) -> None:
    """Moves a message's parameters by its verdict, to the same bits on every rank."""
    active = message.rows.by_word(verdict.row_voters)
    for piece in message.pieces:
        if piece.has(Field.MOVING):
            delta = piece.memory("direction", context.scratch)
            lr, planes = context.rates[piece.group].lr, verdict.planes[:, piece.words]
            rule.decode(planes, None if active is None else active[piece.words], lr, delta)
            _decay_and_subtract(piece, delta, context)


def plain_lion(messages: Iterable[Message], context: StepContext, *, exact: bool = False) -> None:
    """Takes Lion's step without votes: v = sign(u), sign(0) = 0.

    With `exact`, ranks with equal gradients and momenta get equal results on all processors.
    """
    for piece in (piece for message in messages for piece in message.pieces):
        if piece.has(Field.MOVING):
            u = exact_direction(piece, context) if exact else direction(piece, context)
            delta = u.sign_().mul_(context.rates[piece.group].lr)
            _decay_and_subtract(piece, delta, context)


def _decay_and_subtract(piece: Piece, delta: Tensor, context: StepContext) -> None:
    """Decays p and subtracts delta, rounding twice: processors differ in fused operations."""
    p = piece.read(Field.MOVING, context.scratch)
    p.mul_(context.rates[piece.group].decay).sub_(delta)
    piece.write(Field.MOVING, p, partial(context.random, PARAMETERS))


def local_step(messages: Iterable[Message], context: StepContext) -> None:
    """Takes a local step: moves this rank's own weights by -lr * sign(u), without decay."""
    for piece in (piece for message in messages for piece in message.pieces):
        if piece.has(Field.GRAD):
            _local_step(piece, context)


def _local_step(piece: Piece, context: StepContext) -> None:
    # lr * sign(u) is exact, so a fused add rounds as two operations do.
    sign, lr = direction(piece, context).sign_(), context.rates[piece.group].lr
    p = piece.read(Field.MOVING, context.scratch)
    if not piece.is_low:
        piece.write(Field.MOVING, p.add_(sign, alpha=-lr), None)
        return
    # y is p to more than 16 bits. What p, its nearest number of 16 bits, leaves of it goes into c.
    c, y = piece.read(Field.COMPENSATION, context.scratch), piece.memory("y", context.scratch)
    torch.add(p, c, out=y)
    piece.write(Field.MOVING, y.add_(sign, alpha=-lr), None, without_infs=True)
    left = y.sub_(piece.read(Field.MOVING, context.scratch))
    random = partial(context.random, COMPENSATIONS + context.voter)
    piece.write(Field.COMPENSATION, left, random)


def move_from_anchor(piece: Piece, mean: Tensor, context: StepContext) -> None:
    """Ends a period of local steps: p = (x - d) * D, with the mean d of the displacements."""
    p = piece.read(Field.MOVING, context.scratch)
    torch.sub(piece.read(Field.ANCHOR, context.scratch), mean, out=p)
    decays = [decay_of(stretch.slot) for stretch in piece.stretches]
    if len(set(decays)) == 1:
        p.mul_(decays[0])
    else:  # A parameter began to train within the period.
        p.view(-1, WORD).mul_(piece.by_word(decays, p).view(-1, 1))
    piece.write(Field.MOVING, p, partial(context.random, PARAMETERS))


def decay_of(slot: Slot) -> float:
    """Returns the decay D of a tensor over a period of local steps."""
    return 1.0 if slot.local is None else slot.local.decay


# What a rank sends.


def direction(piece: Piece, context: StepContext, *, advance: bool = True) -> Tensor:
    """Returns a piece's u = beta1 * m + (1 - beta1) * g, in scratch memory, 0 in old rows.

    `advance` also updates the momentum with beta2. Processors may differ in the last bit, as in
    torch.lerp.
    """
    _, beta1, beta2, _ = context.rates[piece.group]
    g, m = piece.read(Field.GRAD, context.scratch), piece.read(Field.MOMENTUM, context.scratch)
    u = torch.lerp(m, g, 1 - beta1, out=piece.memory("direction", context.scratch))
    if advance:
        _write_momentum(piece, m.lerp_(g, 1 - beta2), context)
    return _without_old_rows(piece, u)


def exact_direction(piece: Piece, context: StepContext) -> Tensor:
    """Returns u and updates the momentum, as `direction`, but each operation rounds by itself."""
    _, beta1, beta2, _ = context.rates[piece.group]
    g, m = piece.read(Field.GRAD, context.scratch), piece.read(Field.MOMENTUM, context.scratch)
    difference, u = g - m, piece.memory("direction", context.scratch)
    torch.mul(difference, 1 - beta1, out=u).add_(m)
    _write_momentum(piece, m.add_(difference.mul_(1 - beta2)), context)
    return _without_old_rows(piece, u)


def _write_momentum(piece: Piece, m: Tensor, context: StepContext) -> None:
    # An Inf that rounding to 16 bits makes would decide the vote forever.
    random = partial(context.random, MOMENTA + context.voter)
    piece.write(Field.MOMENTUM, m, random, without_infs=True)


def _without_old_rows(piece: Piece, u: Tensor) -> Tensor:
    for slot, start, stop, at in piece.stretches:
        if slot.old is not None and slot.grad is not None:
            silence(u[at : at + stop - start], start, slot.old, slot.size // slot.old.numel())
    return u


def encode(
    message: Message, context: StepContext, source: Source, *, bits: int, by_tensor: bool = False
) -> Votes:
    """Returns the votes of a message, which encode what `source` returns.

    Votes of several bits are relative to the slots' magnitudes with `by_tensor` or
    level_scale="tensor", and else to the mean of each word.
    """
    phase = context.zero_phase
    by_tensor |= context.options.level_scale == "tensor"
    planes = torch.empty(bits, message.words, dtype=torch.int64, device=message.device)
    words = torch.ones(message.words, dtype=torch.bool, device=message.device)
    all_active = True
    for piece in message.pieces:
        u, out = source(piece), planes[:, piece.words]
        if bits == 1:
            memory = context.scratch("codes", piece.size, torch.bool, u.device)
            codes = codec.sign_codes(u, phase, memory)
        else:
            codes = _levels(piece, u, context, bits=bits, by_tensor=by_tensor)
        for bit in range(bits):
            memory = context.scratch("bit", piece.size, codes.dtype, u.device)
            codec.pack(codes, bit, out[bit], memory)
        active = codec.active_words(u, out[0] if bits == 1 else None, phase)
        if active is not None:
            words[piece.words] = active
            all_active = False
    if all_active:
        active = torch.ones(len(message.rows), dtype=torch.bool, device=message.device)
        return Votes(planes, active, message.rows)
    active = message.rows_with(words)
    planes *= active[message.rows.of_word]
    return Votes(planes, active, message.rows)


def _levels(piece: Piece, u: Tensor, context: StepContext, *, bits: int, by_tensor: bool) -> Tensor:
    """Returns a piece's codes of several bits in scratch, uint8, shape (64 * W,)."""
    scratch = piece.memory("levels", context.scratch)
    if by_tensor:
        magnitude = piece.by_word([stretch.slot.magnitude for stretch in piece.stretches], u)
    else:
        sums, counts = codec.word_magnitudes(u, scratch)
        magnitude = sums.div_(counts.clamp_min_(1))
    codes = context.scratch("codes", 2 * piece.size, torch.uint8, u.device).view(2, -1)
    return codec.level_codes(u, magnitude, bits, context.zero_phase, codes, scratch)


def set_mean_magnitudes(layout: Layout, context: StepContext) -> None:
    """Sets every slot's magnitude to its mean of |u|, if votes are relative to that of a tensor.

    It takes a pass of its own, which leaves the momenta alone.
    """
    if context.bits == 1 or context.options.level_scale == "word":
        return
    source = partial(direction, context=context, advance=False)
    sums, counts = tensor_sums(layout.slots, layout.messages, source, context)
    for slot, total, count in zip(layout.slots, sums, counts, strict=True):
        slot.magnitude = total / count


def tensor_sums(
    slots: Sequence[Slot], messages: Sequence[Message], source: Source, context: StepContext
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns each slot's sum of |u|, and the number of elements in its active rows, at least 1.

    Both are 0-D, float64, on the slot's device.
    """
    zeros = {slot: torch.zeros((), dtype=torch.float64, device=slot.device) for slot in slots}
    counts, parts = dict(zeros), {slot: list[Tensor]() for slot in slots}
    for message in messages:
        active_words = torch.empty(message.words, dtype=torch.bool, device=message.device)
        total = torch.empty(message.words, dtype=torch.float64, device=message.device)
        for piece in message.pieces:
            u = source(piece)
            active = codec.active_words(u)
            active_words[piece.words] = True if active is None else active
            total[piece.words] = codec.word_sums(u, piece.memory("levels", context.scratch))
        active_rows, row = message.rows_with(active_words), 0
        for slot, first, words, row_words in message.spans:
            rows = active_rows[row : row + words // row_words]
            row += words // row_words
            parts[slot].append(total[first : first + words])
            counts[slot] = counts[slot] + rows.sum() * min(row_words * WORD, slot.size)
    sums = [_tree_sum(torch.cat(parts[slot])) if parts[slot] else zeros[slot] for slot in slots]
    return sums, [counts[slot].clamp_min(1) for slot in slots]


def tensor_maxima(
    slots: Sequence[Slot], messages: Sequence[Message], source: Source
) -> list[Tensor]:
    """Returns each slot's largest |u|, 0-D, float64; see `tensor_sums`."""
    maxima = {slot: torch.zeros((), dtype=torch.float64, device=slot.device) for slot in slots}
    for piece in (piece for message in messages for piece in message.pieces):
        u = source(piece)
        for slot, start, stop, at in piece.stretches:
            # Unlike u.abs().max(), it takes no memory.
            low, high = torch.aminmax(u[at : at + stop - start])
            largest = torch.maximum(high, -low).to(torch.float64)
            maxima[slot] = torch.maximum(maxima[slot], largest)
    return list(maxima.values())


def _tree_sum(values: Tensor) -> Tensor:
    """Returns the sum, adding neighbors, then neighboring sums: in one order on all devices."""
    size = 1 << math.ceil(math.log2(max(len(values), 1)))
    values = torch.nn.functional.pad(values, (0, size - len(values)))
    while len(values) > 1:
        values = values[::2] + values[1::2]
    return values[0]
