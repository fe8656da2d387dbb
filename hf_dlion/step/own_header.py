"""What a rank says of itself before a step, and how it hears the others."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import Tensor

from hf_dlion.backward.flight import Flight
from hf_dlion.backward.overlap import Overlap
from hf_dlion.exchange import Wire
from hf_dlion.momentum.store import Momenta
from hf_dlion.momentum.sync import MomentumSync
from hf_dlion.options import Options
from hf_dlion.options.params import check_gradient
from hf_dlion.ranks.abstention import all_finite, unscale
from hf_dlion.ranks.groups import Groups, agreed_values, option_values, trainable
from hf_dlion.ranks.header import Agreement, Details, Disagreement, Header, digest
from hf_dlion.ranks.node import Node
from hf_dlion.step.plan import Plan
from hf_dlion.step.presence import Presence


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What GradScaler leaves to the step.

    Attributes:
        scale: What the loss was multiplied by, or None if that is divided out already.
        found_inf: Not 0 if GradScaler saw a NaN or an Inf, or None if it did not look.
    """

    scale: Tensor | None
    found_inf: Tensor | None


def own_header(
    momenta: Momenta,
    options: Options,
    steps: int,
    plan: Plan,
    presence: Presence,
    node: Node | None,
    overlap: Overlap | None,
    scaling: Scaling,
    common: frozenset[int],
    sync: MomentumSync,
) -> Header:
    """Returns what this rank says of itself, after all that can fail on it alone.

    Gradients are unscaled in place; a parameter with a gradient gets its momentum.

    Args:
        momenta: Of this rank, with the parameter groups.
        options: The options.
        steps: Number of the last step.
        plan: Of the coming one.
        presence: Knows which parameters received a gradient.
        node: Who votes together with this rank.
        overlap: Knows which gradients were finite when their votes left.
        scaling: What GradScaler left to do.
        common: Indices of parameters of which all ranks are known to have one momentum.
        sync: Knows what decides which momenta are averaged.

    Raises:
        TypeError: If a gradient is sparse.
    """
    pairs = trainable(momenta.groups)
    params = [param for _, param in pairs]
    for param in params:
        check_gradient(param)
    present = presence.of(params)
    presence.watch(params)
    for (index, param), has in zip(pairs, present, strict=True):
        if has:
            momenta.of(param, index, plan.owned)
    # A wrapper gives the node's gradient also to a rank that did not use the parameter.
    voting = [
        param
        for param, has in zip(params, present, strict=True)
        if has or (node is not None and presence.reduced(param))
    ]
    unaveraged = displaced = False
    if node is not None:
        # At once: should all nodes abstain from their first step, nothing else is shared out in it.
        momenta.shards.members = momenta.shards.members or node.members
        unaveraged = any(presence.unaveraged(params, present))
        displaced = momenta.displaced(plan.owned)
    finite = unscale(_gradients(voting), scaling.scale, scaling.found_inf)
    if overlap is not None:
        voting = overlap.unknown(voting)
    return Header(
        finite=finite and all_finite(_gradients(voting)),
        failed=False,
        step=steps,
        layout=plan.layout,
        options=digest(option_values(options)),
        groups=digest([*agreed_values(momenta.groups), *sync.agreed()]),
        present=torch.tensor(present, dtype=torch.bool),
        unaveraged=unaveraged,
        displaced=displaced,
        uncommon=not plan.routes.full <= common,
    )


def completed(
    header: Header,
    failure: Exception | None,
    groups: Groups,
    plan: Plan | None,
    overlap: Overlap,
) -> tuple[Header, Flight | None, Exception | None]:
    """Sends the votes that did not leave during backward, and says so in the header.

    Args:
        header: What this rank says of itself otherwise.
        failure: What failed on it so far.
        groups: The parameter groups.
        plan: Of this step, if it is known.
        overlap: What backward sent.

    Returns:
        The header, the messages on their way, if any, and what failed by now.
    """
    votes = header.present.tolist() if header.finite else []
    present = {index: has for (index, _), has in zip(trainable(groups), votes, strict=False)}
    flight = overlap.complete(present)
    if flight is not None and flight.failure is not None and failure is None:
        failure, header = flight.failure, Header.of_failure(header.step)
    ordered = plan is not None and plan.ordered and not overlap.wants_order
    stale = flight is not None and (
        flight.stale or header.unaveraged or plan is None or flight.messages is not plan.messages
    )
    return dataclasses.replace(header, stale=stale, ordered=ordered), flight, failure


def agreed(
    mine: Header,
    wire: Wire,
    agreement: Agreement,
    details: Details,
    failure: Exception | None,
    flight: Flight | None,
) -> list[Header]:
    """Returns all ranks' headers once they fit; a rank that failed raises its own error.

    Every rank must call this.

    Args:
        mine: This rank's header.
        wire: The ranks.
        agreement: Compares the headers.
        details: Called only for an error message.
        failure: What failed on this rank.
        flight: Messages on their way, which are dropped should the headers not fit.

    Raises:
        Disagreement: On every rank on which nothing failed itself, if they do not fit.
    """
    try:
        return agreement.agree(mine, wire, details)
    except Disagreement:
        if flight is not None:
            flight.discard()
        if failure is not None:
            raise failure from None
        raise


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [cast(Tensor, param.grad) for param in params]
