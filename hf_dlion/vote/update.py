"""Lion on one message: its votes before the exchange, its move after it.

Lion (Chen et al. 2023, arXiv 2302.06675, Algorithm 2), of which a rank sends sign(u) or a level:

    u = beta1 * m + (1 - beta1) * g
    m = beta2 * m + (1 - beta2) * g
    p = p * (1 - lr * weight_decay) - lr * v          v = sign(u) for one rank alone
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_dlion.exchange.exchange import Votes
from hf_dlion.exchange.rule import Rule
from hf_dlion.vote import codec
from hf_dlion.vote.codec import WORD
from hf_dlion.vote.message import Message, Part, Piece
from hf_dlion.vote.rounding import PARAMETERS, random_bits, round_to

Groups = Sequence[Mapping[str, Any]]
# By index in the layout: this rank's flat tensor, or None where it takes no part.
Flat = Sequence[Tensor | None]
LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass
class Scratch:
    """Memory that is used again from piece to piece and from step to step."""

    _held: dict[tuple[str, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def __call__(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns `size` elements of any value."""
        key = (name, dtype, device)
        held = self._held.get(key)
        if held is None or held.numel() < size:
            held = self._held[key] = torch.empty(size, dtype=dtype, device=device)
        return held[:size]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the arithmetic of a step depends on besides tensors.

    Attributes:
        step: Number of the step, 1 for the first.
        rank: This voter.
        seed: Seed of the stochastic rounding.
        bits: Of a vote.
        level_scale: "word" or "tensor", with 2, 4 or 8 bits.
        groups: The parameter groups.
        scratch: Memory.
    """

    step: int
    rank: int
    seed: int
    bits: int
    level_scale: str
    groups: Groups
    scratch: Scratch


def encode(message: Message, grads: Flat, momenta: Flat, turn: Turn, means: Flat) -> Votes:
    """Returns the votes of a message, and moves this rank's momenta.

    Args:
        message: Whose votes.
        grads: Gradients, not changed; None abstains from the tensor.
        momenta: Momenta, changed in place; None where `grads` has None.
        turn: The step.
        means: `tensor_means` with level_scale="tensor", else empty.
    """
    zero_word = codec.alternating_word((turn.step + turn.rank) % 2)
    planes = torch.empty(turn.bits, message.words, dtype=torch.int64, device=message.device)
    words = torch.empty(message.words, dtype=torch.bool, device=message.device)
    for piece in message.pieces:
        u = direction(piece, grads, momenta, turn, advance=True)
        codes = _codes(piece, u, turn, means)
        for bit in range(turn.bits):
            codec.pack(codes, bit, planes[bit, piece.words])
        # With one bit, a word of zeros votes both ways in turns: nearly no other word does.
        zeros = planes[0, piece.words] == zero_word if turn.bits == 1 else None
        words[piece.words] = codec.active_words(u, zeros)
    if message.device.type == "cpu" and words.all():
        return Votes(planes, torch.ones(message.rows.count, dtype=torch.bool), message.rows)
    active = rows_of(words, message)
    planes *= active[message.rows.of_word]
    return Votes(planes, active, message.rows)


def direction(piece: Piece, grads: Flat, momenta: Flat, turn: Turn, *, advance: bool) -> Tensor:
    """Returns u of a piece, and moves the momentum if it is to advance."""
    beta1, beta2 = turn.groups[piece.group]["betas"]
    g = gather(piece, grads, "gradient", turn.scratch)
    m = gather(piece, momenta, "momentum", turn.scratch)
    u = turn.scratch("direction", piece.size, piece.dtype, g.device)
    torch.lerp(m, g, 1 - beta1, out=u)
    if advance:
        m.lerp_(g, 1 - beta2)
        put(piece, m, momenta, turn, 1 + turn.rank)
    return u


def tensor_means(
    messages: Sequence[Message], grads: Flat, momenta: Flat, turn: Turn
) -> list[Tensor | None]:
    """Returns each tensor's mean of |u| over the elements of its active rows, 0-D, float64."""
    sums: list[list[Tensor]] = [[] for _ in grads]
    voted: list[Tensor | float] = [0.0 for _ in grads]
    for message in messages:
        words = torch.empty(message.words, dtype=torch.bool, device=message.device)
        total = torch.empty(message.words, dtype=torch.float64, device=message.device)
        for piece in message.pieces:
            u = direction(piece, grads, momenta, turn, advance=False)
            words[piece.words] = codec.active_words(u)
            total[piece.words] = codec.word_magnitudes(u)[0]
        active, row = rows_of(words, message), 0
        for index, first, count, length in message.spans:
            rows = active[row : row + count // length]
            row += count // length
            sums[index].append(total[first : first + count])
            grad = grads[index]
            size = 0 if grad is None else min(length * WORD, grad.numel())
            voted[index] = voted[index] + rows.sum() * float(size)
    return [
        _tree_sum(torch.cat(own)) / torch.as_tensor(count).clamp_min(1) if own else None
        for own, count in zip(sums, voted, strict=True)
    ]


def move(
    message: Message,
    params: Flat,
    planes: list[Tensor],
    voters: Tensor | None,
    rule: Rule,
    turn: Turn,
) -> None:
    """Moves parameters by a verdict, the same bits on every rank.

    Args:
        message: Whose verdict.
        params: Flat parameters, changed in place; None stays.
        planes: Of the verdict, int64, shape (W,) each.
        voters: Number of active ranks by row, int64, shape (R,); None if all are.
        rule: That made the verdict.
        turn: The step.
    """
    by_word = None if voters is None else voters[message.rows.of_word]
    for piece in message.pieces:
        if all(params[part.tensor] is None for part in piece.parts):
            continue
        group = turn.groups[piece.group]
        p = gather(piece, params, "parameter", turn.scratch)
        step = turn.scratch("direction", piece.size, piece.dtype, p.device)
        own = [plane[piece.words] for plane in planes]
        votes = None if by_word is None else by_word[piece.words]
        rule.move(own, votes, float(group["lr"]), step)
        _apply(piece, p, step, params, turn)


def plain_lion(message: Message, params: Flat, grads: Flat, momenta: Flat, turn: Turn) -> None:
    """Takes Lion's step on a message, for one rank alone: v = sign(u), sign(0) = 0."""
    for piece in message.pieces:
        if all(params[part.tensor] is None for part in piece.parts):
            continue
        u = direction(piece, grads, momenta, turn, advance=True)
        p = gather(piece, params, "parameter", turn.scratch)
        u.sign_().mul_(float(turn.groups[piece.group]["lr"]))
        _apply(piece, p, u, params, turn)


def _apply(piece: Piece, p: Tensor, step: Tensor, params: Flat, turn: Turn) -> None:
    """Decays and moves: two operations, since one fused operation differs between processors."""
    group = turn.groups[piece.group]
    p.mul_(1 - float(group["lr"]) * float(group["weight_decay"])).sub_(step)
    put(piece, p, params, turn, PARAMETERS)


def gather(piece: Piece, tensors: Flat, name: str, scratch: Scratch) -> Tensor:
    """Returns a piece's elements: a view of the tensor where possible, else scratch."""
    first = tensors[piece.parts[0].tensor]
    if piece.is_whole and first is not None and first.dtype == piece.dtype:
        return first[piece.parts[0].start : piece.parts[0].stop]
    here = [part for part in piece.parts if tensors[part.tensor] is not None]
    device = next((t.device for t in tensors if t is not None), torch.device("cpu"))
    flat = scratch(name, piece.size, piece.dtype, device).zero_()
    if here:
        targets = [flat[part.at : part.at + part.stop - part.start] for part in here]
        torch._foreach_copy_(targets, [_part(tensors, part) for part in here])
    return flat


def put(piece: Piece, flat: Tensor, tensors: Flat, turn: Turn, stream: int) -> None:
    """Writes a piece's elements back, rounded where the tensors have less precision."""
    first = tensors[piece.parts[0].tensor]
    if piece.is_whole and first is not None and first.dtype == piece.dtype:
        return  # `gather` gave a view.
    here = [part for part in piece.parts if tensors[part.tensor] is not None]
    if not here:
        return
    targets = [_part(tensors, part) for part in here]
    sources = [flat[part.at : part.at + part.stop - part.start] for part in here]
    if any(target.dtype in LOW_PRECISION for target in targets):
        random = turn.scratch("random", piece.size, torch.int32, flat.device)
        random_bits(piece.size, piece.first, turn.step, turn.seed, stream, random)
        for k, (part, target) in enumerate(zip(here, targets, strict=True)):
            if target.dtype in LOW_PRECISION:
                x = sources[k]
                if stream != PARAMETERS:
                    # An Inf would decay to Inf and decide the vote forever.
                    x.clamp_(-torch.finfo(target.dtype).max, torch.finfo(target.dtype).max)
                own = random[part.at : part.at + x.numel()]
                sources[k] = round_to(x, target.dtype, own)
    torch._foreach_copy_(targets, sources)


def rows_of(words: Tensor, message: Message) -> Tensor:
    """Returns which rows hold a word that is set, bool, shape (R,)."""
    count = torch.zeros(message.rows.count, dtype=torch.int32, device=message.device)
    return count.index_add_(0, message.rows.of_word, words.to(torch.int32)) > 0


def _codes(piece: Piece, u: Tensor, turn: Turn, means: Flat) -> Tensor:
    phase = turn.step + turn.rank
    if turn.bits == 1:
        out = turn.scratch("codes", piece.size, torch.bool, u.device)
        return codec.sign_codes(u, phase, out)
    if turn.level_scale == "word":
        sums, counts = codec.word_magnitudes(u)
        magnitude = (sums / counts.clamp_min(1)).to(u.dtype)
    else:
        magnitude = torch.cat(
            [
                torch.as_tensor(means[part.tensor]).to(u).expand(-(-(part.stop - part.start) // 64))
                for part in piece.parts
            ]
        )
    return codec.level_codes(u, magnitude, turn.bits, phase)


def _part(tensors: Flat, part: Part) -> Tensor:
    tensor = tensors[part.tensor]
    assert tensor is not None
    return tensor[part.start : part.stop]


def _tree_sum(values: Tensor) -> Tensor:
    """Returns the sum of neighbors, of neighboring sums, and so on: one order everywhere."""
    size = 1 << math.ceil(math.log2(max(len(values), 1)))
    values = torch.nn.functional.pad(values, (0, size - len(values)))
    while len(values) > 1:
        values = values[::2] + values[1::2]
    return values[0]
