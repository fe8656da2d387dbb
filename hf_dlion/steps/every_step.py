"""Steps by votes: `vote_every=1`. The ranks have exchanged headers before (`ranks.agreement`).

`vote_on_message` is a message's step. It is suspended while its data travel, and `in_lockstep`
resumes all messages in turns, so one is encoded while another is sent.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Layout, Message
from hf_dlion.core.lion import set_mean_magnitudes
from hf_dlion.core.rule import Majority, Rule, rule_of
from hf_dlion.gpu import form
from hf_dlion.ranks.routes import verdict_of
from hf_dlion.ranks.topology import Topology

# Suspended whenever its data travel.
Task = Generator[None, None, None]
# Words of a message that `WireStats.agreement` and `remainder` look at.
SAMPLE = 1024


def vote(layout: Layout, context: StepContext, ranks: Topology) -> None:
    """Takes a step by votes, which every voter must take. Bytes: see `ranks.routes`."""
    stats, options = ranks.voters.stats, context.options
    rule = rule_of(options, context.voters)
    stats.lap("", layout.device)
    set_mean_magnitudes(layout, context)
    in_lockstep([vote_on_message(message, context, rule, ranks) for message in layout.messages])
    stats.exchanges += 1


def in_lockstep(tasks: Sequence[Task]) -> None:
    """Resumes every task until it is next suspended, in turns, until all have ended.

    So all ranks begin the same collectives in one order, also those of two groups, as NCCL needs.
    """
    while tasks:
        tasks = [task for task in tasks if next(task, task) is not task]


def vote_on_message(message: Message, context: StepContext, rule: Rule, ranks: Topology) -> Task:
    """Takes a message's step."""
    voters, stats = ranks.voters, ranks.voters.stats
    step = form.vote_of(message, context)
    votes = step.encode()
    stats.lap("encode_s", message.device)
    route = context.options.exchange
    verdict = yield from verdict_of(votes, route, voters, ranks.node, rule, context.phase)
    stats.lap("exchange_s", message.device)
    if message.pieces[0].first == 0 and context.bits == 1 and isinstance(rule, Majority):
        voting = votes.active.to(message.device)[votes.rows.of_word[:SAMPLE]]
        voting &= message.unpadded[:SAMPLE]
        planes = [plane[:SAMPLE].clone() for plane in verdict.planes]
        stats.sample = votes.planes[0, :SAMPLE].clone(), planes, voting
    step.move(verdict, rule)
    stats.lap("apply_s", message.device)
