"""The exchange that ends a period of local steps (docs/rule.md, section 9).

w = x - p                    how far this rank was moved; a voter sends it in a few bits
p = (x - d) * D              d is the mean of what all voters sent; equal on all ranks
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hf_dlion.core.context import StepContext
from hf_dlion.core.fingerprint import fingerprints
from hf_dlion.core.layout import Layout, Message, Piece
from hf_dlion.core.lion import move_from_anchor
from hf_dlion.core.quantized_mean import Mean, Scale
from hf_dlion.core.slot import Field, Slot
from hf_dlion.gpu import form
from hf_dlion.ranks.compare import CHANGED_PARAMETERS, compare_parameters
from hf_dlion.ranks.header import Disagreement
from hf_dlion.ranks.routes import run_as_pipeline
from hf_dlion.ranks.stats import SAMPLE, WireStats
from hf_dlion.ranks.topology import SAME_IN_NODE, Topology
from hf_dlion.ranks.wire import digest
from hf_dlion.steps.means import average_message, set_means
from hf_dlion.user_warning import defer_warning

# Many elements go one way in nearly all steps of a period, so |w| has a peak at its largest value,
# which is the largest level of 2 to 8 bits.
SCALES = {
    1: Scale(1, of_largest=False, factor=1.0),
    2: Scale(2, of_largest=True, factor=4 / 9),
    4: Scale(4, of_largest=True, factor=0.5),
    8: Scale(8, of_largest=True, factor=0.5),
}
# What a rank gathers as the amount of a parameter whose weights were replaced on it.
_REPLACED = math.inf
_REMEDY = (
    "Load or change weights on every rank, right after optimizer.exchange_now() or in `with "
    "optimizer.common_weights():`, and set max_norm=None in nn.Embedding. To go on from the last "
    "exchange, call optimizer.detach() on every rank, and attach() again"
)


def average_displacements(
    layout: Layout, gradient_counts: Sequence[int], context: StepContext, ranks: Topology
) -> None:
    """Moves the parameters by the mean of how far the ranks moved; every rank must call this.

    A parameter that wasn't finite on this rank abstains, with a warning.

    Args:
        layout: The tensors, with local states.
        gradient_counts: How many ranks had a finite gradient of each parameter in the period.
        context: The context, whose step is the number of this exchange.
        ranks: The ranks. Bytes for P trainable parameters: 8 (N - 1) (P + 1) for amounts and a
            hash, 8 (N - 1) more with nodes, those of `ranks.routes`, and of
            `means.set_means`.

    Raises:
        Disagreement: On every rank, before a parameter moves, if the ranks began the period with
            different weights, or a parameter's amount on one is larger than steps can have made it.
            With 1 bit the amount is a mean, which shows only if most elements were replaced.
    """
    voters = ranks.voters
    stats = ranks.voters.stats
    scale = SCALES[context.bits]
    by_voter = _amounts_by_voter(layout, scale, context, ranks)
    scale.set_magnitudes(layout.slots, by_voter)
    for slot, count, *amounts in zip(layout.slots, gradient_counts, *by_voter, strict=True):
        if not count and not any(amounts):  # No rank moved it.
            slot.moves = False
    stats.drift = []
    source, move = partial(displacement, context=context), partial(move_by_mean, stats)
    run_as_pipeline(
        average_message(message, scale, source, move, context, ranks) for message in layout.messages
    )
    # Tensors of `full_precision` are averaged without votes.
    set_means(layout, _whole_displacement, [voters.world_size] * len(layout.slots), ranks)
    stats.lap("exchange_s", layout.device)
    for piece in (piece for message in layout.averaged_messages for piece in message.pieces):
        if piece.has(Field.MOVING):
            move_from_anchor(piece, piece.read(Field.MEAN, context.scratch), context)
    stats.lap("apply_s", layout.device)


def _amounts_by_voter(
    layout: Layout, scale: Scale, context: StepContext, ranks: Topology
) -> list[list[float]]:
    """Returns the amount of each parameter by voter."""
    everyone = ranks.everyone
    amounts = _amounts(layout, scale, context)
    anchors = [(slot.name, slot.local.anchor) for slot in layout.slots if slot.local is not None]
    words = torch.tensor(amounts, dtype=torch.float64, device="cpu").view(torch.int64).tolist()
    words.append(digest(fingerprints([anchor for _, anchor in anchors])))
    if ranks.node is not None:
        tensors = [tensor for slot in layout.slots for tensor in (slot.p, slot.compensation)]
        words.append(digest(fingerprints([t for t in tensors if t is not None])))
    # Of all ranks, so those that hold other shards, or are in other nodes, raise together.
    table = everyone.gather_words(words, "how far weights were moved")
    amounts_by_rank = table[:, : len(amounts)].contiguous().view(torch.float64).tolist()
    _refuse_replaced(layout, amounts_by_rank, ranks)
    _refuse_other_anchors(anchors, table[:, len(amounts)].tolist(), ranks)
    if ranks.node is not None:
        _refuse_unequal_nodes(table[:, -1].tolist(), ranks)
    voters = [everyone.global_ranks.index(rank) for rank in ranks.voters.global_ranks]
    return [amounts_by_rank[voter] for voter in voters]


def _amounts(layout: Layout, scale: Scale, context: StepContext) -> list[float]:
    """Returns this rank's amounts; a move that isn't finite is undone, with a warning."""
    source = partial(displacement, context=context)
    amounts = scale.amounts(layout.slots, layout.all_messages, source, context)
    for k, slot in enumerate(layout.slots):
        if not math.isfinite(amounts[k]):
            amounts[k] = 0.0
            _forget_move(slot)
            defer_warning(
                f"the weights of {slot.name!r} were not finite on rank {dist.get_rank()}, which "
                f"continues with those of the other ranks"
            )
        elif _was_replaced(slot, amounts[k]):
            amounts[k] = _REPLACED
    return amounts


def _forget_move(slot: Slot) -> None:
    """Puts the anchor into a slot; one that isn't finite itself takes no part on any rank."""
    if slot.local is not None:
        slot.local.restore_anchor(slot.part)
    if slot.compensation is not None:
        slot.compensation.zero_()
    if not slot.p.isfinite().all():
        slot.moves = False


def _refuse_replaced(
    layout: Layout, amounts_by_rank: Sequence[Sequence[float]], ranks: Topology
) -> None:
    for slot, *by_rank in zip(layout.slots, *amounts_by_rank, strict=True):
        if replaced := [rank for rank, amount in enumerate(by_rank) if amount == _REPLACED]:
            raise Disagreement(
                f"the weights of {slot.name!r} on {ranks.everyone.named(replaced)} are farther "
                f"from the last exchange's than steps can have moved them, so something replaced "
                f"them. {_REMEDY}"
            )


def _refuse_other_anchors(
    anchors: Sequence[tuple[str, Tensor]], hashes: Sequence[int], ranks: Topology
) -> None:
    if any([len({hashes[rank] for rank in same}) > 1 for same in ranks.same_parts]):
        compare_parameters(
            lambda: anchors, ranks.everyone, ranks.same_parts, CHANGED_PARAMETERS,
            when=", with which the last period of local steps began,",
        )  # fmt: skip


def _refuse_unequal_nodes(hashes: Sequence[int], ranks: Topology) -> None:
    if node := ranks.unequal_node(hashes):
        raise Disagreement(
            f"{ranks.everyone.named(node)} vote as one node, but their weights differ: something "
            f"changed gradients or weights on one of them after DDP averaged the gradients. "
            f"{SAME_IN_NODE}"
        )


def _was_replaced(slot: Slot, amount: float) -> bool:
    """Returns whether a rank is farther from an anchor than the steps can have moved it.

    True for weights that were loaded on some ranks only, unless they are close to the anchor.
    """
    if slot.local is None or (x := slot.anchor) is None or not slot.size:
        return False
    limit = 2 * slot.local.path  # Rounding can double a move, but not more.
    if amount <= limit:
        return False
    # What many steps can round: units in the last place of x, or of a compensation of 16 bits,
    # which is at least the smallest number.
    info = torch.finfo(x.dtype)
    eps = info.eps if slot.compensation is None else info.eps**2
    smallest = info.eps * info.smallest_normal
    return amount > limit + 16 * eps * float(x.abs().max()) + 128 * smallest


def displacement(piece: Piece, context: StepContext) -> Tensor:
    """Returns how far this rank's weights are from the anchor, in scratch memory."""
    x, p = piece.read(Field.ANCHOR, context.scratch), piece.read(Field.MOVING, context.scratch)
    w = torch.sub(x, p, out=piece.memory("direction", context.scratch))
    return w.sub_(piece.read(Field.COMPENSATION, context.scratch)) if piece.is_low else w


def _whole_displacement(slot: Slot) -> Tensor | None:
    """Returns the displacement of a complete slot, flat, if it moves."""
    if (x := slot.anchor) is None or (c := slot.compensation) is None:
        return None if x is None else x - slot.p
    return x.float().sub_(slot.p).sub_(c)


def move_by_mean(stats: WireStats, message: Message, mean: Mean) -> None:
    """Moves a message's tensors from their anchors, and notes a sample of them in `stats`."""
    moving = [piece for piece in message.pieces if piece.has(Field.MOVING)]
    for head in [piece.head(SAMPLE) for piece in moving[:1]]:
        own = displacement(head, mean.context)
        stats.note_displacements(own, mean.of(head))
    form.end_period(message, mean)
