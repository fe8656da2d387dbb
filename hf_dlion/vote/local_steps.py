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

import torch
from torch import Tensor

from hf_dlion.exchange import routes
from hf_dlion.exchange.rule import Average
from hf_dlion.exchange.wire import Wire, named_ranks
from hf_dlion.ranks.failures import Disagreement
from hf_dlion.ranks.fingerprint import digest
from hf_dlion.ranks.topology import Topology
from hf_dlion.vote.codec import divided
from hf_dlion.vote.displacement import (
    Outcome,
    Weights,
    amounts_of,
    decoded,
    displacement_of,
    displacements_of,
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
_REMEDY = (
    "Before you change weights, call optimizer.detach() on every rank; with DDP or FSDP2, call "
    "optimizer.attach(model) after it"
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
        anchors: Anchors x. While `swapped`, own weights of 32 and 64 bits, and for 16 bits tensors
            of any value.
        displacements: x - p of parameters of 16 bits, in their dtype.
        limits: Largest sum of |x - p| that the last exchange can have left (with 8 bits the largest
            |x - p|).
        swapped: Whether the model holds the anchors, as between `eval()` and `train()`.
    """

    period: Period = field(default_factory=Period)
    exchanges: int = 0
    used: set[Tensor] = field(default_factory=set)
    moved: set[Tensor] = field(default_factory=set)
    anchors: dict[Tensor, Tensor] = field(default_factory=dict)
    displacements: dict[Tensor, Tensor] = field(default_factory=dict)
    limits: dict[Tensor, float] = field(default_factory=dict)
    swapped: bool = False
    _plan: Plan | None = None  # the layout in which own weights of 16 bits were rounded
    _versions: dict[Tensor, int] = field(default_factory=dict)
    _layouts: dict[Tensor, tuple[object, ...]] = field(default_factory=dict)

    def check(self, trainable: Trainable, turn: Turn) -> None:
        """Refuses changes to parameters that a step would undo or mix up.

        Raises:
            RuntimeError: If a parameter has another dtype or memory layout than its anchor, or a
                parameter of 16 bits has other values than after the last step.
        """
        for p in trainable.params:
            if self._layouts.get(p, _layout(p)) != _layout(p):
                raise _changed(p, "its dtype or memory layout was changed")
        if self.swapped:
            return
        if self._plan is not trainable.plan:
            # Random bits depend on the layout, so the weights below must have those of this one.
            self._round(trainable, turn)
            self._note_rounded(trainable)
            return
        # A version also counts writes that change no value, so the values are compared then.
        written = {
            k: trainable.flat[k].clone()
            for k, p in enumerate(trainable.params)
            if p in self.displacements and p._version != self._versions.get(p, p._version)
        }
        if written:
            self._round(trainable, turn, [k in written for k in range(len(trainable.params))])
            for k, values in written.items():
                if not torch.equal(trainable.flat[k], values):
                    for other, kept in written.items():
                        trainable.flat[other].copy_(kept)
                    raise _changed(trainable.params[k], "its values were changed between two steps")
            self._note_rounded(trainable)

    def step(self, trainable: Trainable, turn: Turn) -> None:
        """Takes a step on this rank's gradients, without communication."""
        self.moved.update(trainable.params)
        for p, flat, grad in zip(trainable.params, trainable.flat, trainable.grads, strict=True):
            if grad is not None:
                self._add_anchor(p, flat)
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
                self._add_anchor(p, flat)
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
        units = [unit_of(s, bits) for s in scales]
        for message, votes, verdict in zip(
            plan.messages, sent, routes.complete(under_way, ranks.node), strict=True
        ):
            now = voters.stats.add("exchange_s", now)
            for piece in message.pieces:
                if takes_part(piece, weights.own):
                    outcome = decoded(piece, votes, verdict, units, turn, voters.world_size)
                    move_by(piece, outcome, weights, self.period.decays, turn, exchange_turn)
            now = voters.stats.add("apply_s", now)
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

    def swap(self, trainable: Trainable, turn: Turn) -> None:
        """Exchanges the weights in the model with those in `anchors`, bit for bit."""
        self.check(trainable, turn)  # The order in memory must be that of the last swap.
        for p, flat in zip(trainable.params, trainable.flat, strict=True):
            if (kept := self.anchors.get(p)) is not None:
                shown, self._layouts[p] = flat.clone(), _layout(p)
                flat.copy_(kept)
                kept.copy_(shown)
        self.swapped = not self.swapped
        if not self.swapped:  # Own weights of 16 bits follow from anchor and displacement.
            self._round(trainable, turn)
            self._note_rounded(trainable)

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
        self, trainable: Trainable, turn: Turn, chosen: Sequence[bool] | None = None
    ) -> None:
        """Sets own weights of 16 bits to x - c, rounded as in the last step."""
        weights = self._weights(trainable, chosen)
        for message in (*trainable.plan.messages, *trainable.plan.full):
            for piece in message.pieces:
                round_own(piece, weights, turn)

    def _note_rounded(self, trainable: Trainable) -> None:
        self._plan = trainable.plan
        self._versions = {p: p._version for p in trainable.params if p in self.displacements}


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
        f"a {param.dtype} parameter of shape {tuple(param.shape)} has local steps, and {how}. "
        f"{_REMEDY}"
    )


def _layout(param: Tensor) -> tuple[object, ...]:
    return param.dtype, param.shape, param.stride()
