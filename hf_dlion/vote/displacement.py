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

from hf_dlion.exchange.codec import WORD
from hf_dlion.exchange.wire import WireStats, digest
from hf_dlion.ranks.fingerprint import checksums, fingerprints
from hf_dlion.ranks.meeting import Disagreement
from hf_dlion.ranks.replicas import compare_parameters
from hf_dlion.ranks.topology import SAME_IN_NODE, Topology
from hf_dlion.vote import on_gpu
from hf_dlion.vote.context import StepContext
from hf_dlion.vote.full_precision import set_means
from hf_dlion.vote.layout import Layout, Message, Piece, Slot
from hf_dlion.vote.quantized_mean import Mean, Scale, averaged
from hf_dlion.vote.rounding import PARAMETERS
from hf_dlion.vote.step import SAMPLE, in_lockstep

# Many elements go one way in nearly all steps of a period, so |w| has a peak at its largest value,
# where 2 to 8 bits have a level.
SCALES = {
    1: Scale(1, of_largest=False, factor=1.0),
    2: Scale(2, of_largest=True, factor=4 / 9),
    4: Scale(4, of_largest=True, factor=0.5),
    8: Scale(8, of_largest=True, factor=0.5),
}
# What a rank gathers as the amount of a parameter whose weights were replaced on it.
_REPLACED = math.inf
REMEDY = (
    "Load or change weights on every rank, right after optimizer.exchange_now() or in `with "
    "optimizer.common_weights():`, and set max_norm=None in nn.Embedding"
)


def average(
    layout: Layout, counts: Sequence[int], context: StepContext, ranks: Topology
) -> list[str]:
    """Moves the parameters by the mean of how far the ranks moved; every rank must call this.

    It returns warnings: a parameter that wasn't finite on this rank abstains.

    Args:
        layout: The tensors, with local states.
        counts: How many ranks had a finite gradient of each parameter in the period.
        context: The context, whose step is the number of this exchange.
        ranks: The ranks. Bytes for P trainable parameters: 8 (N - 1) (P + 1) for amounts and a
            checksum, 8 (N - 1) more with nodes, those of `exchange.routes`, and of
            `full_precision.set_means`.

    Raises:
        Disagreement: On every rank, before a parameter moves, if weights were replaced on one
            within the period, or the ranks began it with different weights.
    """
    voters, stats, scale = ranks.voters, ranks.voters.stats, SCALES[context.bits]
    by_voter, texts = _amounts_by_voter(layout, scale, context, ranks)
    scale.set_magnitudes(layout.slots, by_voter)
    for slot, count, *found in zip(layout.slots, counts, *by_voter, strict=True):
        if not count and not any(found):  # No rank moved it.
            slot.target = None
    stats.drift = []
    source = partial(displacement, context=context)
    tasks = []
    for message in layout.messages:
        move = partial(move_message, message, context, stats)
        tasks.append(averaged(message, scale, source, move, context, ranks))
    in_lockstep(tasks)
    # Tensors of `full_precision` are averaged without votes.
    set_means(layout, "w", [voters.world_size] * len(layout.slots), voters)
    stats.lap("exchange_s", layout.device)
    for piece in (piece for message in layout.full for piece in message.pieces):
        if piece.has("target"):
            _move(piece, piece.read("mean", context.scratch), context)
    for slot in layout.slots:
        slot.mean = None
    stats.lap("apply_s", layout.device)
    return texts


def _amounts_by_voter(
    layout: Layout, scale: Scale, context: StepContext, ranks: Topology
) -> tuple[list[list[float]], list[str]]:
    """Returns the amount of each parameter by voter, and warnings of those that aren't finite."""
    everyone, found = ranks.everyone, [*layout.messages, *layout.full]
    own = scale.amounts(layout.slots, found, partial(displacement, context=context), context)
    texts = []
    for k, slot in enumerate(layout.slots):
        if not math.isfinite(own[k]):
            own[k] = 0.0
            _forget_move(slot)
            texts.append(
                f"the weights of {slot.name!r} were not finite on rank {dist.get_rank()}, which "
                f"continues with those of the other ranks"
            )
        elif _was_replaced(slot, own[k]):
            own[k] = _REPLACED
    anchors = {slot.name: slot.local.anchor for slot in layout.slots if slot.local is not None}
    words = torch.tensor(own, dtype=torch.float64).view(torch.int64).tolist()
    words.append(digest(checksums([*anchors.values()])))
    if ranks.node is not None:
        tensors = [tensor for slot in layout.slots for tensor in (slot.p, slot.c)]
        words.append(digest(fingerprints([t for t in tensors if t is not None])))
    # Of all ranks, so those that hold other shards, or are in other nodes, raise together.
    table = everyone.gather_words(words, "how far weights were moved")
    rows = table[:, : len(own)].contiguous().view(torch.float64).tolist()
    for slot, *by_rank in zip(layout.slots, *rows, strict=True):
        if those := [rank for rank, amount in enumerate(by_rank) if amount == _REPLACED]:
            raise Disagreement(
                f"the weights of {slot.name!r} on {everyone.named(those)} are farther from the "
                f"last exchange's than steps can have moved them, so something replaced them. "
                f"{REMEDY}"
            )
    hashes = table[:, len(own)].tolist()
    same_parts = ranks.same_parts or [[*range(everyone.world_size)]]
    if any([len({hashes[rank] for rank in same}) > 1 for same in same_parts]):
        compare_parameters(
            lambda: [*anchors.items()], everyone, ranks.same_parts, REMEDY,
            when=", with which the last period of local steps began,",
        )  # fmt: skip
    if node := ranks.unequal_node(table[:, -1].tolist()):
        raise Disagreement(
            f"{everyone.named(node)} vote as one node, but their weights differ: something "
            f"changed gradients or weights on one of them after DDP averaged the gradients. "
            f"{SAME_IN_NODE}"
        )
    return [rows[everyone.ranks.index(rank)] for rank in ranks.voters.ranks], texts


def _forget_move(slot: Slot) -> None:
    """Puts the anchor into a slot; one that isn't finite itself takes no part on any rank."""
    if slot.x is not None:
        slot.p.copy_(slot.x)
    if slot.c is not None:
        slot.c.zero_()
    if not slot.p.isfinite().all():
        slot.target = None


def _was_replaced(slot: Slot, amount: float) -> bool:
    """Returns whether a rank is farther from an anchor than the steps can have moved it.

    Weights that are loaded on some ranks are, unless they are close to the anchor.
    """
    if slot.local is None or (x := slot.x) is None or not slot.size:
        return False
    limit = 2 * slot.local.path  # Rounding can double a move, but not more.
    if amount <= limit:
        return False
    # What many steps can round: units in the last place of x, or of a compensation of 16 bits,
    # which is at least the smallest number.
    info = torch.finfo(x.dtype)
    eps = info.eps if slot.c is None else info.eps**2
    smallest = info.eps * info.smallest_normal
    return amount > limit + 16 * eps * float(x.abs().max()) + 128 * smallest


def displacement(piece: Piece, context: StepContext) -> Tensor:
    """Returns how far this rank's weights are from the anchor, in scratch memory."""
    x, p = piece.read("x", context.scratch), piece.read("target", context.scratch)
    w = torch.sub(x, p, out=piece.memory("direction", context.scratch))
    return w.sub_(piece.read("c", context.scratch)) if piece.is_low else w


def move_message(message: Message, context: StepContext, stats: WireStats, mean: Mean) -> None:
    """Moves a message's tensors from their anchors, and notes a sample of them in `stats`."""
    moving = [piece for piece in message.pieces if piece.has("target")]
    for head in [piece.head(SAMPLE) for piece in moving[:1]]:
        stats.drift.append(_drift(displacement(head, context), mean.of(head), mean.own(head)))
    if on_gpu.covers(message, mean.rule.ranks):
        on_gpu.end_period(message, mean.verdict, mean.rule, mean.scale.unit, context)
        return
    for piece in moving:
        _move(piece, mean.of(piece), context)


def _move(piece: Piece, d: Tensor, context: StepContext) -> None:
    p = piece.read("target", context.scratch)
    torch.sub(piece.read("x", context.scratch), d, out=p)
    decays = [1.0 if part.slot.local is None else part.slot.local.decay for part in piece.parts]
    if len(set(decays)) == 1:
        p.mul_(decays[0])
    else:  # A parameter began to train within the period.
        p.view(-1, WORD).mul_(piece.by_word(decays, p).view(-1, 1))
    piece.write("target", p, partial(context.random, PARAMETERS))


def _drift(w: Tensor, d: Tensor, sent: Tensor) -> Tensor:
    """Returns sums over the elements that this rank moved, for `WireStats`: float64, shape (4,).

    They are the sums of sign(w) * sign(d), of 1, of |w - sent|, and of |w|.
    """
    sign = w.sign()  # 0 in padding and in rows that abstain
    terms = sign * d.sign(), sign.abs(), (sign * (w - sent)).abs(), w.abs()
    return torch.stack([term.sum(dtype=torch.float64) for term in terms])
