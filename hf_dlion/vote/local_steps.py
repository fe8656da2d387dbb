r"""Steps that a rank takes by itself between two exchanges (`vote_every`; docs/rule.md, section 9).

    own weights p    p - p - p - p \                                / p - ...   rank 0
    anchor x         x ------------- w = x - p, a few bits of each -- x - ...   equal on all ranks
    own weights p    p - p - p - p /                                \ p - ...   rank 1

The part of w that a message leaves out stays in p and is in the next message (error feedback).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
from torch import Tensor

from hf_dlion.exchange import routes
from hf_dlion.exchange.routes import Verdict, Votes
from hf_dlion.exchange.rule import Average
from hf_dlion.exchange.wire import Wire, named_ranks
from hf_dlion.ranks.agreement import Disagreement
from hf_dlion.ranks.fingerprint import digest
from hf_dlion.ranks.topology import Topology
from hf_dlion.vote.codec import WORD, divided
from hf_dlion.vote.full_precision import sum_over_voters
from hf_dlion.vote.groups import Groups, hyperparameters
from hf_dlion.vote.local import Plan, Tensors, Trainable
from hf_dlion.vote.message import Piece
from hf_dlion.vote.rounding import DISPLACEMENTS, EXCHANGED, OWN_WEIGHTS, PARAMETERS
from hf_dlion.vote.update import (
    LOW_PRECISION,
    Flat,
    Scratch,
    Source,
    Turn,
    by_word,
    direction,
    read,
    takes_part,
    tensor_maxima,
    tensor_sums,
    votes_by,
    write,
)

# `vote_every_for` aims at this share of the time for exchanges, and proposes at most so many steps,
# because one exchange in 160 steps cost loss (docs/results.md).
LOCAL_SHARE, MOST_STEPS = 0.1, 64
# Sent in the place of a mean if a parameter's weights were replaced on this rank.
_REPLACED = -1.0
_REMEDY = (
    "Before you change weights, call optimizer.detach() on every rank; with DDP or FSDP2, call "
    "optimizer.attach(model) after it"
)


def vote_every_for(step_s: float, exchange_s: float) -> int:
    """Returns the smallest power of two k for which an exchange takes at most 10% of k steps.

    It is at most 64.

    Args:
        step_s: Seconds of a step without exchange.
        exchange_s: Seconds of an exchange.
    """
    steps = exchange_s / (LOCAL_SHARE * step_s)
    return min(1 << math.ceil(math.log2(max(steps, 1.0))), MOST_STEPS)


@dataclass(frozen=True)
class Period:
    """The steps since the last exchange, the same on every rank.

    Attributes:
        steps: Number of steps.
        decays: Product D of 1 - lr * weight_decay, by parameter group.
        paths: Sum of lr, by parameter group.
        history: Hash of every step's lr, betas and weight decay.
    """

    steps: int = 0
    decays: tuple[float, ...] = ()
    paths: tuple[float, ...] = ()
    history: int = 0

    def and_a_step(self, groups: Groups) -> Period:
        """Returns the period with one more step; a new group begins with this step."""
        new = len(groups) - len(self.decays)
        decays, paths = [*self.decays, *[1.0] * new], [*self.paths, *[0.0] * new]
        for g, group in enumerate(groups):
            lr = float(group["lr"])
            decays[g] *= 1 - lr * float(group["weight_decay"])
            paths[g] += lr
        history = digest([self.history, hyperparameters(groups)])
        return Period(self.steps + 1, tuple(decays), tuple(paths), history)


class _Weights:
    """Flat tensors by index in the layout; None for a parameter that has no anchor or isn't chosen.

    A parameter of 32 or 64 bits ("wide") keeps p and x. A parameter of 16 bits ("low") also keeps
    x - p.

    Attributes:
        own: Own weights p, wide and low.
        wide: Own weights p, wide only.
        wide_anchors: Anchors x of `wide`.
        low: Own weights p, low only.
        low_anchors: Anchors x of `low`.
        displacements: x - p of `low`.
    """

    def __init__(self, count: int) -> None:
        """Begins without weights.

        Args:
            count: Number of tensors in the layout.
        """
        self.own: list[Tensor | None] = [None] * count
        self.wide: list[Tensor | None] = [None] * count
        self.wide_anchors: list[Tensor | None] = [None] * count
        self.low: list[Tensor | None] = [None] * count
        self.low_anchors: list[Tensor | None] = [None] * count
        self.displacements: list[Tensor | None] = [None] * count


@dataclass
class LocalSteps:
    """State of a rank's local steps, by parameter; tensors are flat and this rank's parts.

    Attributes:
        bits: Bits per element of a message.
        period: The steps since the last exchange.
        exchanges: Number of exchanges so far.
        used: Parameters of which this rank had a finite gradient since the last exchange.
        moved: Parameters that local steps may have moved. One that is frozen leaves them in the
            next exchange, and then has the common weights.
        anchors: Anchors x. While `swapped`, own weights of 32 and 64 bits, and for 16 bits tensors
            of any value.
        displacements: x - p of parameters of 16 bits, in their dtype.
        limits: Largest sum of |x - p| that the last exchange can have left (with 8 bits the
            largest |x - p|).
        swapped: Whether the model holds the anchors, as between `eval()` and `train()`.
    """

    bits: int
    period: Period = field(default_factory=Period)
    exchanges: int = 0
    used: set[Tensor] = field(default_factory=set)
    moved: set[Tensor] = field(default_factory=set)
    anchors: dict[Tensor, Tensor] = field(default_factory=dict)
    displacements: dict[Tensor, Tensor] = field(default_factory=dict)
    limits: dict[Tensor, float] = field(default_factory=dict)
    swapped: bool = False
    _versions: dict[Tensor, int] = field(default_factory=dict)
    _layouts: dict[Tensor, tuple[object, ...]] = field(default_factory=dict)

    def check(self, trainable: Trainable, turn: Turn) -> None:
        """Refuses changes to parameters that a step would undo or mix up.

        Args:
            trainable: The trainable parameters.
            turn: The last step.

        Raises:
            RuntimeError: If a parameter has another dtype or memory layout than its anchor, or a
                parameter of 16 bits has other values than after the last step.
        """
        for p in trainable.params:
            if self._layouts.get(p, _layout(p)) != _layout(p):
                raise _changed(p, "its dtype or memory layout was changed")
        if self.swapped:
            return
        # A version also counts writes that change no value, so the values are compared then.
        written = [
            p in self.displacements and p._version != self._versions.get(p, p._version)
            for p in trainable.params
        ]
        if any(written):
            found = [
                flat.clone() if was_written else None
                for flat, was_written in zip(trainable.flat, written, strict=True)
            ]
            self._round_all(trainable, self._weights(trainable, written), turn)
            for p, flat, values in zip(trainable.params, trainable.flat, found, strict=True):
                if values is not None and not torch.equal(flat, values):
                    raise _changed(p, "its values were changed between two steps")
            self._note_versions(trainable)

    def step(self, trainable: Trainable, tensors: Tensors, turn: Turn) -> None:
        """Takes a step on this rank's gradients, without communication.

        Args:
            trainable: The trainable parameters, changed in place.
            tensors: Gradients and momenta of this step; None for gradients that don't count.
            turn: The step.
        """
        self.moved.update(trainable.params)
        for p, flat, grad in zip(trainable.params, trainable.flat, tensors.grads, strict=True):
            if grad is not None:
                self._add_anchor(p, flat)
                self.used.add(p)
        weights = self._weights(trainable)
        for message in (*trainable.plan.messages, *trainable.plan.full):
            for piece in message.pieces:
                _own_step(piece, weights, tensors, turn)
        self._note_versions(trainable)

    def exchange(
        self, trainable: Trainable, used_anywhere: Sequence[bool], turn: Turn, ranks: Topology
    ) -> list[int]:
        """Averages how far the ranks were moved; every rank must call this.

        Bytes: 8 (N - 1) for each trainable parameter, and those of `exchange.routes`.

        Args:
            trainable: The trainable parameters, changed in place.
            used_anywhere: Whether some rank used each parameter.
            turn: The last step.
            ranks: The groups of ranks, with several voters.

        Returns:
            Indices of parameters that weren't finite on this rank and were reset to the anchor.

        Raises:
            Disagreement: On every rank, before anchors move, if weights were replaced on one.
        """
        plan, voters, now = trainable.plan, ranks.voters, time.perf_counter()
        # Votes, and the rounding of what moves, depend on the number of the exchange.
        exchange_turn = replace(turn, step=self.exchanges + 1)
        for p, flat, used in zip(trainable.params, trainable.flat, used_anywhere, strict=True):
            if used:
                self._add_anchor(p, flat)
        weights = self._weights(trainable, used_anywhere)
        source = functools.partial(_displacement, weights=weights, scratch=turn.scratch)
        reset, limits, scales = self._scales(trainable, weights, source, exchange_turn, ranks)

        # Encode and send all messages, then decode and apply one after the other.
        magnitudes = [_number(s / 2 if self.bits == 8 else s) for s in scales]
        sent = [votes_by(source, message, exchange_turn, magnitudes) for message in plan.messages]
        mean = Average(voters.world_size, self.bits)
        under_way = [
            routes.start(votes, turn.exchange, voters, ranks.node, mean, exchange_turn.step)
            for votes in sent
        ]
        words = [message.words for message in plan.messages]
        now = voters.stats.add("encode_s", now)
        units = [_number(_unit(s, self.bits)) for s in scales]
        for message, votes, verdict in zip(
            plan.messages, sent, routes.complete(under_way, words, ranks.node), strict=True
        ):
            now = voters.stats.add("exchange_s", now)
            for piece in message.pieces:
                if takes_part(piece, weights.own):
                    outcome = _decoded(piece, votes, verdict, units, turn, voters.world_size)
                    _move(piece, outcome, weights, self.period.decays, turn, exchange_turn)
            now = voters.stats.add("apply_s", now)
        # Tensors of `full_precision` are averaged without votes.
        sums = sum_over_voters(plan.full, weights.own, _displacements(plan, weights), voters)
        means = [None if total is None else divided(total, voters.world_size) for total in sums]
        now = voters.stats.add("exchange_s", now)
        for message in plan.full:
            for piece in message.pieces:
                if takes_part(piece, weights.own):
                    outcome = _Outcome(read(piece, means, "direction", turn.scratch))
                    _move(piece, outcome, weights, self.period.decays, turn, exchange_turn)
        voters.stats.add("apply_s", now)

        self.limits |= {p: limits[k] for k, p in enumerate(trainable.params) if used_anywhere[k]}
        for p, flat in zip(trainable.params, trainable.flat, strict=True):
            if not p.requires_grad:
                self.drop(p, flat)
        self._note_versions(trainable)
        self.used, self.period = set(), Period()
        self.exchanges += 1
        voters.stats.exchanges += 1
        return reset

    def _scales(
        self,
        trainable: Trainable,
        weights: _Weights,
        source: Source,
        exchange_turn: Turn,
        ranks: Topology,
    ) -> tuple[list[int], list[float], list[float]]:
        """Returns indices of reset parameters, each tensor's next limit, and its scale.

        Every rank must call this. Parameters that aren't finite on this rank are reset to anchors.
        """
        amounts, counts = _amounts(trainable.plan, weights, source, exchange_turn)
        reset = [k for k, amount in enumerate(amounts) if not math.isfinite(amount)]
        for k in reset:
            _reset(k, weights)
            amounts[k] = 0.0
        replaced = self._replaced(trainable, amounts, weights)
        # The means below only reach this rank's voters, but all ranks must raise.
        if ranks.voters is not ranks.everyone:
            flags = ranks.everyone.gather_words([bool(replaced)], "replaced weights").view(-1)
            if bool(flags.any()):
                _raise_replaced("some parameters", flags.nonzero().view(-1).tolist())
        means = [
            _REPLACED if k in replaced else amount / count
            for k, (amount, count) in enumerate(zip(amounts, counts, strict=True))
        ]
        scales = _agreed_scales(means, trainable.plan, self.bits, ranks.voters)
        limits = [a + s * n for a, s, n in zip(amounts, scales, counts, strict=True)]
        return reset, limits, scales

    def show_anchors(self, trainable: Trainable) -> None:
        """Puts the anchors into the parameters, and keeps the own weights in their place."""
        for p, flat in zip(trainable.params, trainable.flat, strict=True):
            anchor = self.anchors.get(p)
            if anchor is None:
                continue
            if p in self.displacements:  # Own weights follow from anchor and displacement.
                flat.copy_(anchor)
            else:
                own = flat.clone()
                flat.copy_(anchor)
                anchor.copy_(own)
        self.swapped = True

    def show_own(self, trainable: Trainable, turn: Turn) -> None:
        """Puts the own weights back, bit for bit.

        Args:
            trainable: The trainable parameters, changed in place.
            turn: The last step.
        """
        for p, flat in zip(trainable.params, trainable.flat, strict=True):
            kept = self.anchors.get(p)
            if kept is None:
                continue
            anchor, self._layouts[p] = flat.clone(), _layout(p)
            if p not in self.displacements:
                flat.copy_(kept)
            kept.copy_(anchor)
        self._round_all(trainable, self._weights(trainable), turn)
        self.swapped = False
        self._note_versions(trainable)

    def drop(self, param: Tensor, flat: Tensor) -> None:
        """Puts a parameter's anchor into it, and forgets the parameter."""
        anchor = self.anchors.pop(param, None)
        if anchor is not None and not self.swapped and anchor.numel() == flat.numel():
            flat.copy_(anchor)
        for by_param in (self.displacements, self.limits, self._versions, self._layouts):
            by_param.pop(param, None)
        self.used.discard(param)
        self.moved.discard(param)

    def _add_anchor(self, param: Tensor, flat: Tensor) -> None:
        """Copies a parameter to its anchor, unless it has one."""
        if param not in self.anchors:
            self.anchors[param], self._layouts[param] = flat.clone(), _layout(param)
            if param.dtype in LOW_PRECISION:
                self.displacements[param] = torch.zeros_like(flat)

    def _weights(self, trainable: Trainable, chosen: Sequence[bool] | None = None) -> _Weights:
        """Returns the weights of all parameters that have an anchor, or of the chosen ones."""
        weights = _Weights(len(trainable.params))
        for k, (p, flat) in enumerate(zip(trainable.params, trainable.flat, strict=True)):
            anchor = self.anchors.get(p)
            if anchor is None or (chosen is not None and not chosen[k]):
                continue
            weights.own[k] = flat
            if p.dtype in LOW_PRECISION:
                weights.low[k], weights.low_anchors[k] = flat, anchor
                weights.displacements[k] = self.displacements[p]
            else:
                weights.wide[k], weights.wide_anchors[k] = flat, anchor
        return weights

    def _replaced(
        self, trainable: Trainable, amounts: Sequence[float], weights: _Weights
    ) -> list[int]:
        """Returns indices of parameters farther from their anchors than steps can move them."""
        found = []
        for k, p in enumerate(trainable.params):
            x, group = weights.wide_anchors[k], trainable.plan.shapes[k].group
            if x is None or not x.numel() or group >= len(self.period.paths):
                continue
            # Rounding can double a move, but not more.
            path = 2 * self.period.paths[group]
            limit = self.limits.get(p, 0.0) + path * (1 if self.bits == 8 else x.numel())
            if amounts[k] > limit:
                size = x.abs().max() if self.bits == 8 else x.abs().sum(dtype=torch.float64)
                if amounts[k] > limit + 16 * torch.finfo(x.dtype).eps * float(size):
                    found.append(k)
        return found

    def _round_all(self, trainable: Trainable, weights: _Weights, turn: Turn) -> None:
        for message in (*trainable.plan.messages, *trainable.plan.full):
            for piece in message.pieces:
                _round_own(piece, weights, turn)

    def _note_versions(self, trainable: Trainable) -> None:
        self._versions = {p: p._version for p in trainable.params if p in self.displacements}


@dataclass(frozen=True)
class _Outcome:
    """What the voters sent of a piece, each of shape (64 * W,) in the piece's dtype.

    Attributes:
        mean: Mean of what the voters sent.
        sent: What this voter sent; None if `mean` is exact.
        silent: Words on which every voter abstained, bool, shape (W, 1); None if there are none.
    """

    mean: Tensor
    sent: Tensor | None = None
    silent: Tensor | None = None


def _own_step(piece: Piece, weights: _Weights, tensors: Tensors, turn: Turn) -> None:
    """Moves this rank's own weights by lr * sign(u)."""
    if takes_part(piece, tensors.grads):
        sign = direction(piece, tensors.grads, tensors.momenta, turn, advance=True).sign_()
        # lr * sign(u) is exact, so a fused add rounds as two operations do.
        lr = float(turn.groups[piece.group]["lr"])
        if takes_part(piece, weights.wide):
            p = read(piece, weights.wide, "parameter", turn.scratch).add_(sign, alpha=-lr)
            write(piece, p, weights.wide, turn, PARAMETERS)
        if takes_part(piece, weights.low):
            c = read(piece, weights.displacements, "displacement", turn.scratch)
            c.add_(sign, alpha=lr)
            write(piece, c, weights.displacements, turn, DISPLACEMENTS + turn.voter)
    _round_own(piece, weights, turn)


def _round_own(piece: Piece, weights: _Weights, turn: Turn) -> None:
    """Sets own weights of 16 bits to x - c, rounded; a second call gives the same bits."""
    if takes_part(piece, weights.low):
        x = read(piece, weights.low_anchors, "parameter", turn.scratch)
        x.sub_(read(piece, weights.displacements, "displacement", turn.scratch))
        write(piece, x, weights.low, turn, OWN_WEIGHTS + turn.voter)


def _displacement(piece: Piece, weights: _Weights, scratch: Scratch) -> Tensor:
    """Returns how far this rank's weights are from the anchor, x - p, in scratch memory."""
    if not takes_part(piece, weights.wide):
        return read(piece, weights.displacements, "displacement", scratch)
    x = read(piece, weights.wide_anchors, "anchor", scratch)
    p = read(piece, weights.wide, "parameter", scratch)
    w = torch.sub(x, p, out=scratch("direction", piece.size, piece.dtype, x.device))
    if takes_part(piece, weights.low):
        w.add_(read(piece, weights.displacements, "displacement", scratch))
    return w


def _displacements(plan: Plan, weights: _Weights) -> list[Tensor | None]:
    """Returns x - p of the tensors of `full_precision`, by index in the layout."""
    found: list[Tensor | None] = [None] * len(weights.own)
    for index in plan.full_set:
        x, p = weights.wide_anchors[index], weights.wide[index]
        found[index] = weights.displacements[index] if x is None or p is None else x - p
    return found


def _amounts(
    plan: Plan, weights: _Weights, source: Source, exchange_turn: Turn
) -> tuple[list[float], list[float]]:
    """Returns each tensor's sum of |w| and number of elements; with 8 bits largest |w| and 1."""
    messages = [*plan.messages, *plan.full]
    if exchange_turn.bits == 8:
        maxima = tensor_maxima(messages, weights.own, source)
        return _numbers(maxima), [1.0] * len(maxima)
    sums, counts = tensor_sums(messages, weights.own, source, exchange_turn)
    return _numbers(sums), _numbers(counts)


def _reset(index: int, weights: _Weights) -> None:
    """Sets a parameter's own weights to its anchor."""
    p, x, c = weights.own[index], weights.wide_anchors[index], weights.displacements[index]
    x = weights.low_anchors[index] if x is None else x
    assert p is not None
    assert x is not None
    p.copy_(x)
    if c is not None:
        c.zero_()


def _agreed_scales(means: Sequence[float], plan: Plan, bits: int, voters: Wire) -> list[float]:
    """Returns each tensor's scale, the same on all voters, which must all call this.

    Bytes per rank: 8 (N - 1) for each tensor.

    Raises:
        Disagreement: On every voter, if weights were replaced on one.
    """
    words = torch.tensor(means, dtype=torch.float64).view(torch.int64)
    table = voters.gather_words(words, "means of displacements").view(torch.float64).tolist()
    for index in range(len(means)):
        ranks = [voters.ranks[v] for v, row in enumerate(table) if row[index] == _REPLACED]
        if ranks:
            _raise_replaced(repr(plan.lines[index][0]), ranks)
    scales = []
    for by_voter in zip(*table, strict=True):
        positive = [mean for mean in by_voter if mean > 0.0]
        if bits == 8:
            scales.append(max(positive, default=0.0))
        else:
            scales.append(math.fsum(positive) / max(len(positive), 1))
    return scales


def _raise_replaced(what: str, ranks: Sequence[int]) -> NoReturn:
    raise Disagreement(
        f"the weights of {what} on {named_ranks(ranks)} are farther from the last exchange's than "
        f"steps can have moved them, so something replaced them. {_REMEDY}"
    )


def _changed(param: Tensor, how: str) -> RuntimeError:
    return RuntimeError(
        f"a {param.dtype} parameter of shape {tuple(param.shape)} has local steps, and {how}. "
        f"{_REMEDY}"
    )


def _layout(param: Tensor) -> tuple[object, ...]:
    return param.dtype, param.shape, param.stride()


def _unit(scale: float, bits: int) -> float:
    """Returns the displacement of a level of 1."""
    return {1: scale, 2: 0.625 * scale, 4: scale / 7, 8: scale / 254}[bits]


def _decoded(
    piece: Piece, votes: Votes, verdict: Verdict, units: Flat, turn: Turn, voters: int
) -> _Outcome:
    """Returns the mean of all votes on a piece, and this rank's own, as displacements."""
    bits, rows = votes.planes.shape[0], votes.rows.of_word[piece.words]
    mean = turn.scratch("mean", piece.size, piece.dtype, piece.device)
    sent = turn.scratch("own", piece.size, piece.dtype, piece.device)
    count = None if verdict.voters is None else verdict.voters[rows]
    active = votes.active.to(rows.device, torch.int64)[rows]
    # A single tensor's unit goes into `Rule.move`, which saves a pass over both.
    single = len(piece.parts) == 1
    unit = float(torch.as_tensor(units[piece.parts[0].tensor])) if single else 1.0
    planes = [plane[piece.words] for plane in verdict.planes]
    Average(voters, bits).move(planes, count, unit, mean)
    Average(1, bits).move([plane[piece.words] for plane in votes.planes], active, unit, sent)
    if not single:
        unit_of_word = by_word(piece, units, mean).view(-1, 1)
        mean.view(-1, WORD).mul_(unit_of_word)
        sent.view(-1, WORD).mul_(unit_of_word)
    return _Outcome(mean, sent, None if count is None else (count == 0).view(-1, 1))


def _move(
    piece: Piece,
    outcome: _Outcome,
    weights: _Weights,
    decays: Sequence[float],
    turn: Turn,
    exchange_turn: Turn,
) -> None:
    """Moves anchors by the mean, and removes what was sent from the displacements."""
    scratch, decay = turn.scratch, decays[piece.group]
    if takes_part(piece, weights.wide):
        x = read(piece, weights.wide_anchors, "anchor", scratch).sub_(outcome.mean).mul_(decay)
        write(piece, x, weights.wide_anchors, exchange_turn, PARAMETERS)
        p = read(piece, weights.wide, "parameter", scratch)
        if outcome.sent is None:
            p.copy_(x)
        else:
            p.add_(outcome.sent).sub_(outcome.mean).mul_(decay)
        write(piece, p, weights.wide, turn, PARAMETERS)
    if takes_part(piece, weights.low):
        y = read(piece, weights.low_anchors, "parameter", scratch).sub_(outcome.mean).mul_(decay)
        # x - y, what rounding the anchor adds, belongs to the displacement.
        left = torch.neg(y, out=scratch("anchor", piece.size, piece.dtype, piece.device))
        write(piece, y, weights.low_anchors, exchange_turn, PARAMETERS)
        left.add_(read(piece, weights.low_anchors, "parameter", scratch))
        if outcome.sent is not None:
            if outcome.silent is not None:
                left.view(-1, WORD).masked_fill_(outcome.silent, 0.0)
            c = read(piece, weights.displacements, "displacement", scratch)
            left = c.sub_(outcome.sent).mul_(decay).add_(left)
        write(piece, left, weights.displacements, exchange_turn, EXCHANGED + turn.voter)
        _round_own(piece, weights, turn)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _numbers(values: Sequence[Tensor]) -> list[float]:
    """Returns 0-D tensors of one or several devices as numbers; the host waits once."""
    if not values:
        return []
    numbers: list[float] = torch.stack([value.to(values[0].device) for value in values]).tolist()
    return numbers
