"""One step of the parameters: votes are exchanged, the verdict is applied."""

from __future__ import annotations

import time
from typing import cast

import torch
from torch import Tensor

from hf_dlion.backward.flight import Flight
from hf_dlion.codec import AloneJob, codec_for
from hf_dlion.codec.rule import StepRule, tensor_rules
from hf_dlion.exchange import Wire, WireStats
from hf_dlion.momentum.store import Momenta
from hf_dlion.options.groups import trainable
from hf_dlion.ranks.header import Header
from hf_dlion.step.ballot import Ballot
from hf_dlion.step.full_precision import step_in_full
from hf_dlion.step.message import exchange_all
from hf_dlion.step.node_messages import step_alone_in_node
from hf_dlion.step.node_plan import NodePlan
from hf_dlion.step.plan import Plan


def ballot_of(momenta: Momenta, plan: Plan, votes: Tensor, mine: Header, rule: StepRule) -> Ballot:
    """Returns what moves in a step; momenta are made where there are none.

    Args:
        momenta: Of this rank, with the parameter groups.
        plan: Of the step.
        votes: int64, shape (P,), how many ranks vote on each parameter.
        mine: What this rank, or its node, said of itself.
        rule: The step's constants.
    """
    pairs = trainable(momenta.groups)
    counts = dict(zip((index for index, _ in pairs), votes.tolist(), strict=True))
    voting: dict[int, Tensor] = {}
    full: dict[int, tuple[Tensor, int]] = {}
    for (index, param), has in zip(pairs, mine.present.tolist(), strict=True):
        if counts[index] == 0:
            continue
        # Also where this rank does not vote: the state has the same entries on all ranks.
        momentum = momenta.of(param, index, plan.owned)
        if has and mine.finite:
            voting[index] = momentum
        if index in plan.treatment.full:
            full[index] = momentum, counts[index]
    voted = {index for index, count in counts.items() if count}
    return Ballot(voting, tensor_rules(momenta.groups, voted, rule), rule, full)


def move(
    ballot: Ballot,
    plan: Plan,
    params: list[tuple[int, Tensor]],
    wire: Wire | None,
    flight: Flight | None,
    stats: WireStats,
) -> None:
    """Exchanges votes and applies the verdict to the parameters of the ballot.

    Every rank must call this with the same `ballot.rules` and plan. Messages leave alone what is
    not in the ballot, and what is not theirs.

    Args:
        ballot: What moves.
        plan: Carries it.
        params: Pairs of parameter index and parameter, those with requires_grad.
        wire: The process group, or None where this rank is alone.
        flight: The plan's messages if they left already, or None.
        stats: Receives times and agreement.
    """
    if isinstance(plan, NodePlan) and plan.alone:
        step_alone_in_node(plan.alone, ballot, stats)
        return
    if wire is None:
        step_alone(params, ballot, stats)
        return
    step_in_full(plan.full, ballot, wire, stats)
    if flight is not None:
        flight.land(ballot)
    elif plan.messages:
        exchange_all(plan.messages, ballot, stats)


def step_alone(params: list[tuple[int, Tensor]], ballot: Ballot, stats: WireStats) -> None:
    """Takes a step of plain Lion on this rank alone; nothing is sent.

    Args:
        params: Pairs of parameter index and parameter.
        ballot: What moves.
        stats: Receives the time.
    """
    start = time.perf_counter()
    jobs: dict[torch.device, list[AloneJob]] = {}
    for index, param in params:
        if index in ballot.voting:
            momentum, rule = ballot.voting[index], ballot.rules[index]
            job = AloneJob(param, cast(Tensor, param.grad), momentum, rule)
            jobs.setdefault(param.device, []).append(job)
    for device, of_device in jobs.items():
        codec_for(device).step_alone_all(of_device)
    stats.apply_s += time.perf_counter() - start
