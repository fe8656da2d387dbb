"""Plain Lion on mean gradients, for parameters that `full_precision` selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from hf_dlion.core.context import StepContext
from hf_dlion.core.fingerprint import fingerprints
from hf_dlion.core.idle_rows import survey
from hf_dlion.core.layout import Layout
from hf_dlion.core.lion import plain_lion
from hf_dlion.core.slot import Slot
from hf_dlion.ranks.agreement import Agreed
from hf_dlion.ranks.topology import Topology
from hf_dlion.ranks.wire import digest
from hf_dlion.steps.means import average_whole, set_means
from hf_dlion.user_warning import defer_warning


def step_in_full_precision(
    layout: Layout, agreed: Agreed, ranks: Topology, context: StepContext, *, equal: bool
) -> None:
    """Takes plain Lion's step on mean gradients; every rank must call this.

    The mean is over the voters that have a finite gradient, and a gradient of None counts as zeros.
    All slots have a momentum. `equal`, the same on every voter, says whether the voters' momenta
    are known to be equal. Bytes: `means.sum_over_voters` of each message and dtype.
    """
    slots = [slot for slot in layout.slots if slot.full_precision]
    if not equal:
        _equalize(slots, context, ranks)
    set_means(layout, attrgetter("grad"), agreed.gradient_counts, ranks)
    for slot in slots:
        slot.grad = slot.mean
        if slot.grad is None:
            slot.momentum = None
    if not survey(slots):
        # Finite gradients with a sum that isn't: as if no rank had one.
        for slot in slots:
            if slot.grad is not None and not slot.grad.isfinite().all():
                slot.grad = slot.momentum = None
                slot.moves = False
                if ranks.everyone.rank == 0:
                    defer_warning(
                        f"the gradients of {slot.name!r} are finite, but not their sum over the "
                        f"ranks, so the step leaves it as it is"
                    )
        survey(slots)  # Notes the idle rows of the others.
    # Rows of the mean and one random stream, so momenta stay equal on all voters.
    context = replace(context, voter=0)
    context.age_rows(slots)
    plain_lion(layout.averaged_messages, context, exact=True)


def _equalize(slots: Sequence[Slot], context: StepContext, ranks: Topology) -> None:
    """Averages momenta over the voters if they differ, for example after a load."""
    momenta = [slot.momentum for slot in slots if slot.momentum is not None]
    ages = [age for slot in slots if (age := context.ages.get(slot.param)) is not None]
    words = [digest(fingerprints([*momenta, *ages]))]
    hashes = ranks.voters.gather_words(words, "hashes of momenta")
    if len(set(hashes.view(-1).tolist())) > 1:
        average_whole(momenta, ranks)
        for slot in slots:
            context.ages.pop(slot.param, None)
