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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_dlion.exchange import routes
from hf_dlion.exchange.codec import divided
from hf_dlion.exchange.rule import Average
from hf_dlion.exchange.wire import Wire, named_ranks
from hf_dlion.ranks.fingerprint import digest, numbers
from hf_dlion.ranks.meeting import Disagreement
from hf_dlion.ranks.topology import Topology
from hf_dlion.vote.displacement import (
    Outcome,
    Weights,
    amounts_of,
    decoded,
    displacement_of,
    displacements_of,
    drift_of,
    move_by,
    own_step,
    reset_to_anchor,
    round_own,
    unit_of,
)
from hf_dlion.vote.full_precision import sum_over_voters
from hf_dlion.vote.groups import Groups, hyperparameters
from hf_dlion.vote.tensors import Plan, Trainable
from hf_dlion.vote.update import (
    LOW_PRECISION,
    Source,
    Turn,
    read,
    takes_part,
    votes_by,
)

# `vote_every_for` aims at this share of the time for exchanges, and proposes at most so many steps,
# the largest number that was tried in more than one period (docs/results.md).
LOCAL_SHARE, MOST_STEPS = 0.1, 64
_Pair = tuple[Tensor, Tensor, Tensor]
_DETACH = (
    "call optimizer.detach() on every rank, and with DDP or FSDP2 optimizer.attach(model) after it"
)
_REMEDY = (
    "Write the same values on every rank in `with optimizer.common_weights():`, and set "
    f"max_norm=None in nn.Embedding. Before you load other weights, {_DETACH}"
)


def vote_every_for(step_s: float, exchange_s: float) -> int:
    """Returns the smallest power of two k for which an exchange takes at most 10% of k steps.

    It is at most 64. `step_s` is the time of a step without exchange.
    """
    steps = exchange_s / (LOCAL_SHARE * step_s)
    return min(1 << math.ceil(math.log2(max(steps, 1.0))), MOST_STEPS)


@dataclass(frozen=True)
class Period:
    """The steps since the last exchange, the same on every rank.

    By parameter group, `decays` has the product D of 1 - lr * weight_decay, and `paths` the sum of
    lr. `history` is a hash of every step's lr, betas and weight decay.
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


@dataclass
class LocalSteps:
    """State of a rank's local steps, by parameter; tensors are flat and this rank's parts.

    Attributes:
        used: Parameters of which this rank had a finite gradient since the last exchange.
        moved: Parameters that local steps may have moved. One that is frozen leaves them in the
            next exchange, and then has the common weights.
        anchors: Anchors x.
        displacements: x - p of parameters of 16 bits, in their dtype.
        limits: Largest sum of |x - p| that the last exchange can have left (with 8 bits the largest
            |x - p|).
        shown: Whether the model holds the anchors, as between `eval()` and `train()`.
        aside: Own weights p of 32 and 64 bits while `shown`. Those of 16 bits follow from anchors
            and displacements.
        layout: Plan and parameters with which own weights of 16 bits were last rounded (default:
            None, which means those of the next rounding). Random bits depend on the layout, so a
            later one would give other weights.
    """

    period: Period = field(default_factory=Period)
    exchanges: int = 0
    used: set[Tensor] = field(default_factory=set)
    moved: set[Tensor] = field(default_factory=set)
    anchors: dict[Tensor, Tensor] = field(default_factory=dict)
    displacements: dict[Tensor, Tensor] = field(default_factory=dict)
    limits: dict[Tensor, float] = field(default_factory=dict)
    shown: bool = False
    aside: dict[Tensor, Tensor] = field(default_factory=dict)
    layout: tuple[Plan, Sequence[Tensor]] | None = None
    _versions: dict[Tensor, int] = field(default_factory=dict)
    _layouts: dict[Tensor, tuple[object, ...]] = field(default_factory=dict)

    def check(self, trainable: Trainable, turn: Turn) -> None:
        """Refuses changes to parameters that a step would undo or mix up.

        Raises:
            RuntimeError: If a parameter has another dtype or memory layout than its anchor, or a
                parameter of 16 bits has other values than after the last step.
        """
        self._check_layouts(trainable)
        if self.shown:
            return
        # A version also counts writes that change no value, so the values are compared then.
        written = {
            p: flat.clone()
            for p, flat in zip(trainable.params, trainable.flat, strict=True)
            if p in self.displacements and p._version != self._versions.get(p, p._version)
        }
        if written:
            self._round(trainable, turn, written)
            flats = dict(zip(trainable.params, trainable.flat, strict=True))
            pairs = [(p, flats[p], values) for p, values in written.items()]
            if changed := _different(pairs):
                for _, flat, values in pairs:
                    flat.copy_(values)
                raise _changed(changed[0][0], f"values were changed between two steps. {_REMEDY}")
            self._note_versions()

    def step(self, trainable: Trainable, turn: Turn) -> None:
        """Takes a step on this rank's gradients, without communication."""
        self.moved.update(trainable.params)
        for p, flat, grad in zip(trainable.params, trainable.flat, trainable.grads, strict=True):
            if grad is not None:
                self.add_anchor(p, flat)
                self.used.add(p)
        weights = self._weights(trainable)
        for message in (*trainable.plan.messages, *trainable.plan.full):
            for piece in message.pieces:
                own_step(piece, weights, trainable, turn)
        self._note_rounded(trainable)

    def exchange(
        self, trainable: Trainable, used_anywhere: Sequence[bool], turn: Turn, ranks: Topology
    ) -> list[int]:
        """Averages how far the ranks were moved; every rank must call this.

        It returns indices of parameters that weren't finite on this rank and were reset to the
        anchor. `used_anywhere` marks the parameters that some rank used. Bytes for P trainable
        parameters: 8 (N - 1) (P + 1), and those of `exchange.routes`.

        Raises:
            Disagreement: On every rank, before anchors move, if weights were replaced on one.
        """
        plan, voters, now = trainable.plan, ranks.voters, time.perf_counter()
        bits = turn.options.bits
        # Votes, and the rounding of what moves, depend on the number of the exchange.
        exchange_turn = replace(turn, step=self.exchanges + 1)
        for p, flat, used in zip(trainable.params, trainable.flat, used_anywhere, strict=True):
            if used:
                self.add_anchor(p, flat)
        if self.layout is not None and self.layout[0] is not plan:  # It changed since the step.
            self.layout = None
            self._round(trainable, turn)
        weights = self._weights(trainable, used_anywhere)
        source = functools.partial(displacement_of, weights=weights, scratch=turn.scratch)
        reset, limits, scales = self._scales(trainable, weights, source, exchange_turn, ranks)

        # Encode and send all messages, then decode and apply one after the other.
        magnitudes = [s / 2 if bits == 8 else s for s in scales]
        mean, route = Average(voters.world_size, bits), turn.options.exchange
        sent, under_way = [], []
        for message in plan.messages:
            sent.append(votes_by(source, message, exchange_turn, magnitudes))
            under_way.append(
                routes.start(sent[-1], route, voters, ranks.node, mean, exchange_turn.step)
            )
        now = voters.stats.add("encode_s", now)
        units, drift = [unit_of(s, bits) for s in scales], []
        for message, votes, verdict in zip(
            plan.messages, sent, routes.complete(under_way, ranks.node), strict=True
        ):
            now = voters.stats.add("exchange_s", now)
            moving = [piece for piece in message.pieces if takes_part(piece, weights.own)]
            for piece in moving:
                outcome = decoded(piece, votes, verdict, units, turn, voters.world_size)
                if piece is moving[0]:  # The log shows a sample of each message.
                    drift.append(drift_of(source(piece), outcome))
                move_by(piece, outcome, weights, self.period.decays, turn, exchange_turn)
            now = voters.stats.add("apply_s", now)
        voters.stats.drift = drift
        # Tensors of `full_precision` are averaged without votes.
        sums = sum_over_voters(plan.full, weights.own, displacements_of(plan, weights), voters)
        means = [None if total is None else divided(total, voters.world_size) for total in sums]
        now = voters.stats.add("exchange_s", now)
        for message in plan.full:
            for piece in message.pieces:
                if takes_part(piece, weights.own):
                    outcome = Outcome(read(piece, means, "direction", turn.scratch))
                    move_by(piece, outcome, weights, self.period.decays, turn, exchange_turn)
        voters.stats.add("apply_s", now)

        self.limits |= {p: limits[k] for k, p in enumerate(trainable.params) if used_anywhere[k]}
        for p, flat in zip(trainable.params, trainable.flat, strict=True):
            if not p.requires_grad:
                self.drop(p, flat)
        self._note_rounded(trainable)
        self.used, self.period = set(), Period()
        self.exchanges += 1
        voters.stats.exchanges += 1
        return reset

    def _scales(
        self,
        trainable: Trainable,
        weights: Weights,
        source: Source,
        exchange_turn: Turn,
        ranks: Topology,
    ) -> tuple[list[int], list[float], list[float]]:
        """Returns indices of reset parameters, each tensor's next limit, and its scale.

        Every rank must call this. Parameters that aren't finite on this rank are reset to anchors.
        """
        amounts, counts = amounts_of(trainable.plan, weights, source, exchange_turn)
        reset = [k for k, amount in enumerate(amounts) if not math.isfinite(amount)]
        for k in reset:
            reset_to_anchor(k, weights)
            amounts[k] = 0.0
        bits = exchange_turn.options.bits
        replaced = self._replaced(trainable, amounts, weights, bits)
        # Ranks that vote on other shards, or in other nodes, must raise as well.
        first = min(replaced, default=len(amounts))
        firsts = ranks.everyone.gather_words([first], "a check of weights").view(-1).tolist()
        if (first := min(firsts)) < len(amounts):
            found = [ranks.everyone.ranks[r] for r, index in enumerate(firsts) if index == first]
            raise Disagreement(
                f"the weights of {trainable.plan.lines[first][0]!r} on {named_ranks(found)} are "
                f"farther from the last exchange's than steps can have moved them, so something "
                f"replaced them. {_REMEDY}"
            )
        means = [amount / count for amount, count in zip(amounts, counts, strict=True)]
        scales = _agreed_scales(means, bits, ranks.voters)
        limits = [a + s * n for a, s, n in zip(amounts, scales, counts, strict=True)]
        return reset, limits, scales

    def show_common(self, trainable: Trainable, turn: Turn) -> None:
        """Puts the anchors into the model."""
        self.check(trainable, turn)
        pairs = [*zip(trainable.params, trainable.flat, strict=True)]
        wide = self.anchors.keys() - self.displacements.keys()
        self.aside = {p: flat.clone() for p, flat in pairs if p in wide}
        for p, flat in pairs:
            if p in self.anchors:
                flat.copy_(self.anchors[p])
        self.shown = True

    def show_own(self, trainable: Trainable, turn: Turn) -> None:
        """Puts own weights back, bit for bit except for what `take_in_writes` has moved."""
        for p, flat in zip(trainable.params, trainable.flat, strict=True):
            if p in self.aside:
                flat.copy_(self.aside.pop(p))
        self._round(trainable, turn)
        self._note_versions()
        self.shown = False

    def take_in_writes(self, trainable: Trainable) -> None:
        """Moves anchors and own weights by what was written into the model while it shows anchors.

        The displacements x - p stay, as do the bits of elements that weren't written.

        Raises:
            RuntimeError: As `check`.
        """
        self._check_layouts(trainable)
        pairs = zip(trainable.params, trainable.flat, strict=True)
        shown = [(p, flat, self.anchors[p]) for p, flat in pairs if p in self.anchors]
        for p, flat, anchor in _different(shown):
            if (own := self.aside.get(p)) is not None:
                kept = _bits(flat) == _bits(anchor)
                self.aside[p] = torch.where(kept, own, flat - (anchor - own))
            anchor.copy_(flat)

    def add_anchor(self, param: Tensor, flat: Tensor) -> None:
        """Copies a parameter to its anchor, unless it has one."""
        if param not in self.anchors:
            self.anchors[param], self._layouts[param] = flat.clone(), _layout(param)
            if param.dtype in LOW_PRECISION:
                self.displacements[param] = torch.zeros_like(flat)

    def drop(self, param: Tensor, flat: Tensor) -> None:
        """Puts a parameter's anchor into it, and forgets the parameter."""
        anchor = self.anchors.pop(param, None)
        if anchor is not None and not self.shown and anchor.numel() == flat.numel():
            flat.copy_(anchor)
        values = self.aside, self.displacements, self.limits
        for by_param in (*values, self._versions, self._layouts):
            by_param.pop(param, None)
        self.used.discard(param)
        self.moved.discard(param)

    def _check_layouts(self, trainable: Trainable) -> None:
        for p in trainable.params:
            if self._layouts.get(p, _layout(p)) != _layout(p):
                raise _changed(
                    p, f"dtype or memory layout was changed. Before you change it, {_DETACH}"
                )

    def _weights(self, trainable: Trainable, chosen: Sequence[bool] | None = None) -> Weights:
        """Returns the weights of all parameters that have an anchor, or of the chosen ones."""
        weights = Weights(len(trainable.params))
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
        self, trainable: Trainable, amounts: Sequence[float], weights: Weights, bits: int
    ) -> list[int]:
        """Returns indices of parameters farther from their anchors than steps can move them."""
        found = []
        for k, p in enumerate(trainable.params):
            x, group = weights.wide_anchors[k], trainable.plan.shapes[k].group
            if x is None or not x.numel() or group >= len(self.period.paths):
                continue
            # Rounding can double a move, but not more.
            path = 2 * self.period.paths[group]
            limit = self.limits.get(p, 0.0) + path * (1 if bits == 8 else x.numel())
            if amounts[k] > limit:
                size = x.abs().max() if bits == 8 else x.abs().sum(dtype=torch.float64)
                if amounts[k] > limit + 16 * torch.finfo(x.dtype).eps * float(size):
                    found.append(k)
        return found

    def _round(
        self, trainable: Trainable, turn: Turn, chosen: Collection[Tensor] | None = None
    ) -> None:
        """Sets own weights of 16 bits to x - c, rounded to the same bits as the last time."""
        if self.layout is None:
            self.layout = trainable.plan, trainable.params
        plan, params = self.layout
        flats = dict(zip(trainable.params, trainable.flat, strict=True))
        # A parameter that isn't trainable any more has no anchor.
        then = Trainable(plan, [*params], [flats.get(p, p) for p in params])
        weights = self._weights(then, None if chosen is None else [p in chosen for p in params])
        for message in (*plan.messages, *plan.full):
            for piece in message.pieces:
                round_own(piece, weights, turn)

    def _note_rounded(self, trainable: Trainable) -> None:
        self.layout = trainable.plan, trainable.params
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = {p: p._version for p in self.displacements}


def _agreed_scales(means: Sequence[float], bits: int, voters: Wire) -> list[float]:
    """Returns each tensor's scale, the same on all voters, which must all call this.

    Bytes per rank: 8 (N - 1) for each tensor.
    """
    words = torch.tensor(means, dtype=torch.float64).view(torch.int64)
    table = voters.gather_words(words, "means of displacements").view(torch.float64).tolist()
    scales = []
    for by_voter in zip(*table, strict=True):
        positive = [mean for mean in by_voter if mean > 0.0]
        if bits == 8:
            scales.append(max(positive, default=0.0))
        else:
            scales.append(math.fsum(positive) / max(len(positive), 1))
    return scales


def _changed(param: Tensor, how: str) -> RuntimeError:
    return RuntimeError(
        f"a {param.dtype} parameter of shape {tuple(param.shape)} has local steps, and its {how}"
    )


def _different(found: Sequence[_Pair]) -> list[_Pair]:
    """Returns the entries, a parameter and two flat tensors, whose tensors differ in a bit."""
    differ = numbers([(_bits(left) != _bits(right)).any() for _, left, right in found])
    return [entry for entry, differs in zip(found, differ, strict=True) if differs]


def _bits(flat: Tensor) -> Tensor:
    """Returns a view of integers, because a NaN differs from itself, and 0.0 equals -0.0."""
    return flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def _layout(param: Tensor) -> tuple[object, ...]:
    return param.dtype, param.shape, param.stride()
