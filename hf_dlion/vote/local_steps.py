r"""Steps that a rank takes by itself between two exchanges (`vote_every`; docs/rule.md, section 9).

    own weights p    p - p - p - p \                                / p - ...   rank 0
    anchor x         x ------------- w = x - p, a few bits of each -- x - ...   equal on all ranks
    own weights p    p - p - p - p /                                \ p - ...   rank 1

What a message leaves out of w stays in p and is in the next one, so nothing is lost.
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
from hf_dlion.vote.codec import WORD
from hf_dlion.vote.full_precision import sum_over_voters
from hf_dlion.vote.groups import Groups, hyperparameters
from hf_dlion.vote.local import Plan, Tensors
from hf_dlion.vote.message import Message, Piece
from hf_dlion.vote.rounding import DISPLACEMENTS, EXCHANGED, OWN_WEIGHTS, PARAMETERS
from hf_dlion.vote.update import (
    LOW_PRECISION,
    Flat,
    Scratch,
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

# The share of the time that an exchange may take, where a number of local steps is proposed.
LOCAL_SHARE = 0.1
# What a rank sends for a parameter that somebody replaced, in the place of a mean.
_REPLACED = -1.0
_REMEDY = (
    "Before you change weights, call optimizer.detach() on every rank; with DDP or FSDP2, call "
    "optimizer.attach(model) after it"
)


def vote_every_for(step_s: float, exchange_s: float) -> int:
    """Returns the smallest power of two k with which an exchange takes 10% of k steps at most.

    Args:
        step_s: Seconds of a step without exchange.
        exchange_s: Seconds of an exchange.
    """
    steps = exchange_s / (LOCAL_SHARE * step_s)
    return 1 << math.ceil(math.log2(max(steps, 1.0)))


@dataclass(frozen=True)
class Period:
    """The steps since the last exchange, the same on every rank.

    Attributes:
        steps: Their number.
        decays: By group, D: the product of 1 - lr * weight_decay.
        paths: By group, the sum of lr.
        history: Hash of every step's lr, betas and weight decay.
    """

    steps: int = 0
    decays: tuple[float, ...] = ()
    paths: tuple[float, ...] = ()
    history: int = 0

    def and_a_step(self, groups: Groups) -> Period:
        """Returns the period with one more step; a new group begins with it."""
        new = len(groups) - len(self.decays)
        decays, paths = [*self.decays, *[1.0] * new], [*self.paths, *[0.0] * new]
        for g, group in enumerate(groups):
            lr = float(group["lr"])
            decays[g] *= 1 - lr * float(group["weight_decay"])
            paths[g] += lr
        history = digest([self.history, hyperparameters(groups)])
        return Period(self.steps + 1, tuple(decays), tuple(paths), history)


@dataclass(frozen=True)
class _Weights:
    """Flat tensors by index in the layout, None for those without anchor and those left out.

    Attributes:
        wide: Own weights p of 32 and 64 bits.
        wide_anchors: Their anchors.
        low: Own weights of 16 bits.
        low_anchors: Their anchors.
        displacements: Their x - p.
    """

    wide: list[Tensor | None]
    wide_anchors: list[Tensor | None]
    low: list[Tensor | None]
    low_anchors: list[Tensor | None]
    displacements: list[Tensor | None]

    @functools.cached_property
    def any(self) -> list[Tensor | None]:
        """Own weights of all precisions."""
        return [p if p is not None else q for p, q in zip(self.wide, self.low, strict=True)]


@dataclass
class LocalSteps:
    """What a rank keeps for its local steps, by parameter; tensors are flat and of its own part.

    Attributes:
        bits: Of a message.
        period: The steps since the last exchange.
        exchanges: Number of exchanges so far.
        used: Parameters of which this rank had a finite gradient since the last exchange.
        anchors: x; while `swapped`, the own weights of 32 and 64 bits, and nothing of 16.
        displacements: x - p of parameters of 16 bits, in their dtype.
        limits: The largest sum of |x - p| that the last exchange may have left (8 bits: the
            largest |x - p|).
        swapped: Whether the model holds the anchors: between `eval()` and `train()`.
    """

    bits: int
    period: Period = field(default_factory=Period)
    exchanges: int = 0
    used: set[Tensor] = field(default_factory=set)
    anchors: dict[Tensor, Tensor] = field(default_factory=dict)
    displacements: dict[Tensor, Tensor] = field(default_factory=dict)
    limits: dict[Tensor, float] = field(default_factory=dict)
    swapped: bool = False
    _versions: dict[Tensor, int] = field(default_factory=dict)
    _layouts: dict[Tensor, tuple[object, ...]] = field(default_factory=dict)

    def check(
        self, whole: Sequence[Tensor], params: Sequence[Tensor], plan: Plan, turn: Turn
    ) -> None:
        """Refuses what somebody did to parameters that steps would undo or mix up.

        Args:
            whole: The trainable parameters.
            params: Their flat tensors.
            plan: Of those parameters.
            turn: The last step.

        Raises:
            RuntimeError: If a parameter has another dtype or memory layout than its anchor, or one
                of 16 bits has other values than the last step gave it.
        """
        for p in whole:
            if self._layouts.get(p, _layout(p)) != _layout(p):
                raise _changed(p, "its dtype or memory layout was changed")
        if self.swapped:
            return
        touched = [
            p in self.displacements and p._version != self._versions.get(p, p._version)
            for p in whole
        ]
        if any(touched):
            held = [
                flat.clone() if own else None for flat, own in zip(params, touched, strict=True)
            ]
            weights = self._weights(whole, params, touched)
            for message in (*plan.messages, *plan.full):
                for piece in message.pieces:
                    _round_own(piece, weights, turn)
            for p, flat, own in zip(whole, params, held, strict=True):
                if own is not None and not torch.equal(flat, own):
                    raise _changed(p, "its values were changed between two steps")
            self._note_versions(whole)

    def step(self, whole: Sequence[Tensor], tensors: Tensors, plan: Plan, turn: Turn) -> None:
        """Takes a step on this rank's gradients; communicates nothing.

        Args:
            whole: The trainable parameters.
            tensors: Of this step; None for gradients that don't count.
            plan: Of those parameters.
            turn: The step.
        """
        for p, flat, grad in zip(whole, tensors.params, tensors.grads, strict=True):
            if grad is not None:
                self._use(p, flat)
                self.used.add(p)
        weights = self._weights(whole, tensors.params)
        for message in (*plan.messages, *plan.full):
            for piece in message.pieces:
                _own_step(piece, weights, tensors, turn)
        self._note_versions(whole)

    def exchange(
        self,
        whole: Sequence[Tensor],
        params: Sequence[Tensor],
        plan: Plan,
        used_anywhere: Sequence[bool],
        turn: Turn,
        ranks: Topology,
    ) -> list[int]:
        """Exchanges how far the ranks were moved; every rank must call this.

        Bytes: 8 (N - 1) for each trainable parameter, and those of `exchange.routes`.

        Args:
            whole: The trainable parameters.
            params: Their flat tensors, changed in place.
            plan: Of those parameters.
            used_anywhere: By parameter, whether some rank used it.
            turn: The last step.
            ranks: Several voters.

        Returns:
            Indices of parameters that were not finite on this rank, which got the anchor.

        Raises:
            Disagreement: On every rank, before anchors move, if weights were replaced on one.
        """
        stats, voters, now = ranks.voters.stats, ranks.voters, time.perf_counter()
        ballot = replace(turn, step=self.exchanges + 1)
        for p, flat, used in zip(whole, params, used_anywhere, strict=True):
            if used:
                self._use(p, flat)
        weights = self._weights(whole, params, used_anywhere)
        of = functools.partial(_displacement, weights=weights, scratch=turn.scratch)
        lost, limits, scales = self._scales(whole, plan, weights, of, ballot, ranks)

        relative = [_number(s / 2 if self.bits == 8 else s) for s in scales]
        sent = [votes_by(of, message, ballot, relative) for message in plan.messages]
        mean = Average(voters.world_size, self.bits)
        under_way = [
            routes.start(votes, turn.exchange, voters, mean, ballot.step, ranks.node)
            for votes in sent
        ]
        now = stats.add("encode_s", now)
        decays = self.period.decays
        units = [_number(_unit(s, self.bits)) for s in scales]
        for message, votes, verdict in zip(
            plan.messages, sent, routes.complete(under_way), strict=True
        ):
            now = stats.add("exchange_s", now)
            for piece in message.pieces:
                if takes_part(piece, weights.any):
                    heard = _heard(piece, votes, verdict, units, turn, voters.world_size)
                    _settle(piece, heard, weights, decays, turn, ballot)
            now = stats.add("apply_s", now)
        for message in plan.full:
            sums = sum_over_voters(message, weights.any, _moved(message, weights), voters)
            means = [None if own is None else own.div_(voters.world_size) for own in sums]
            now = stats.add("exchange_s", now)
            for piece in message.pieces:
                if takes_part(piece, weights.any):
                    heard = _Heard(read(piece, means, "direction", turn.scratch))
                    _settle(piece, heard, weights, decays, turn, ballot)
            now = stats.add("apply_s", now)

        self.limits |= {p: limits[k] for k, p in enumerate(whole) if used_anywhere[k]}
        self._note_versions(whole)
        self.used, self.period = set(), Period()
        self.exchanges += 1
        stats.exchanges += 1
        return lost

    def _scales(
        self,
        whole: Sequence[Tensor],
        plan: Plan,
        weights: _Weights,
        of: functools.partial[Tensor],
        ballot: Turn,
        ranks: Topology,
    ) -> tuple[list[int], list[float], list[float]]:
        """Returns lost parameters, and each tensor's limit after the exchange, and its scale.

        Every rank must call this. What isn't finite on this rank gets the anchor.
        """
        amounts, counts = _amounts(plan, weights, of, ballot)
        lost = [k for k, amount in enumerate(amounts) if not math.isfinite(amount)]
        for k in lost:
            _give_up(k, weights)
            amounts[k] = 0.0
        replaced = self._replaced(whole, amounts, plan, weights)
        if ranks.voters is not ranks.everyone:  # Voters hear of their own shard or place only.
            flags = ranks.everyone.gather_words([bool(replaced)], "replaced weights").view(-1)
            if bool(flags.any()):
                _raise_replaced("some parameters", flags.nonzero().view(-1).tolist())
        means = [
            _REPLACED if k in replaced else amount / count
            for k, (amount, count) in enumerate(zip(amounts, counts, strict=True))
        ]
        scales = _agreed_scales(means, plan, self.bits, ranks.voters)
        limits = [a + s * n for a, s, n in zip(amounts, scales, counts, strict=True)]
        return lost, limits, scales

    def show_anchors(self, whole: Sequence[Tensor], params: Sequence[Tensor]) -> None:
        """Puts the anchors into the parameters, and keeps the own weights."""
        for p, flat in zip(whole, params, strict=True):
            anchor = self.anchors.get(p)
            if anchor is None:
                continue
            own = None if p in self.displacements else flat.clone()
            flat.copy_(anchor)
            if own is not None:
                anchor.copy_(own)
        self.swapped = True

    def show_own(
        self, whole: Sequence[Tensor], params: Sequence[Tensor], plan: Plan, turn: Turn
    ) -> None:
        """Puts the own weights back, bit for bit.

        Args:
            whole: The trainable parameters.
            params: Their flat tensors, changed in place.
            plan: Of those parameters.
            turn: The last step.
        """
        for p, flat in zip(whole, params, strict=True):
            own = self.anchors.get(p)
            if own is None:
                continue
            anchor, self._layouts[p] = flat.clone(), _layout(p)
            if p not in self.displacements:
                flat.copy_(own)
            own.copy_(anchor)
        weights = self._weights(whole, params)
        for message in (*plan.messages, *plan.full):
            for piece in message.pieces:
                _round_own(piece, weights, turn)
        self.swapped = False
        self._note_versions(whole)

    def drop(self, param: Tensor, flat: Tensor) -> None:
        """Puts a parameter's anchor into it, and keeps nothing of it."""
        anchor = self.anchors.pop(param)
        if not self.swapped and anchor.numel() == flat.numel():
            flat.copy_(anchor)
        for kept in (self.displacements, self.limits, self._versions, self._layouts):
            kept.pop(param, None)
        self.used.discard(param)

    def _use(self, param: Tensor, flat: Tensor) -> None:
        if param not in self.anchors:
            self.anchors[param], self._layouts[param] = flat.clone(), _layout(param)
            if param.dtype in LOW_PRECISION:
                self.displacements[param] = torch.zeros_like(flat)

    def _weights(
        self,
        whole: Sequence[Tensor],
        params: Sequence[Tensor],
        chosen: Sequence[bool] | None = None,
    ) -> _Weights:
        """Returns the weights that have an anchor, or only the chosen ones of them."""
        anchors = [self.anchors.get(p) for p in whole]
        if chosen is not None:
            anchors = [x if own else None for x, own in zip(anchors, chosen, strict=True)]
        low = [p.dtype in LOW_PRECISION for p in whole]
        has = [x is not None for x in anchors]
        return _Weights(
            wide=[p if a and not b else None for p, a, b in zip(params, has, low, strict=True)],
            wide_anchors=[None if b else x for x, b in zip(anchors, low, strict=True)],
            low=[p if a and b else None for p, a, b in zip(params, has, low, strict=True)],
            low_anchors=[x if b else None for x, b in zip(anchors, low, strict=True)],
            displacements=[
                self.displacements[p] if a and b else None
                for p, a, b in zip(whole, has, low, strict=True)
            ],
        )

    def _replaced(
        self, whole: Sequence[Tensor], amounts: Sequence[float], plan: Plan, weights: _Weights
    ) -> list[int]:
        """Returns the parameters that are farther from their anchors than steps can have moved."""
        found = []
        for k, p in enumerate(whole):
            x = weights.wide_anchors[k]
            if x is None or not x.numel() or plan.shapes[k].group >= len(self.period.paths):
                continue
            # Rounding can double a move, but not more.
            path = 2 * self.period.paths[plan.shapes[k].group]
            limit = self.limits.get(p, 0.0) + path * (1 if self.bits == 8 else x.numel())
            if amounts[k] > limit:
                size = x.abs().max() if self.bits == 8 else x.abs().sum(dtype=torch.float64)
                if amounts[k] > limit + 16 * torch.finfo(x.dtype).eps * float(size):
                    found.append(k)
        return found

    def _note_versions(self, whole: Sequence[Tensor]) -> None:
        self._versions = {p: p._version for p in whole if p in self.displacements}


@dataclass(frozen=True)
class _Heard:
    """What an exchange says about a piece, each of shape (64 * W,) in the piece's dtype.

    Attributes:
        mean: The mean of what the voters sent.
        own: What this voter sent; None if `mean` is exact.
        silent: Words on which no voter sent anything, bool, shape (W, 1); None if there are none.
    """

    mean: Tensor
    own: Tensor | None = None
    silent: Tensor | None = None


def _own_step(piece: Piece, weights: _Weights, tensors: Tensors, turn: Turn) -> None:
    """Moves this rank's own weights by lr * sign(u)."""
    moves = takes_part(piece, tensors.grads)
    if moves:
        sign = direction(piece, tensors.grads, tensors.momenta, turn, advance=True).sign_()
        lr = float(turn.groups[piece.group]["lr"])  # lr * sign is exact, so fusing changes nothing.
        if takes_part(piece, weights.wide):
            p = read(piece, weights.wide, "parameter", turn.scratch).add_(sign, alpha=-lr)
            write(piece, p, weights.wide, turn, PARAMETERS)
        if takes_part(piece, weights.low):
            c = read(piece, weights.displacements, "displacement", turn.scratch)
            c.add_(sign, alpha=lr)
            write(piece, c, weights.displacements, turn, DISPLACEMENTS + turn.voter)
    _round_own(piece, weights, turn)


def _round_own(piece: Piece, weights: _Weights, turn: Turn) -> None:
    """Sets own weights of 16 bits to x - c, rounded; the same bits as often as it is called."""
    if takes_part(piece, weights.low):
        x = read(piece, weights.low_anchors, "parameter", turn.scratch)
        x.sub_(read(piece, weights.displacements, "displacement", turn.scratch))
        write(piece, x, weights.low, turn, OWN_WEIGHTS + turn.voter)


def _displacement(piece: Piece, weights: _Weights, scratch: Scratch) -> Tensor:
    """Returns how far this rank's weights are from the anchor, x - p, in scratch."""
    if not takes_part(piece, weights.wide):
        return read(piece, weights.displacements, "displacement", scratch)
    x = read(piece, weights.wide_anchors, "anchor", scratch)
    p = read(piece, weights.wide, "parameter", scratch)
    w = torch.sub(x, p, out=scratch("direction", piece.size, piece.dtype, x.device))
    if takes_part(piece, weights.low):
        w.add_(read(piece, weights.displacements, "displacement", scratch))
    return w


def _moved(message: Message, weights: _Weights) -> list[Tensor | None]:
    """Returns the displacements of a message's tensors, whole, in new memory."""
    moved: list[Tensor | None] = [None] * len(weights.wide)
    for index, *_ in message.spans:
        x, p = weights.wide_anchors[index], weights.wide[index]
        moved[index] = weights.displacements[index] if x is None or p is None else x - p
    return moved


def _amounts(
    plan: Plan, weights: _Weights, of: functools.partial[Tensor], ballot: Turn
) -> tuple[list[float], list[float]]:
    """Returns each tensor's sum of |w| and number of elements, or its largest |w| and 1."""
    messages = [*plan.messages, *plan.full]
    if ballot.bits == 8:
        maxima = tensor_maxima(messages, weights.any, of)
        return _numbers(maxima), [1.0] * len(maxima)
    sums, counts = tensor_sums(messages, weights.any, of, ballot)
    return _numbers(sums), _numbers(counts)


def _give_up(index: int, weights: _Weights) -> None:
    """Sets own weights to the anchor."""
    p, x, c = weights.any[index], weights.wide_anchors[index], weights.displacements[index]
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
        Disagreement: If weights were replaced on a voter.
    """
    words = torch.tensor(means, dtype=torch.float64).view(torch.int64)
    table = voters.gather_words(words, "means of displacements").view(torch.float64).tolist()
    for index in range(len(means)):
        ranks = [voters.ranks[v] for v, own in enumerate(table) if own[index] == _REPLACED]
        if ranks:
            _raise_replaced(repr(plan.lines[index][0]), ranks)
    scales = []
    for own in zip(*table, strict=True):
        heard = [mean for mean in own if mean > 0.0]
        total = max(heard, default=0.0) if bits == 8 else sum(heard)
        scales.append(total if bits == 8 else total / max(len(heard), 1))
    return scales


def _raise_replaced(what: str, ranks: Sequence[int]) -> NoReturn:
    raise Disagreement(
        f"the weights of {what} on {named_ranks(ranks)} are farther from the last exchange's than "
        f"steps can have moved them: something replaced them. {_REMEDY}"
    )


def _changed(param: Tensor, how: str) -> RuntimeError:
    return RuntimeError(
        f"a {param.dtype} parameter of shape {tuple(param.shape)} has local steps, and {how}. "
        f"{_REMEDY}"
    )


def _layout(param: Tensor) -> tuple[object, ...]:
    return param.dtype, param.shape, param.stride()


def _unit(scale: float, bits: int) -> float:
    """Returns what a level of 1 stands for."""
    return {1: scale, 2: 0.625 * scale, 4: scale / 7, 8: scale / 254}[bits]


def _heard(
    piece: Piece, votes: Votes, verdict: Verdict, units: Flat, turn: Turn, voters: int
) -> _Heard:
    """Returns what a verdict and this rank's votes say about a piece."""
    bits, rows = votes.planes.shape[0], votes.rows.of_word[piece.words]
    mean = turn.scratch("mean", piece.size, piece.dtype, piece.device)
    own = turn.scratch("own", piece.size, piece.dtype, piece.device)
    count = None if verdict.voters is None else verdict.voters[rows]
    spoken = votes.active.to(rows.device, torch.int64)[rows]
    # One tensor's unit is a number, which saves a pass over both.
    shared = float(torch.as_tensor(units[piece.parts[0].tensor])) if len(piece.parts) == 1 else 1.0
    planes = [plane[piece.words] for plane in verdict.planes]
    Average(voters, bits).move(planes, count, shared, mean)
    Average(1, bits).move([plane[piece.words] for plane in votes.planes], spoken, shared, own)
    if len(piece.parts) > 1:
        unit = by_word(piece, units, mean).view(-1, 1)
        mean.view(-1, WORD).mul_(unit)
        own.view(-1, WORD).mul_(unit)
    return _Heard(mean, own, None if count is None else (count == 0).view(-1, 1))


def _settle(
    piece: Piece,
    heard: _Heard,
    weights: _Weights,
    decays: Sequence[float],
    turn: Turn,
    ballot: Turn,
) -> None:
    """Moves anchors by the mean, and takes what was sent out of the displacements."""
    scratch, decay = turn.scratch, decays[piece.group]
    if takes_part(piece, weights.wide):
        x = read(piece, weights.wide_anchors, "anchor", scratch).sub_(heard.mean).mul_(decay)
        write(piece, x, weights.wide_anchors, ballot, PARAMETERS)
        p = read(piece, weights.wide, "parameter", scratch)
        if heard.own is None:
            p.copy_(x)
        else:
            p.add_(heard.own).sub_(heard.mean).mul_(decay)
        write(piece, p, weights.wide, turn, PARAMETERS)
    if takes_part(piece, weights.low):
        y = read(piece, weights.low_anchors, "parameter", scratch).sub_(heard.mean).mul_(decay)
        write(piece, y, weights.low_anchors, ballot, PARAMETERS)
        left = read(piece, weights.low_anchors, "anchor", scratch).sub_(y)
        if heard.own is not None:
            if heard.silent is not None:
                left.view(-1, WORD).masked_fill_(heard.silent, 0.0)
            c = read(piece, weights.displacements, "displacement", scratch)
            left = c.sub_(heard.own).mul_(decay).add_(left)
        write(piece, left, weights.displacements, ballot, EXCHANGED + turn.voter)
        _round_own(piece, weights, turn)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _numbers(values: Sequence[Tensor]) -> list[float]:
    """Returns numbers of one device or several, for which the host waits once."""
    if not values:
        return []
    numbers: list[float] = torch.stack([own.to(values[0].device) for own in values]).tolist()
    return numbers
