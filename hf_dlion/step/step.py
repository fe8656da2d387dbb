"""One step, from a rank's own gradients to parameters that are equal on all ranks.

Where a gradient becomes a vote and a verdict moves a weight: `Moving` (what takes part) goes to
`delivery.land`, which has each `Message` encode, exchange, count and apply by a codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from hf_dlion.codec.rule import StepRule, tensor_rules
from hf_dlion.exchange import LostRank
from hf_dlion.exchange.mean import average_over_ranks
from hf_dlion.momentum.slices import Held
from hf_dlion.momentum.store import MomentumStore
from hf_dlion.options import check_group
from hf_dlion.options.groups import agreed_values, flat_params, option_values, trainable
from hf_dlion.options.params import settle_gradient
from hf_dlion.ranks.abstention import all_finite
from hf_dlion.ranks.agreement import Crossed, Disagreement, details_of
from hf_dlion.ranks.fingerprint import digest
from hf_dlion.ranks.header import Header, voters_on
from hf_dlion.ranks.replicas import check_replicas
from hf_dlion.step.delivery import Delivery, Moving
from hf_dlion.step.engine import Engine
from hf_dlion.step.full_precision import momenta_differ, step_in_full
from hf_dlion.step.plan import Plan
from hf_dlion.step.unanimity import LOOKED_AT, warn_if_unanimous
from hf_dlion.step.voters import Voters


@dataclass(frozen=True)
class Scaling:
    """The part of a GradScaler's work that it leaves to the optimizer.

    Attributes:
        scale: The factor of the loss, by which gradients are still to be divided; None if they
            have been.
        found_inf: Nonzero if GradScaler saw a NaN or an Inf, the number 0 where it saw no gradient;
            None if it did not look.
    """

    scale: Tensor | None
    found_inf: Tensor | int | None


class Step:
    """One step of all ranks, made by each of them for one call of `optimizer.step()`.

    Every rank goes through all phases in this order, and makes the collectives of each phase in
    the same order as the others, even if something failed on it:

    1. *Prepare.* Run the closure; find this rank's gradients and momenta; plan the messages. With
       `local_group` the first step also makes the nodes' process groups. A failure of this rank
       alone is kept for phase 3.
    2. *Send early votes.* With overlap, send the messages that backward did not, so no rank waits
       for one that never comes. This may fail on one rank, too.
    3. *Agree.* Exchange one header per rank. A failure or a difference raises on every rank; no
       parameter has moved yet. After this nothing is expected to fail on one rank alone.
    4. *Decide.* From the headers, alike on every rank: who abstains, which parameters move, and
       whether early votes hold.
    5. *Complete.* Give each rank the momenta and gradients that it needs: a node's ranks share
       both, and all ranks share a momentum where gradients are averaged in full precision.
    6. *Move.* Average gradients where that replaces a vote; exchange votes and apply the verdict.
    7. *End.* Clear what was seen of gradients; synchronise momenta (`momentum_sync_every`), plan
       the next step's early votes, compare replicas (`check_replicas_every`).
    """

    # Set in phase 1; where that failed, phase 3 raises before they are read.
    _voters: Voters
    _pairs: list[tuple[int, Tensor]]  # index and parameter of those that require a gradient
    _momenta: MomentumStore
    _plan: Plan
    _unaveraged: list[bool]
    # Set in phase 6, and read in phase 7 of a step that moved something.
    _rule: StepRule

    def __init__(self, engine: Engine, scaling: Scaling) -> None:
        """Starts a step.

        Args:
            engine: What lasts from step to step.
            scaling: What GradScaler left to do.
        """
        self._engine, self._scaling = engine, scaling
        engine.ranks.bind(engine.groups)
        self._wire, self._stats = engine.wire_if_several(), engine.stats
        self._plan_before = engine.plan

    def take(self, closure: Callable[[], float] | None) -> float | None:
        """Takes the step together with all ranks; see `DistributedLion.step`.

        Returns:
            What the closure returned, or None.
        """
        engine = self._engine
        loss: float | None = None
        failure: Exception | None = None
        bytes_before = self._stats.bytes_sent
        # 1. Prepare.
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._voters = engine.voters()
            header = self._prepare()
        except (Disagreement, LostRank):
            raise  # By the closure or `voters()`, on every rank that is still there.
        except Exception as error:
            if self._wire is None:
                raise
            # The other ranks wait for this one's header, so that is where they hear of it.
            failure, header = error, Header.of_failure(engine.steps)
        # 2. Send early votes.
        sent = engine.early.complete(header, failure, engine.plan, engine.momenta(), bytes_before)
        # 3. Agree.
        headers = self._agree(sent.header, sent.failure, sent.delivery)
        # 4. Decide.
        plan, delivery = self._plan, sent.delivery
        if any(other.stale or not other.finite for other in headers):
            # Some rank's early votes are no longer those that the rule asks of it: gradients
            # changed since, or turned out to hold a NaN. All ranks drop theirs and vote again.
            delivery.discard()
            delivery = plan.delivery
        heard = self._voters.heard(headers)
        mine = heard[self._voters.index]
        abstentions = engine.ranks.abstentions
        self._stats.abstentions += abstentions.note([other.finite for other in heard])
        # No entries if every voter abstains; then nothing moves.
        counts = voters_on(heard)
        moves = bool(counts.any())
        if moves:
            self._complete(heard, mine)
            self._move(plan, counts, mine, delivery)
            engine.steps += 1
        else:
            delivery.discard()
        self._end(plan, heard, moves)
        self._count_bytes(sent.bytes_before)
        # Last: where a warning is an error, the step has been taken as on the other ranks.
        if self._wire is not None:
            engine.origin.warn_if_foreign(self._wire.rank)
        abstentions.warn(self._voters.index, others=engine.rank == 0)
        if moves and engine.rank == 0:
            self._warn_if_unanimous(counts, len(heard))
        return loss

    def _prepare(self) -> Header:
        """Returns this rank's header, after everything that may fail on this rank alone.

        Unscales gradients in place, and makes the momentum of each parameter that has a gradient.

        Raises:
            TypeError: If a gradient is sparse, or a group's value has the wrong type.
            ValueError: If a group's value is out of its range.
            RuntimeError: If a gradient or a momentum is of another shape than its parameter.
        """
        engine = self._engine
        engine.ranks.check_step()
        passes, dropped = engine.presence.batches.taken()
        for group in engine.groups:
            check_group(group)
        self._pairs = trainable(engine.local_groups)
        params = [param for _, param in self._pairs]
        self._momenta = momenta = engine.momenta()
        self._plan = plan = engine.plan_for(self._pairs, self._voters)
        momenta.fit(self._pairs)
        displaced = self._voters.settle(momenta, plan.owned)
        momenta.shares.warn_of_gap()
        for param in params:
            settle_gradient(param)
        present = engine.presence.of(params)
        # Parameters that were thawed after their wrapper was attached.
        engine.hooks.watch_gradients(flat_params(engine.groups))
        for (index, param), has in zip(self._pairs, present, strict=True):
            if has:
                momenta.of(param, index, plan.owned)
        if plan is not self._plan_before:
            self._rehearse(plan, present)
        voting = self._voters.voting(engine.presence, params, present)
        self._unaveraged = self._voters.unaveraged(engine.presence, params, present)
        scale, found_inf = self._scaling.scale, self._scaling.found_inf
        # A gradient that was finite when its early vote left need not be read again, unless it is
        # yet to be unscaled.
        read = voting if scale is not None else engine.early.unknown(voting)
        finite = all_finite(_gradients(read), scale, found_inf)
        return Header(
            finite=finite,
            failed=False,
            step=engine.steps,
            layout=plan.layout,
            options=digest(option_values(engine.options)),
            groups=digest([*agreed_values(engine.groups), *engine.sync.agreed()]),
            present=torch.tensor(present, dtype=torch.bool),
            unaveraged=any(self._unaveraged),
            displaced=displaced,
            unshared=not plan.treatment.full.issubset(engine.shared_momenta),
            passes=passes,
            dropped=dropped,
        )

    def _rehearse(self, plan: Plan, present: Sequence[bool]) -> None:
        """Compiles what the plan's messages need: a failure of that is one to be agreed on."""
        rule = self._engine.rule()
        voting: dict[int, Tensor] = {}
        for (index, param), has in zip(self._pairs, present, strict=True):
            if not has:
                continue
            momentum = self._momenta.of(param, index, plan.owned)
            start, stop = plan.owned.get(index, (0, param.numel()))
            # A node's momenta are shared out after the headers, if they are not yet.
            if momentum.numel() == stop - start:
                voting[index] = momentum
        rules = tensor_rules(self._engine.groups, {index for index, _ in self._pairs}, rule)
        for message in plan.messages:
            message.rehearse(voting, rules, rule)

    def _agree(self, header: Header, failure: Exception | None, delivery: Delivery) -> list[Header]:
        """Returns all ranks' headers if they agree; a rank that failed raises its own error."""
        engine = self._engine
        if self._wire is None:
            return [header]
        treatment = None if engine.plan is None else engine.plan.treatment
        details = details_of(
            engine.local_groups, engine.options, failure, treatment, engine.sync.agreed()
        )
        try:
            headers = engine.ranks.agreement.agree(header, self._wire, details)
        except Exception as error:
            # This rank alone may have made a new plan; all go on from the last one they shared.
            engine.plan = self._plan_before
            if isinstance(error, Disagreement) and not isinstance(error, Crossed):
                delivery.discard()
            if isinstance(error, Disagreement) and failure is not None:
                raise failure from None
            raise
        return headers

    def _complete(self, heard: Sequence[Header], mine: Header) -> None:
        """Gives this rank the momenta and gradients that it needs for its part of the votes."""
        if self._wire is not None and any(other.unshared for other in heard):
            self._share_momenta()
        params = [param for _, param in self._pairs]
        self._voters.complete(self._momenta, self._plan.owners, params, self._unaveraged, mine)

    def _share_momenta(self) -> None:
        """Gives all voters one momentum of the parameters whose gradients are averaged.

        They differ if these parameters were voted on before, or loaded per rank. Every rank must
        call this. Bytes per rank: 8 * (N - 1), and those of `synchronize_momentum` if they differ.
        """
        between = self._voters.between
        assert between is not None, "one rank has nobody to share with"
        full = self._plan.treatment.full
        # A rank that did not use a parameter takes part as well: all must send the same.
        held = {
            index: self._momenta.of(param, index, {})
            for index, param in self._pairs
            if index in full
        }
        if momenta_differ(held, between):
            average_over_ranks(list(held.values()), between)
        self._engine.shared_momenta = full

    def _move(self, plan: Plan, counts: Tensor, mine: Header, delivery: Delivery) -> None:
        """Moves the parameters that any rank votes on, by the verdict or by the mean gradient.

        Args:
            plan: Of the step.
            counts: int64, shape (P,), how many vote on each parameter.
            mine: What this rank, or its node, said of itself.
            delivery: Carries the votes.
        """
        moving = self._moving(plan, counts, mine)
        between = self._voters.between
        if plan.averaged and between is not None:
            step_in_full(plan.averaged, moving, between, self._stats)
        delivery.land(moving, self._stats)

    def _moving(self, plan: Plan, counts: Tensor, mine: Header) -> Moving:
        """Returns what moves; momenta are made where there are none."""
        self._rule = rule = self._engine.rule()
        voters = dict(zip((index for index, _ in self._pairs), counts.tolist(), strict=True))
        voting: dict[int, Tensor] = {}
        full: dict[int, tuple[Tensor, int]] = {}
        for (index, param), has in zip(self._pairs, mine.present.tolist(), strict=True):
            if voters[index] == 0:
                continue
            # Made where this rank does not vote, too: all ranks' states have the same entries.
            momentum = self._momenta.of(param, index, plan.owned)
            if has and mine.finite:
                voting[index] = momentum
            if index in plan.treatment.full:
                full[index] = momentum, voters[index]
        voted = {index for index, count in voters.items() if count}
        return Moving(voting, tensor_rules(self._engine.groups, voted, rule), rule, full)

    def _end(self, plan: Plan, heard: Sequence[Header], moved: bool) -> None:
        """Clears what belongs to this step, and prepares the next one."""
        engine, wire = self._engine, self._wire
        engine.hooks.after_step()
        engine.presence.note_step()
        if wire is None:
            return
        if moved:
            self._synchronize_momenta(plan)
        # After everything that changes momenta. If it fails, the step has been taken on every rank.
        engine.plan = engine.early.prepare(heard, plan, self._pairs, wire)
        # Last, because it may raise.
        every = engine.options.check_replicas_every
        if moved and every and engine.steps % every == 0:
            check_replicas(
                engine.local_groups,
                wire,
                engine.steps,
                engine.options.on_divergence,
                self._voters.near,
                engine.ranks.agreement.alike,
                self._voters.twins,
            )

    def _synchronize_momenta(self, plan: Plan) -> None:
        """Averages the slice of the selected momenta whose turn it is.

        Momenta of parameters whose gradients are averaged are the same on all ranks already.
        """
        engine, between = self._engine, self._voters.between
        # What this step voted on has a momentum per rank from now on.
        engine.shared_momenta &= plan.treatment.full
        if not plan.treatment.synced or between is None or between.world_size == 1:
            return
        held = [
            Held(
                index,
                self._momenta.of(param, index, plan.owned),
                plan.owned.get(index, (0, 0))[0],
            )
            for index, param in self._pairs
            if index in plan.treatment.synced
        ]
        rules = tensor_rules(engine.groups, {piece.index for piece in held}, self._rule)
        engine.sync.after_step(held, rules, engine.steps, engine.options, between)

    def _warn_if_unanimous(self, counts: Tensor, voters: int) -> None:
        if self._stats.exchanges != LOOKED_AT or int(counts.min()) < voters:
            return
        full = self._plan.treatment.full
        voted = sum(param.numel() for index, param in self._pairs if index not in full)
        warn_if_unanimous(self._stats, voted)

    def _count_bytes(self, bytes_before: int) -> None:
        """Notes the bytes of this step; inside a node those of its backward pass, too."""
        stats, engine = self._stats, self._engine
        stats.last_bytes_sent = stats.bytes_sent - bytes_before
        stats.last_node_bytes_sent = stats.node_bytes_sent - engine.sent_inside
        engine.sent_inside = stats.node_bytes_sent


def _gradients(params: Sequence[Tensor]) -> list[Tensor]:
    return [cast(Tensor, param.grad) for param in params]
