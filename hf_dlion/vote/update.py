"""Lion on one message: its votes before the exchange, its move after it.

Lion (Chen et al. 2023, arXiv 2302.06675, Algorithm 2), of which a rank sends sign(u) or a level:

    u = beta1 * m + (1 - beta1) * g
    m = beta2 * m + (1 - beta2) * g
    p = p * (1 - lr * weight_decay) - lr * v          v = sign(u) for one rank alone
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_dlion.exchange import routes
from hf_dlion.exchange.routes import Votes
from hf_dlion.exchange.rule import Majority, Rule
from hf_dlion.options import ExchangeName
from hf_dlion.ranks.topology import Topology
from hf_dlion.vote import codec
from hf_dlion.vote.codec import WORD
from hf_dlion.vote.groups import Groups
from hf_dlion.vote.message import Message, Part, Piece
from hf_dlion.vote.rounding import MOMENTA, PARAMETERS, random_bits, round_to

# By index in the layout: this rank's flat tensor, or None where it takes no part.
Flat = Sequence[Tensor | None]
# Returns what a piece votes by, in scratch: its direction, or how far local steps moved it.
Source = Callable[[Piece], Tensor]
LOW_PRECISION = (torch.bfloat16, torch.float16)
# Words of a step's first message that `WireStats.agreement` looks at.
SAMPLE = 1024


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
        voter: Number of this voter.
        seed: Seed of the stochastic rounding.
        bits: Of a vote.
        level_scale: "word" or "tensor", with 2, 4 or 8 bits.
        exchange: "auto", "gather" or "two_phase".
        groups: The parameter groups.
        scratch: Memory.
    """

    step: int
    voter: int
    seed: int
    bits: int
    level_scale: str
    exchange: ExchangeName
    groups: Groups
    scratch: Scratch


def step_by_votes(
    messages: Sequence[Message],
    params: Flat,
    grads: Flat,
    momenta: Flat,
    turn: Turn,
    rule: Rule,
    ranks: Topology,
) -> None:
    """Takes a step: all messages are encoded and sent, then counted, then applied.

    Every rank must call this with the same messages. Bytes: see `exchange.routes`.

    Args:
        messages: The plan's.
        params: Flat parameters, changed in place; None stays.
        grads: Flat gradients, not changed; None abstains.
        momenta: Flat momenta, changed in place; None where `grads` has None.
        turn: The step.
        rule: What becomes of the votes.
        ranks: Several ranks.
    """
    stats, voters, node = ranks.voters.stats, ranks.voters, ranks.node
    now = time.perf_counter()
    means: Flat = ()
    if turn.bits > 1 and turn.level_scale == "tensor":
        look = functools.partial(direction, grads=grads, momenta=momenta, turn=turn, advance=False)
        sums, counts = tensor_sums(messages, params, look, turn)
        means = [total / count for total, count in zip(sums, counts, strict=True)]
    under_way: list[routes.Exchange] = []
    for message in messages:
        votes = encode(message, grads, momenta, turn, means)
        if not under_way:
            own = votes.planes[0, :SAMPLE].clone()
        under_way.append(routes.start(votes, turn.exchange, voters, rule, turn.step, node))
    now = stats.add("encode_s", now)
    for k, verdict in enumerate(routes.complete(under_way)):
        now = stats.add("exchange_s", now)
        if k == 0 and turn.bits == 1 and isinstance(rule, Majority):
            stats.sample = own, verdict.planes[0][:SAMPLE].clone()
        move(messages[k], params, verdict.planes, verdict.voters, rule, turn)
        now = stats.add("apply_s", now)
    stats.exchanges += 1


def encode(message: Message, grads: Flat, momenta: Flat, turn: Turn, scales: Flat) -> Votes:
    """Returns the votes of a message by the directions, and moves this rank's momenta.

    Args:
        message: Whose votes.
        grads: Gradients, not changed; None abstains from the tensor.
        momenta: Momenta, changed in place; None where `grads` has None.
        turn: The step.
        scales: As for `votes_by`.
    """
    of = functools.partial(direction, grads=grads, momenta=momenta, turn=turn, advance=True)
    return votes_by(of, message, turn, scales)


def votes_by(of: Source, message: Message, turn: Turn, scales: Flat) -> Votes:
    """Returns the votes of a message.

    Args:
        of: Returns what a piece votes by.
        message: Whose votes.
        turn: The step.
        scales: By tensor, what a vote of 2, 4 or 8 bits is relative to, 0-D; empty with
            level_scale="word".
    """
    planes = torch.empty(turn.bits, message.words, dtype=torch.int64, device=message.device)
    words = torch.ones(message.words, dtype=torch.bool, device=message.device)
    all_active = True
    for piece in message.pieces:
        u = of(piece)
        codes = _codes(piece, u, turn, scales)
        own = planes[:, piece.words]
        for bit in range(turn.bits):
            codec.pack(codes, bit, own[bit], turn.scratch("bit", piece.size, codes.dtype, u.device))
        active = codec.active_words(u, own[0] if turn.bits == 1 else None, turn.step + turn.voter)
        if active is not None:
            words[piece.words] = active
            all_active = False
    if all_active:
        return Votes(planes, torch.ones(message.rows.count, dtype=torch.bool), message.rows)
    active = rows_of(words, message)
    planes *= active[message.rows.of_word]
    return Votes(planes, active, message.rows)


def direction(piece: Piece, grads: Flat, momenta: Flat, turn: Turn, *, advance: bool) -> Tensor:
    """Returns u of a piece, and moves the momentum if it is to advance."""
    beta1, beta2 = turn.groups[piece.group]["betas"]
    g = read(piece, grads, "gradient", turn.scratch)
    m = read(piece, momenta, "momentum", turn.scratch)
    u = turn.scratch("direction", piece.size, piece.dtype, g.device)
    torch.lerp(m, g, 1 - beta1, out=u)
    if advance:
        m.lerp_(g, 1 - beta2)
        write(piece, m, momenta, turn, MOMENTA + turn.voter)
    return u


def tensor_sums(
    messages: Sequence[Message], tensors: Flat, of: Source, turn: Turn
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns each tensor's sum of |u|, and the number of elements in its active rows, at least 1.

    Both are 0-D, float64, on the tensor's device.

    Args:
        messages: Of all tensors or some.
        tensors: By index, flat tensors of those sizes.
        of: Returns what a piece votes by.
        turn: The step.
    """
    devices = [torch.device("cpu") if own is None else own.device for own in tensors]
    counts = [torch.zeros((), dtype=torch.float64, device=device) for device in devices]
    words_of: list[list[Tensor]] = [[] for _ in tensors]
    for message in messages:
        words = torch.empty(message.words, dtype=torch.bool, device=message.device)
        total = torch.empty(message.words, dtype=torch.float64, device=message.device)
        for piece in message.pieces:
            u = of(piece)
            active_words = codec.active_words(u)
            words[piece.words] = True if active_words is None else active_words
            scratch = turn.scratch("levels", piece.size, u.dtype, u.device)
            total[piece.words] = codec.word_sums(u, scratch)
        active, row = rows_of(words, message), 0
        for index, first, count, length in message.spans:
            rows = active[row : row + count // length]
            row += count // length
            words_of[index].append(total[first : first + count])
            tensor = tensors[index]
            size = 0 if tensor is None else min(length * WORD, tensor.numel())
            counts[index] = counts[index] + rows.sum() * float(size)
    sums = [
        _tree_sum(torch.cat(own)) if own else count
        for own, count in zip(words_of, counts, strict=True)
    ]
    return sums, [count.clamp_min(1) for count in counts]


def tensor_maxima(messages: Sequence[Message], tensors: Flat, of: Source) -> list[Tensor]:
    """Returns each tensor's largest |u|, 0-D, float64; see `tensor_sums`."""
    devices = [torch.device("cpu") if own is None else own.device for own in tensors]
    found = [torch.zeros((), dtype=torch.float64, device=device) for device in devices]
    for message in messages:
        for piece in message.pieces:
            u = of(piece)
            for part in piece.parts:
                own = u[part.at : part.at + part.stop - part.start]
                # As the largest of both ends, which takes no memory.
                low, high = torch.aminmax(own)
                largest = torch.maximum(high, -low).to(torch.float64)
                found[part.tensor] = torch.maximum(found[part.tensor], largest)
    return found


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
        if not takes_part(piece, params):
            continue
        group = turn.groups[piece.group]
        p = read(piece, params, "parameter", turn.scratch)
        delta = turn.scratch("direction", piece.size, piece.dtype, p.device)
        planes_here = [plane[piece.words] for plane in planes]
        voters_here = None if by_word is None else by_word[piece.words]
        rule.move(planes_here, voters_here, float(group["lr"]), delta)
        _apply(piece, p, delta, params, turn)


def plain_lion(message: Message, params: Flat, grads: Flat, momenta: Flat, turn: Turn) -> None:
    """Takes Lion's step on a message, for one rank alone: v = sign(u), sign(0) = 0."""
    for piece in message.pieces:
        if not takes_part(piece, params):
            continue
        u = direction(piece, grads, momenta, turn, advance=True)
        p = read(piece, params, "parameter", turn.scratch)
        u.sign_().mul_(float(turn.groups[piece.group]["lr"]))
        _apply(piece, p, u, params, turn)


def takes_part(piece: Piece, tensors: Flat) -> bool:
    """Returns whether one of a piece's tensors is there."""
    return any([tensors[part.tensor] is not None for part in piece.parts])


def _apply(piece: Piece, p: Tensor, delta: Tensor, params: Flat, turn: Turn) -> None:
    """Decays and moves: two operations, since one fused operation differs between processors."""
    group = turn.groups[piece.group]
    p.mul_(1 - float(group["lr"]) * float(group["weight_decay"])).sub_(delta)
    write(piece, p, params, turn, PARAMETERS)


def read(piece: Piece, tensors: Flat, name: str, scratch: Scratch) -> Tensor:
    """Returns a piece's elements: a view of the tensor where possible, else scratch."""
    if _is_view(piece, tensors):
        part = piece.parts[0]
        return tensors[part.tensor][part.start : part.stop]  # type: ignore[index]
    flat = scratch(name, piece.size, piece.dtype, piece.device)
    places, values, _ = _parts(piece, flat, tensors)
    if sum([place.numel() for place in places]) < piece.size:
        flat.zero_()  # Padding, and what takes no part.
    if values:
        torch._foreach_copy_(places, values)
    return flat


def write(piece: Piece, flat: Tensor, tensors: Flat, turn: Turn, stream: int) -> None:
    """Writes a piece's elements back, rounded where the tensors have less precision."""
    if _is_view(piece, tensors):
        return  # `read` gave the tensor's own elements.
    values, places, parts = _parts(piece, flat, tensors)
    for dtype in {place.dtype for place in places}.intersection(LOW_PRECISION):
        random = turn.scratch("random", piece.size, torch.int32, flat.device)
        random_bits(piece.size, piece.first, turn.step, turn.seed, stream, random)
        # Of a momentum an Inf would decay to Inf and decide the vote forever.
        most = torch.finfo(dtype).max if stream != PARAMETERS else math.inf
        x = turn.scratch("rounded", piece.size, torch.float32, flat.device)
        x.copy_(flat).clamp_(-most, most)
        rounded = round_to(x, dtype, random)
        for k, (part, place) in enumerate(zip(parts, places, strict=True)):
            if place.dtype == dtype:
                values[k] = rounded[part.at : part.at + place.numel()]
    if places:
        torch._foreach_copy_(places, values)


def _is_view(piece: Piece, tensors: Flat) -> bool:
    """Returns whether a piece is a stretch of one tensor that needs no conversion."""
    if not piece.is_whole:
        return False
    tensor = tensors[piece.parts[0].tensor]
    return tensor is not None and tensor.dtype == piece.dtype


def _parts(
    piece: Piece, flat: Tensor, tensors: Flat
) -> tuple[list[Tensor], list[Tensor], list[Part]]:
    """Returns views of a piece's scratch, and the stretches of tensors that they stand for."""
    ours, theirs, parts = [], [], []
    for part in piece.parts:
        tensor = tensors[part.tensor]
        if tensor is not None:
            ours.append(flat[part.at : part.at + part.stop - part.start])
            theirs.append(tensor[part.start : part.stop])
            parts.append(part)
    return ours, theirs, parts


def rows_of(words: Tensor, message: Message) -> Tensor:
    """Returns which rows hold a word that is set, bool, shape (R,)."""
    count = torch.zeros(message.rows.count, dtype=torch.int32, device=message.device)
    return count.index_add_(0, message.rows.of_word, words.to(torch.int32)) > 0


def by_word(piece: Piece, numbers: Flat, like: Tensor) -> Tensor:
    """Returns a number of each tensor for each of a piece's words, dtype of `like`, shape (W,)."""
    return torch.cat(
        [
            torch.as_tensor(numbers[part.tensor])
            .to(like)
            .expand(-(-(part.stop - part.start) // WORD))
            for part in piece.parts
        ]
    )


def _codes(piece: Piece, u: Tensor, turn: Turn, scales: Flat) -> Tensor:
    phase = turn.step + turn.voter
    if turn.bits == 1:
        out = turn.scratch("codes", piece.size, torch.bool, u.device)
        return codec.sign_codes(u, phase, out)
    scratch = turn.scratch("levels", piece.size, u.dtype, u.device)
    if scales:
        magnitude = by_word(piece, scales, u)
    else:
        sums, counts = codec.word_magnitudes(u, scratch)
        magnitude = sums.div_(counts.clamp_min_(1))
    codes = turn.scratch("codes", 2 * piece.size, torch.uint8, u.device).view(2, -1)
    return codec.level_codes(u, magnitude, turn.bits, phase, codes, scratch)


def _tree_sum(values: Tensor) -> Tensor:
    """Returns the sum of neighbors, of neighboring sums, and so on: one order everywhere."""
    size = 1 << math.ceil(math.log2(max(len(values), 1)))
    values = torch.nn.functional.pad(values, (0, size - len(values)))
    while len(values) > 1:
        values = values[::2] + values[1::2]
    return values[0]
