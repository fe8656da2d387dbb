"""The votes of a step, with `vote_every=1`.

    collect, agree     before: `DistributedLion.step`, which ends in the header
    choose             before: `DistributedLion._vote`, which tensors move, and who abstains
    encode             u and m, then the votes
    send and count     `routes.exchange_votes`
    move               p = p * decay - lr * v

Messages follow one another (`routes.run_as_pipeline`): one is encoded while another is sent.
"""

from __future__ import annotations

from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Layout, Message
from hf_dlion.core.lion import set_mean_magnitudes
from hf_dlion.core.rule import Majority, Rule, rule_of
from hf_dlion.gpu import form
from hf_dlion.ranks.routes import Task, exchange_votes, run_as_pipeline
from hf_dlion.ranks.topology import Topology


def vote(layout: Layout, context: StepContext, ranks: Topology) -> None:
    """Takes a step by votes, which every voter must take. Bytes: see `ranks.routes`."""
    stats, rule = ranks.voters.stats, rule_of(context.options, context.voters)
    stats.lap("", layout.device)
    set_mean_magnitudes(layout, context)
    run_as_pipeline(vote_on_message(message, context, rule, ranks) for message in layout.messages)
    stats.exchanges += 1


def vote_on_message(message: Message, context: StepContext, rule: Rule, ranks: Topology) -> Task:
    """Takes a message's step."""
    stats, step = ranks.voters.stats, form.vote_of(message, context)
    votes = step.encode()
    stats.lap("encode_s", message.device)
    verdict = yield from exchange_votes(votes, rule, context, ranks)
    stats.lap("exchange_s", message.device)
    if context.bits == 1 and isinstance(rule, Majority):
        stats.note_votes(message, votes, verdict)
    step.move(verdict, rule)
    stats.lap("apply_s", message.device)
