"""Lion on one message, from its gradients to its parameters.

Lion is Chen et al. 2023, arXiv 2302.06675, Algorithm 2. A rank sends sign(u), or a level:

    u = beta1 * m + (1 - beta1) * g
    m = beta2 * m + (1 - beta2) * g
    p = p * (1 - lr * weight_decay) - lr * v          v = sign(u) for one rank alone

The ranks have exchanged headers before (`ranks.agreement`). `voted` is a message's step. It is
suspended while its data travel, and `in_lockstep` resumes all messages in turns, so one is encoded
while another is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_dlion.exchange import codec
from hf_dlion.exchange.codec import WORD
from hf_dlion.exchange.routes import Verdict, Votes, verdict_of
from hf_dlion.exchange.rule import Average, Majority, Rule
from hf_dlion.exchange.wire import Wire
from hf_dlion.options import Groups
from hf_dlion.ranks.agreement import Agreed, Report
from hf_dlion.ranks.meeting import Kind
from hf_dlion.ranks.topology import Topology
from hf_dlion.vote import on_gpu
from hf_dlion.vote.context import StepContext
from hf_dlion.vote.idle_rows import silence
from hf_dlion.vote.layout import Layout, LocalState, Message, Piece, Slot
from hf_dlion.vote.rounding import MOMENTA, PARAMETERS

# Returns what a piece's votes encode, in scratch memory: its direction u, or its displacement w.
Source = Callable[[Piece], Tensor]
# Suspended whenever its data travel.
Task = Generator[None, None, None]
# Words of a message that `WireStats.agreement` and `remainder` look at.
SAMPLE = 1024


class Schedule:
    """When the ranks exchange, and what a rank keeps meanwhile: in every step, and nothing.

    `local_steps.LocalSteps` is the schedule of `vote_every` above 1.

    Attributes:
        is_local: Whether weights differ between ranks within a period.
        states: What a period keeps, by parameter; empty between two periods.
        exchanges: Number of exchanges that ended a period.
        shown: Whether the model holds the anchors, in `common_weights`.
    """

    is_local = False
    exchanges, shown = 0, False

    def __init__(self) -> None:
        """Keeps nothing."""
        self.states: dict[Tensor, LocalState] = {}

    @property
    def steps(self) -> int:
        """Number of steps since the last exchange."""
        return 0

    def next_kind(self, layout: Layout) -> Kind:
        """Returns what all ranks do in the next step."""
        return Kind.STEP

    def begin(self, layout: Layout, groups: Groups) -> None:
        """Prepares a step, or refuses it."""

    def settle(self, report: Report, layout: Layout | None, node: Wire | None) -> None:
        """Does what the ranks of a node do before any header."""

    def presence(self, report: Report, layout: Layout) -> list[bool]:
        """Returns for each tensor of the layout whether this rank has what a header asks for."""
        return report.present

    def equal_values(self, kind: Kind) -> dict[str, object]:
        """Returns what must be equal on all ranks, by name."""
        return {}

    def equal_history(self, kind: Kind) -> dict[str, object]:
        """Returns what must have been equal in each step, by name."""
        return {}

    def is_own_step(self, kind: Kind, agreed: Agreed, ranks: Topology | None, steps: int) -> bool:
        """Returns whether a step after so many others moves weights of this rank's own."""
        return False

    def forget_meeting(self) -> None:
        """Makes the next step begin with a header."""

    def reset(self, exchanges: int = 0) -> None:
        """Forgets the period; the model keeps what it holds."""


def vote(layout: Layout, context: StepContext, ranks: Topology) -> None:
    """Takes a step by votes, which every voter must take. Bytes: see `exchange.routes`."""
    stats, options = ranks.voters.stats, context.options
    rule: Rule = Majority(options.ties)
    if options.aggregation == "average":
        rule = Average(ranks.voters.world_size, context.bits)
    stats.lap("", layout.device)
    if context.bits > 1 and options.level_scale == "tensor":
        scale_by_tensor(layout, context)
    in_lockstep([voted(message, context, rule, ranks) for message in layout.messages])
    stats.exchanges += 1


def in_lockstep(tasks: Sequence[Task]) -> None:
    """Resumes every task until it is next suspended, in turns, until all have ended.

    So all ranks begin the same collectives in one order, also those of two groups, as NCCL needs.
    """
    while tasks:
        tasks = [task for task in tasks if next(task, task) is not task]


def voted(message: Message, context: StepContext, rule: Rule, ranks: Topology) -> Task:
    """Takes a message's step."""
    voters, stats, options = ranks.voters, ranks.voters.stats, context.options
    kernels = None
    if message.device.type != "cpu" and on_gpu.covers(message, voters.world_size):
        kernels = on_gpu.Step(message, context)
    if kernels is not None and context.bits == 1:
        votes = kernels.encode()
    else:
        votes = encode(message, context, partial(direction, context=context), bits=context.bits)
    stats.lap("encode_s", message.device)
    verdict = yield from verdict_of(
        votes, options.exchange, voters, ranks.node, rule, context.phase
    )
    stats.lap("exchange_s", message.device)
    if message.pieces[0].first == 0 and context.bits == 1 and isinstance(rule, Majority):
        voting = votes.active.to(message.device)[votes.rows.of_word[:SAMPLE]]
        voting &= message.whole[:SAMPLE]
        planes = [plane[:SAMPLE].clone() for plane in verdict.planes]
        stats.sample = votes.planes[0, :SAMPLE].clone(), planes, voting
    if kernels is not None:
        kernels.move(verdict, rule)
    else:
        move(message, verdict, rule, context)
    stats.lap("apply_s", message.device)


def move(message: Message, verdict: Verdict, rule: Rule, context: StepContext) -> None:
    """Moves a message's parameters by its verdict, to the same bits on every rank."""
    active = message.rows.by_word(verdict.active)
    for piece in message.pieces:
        if piece.has("target"):
            delta, lr = (
                piece.memory("direction", context.scratch),
                context.groups[piece.group]["lr"],
            )
            planes = [plane[piece.words] for plane in verdict.planes]
            rule.decode(planes, None if active is None else active[piece.words], float(lr), delta)
            _apply(piece, delta, context)


def plain_lion(messages: Iterable[Message], context: StepContext, *, exact: bool = False) -> None:
    """Takes Lion's step without votes: v = sign(u), sign(0) = 0; see `direction`."""
    if not exact:
        messages = on_gpu.each_device(messages, partial(on_gpu.plain_lion, context=context))
    for piece in (piece for message in messages for piece in message.pieces):
        if piece.has("target"):
            u = direction(piece, context, exact=exact)
            _apply(piece, u.sign_().mul_(float(context.groups[piece.group]["lr"])), context)


def _apply(piece: Piece, delta: Tensor, context: StepContext) -> None:
    """Decays p and subtracts delta, rounding twice: processors differ in fused operations."""
    group, p = context.groups[piece.group], piece.read("target", context.scratch)
    p.mul_(1 - float(group["lr"]) * float(group["weight_decay"])).sub_(delta)
    piece.write("target", p, partial(context.random, PARAMETERS))


def direction(
    piece: Piece, context: StepContext, *, advance: bool = True, exact: bool = False
) -> Tensor:
    """Returns a piece's u = beta1 * m + (1 - beta1) * g, in scratch memory, 0 in old rows.

    `advance` also updates the momentum with beta2. Processors may differ in the last bit, as in
    torch.lerp. With `exact`, each operation rounds by itself, for ranks that must get the same u
    and momentum.
    """
    beta1, beta2 = map(float, context.groups[piece.group]["betas"])
    g, m = piece.read("grad", context.scratch), piece.read("momentum", context.scratch)
    u = piece.memory("direction", context.scratch)
    if exact:
        difference = g - m
        torch.mul(difference, 1 - beta1, out=u).add_(m)
    else:
        torch.lerp(m, g, 1 - beta1, out=u)
    if advance:
        if exact:
            m.add_(difference.mul_(1 - beta2))
        else:
            m.lerp_(g, 1 - beta2)
        # An Inf that rounding to 16 bits makes would decide the vote forever.
        piece.write(
            "momentum", m, partial(context.random, MOMENTA + context.voter), without_infs=True
        )
    for slot, start, stop, at in piece.parts:
        if slot.old is not None and slot.grad is not None:
            silence(u[at : at + stop - start], start, slot.old, slot.size // slot.old.numel())
    return u


def encode(
    message: Message, context: StepContext, source: Source, *, bits: int, by_tensor: bool = False
) -> Votes:
    """Returns the votes of a message, which encode what `source` returns.

    Votes of several bits are relative to the slots' scales with `by_tensor` or
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
            codec.pack(
                codes, bit, out[bit], context.scratch("bit", piece.size, codes.dtype, u.device)
            )
        active = codec.active_words(u, out[0] if bits == 1 else None, phase)
        if active is not None:
            words[piece.words] = active
            all_active = False
    if all_active:
        return Votes(planes, torch.ones(message.rows.count, dtype=torch.bool), message.rows)
    active = message.rows_with(words)
    planes *= active[message.rows.of_word]
    return Votes(planes, active, message.rows)


def _levels(piece: Piece, u: Tensor, context: StepContext, *, bits: int, by_tensor: bool) -> Tensor:
    """Returns a piece's codes of several bits in scratch, uint8, shape (64 * W,)."""
    scratch = piece.memory("levels", context.scratch)
    if by_tensor:
        magnitude = piece.by_word([part.slot.scale for part in piece.parts], u)
    else:
        sums, counts = codec.word_magnitudes(u, scratch)
        magnitude = sums.div_(counts.clamp_min_(1))
    codes = context.scratch("codes", 2 * piece.size, torch.uint8, u.device).view(2, -1)
    return codec.level_codes(u, magnitude, bits, context.zero_phase, codes, scratch)


def scale_by_tensor(layout: Layout, context: StepContext) -> None:
    """Sets every slot's scale to its mean of |u|, in a pass that leaves the momenta as they are."""
    source = partial(direction, context=context, advance=False)
    sums, counts = tensor_sums(layout.slots, layout.messages, source, context)
    for slot, total, count in zip(layout.slots, sums, counts, strict=True):
        slot.scale = total / count


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
        for slot, first, words, words_per_row in message.spans:
            rows = active_rows[row : row + words // words_per_row]
            row += words // words_per_row
            parts[slot].append(total[first : first + words])
            counts[slot] = counts[slot] + rows.sum() * min(words_per_row * WORD, slot.size)
    sums = [_tree_sum(torch.cat(parts[slot])) if parts[slot] else zeros[slot] for slot in slots]
    return sums, [counts[slot].clamp_min(1) for slot in slots]


def tensor_maxima(
    slots: Sequence[Slot], messages: Sequence[Message], source: Source
) -> list[Tensor]:
    """Returns each slot's largest |u|, 0-D, float64; see `tensor_sums`."""
    maxima = {slot: torch.zeros((), dtype=torch.float64, device=slot.device) for slot in slots}
    for piece in (piece for message in messages for piece in message.pieces):
        u = source(piece)
        for slot, start, stop, at in piece.parts:
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
