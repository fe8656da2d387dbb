"""What moves in a step, and how: each part of the plan exchanges and applies what is its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from hf_dlion.codec import AloneJob, codec_for
from hf_dlion.exchange import Wire, WireStats
from hf_dlion.flight import Flight
from hf_dlion.groups import tensor_rules, trainable
from hf_dlion.header import Header
from hf_dlion.messages import Plan, exchange_all
from hf_dlion.momenta import Momenta
from hf_dlion.node_messages import NodePlan, step_alone_in_node
from hf_dlion.verdict import StepRule, TensorRule


@dataclass(frozen=True)
class Ballot:
    """The parameters that move in a step.

    Attributes:
        voting: `exp_avg` of every parameter, by index, on which this rank, or its node, votes.
        rules: The step's constants of every parameter on which any rank votes, by index.
        rule: The step's constants.
    """

    voting: dict[int, Tensor]
    rules: dict[int, TensorRule]
    rule: StepRule

    @staticmethod
    def of(momenta: Momenta, plan: Plan, voters: Tensor, mine: Header, rule: StepRule) -> Ballot:
        """Returns the ballot of a step; momenta are made where there are none.

        Args:
            momenta: Of this rank, with the parameter groups.
            plan: Of the step.
            voters: bool, shape (P,), the parameters on which any rank votes.
            mine: What this rank, or its node, said of itself.
            rule: The step's constants.
        """
        pairs = trainable(momenta.groups)
        voted = {
            index for (index, _), any_rank in zip(pairs, voters.tolist(), strict=True) if any_rank
        }
        voting: dict[int, Tensor] = {}
        for (index, param), votes in zip(pairs, mine.present.tolist(), strict=True):
            if index not in voted:
                continue
            # Also where this rank does not vote: the state has the same entries on all ranks.
            momentum = momenta.of(param, index, plan.owned)
            if votes and mine.finite:
                voting[index] = momentum
        return Ballot(voting, tensor_rules(momenta.groups, voted, rule), rule)


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
        wire: The process group, or None for one rank.
        flight: The plan's messages if they left already, or None.
        stats: Receives times and agreement.
    """
    voting, rules, rule = ballot.voting, ballot.rules, ballot.rule
    if isinstance(plan, NodePlan) and plan.alone:
        step_alone_in_node(plan.alone, voting, rules, stats)
    elif wire is None or wire.world_size == 1:
        step_alone(params, voting, rules, stats)
    elif flight is not None:
        flight.land(voting, rules, rule)
    else:
        exchange_all(plan.messages, voting, rules, rule, stats)


def step_alone(
    params: list[tuple[int, Tensor]],
    voting: dict[int, Tensor],
    rules: dict[int, TensorRule],
    stats: WireStats,
) -> None:
    """Takes a step of plain Lion on this rank alone; nothing is sent.

    Args:
        params: Pairs of parameter index and parameter.
        voting: `exp_avg` of every parameter that moves, by index.
        rules: The step's constants of the same parameters.
        stats: Receives the time.
    """
    start = time.perf_counter()
    jobs: dict[torch.device, list[AloneJob]] = {}
    for index, param in params:
        if index in voting:
            job = AloneJob(param, cast(Tensor, param.grad), voting[index], rules[index])
            jobs.setdefault(param.device, []).append(job)
    for device, of_device in jobs.items():
        codec_for(device).step_alone_all(of_device)
    stats.apply_s += time.perf_counter() - start
