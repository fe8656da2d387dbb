"""Lion on one message: votes before the exchange, the move after it.

Lion is Chen et al. 2023, arXiv 2302.06675, Algorithm 2. A rank sends sign(u), or a level:

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

from hf_dlion.exchange import codec, routes
from hf_dlion.exchange.codec import WORD
from hf_dlion.exchange.routes import Verdict, Votes
from hf_dlion.exchange.rule import Majority, Rule
from hf_dlion.options import Options
from hf_dlion.ranks.topology import Topology
from hf_dlion.vote.groups import Groups
from hf_dlion.vote.idle_rows import silence
from hf_dlion.vote.message import Message, Part, Piece
from hf_dlion.vote.rounding import MOMENTA, PARAMETERS, random_bits, round_to

# This rank's flat tensors by index in the layout. Steps change parameters and momenta in place, and
# don't change gradients. None takes no part: a parameter that doesn't move, or a gradient, and with
# it a momentum, for which this rank abstains.
Flat = Sequence[Tensor | None]
# Scales of tensors by index in the layout, 0-D if they are tensors.
Numbers = Sequence[float] | Sequence[Tensor]
# Returns what a piece's votes encode, in scratch memory: its direction u, or its displacement w.
Source = Callable[[Piece], Tensor]
LOW_PRECISION = (torch.bfloat16, torch.float16)
# Words of a message that `WireStats.agreement` and `remainder` look at.
SAMPLE = 1024


@dataclass
class Scratch:
    """Memory that is reused from piece to piece and from step to step."""

    _buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def __call__(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns `size` uninitialized elements; calls with the same name share memory."""
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The step and the options on which the arithmetic depends, in addition to tensors.

    `step` is 1 for the first step. `voter` is the number of this rank's voter. `old_rows` has, by
    index in the layout, the rows in which u is 0, see `idle_rows.old_rows`.
    """

    step: int
    voter: int
    options: Options
    groups: Groups
    scratch: Scratch
    old_rows: Sequence[Tensor | None] = ()


def step_by_votes(
    messages: Sequence[Message],
    params: Flat,
    grads: Flat,
    momenta: Flat,
    turn: Turn,
    rule: Rule,
    ranks: Topology,
) -> None:
    """Takes a step: encodes and sends all messages, then counts and applies one after the other.

    Every rank must call this with the same messages, and there must be several voters. Bytes: see
    `exchange.routes`.
    """
    stats, voters, node = ranks.voters.stats, ranks.voters, ranks.node
    now = time.perf_counter()
    means: Numbers = ()
    if turn.options.bits > 1 and turn.options.level_scale == "tensor":
        # The first of two passes over u, which leaves the momenta as they are.
        source = functools.partial(
            direction, grads=grads, momenta=momenta, turn=turn, advance=False
        )
        sums, counts = tensor_sums(messages, params, source, turn)
        means = [total / count for total, count in zip(sums, counts, strict=True)]
    under_way: list[routes.Route] = []
    for message in messages:
        votes = encode(message, grads, momenta, turn, means)
        if not under_way:
            sample = votes.planes[0, :SAMPLE].clone()
        under_way.append(routes.start(votes, turn.options.exchange, voters, node, rule, turn.step))
    now = stats.add("encode_s", now)
    for k, verdict in enumerate(routes.complete(under_way, node)):
        now = stats.add("exchange_s", now)
        if k == 0 and turn.options.bits == 1 and isinstance(rule, Majority):
            stats.sample = sample, verdict.planes[0][:SAMPLE].clone()
        move(messages[k], params, verdict, rule, turn)
        now = stats.add("apply_s", now)
    stats.exchanges += 1


def encode(message: Message, grads: Flat, momenta: Flat, turn: Turn, scales: Numbers) -> Votes:
    """Returns the votes of a message, see `votes_by`, and updates this rank's momenta."""
    source = functools.partial(direction, grads=grads, momenta=momenta, turn=turn, advance=True)
    return votes_by(source, message, turn, scales)


def votes_by(source: Source, message: Message, turn: Turn, scales: Numbers) -> Votes:
    """Returns the votes of a message, which encode what `source` returns.

    `scales` has each tensor's magnitude, 0-D, to which votes of 2, 4, or 8 bits are relative. It is
    empty with level_scale="word".
    """
    bits, phase = turn.options.bits, turn.step + turn.voter
    planes = torch.empty(bits, message.words, dtype=torch.int64, device=message.device)
    words = torch.ones(message.words, dtype=torch.bool, device=message.device)
    all_active = True
    for piece in message.pieces:
        u = source(piece)
        codes = _codes(piece, u, turn, scales)
        out = planes[:, piece.words]
        for bit in range(bits):
            codec.pack(codes, bit, out[bit], turn.scratch("bit", piece.size, codes.dtype, u.device))
        active = codec.active_words(u, out[0] if bits == 1 else None, phase)
        if active is not None:
            words[piece.words] = active
            all_active = False
    if all_active:
        return Votes(planes, torch.ones(message.rows.count, dtype=torch.bool), message.rows)
    active = rows_of(words, message)
    planes *= active[message.rows.of_word]
    return Votes(planes, active, message.rows)


def direction(
    piece: Piece,
    grads: Flat,
    momenta: Flat,
    turn: Turn,
    *,
    advance: bool,
    fused: bool = True,
) -> Tensor:
    """Returns a piece's u = beta1 * m + (1 - beta1) * g, in scratch memory, 0 in old rows.

    `advance` also updates the momentum with beta2. If `fused`, processors may differ in the last
    bit, as in torch.lerp. Ranks that must get the same u and momentum pass False, and each
    operation then rounds by itself.
    """
    beta1, beta2 = turn.groups[piece.group]["betas"]
    g = read(piece, grads, "gradient", turn.scratch)
    m = read(piece, momenta, "momentum", turn.scratch)
    u = turn.scratch("direction", piece.size, piece.dtype, g.device)
    if fused:
        torch.lerp(m, g, 1 - beta1, out=u)
    else:
        difference = g - m
        torch.mul(difference, 1 - beta1, out=u).add_(m)
    if advance:
        if fused:
            m.lerp_(g, 1 - beta2)
        else:
            m.add_(difference.mul_(1 - beta2))
        write(piece, m, momenta, turn, MOMENTA + turn.voter)
    for part in piece.parts if turn.old_rows else ():
        old, grad = turn.old_rows[part.tensor], grads[part.tensor]
        if old is not None and grad is not None:
            silence(u, part, old, row=grad.numel() // old.numel())
    return u


def tensor_sums(
    messages: Sequence[Message], tensors: Flat, source: Source, turn: Turn
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns each tensor's sum of |u|, and the number of elements in its active rows, at least 1.

    Both are 0-D, float64, on the tensor's device. `tensors` has the sizes and devices.
    """
    devices = [torch.device("cpu") if t is None else t.device for t in tensors]
    counts = [torch.zeros((), dtype=torch.float64, device=device) for device in devices]
    word_sums: list[list[Tensor]] = [[] for _ in tensors]
    for message in messages:
        active_words = torch.empty(message.words, dtype=torch.bool, device=message.device)
        total = torch.empty(message.words, dtype=torch.float64, device=message.device)
        for piece in message.pieces:
            u = source(piece)
            active = codec.active_words(u)
            active_words[piece.words] = True if active is None else active
            scratch = turn.scratch("levels", piece.size, u.dtype, u.device)
            total[piece.words] = codec.word_sums(u, scratch)
        active_rows, row = rows_of(active_words, message), 0
        for index, first, words, words_per_row in message.spans:
            rows = active_rows[row : row + words // words_per_row]
            row += words // words_per_row
            word_sums[index].append(total[first : first + words])
            tensor = tensors[index]
            row_size = 0 if tensor is None else min(words_per_row * WORD, tensor.numel())
            counts[index] = counts[index] + rows.sum() * row_size
    sums = [
        _tree_sum(torch.cat(parts)) if parts else count
        for parts, count in zip(word_sums, counts, strict=True)
    ]
    return sums, [count.clamp_min(1) for count in counts]


def tensor_maxima(messages: Sequence[Message], tensors: Flat, source: Source) -> list[Tensor]:
    """Returns each tensor's largest |u|, 0-D, float64; see `tensor_sums`."""
    devices = [torch.device("cpu") if t is None else t.device for t in tensors]
    maxima = [torch.zeros((), dtype=torch.float64, device=device) for device in devices]
    for message in messages:
        for piece in message.pieces:
            u = source(piece)
            for part in piece.parts:
                # Unlike u.abs().max(), it takes no memory.
                low, high = torch.aminmax(u[part.at : part.at + part.stop - part.start])
                largest = torch.maximum(high, -low).to(torch.float64)
                maxima[part.tensor] = torch.maximum(maxima[part.tensor], largest)
    return maxima


def move(message: Message, params: Flat, verdict: Verdict, rule: Rule, turn: Turn) -> None:
    """Moves a message's parameters by its verdict, to the same bits on every rank."""
    voters = message.rows.by_word(verdict.voters)
    for piece in message.pieces:
        if not takes_part(piece, params):
            continue
        group = turn.groups[piece.group]
        p = read(piece, params, "parameter", turn.scratch)
        delta = turn.scratch("direction", piece.size, piece.dtype, p.device)
        planes = [plane[piece.words] for plane in verdict.planes]
        voters_of_piece = None if voters is None else voters[piece.words]
        rule.decode(planes, voters_of_piece, float(group["lr"]), delta)
        _apply(piece, p, delta, params, turn)


def plain_lion(
    message: Message, params: Flat, grads: Flat, momenta: Flat, turn: Turn, *, fused: bool = True
) -> None:
    """Takes Lion's step on a message without votes: v = sign(u), sign(0) = 0; see `direction`."""
    for piece in message.pieces:
        if not takes_part(piece, params):
            continue
        u = direction(piece, grads, momenta, turn, advance=True, fused=fused)
        p = read(piece, params, "parameter", turn.scratch)
        u.sign_().mul_(float(turn.groups[piece.group]["lr"]))
        _apply(piece, p, u, params, turn)


def takes_part(piece: Piece, tensors: Flat) -> bool:
    """Returns whether at least one of a piece's tensors takes part."""
    return any([tensors[part.tensor] is not None for part in piece.parts])


def _apply(piece: Piece, p: Tensor, delta: Tensor, params: Flat, turn: Turn) -> None:
    """Decays p and subtracts delta, rounding twice: processors differ in fused operations."""
    group = turn.groups[piece.group]
    p.mul_(1 - float(group["lr"]) * float(group["weight_decay"])).sub_(delta)
    write(piece, p, params, turn, PARAMETERS)


def read(piece: Piece, tensors: Flat, name: str, scratch: Scratch) -> Tensor:
    """Returns a piece's elements in its dtype: a view of the tensor if possible, else scratch."""
    if _is_view(piece, tensors):
        part = piece.parts[0]
        return tensors[part.tensor][part.start : part.stop]  # type: ignore[index]
    flat = scratch(name, piece.size, piece.dtype, piece.device)
    in_scratch, in_tensors, _ = _stretches(piece, flat, tensors)
    if sum([stretch.numel() for stretch in in_scratch]) < piece.size:
        flat.zero_()  # Padding, and tensors that take no part.
    if in_tensors:
        torch._foreach_copy_(in_scratch, in_tensors)
    return flat


def write(piece: Piece, flat: Tensor, tensors: Flat, turn: Turn, stream: int) -> None:
    """Writes a piece's elements back, rounded stochastically to bfloat16 or float16.

    `flat` is what `read` returned, changed since then, and is rounded in place. `stream` is a
    stream of random bits, see `rounding`.
    """
    if _is_view(piece, tensors):
        return  # `flat` is a view of the tensor.
    dtypes = {t.dtype for part in piece.parts if (t := tensors[part.tensor]) is not None}
    is_low = not dtypes.isdisjoint(LOW_PRECISION)
    if is_low and piece.dtype == torch.float64:  # Momenta of 16 bits of float64 parameters.
        flat = turn.scratch("rounded", piece.size, torch.float32, flat.device).copy_(flat)
    in_scratch, in_tensors, parts = _stretches(piece, flat, tensors)
    if is_low:
        words = turn.scratch("random", piece.size // 2, torch.int32, flat.device)
        random = random_bits(piece.size, piece.first, turn.step, turn.options.seed, stream, words)
        # Usually all at once, and one by one if some tensors have another dtype.
        rounded = [(flat, random, in_tensors[0].dtype)]
        if len(dtypes) > 1:
            rounded = [
                (x, random[part.at : part.at + x.numel()], tensor.dtype)
                for part, x, tensor in zip(parts, in_scratch, in_tensors, strict=True)
                if tensor.dtype in LOW_PRECISION
            ]
        for x, random_of_x, dtype in rounded:
            if stream != PARAMETERS:  # An Inf in a momentum would decide the vote forever.
                x.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
            round_to(x, dtype, random_of_x)
    if len(dtypes) == 1:
        torch._foreach_copy_(in_tensors, in_scratch)
        return
    # One by one: on CUDA, torch before 2.11 writes all tensors of a call in the first one's dtype.
    for tensor, x in zip(in_tensors, in_scratch, strict=True):
        tensor.copy_(x)


def _is_view(piece: Piece, tensors: Flat) -> bool:
    """Returns whether a piece is a stretch of one tensor and needs no conversion."""
    if not piece.is_whole:
        return False
    tensor = tensors[piece.parts[0].tensor]
    return tensor is not None and tensor.dtype == piece.dtype


def _stretches(
    piece: Piece, flat: Tensor, tensors: Flat
) -> tuple[list[Tensor], list[Tensor], list[Part]]:
    """Returns pairs of views, of a piece's scratch and of the tensors, and the parts they show."""
    in_scratch, in_tensors, parts = [], [], []
    for part in piece.parts:
        tensor = tensors[part.tensor]
        if tensor is not None:
            in_scratch.append(flat[part.at : part.at + part.stop - part.start])
            in_tensors.append(tensor[part.start : part.stop])
            parts.append(part)
    return in_scratch, in_tensors, parts


def rows_of(words: Tensor, message: Message) -> Tensor:
    """Returns which rows have at least one set word, bool, shape (R,), from a flag per word."""
    count = torch.zeros(message.rows.count, dtype=torch.int32, device=message.device)
    return count.index_add_(0, message.rows.of_word, words.to(torch.int32)) > 0


def by_word(piece: Piece, numbers: Numbers, like: Tensor) -> Tensor:
    """Returns the tensor's number for each of a piece's words, dtype of `like`, shape (W,).

    Tensors in `numbers` are 0-D and on one device, so a GPU gets one copy for all of them.
    """
    found = [numbers[part.tensor] for part in piece.parts]
    values = torch.stack([torch.as_tensor(number, dtype=torch.float64) for number in found])
    words = [-(-(part.stop - part.start) // WORD) for part in piece.parts]
    counts = torch.tensor(words, device=values.device)
    return values.repeat_interleave(counts, output_size=sum(words)).to(like)


def _codes(piece: Piece, u: Tensor, turn: Turn, scales: Numbers) -> Tensor:
    """Returns a piece's codes in scratch: bool for one bit, else uint8, shape (64 * W,)."""
    phase = turn.step + turn.voter
    if turn.options.bits == 1:
        out = turn.scratch("codes", piece.size, torch.bool, u.device)
        return codec.sign_codes(u, phase, out)
    scratch = turn.scratch("levels", piece.size, u.dtype, u.device)
    if scales:
        magnitude = by_word(piece, scales, u)
    else:
        sums, counts = codec.word_magnitudes(u, scratch)
        magnitude = sums.div_(counts.clamp_min_(1))
    codes = turn.scratch("codes", 2 * piece.size, torch.uint8, u.device).view(2, -1)
    return codec.level_codes(u, magnitude, turn.options.bits, phase, codes, scratch)


def _tree_sum(values: Tensor) -> Tensor:
    """Returns the sum, adding neighbors, then neighboring sums: in one order on all devices."""
    size = 1 << math.ceil(math.log2(max(len(values), 1)))
    values = torch.nn.functional.pad(values, (0, size - len(values)))
    while len(values) > 1:
        values = values[::2] + values[1::2]
    return values[0]
