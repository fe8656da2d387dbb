"""How far the ranks were moved: averages it over the voters (docs/rule.md, section 9).

w = x - p       what a rank sends of a slot, in a few bits
x = (x - mean of what all voters sent) * D        the anchor, equal on all ranks
w = (w - what this rank sent) * D                 what stays in its own weights
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hf_dlion.exchange.codec import WORD
from hf_dlion.exchange.routes import Verdict, Votes, verdict_of
from hf_dlion.exchange.rule import Average
from hf_dlion.exchange.wire import Wire, digest
from hf_dlion.ranks.fingerprint import fingerprints, numbers
from hf_dlion.ranks.meeting import Disagreement
from hf_dlion.ranks.topology import SAME_IN_NODE, Topology
from hf_dlion.vote import on_gpu
from hf_dlion.vote.full_precision import set_means
from hf_dlion.vote.layout import Layout, Message, Piece, Slot
from hf_dlion.vote.rounding import EXCHANGED, OWN_WEIGHTS, PARAMETERS
from hf_dlion.vote.step import (
    SAMPLE,
    Task,
    Turn,
    encode,
    in_lockstep,
    tensor_maxima,
    tensor_sums,
)

DETACH = (
    "call optimizer.detach() on every rank, and with DDP or FSDP2 optimizer.attach(model) after it"
)
REMEDY = (
    "Write the same values on every rank in `with optimizer.common_weights():`, and set "
    f"max_norm=None in nn.Embedding. Before you load other weights, {DETACH}"
)


def average(
    layout: Layout, decays: Sequence[float], paths: Sequence[float], turn: Turn, ranks: Topology
) -> list[str]:
    """Averages how far the slots with a target were moved; every rank must call this.

    It returns warnings, see `_set_scales`. By parameter group, `decays` has the factor D, and
    `paths` the sum of lr since the last exchange. `turn.step` is the number of this exchange.

    Raises:
        Disagreement: On every rank, before anchors move, if weights were replaced on one.
    """
    voters, stats = ranks.voters, ranks.voters.stats
    texts = _set_scales(layout, paths, turn, ranks)
    rule = Average(voters.world_size, turn.options.bits)
    stats.drift = []
    in_lockstep([_exchanged(m, decays, turn, rule, ranks) for m in layout.messages])
    # Tensors of `full_precision` are averaged without votes.
    set_means(layout, "w", [voters.world_size] * len(layout.slots), voters)
    stats.lap("exchange_s", layout.device)
    for piece in (piece for message in layout.full for piece in message.pieces):
        if piece.has("target"):
            _move(piece, decays, turn, piece.read("mean", turn.scratch))
    stats.lap("apply_s", layout.device)
    return texts


def _exchanged(
    message: Message, decays: Sequence[float], turn: Turn, rule: Average, ranks: Topology
) -> Task:
    """Sends how far a message's tensors were moved, and moves them by the mean."""
    stats, name = ranks.voters.stats, turn.options.exchange
    source, kernels = partial(_displacement, turn=turn), None
    if turn.options.bits == 1 and on_gpu.covers(message, rule.ranks):
        kernels = on_gpu.Exchange(message, decays, turn)
        votes = kernels.encode()
    else:
        votes = encode(message, turn, source, by_tensor=True)
    stats.lap("encode_s", message.device)
    verdict = yield from verdict_of(votes, name, ranks.voters, ranks.node, rule, turn.phase)
    stats.lap("exchange_s", message.device)
    moving = [piece for piece in message.pieces if piece.has("target")]
    for head in [piece.head(SAMPLE) for piece in moving[:1]]:  # The log shows a sample.
        mean, sent, _ = _decoded(head, votes, verdict, rule, turn)
        stats.drift.append(drift_of(source(head), mean, sent))
    if kernels is None:
        for piece in moving:
            _move(piece, decays, turn, *_decoded(piece, votes, verdict, rule, turn))
    else:
        kernels.move(verdict, votes, rule)
    stats.lap("apply_s", message.device)


def _move(
    piece: Piece,
    decays: Sequence[float],
    turn: Turn,
    mean: Tensor,
    sent: Tensor | None = None,
    silent: Tensor | None = None,
) -> None:
    """Moves anchors by the mean, and removes what was sent from the displacements.

    `sent` is None if `mean` is exact. `silent` marks the words on which every voter abstained,
    bool, shape (W, 1); None if there are none.
    """
    scratch, decay = turn.scratch, decays[piece.group]
    y = piece.read("x", scratch).sub_(mean).mul_(decay)
    if not piece.is_low:
        p = piece.read("target", scratch)
        p = p.copy_(y) if sent is None else p.add_(sent).sub_(mean).mul_(decay)
        piece.write("x", y, partial(turn.random, PARAMETERS))
        piece.write("target", p, partial(turn.random, PARAMETERS))
        return
    # x - y, what rounding the anchor adds, belongs to the displacement.
    left = torch.neg(y, out=piece.memory("left", scratch))
    piece.write("x", y, partial(turn.random, PARAMETERS))
    left.add_(piece.read("x", scratch))
    if sent is not None:
        if silent is not None:
            left.view(-1, WORD).masked_fill_(silent, 0.0)
        left = piece.read("c", scratch).sub_(sent).mul_(decay).add_(left)
    piece.write("c", left, partial(turn.random, EXCHANGED + turn.voter), without_infs=True)
    round_own(piece, turn)


def _set_scales(layout: Layout, paths: Sequence[float], turn: Turn, ranks: Topology) -> list[str]:
    """Sets every slot's scale and limit; returns warnings of slots that it resets to anchors.

    Every rank must call this. Slots that aren't finite on this rank are reset.
    """
    slots, bits, warnings = layout.slots, turn.options.bits, []
    found = [*layout.messages, *layout.full]
    source = partial(_displacement, turn=turn)
    if bits == 8:
        amounts, counts = numbers(tensor_maxima(slots, found, source)), [1.0] * len(slots)
    elif len({m.device for m in found}) == 1 and all([on_gpu.covers(m) for m in found]):
        amounts, counts = on_gpu.amounts(slots)
    else:
        amounts, counts = map(numbers, tensor_sums(slots, found, source, turn))
    for k, slot in enumerate(slots):
        if not math.isfinite(amounts[k]) and slot.x is not None:
            slot.p.copy_(slot.x)
            if slot.c is not None:
                slot.c.zero_()
            amounts[k] = 0.0
            warnings.append(
                f"the weights of {slot.name!r} were not finite on rank {dist.get_rank()}, "
                f"which continues with those of the last exchange"
            )
    _refuse_replaced(slots, amounts, paths, bits, ranks)
    means = [amount / count for amount, count in zip(amounts, counts, strict=True)]
    scales = _agreed_scales(means, bits, ranks.voters)
    for slot, scale, amount, count in zip(slots, scales, amounts, counts, strict=True):
        slot.scale = scale / 2 if bits == 8 else scale
        if slot.target is not None and slot.kept is not None:
            slot.kept.limit = amount + scale * count
    return warnings


def _refuse_replaced(
    slots: Sequence[Slot],
    amounts: Sequence[float],
    paths: Sequence[float],
    bits: int,
    ranks: Topology,
) -> None:
    """Raises Disagreement on all ranks if weights aren't those that the steps can have made.

    That is if a rank is farther from an anchor than steps can move it, or if the ranks of a node,
    which vote as one, differ.
    """
    found = [k for k, slot in enumerate(slots) if _was_replaced(slot, amounts[k], paths, bits)]
    # Ranks that vote on other shards, or in other nodes, must raise as well.
    words = [min(found, default=len(slots))]
    if ranks.node is not None:
        own = [slot.p if slot.c is None else slot.c for slot in slots if slot.target is not None]
        words.append(digest(fingerprints(own)))
    table = ranks.everyone.gather_words(words, "a check of weights")
    firsts = table[:, 0].tolist()
    if (first := min(firsts)) < len(slots):
        those = [rank for rank, index in enumerate(firsts) if index == first]
        raise Disagreement(
            f"the weights of {slots[first].name!r} on {ranks.everyone.named(those)} are "
            f"farther from the last exchange's than steps can have moved them, so something "
            f"replaced them. {REMEDY}"
        )
    if node := ranks.unequal_node(table[:, -1].tolist()):
        raise Disagreement(
            f"{ranks.everyone.named(node)} vote as one node, but their weights differ: something "
            f"changed gradients or weights on one of them after DDP averaged the gradients. "
            f"{SAME_IN_NODE}"
        )


def _was_replaced(slot: Slot, amount: float, paths: Sequence[float], bits: int) -> bool:
    x = slot.x
    if x is None or slot.kept is None or slot.c is not None or not slot.size:
        return False
    # Rounding can double a move, but not more.
    limit = (slot.kept.limit or 0.0) + 2 * paths[slot.group] * (1 if bits == 8 else slot.size)
    if amount <= limit:
        return False
    size = x.abs().max() if bits == 8 else x.abs().sum(dtype=torch.float64)
    return amount > limit + 16 * torch.finfo(x.dtype).eps * float(size)


def round_own(piece: Piece, turn: Turn) -> None:
    """Sets a piece's own weights of 16 bits to x - c, rounded; again, it gives the same bits."""
    if piece.has("x"):
        x = piece.read("x", turn.scratch).sub_(piece.read("c", turn.scratch))
        random = partial(turn.random, OWN_WEIGHTS + turn.voter, step=turn.local_step)
        piece.write("target", x, random, without_infs=True)


def _displacement(piece: Piece, turn: Turn) -> Tensor:
    """Returns how far this rank's weights are from the anchor, x - p, in scratch memory."""
    if piece.is_low:
        return piece.read("c", turn.scratch)
    x, p = piece.read("x", turn.scratch), piece.read("target", turn.scratch)
    return torch.sub(x, p, out=piece.memory("direction", turn.scratch))


def _decoded(
    piece: Piece, votes: Votes, verdict: Verdict, rule: Average, turn: Turn
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the mean of all votes on a piece, this rank's own, and the words without a voter.

    The words are marked as `_move` needs them.
    """
    bits, scratch, count, active = turn.options.bits, turn.scratch, None, None
    mean, sent = piece.memory("mean", scratch), piece.memory("own votes", scratch)
    if verdict.active is not None:
        count = votes.rows.by_word(verdict.active, piece.words)
        active = votes.rows.by_word(votes.active.to(piece.device, torch.int64), piece.words)
    units = [_unit_of(part.slot.scale, bits) for part in piece.parts]
    # A single tensor's unit goes into `decode`, which saves a pass over both.
    unit = units[0] if len(units) == 1 else 1.0
    rule.decode([plane[piece.words] for plane in verdict.planes], count, unit, mean)
    own = Average(1, bits)  # The mean of one voter's levels are the levels.
    own.decode([plane[piece.words] for plane in votes.planes], active, unit, sent)
    if len(units) > 1:
        unit_of_word = piece.by_word(units, mean).view(-1, 1)
        mean.view(-1, WORD).mul_(unit_of_word)
        sent.view(-1, WORD).mul_(unit_of_word)
    return mean, sent, None if count is None else (count == 0).view(-1, 1)


def drift_of(w: Tensor, mean: Tensor, sent: Tensor) -> Tensor:
    """Returns sums over the elements of w that this rank displaced, float64, shape (4,).

    They are the sums of sign(w) * sign(mean), of 1, of |w - sent|, and of |w|. `w` is from before
    the exchange.
    """
    sign = w.sign()  # 0 in padding and in rows that abstain
    terms = sign * mean.sign(), sign.abs(), (sign * (w - sent)).abs(), w.abs()
    return torch.stack([term.sum(dtype=torch.float64) for term in terms])


def _unit_of(scale: float | Tensor, bits: int) -> float:
    """Returns the displacement of a level of 1."""
    scale = float(scale)
    return {1: scale, 2: 0.625 * scale, 4: scale / 7, 8: scale / 127}[bits]


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
