"""Arithmetic of local steps on one piece (docs/rule.md, section 9): a step, what is sent, a move.

A parameter of 32 or 64 bits ("wide") keeps own weights p and its anchor x. A parameter of 16 bits
("low") also keeps its displacement x - p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dlion.exchange.codec import WORD
from hf_dlion.exchange.routes import Verdict, Votes
from hf_dlion.exchange.rule import Average
from hf_dlion.ranks.fingerprint import numbers
from hf_dlion.vote.message import Piece
from hf_dlion.vote.rounding import DISPLACEMENTS, EXCHANGED, OWN_WEIGHTS, PARAMETERS
from hf_dlion.vote.tensors import Plan, Trainable
from hf_dlion.vote.update import (
    SAMPLE,
    Scratch,
    Source,
    Turn,
    by_word,
    direction,
    read,
    takes_part,
    tensor_maxima,
    tensor_sums,
    write,
)


class Weights:
    """Flat tensors by index in the layout; None for a parameter that has no anchor or isn't chosen.

    `own` has all own weights p. `wide` and `low` have those of wide or low parameters only, and
    `wide_anchors` and `low_anchors` their anchors x. `displacements` has x - p of `low`.
    """

    def __init__(self, count: int) -> None:
        self.own: list[Tensor | None] = [None] * count
        self.wide: list[Tensor | None] = [None] * count
        self.wide_anchors: list[Tensor | None] = [None] * count
        self.low: list[Tensor | None] = [None] * count
        self.low_anchors: list[Tensor | None] = [None] * count
        self.displacements: list[Tensor | None] = [None] * count


@dataclass(frozen=True)
class Outcome:
    """The mean of what the voters sent of a piece, and what this voter sent.

    Both have shape (64 * W,) and the piece's dtype. `sent` is None if `mean` is exact. `silent`
    marks the words on which every voter abstained, bool, shape (W, 1). It is None if there are
    none.
    """

    mean: Tensor
    sent: Tensor | None = None
    silent: Tensor | None = None


def own_step(piece: Piece, weights: Weights, trainable: Trainable, turn: Turn) -> None:
    """Moves this rank's own weights by lr * sign(u)."""
    if takes_part(piece, trainable.grads):
        sign = direction(piece, trainable.grads, trainable.momenta, turn, advance=True).sign_()
        # lr * sign(u) is exact, so a fused add rounds as two operations do.
        lr = float(turn.groups[piece.group]["lr"])
        if takes_part(piece, weights.wide):
            p = read(piece, weights.wide, "parameter", turn.scratch).add_(sign, alpha=-lr)
            write(piece, p, weights.wide, turn, PARAMETERS)
        if takes_part(piece, weights.low):
            c = read(piece, weights.displacements, "displacement", turn.scratch)
            c.add_(sign, alpha=lr)
            write(piece, c, weights.displacements, turn, DISPLACEMENTS + turn.voter)
    round_own(piece, weights, turn)


def round_own(piece: Piece, weights: Weights, turn: Turn) -> None:
    """Sets own weights of 16 bits to x - c, rounded; a second call gives the same bits."""
    if takes_part(piece, weights.low):
        x = read(piece, weights.low_anchors, "parameter", turn.scratch)
        x.sub_(read(piece, weights.displacements, "displacement", turn.scratch))
        write(piece, x, weights.low, turn, OWN_WEIGHTS + turn.voter)


def displacement_of(piece: Piece, weights: Weights, scratch: Scratch) -> Tensor:
    """Returns how far this rank's weights are from the anchor, x - p, in scratch memory."""
    if not takes_part(piece, weights.wide):
        return read(piece, weights.displacements, "displacement", scratch)
    x = read(piece, weights.wide_anchors, "anchor", scratch)
    p = read(piece, weights.wide, "parameter", scratch)
    w = torch.sub(x, p, out=scratch("direction", piece.size, piece.dtype, x.device))
    if takes_part(piece, weights.low):
        w.add_(read(piece, weights.displacements, "displacement", scratch))
    return w


def displacements_of(plan: Plan, weights: Weights) -> list[Tensor | None]:
    """Returns x - p of the tensors of `full_precision`, by index in the layout."""
    found: list[Tensor | None] = [None] * len(weights.own)
    for index in plan.full_set:
        x, p = weights.wide_anchors[index], weights.wide[index]
        found[index] = weights.displacements[index] if x is None or p is None else x - p
    return found


def amounts_of(
    plan: Plan, weights: Weights, source: Source, exchange_turn: Turn
) -> tuple[list[float], list[float]]:
    """Returns each tensor's sum of |w| and number of elements; with 8 bits largest |w| and 1."""
    messages = [*plan.messages, *plan.full]
    if exchange_turn.options.bits == 8:
        maxima = tensor_maxima(messages, weights.own, source)
        return numbers(maxima), [1.0] * len(maxima)
    sums, counts = tensor_sums(messages, weights.own, source, exchange_turn)
    return numbers(sums), numbers(counts)


def reset_to_anchor(index: int, weights: Weights) -> None:
    """Sets a parameter's own weights to its anchor."""
    p, x, c = weights.own[index], weights.wide_anchors[index], weights.displacements[index]
    x = weights.low_anchors[index] if x is None else x
    assert p is not None
    assert x is not None
    p.copy_(x)
    if c is not None:
        c.zero_()


def unit_of(scale: float, bits: int) -> float:
    """Returns the displacement of a level of 1."""
    return {1: scale, 2: 0.625 * scale, 4: scale / 7, 8: scale / 254}[bits]


def decoded(
    piece: Piece, votes: Votes, verdict: Verdict, units: Sequence[float], turn: Turn, voters: int
) -> Outcome:
    """Returns the mean of all votes on a piece, and this rank's own, as displacements."""
    bits, rows = votes.planes.shape[0], votes.rows.of_word[piece.words]
    mean = turn.scratch("mean", piece.size, piece.dtype, piece.device)
    sent = turn.scratch("own", piece.size, piece.dtype, piece.device)
    count = None if verdict.voters is None else verdict.voters[rows]
    active = votes.active.to(rows.device, torch.int64)[rows]
    # A single tensor's unit goes into `Rule.decode`, which saves a pass over both.
    single = len(piece.parts) == 1
    unit = units[piece.parts[0].tensor] if single else 1.0
    planes = [plane[piece.words] for plane in verdict.planes]
    Average(voters, bits).decode(planes, count, unit, mean)
    Average(1, bits).decode([plane[piece.words] for plane in votes.planes], active, unit, sent)
    if not single:
        unit_of_word = by_word(piece, units, mean).view(-1, 1)
        mean.view(-1, WORD).mul_(unit_of_word)
        sent.view(-1, WORD).mul_(unit_of_word)
    return Outcome(mean, sent, None if count is None else (count == 0).view(-1, 1))


def drift_of(w: Tensor, outcome: Outcome) -> Tensor:
    """Returns sums over a sample of the elements that this rank displaced, float64, shape (4,).

    They are the sums of sign(w) * sign(mean), of 1, of |w - sent|, and of |w|. `w` is the piece's
    displacement, from before the exchange.
    """
    assert outcome.sent is not None
    w, mean, sent = (whole[: SAMPLE * WORD] for whole in (w, outcome.mean, outcome.sent))
    sign = w.sign()  # 0 in padding and in rows that abstain
    terms = sign * mean.sign(), sign.abs(), (sign * (w - sent)).abs(), w.abs()
    return torch.stack([term.sum(dtype=torch.float64) for term in terms])


def move_by(
    piece: Piece,
    outcome: Outcome,
    weights: Weights,
    decays: Sequence[float],
    turn: Turn,
    exchange_turn: Turn,
) -> None:
    """Moves anchors by the mean, and removes what was sent from the displacements."""
    scratch, decay = turn.scratch, decays[piece.group]
    if takes_part(piece, weights.wide):
        x = read(piece, weights.wide_anchors, "anchor", scratch).sub_(outcome.mean).mul_(decay)
        write(piece, x, weights.wide_anchors, exchange_turn, PARAMETERS)
        p = read(piece, weights.wide, "parameter", scratch)
        if outcome.sent is None:
            p.copy_(x)
        else:
            p.add_(outcome.sent).sub_(outcome.mean).mul_(decay)
        write(piece, p, weights.wide, turn, PARAMETERS)
    if takes_part(piece, weights.low):
        y = read(piece, weights.low_anchors, "parameter", scratch).sub_(outcome.mean).mul_(decay)
        # x - y, what rounding the anchor adds, belongs to the displacement.
        left = torch.neg(y, out=scratch("anchor", piece.size, piece.dtype, piece.device))
        write(piece, y, weights.low_anchors, exchange_turn, PARAMETERS)
        left.add_(read(piece, weights.low_anchors, "parameter", scratch))
        if outcome.sent is not None:
            if outcome.silent is not None:
                left.view(-1, WORD).masked_fill_(outcome.silent, 0.0)
            c = read(piece, weights.displacements, "displacement", scratch)
            left = c.sub_(outcome.sent).mul_(decay).add_(left)
        write(piece, left, weights.displacements, exchange_turn, EXCHANGED + turn.voter)
        round_own(piece, weights, turn)
