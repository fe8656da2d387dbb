"""Selective momentum synchronisation (Lion Cub, Ishikawa et al., 2024, arXiv 2411.16462).

Every rank keeps a momentum of its own, and that of some parameters drifts apart so far that votes
on them say little. In every step the ranks average one of k slices of the selected momenta:

    selected momenta, end to end   |  slice 0  |  slice 1  | ... | slice k - 1 |
    step t averages                               slice t mod k

With q = the momentum m of a rank rounded to the wire's dtype, and M = the mean of the ranks' q:

    m = M + (m - q)       each rank keeps what its own rounding left off

so with float32 all ranks get the mean, and with bfloat16 no small step of the average is lost.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dlion.codec.eager import store
from hf_dlion.codec.lion import COMMON_STREAM, compute_dtype, saturate
from hf_dlion.codec.rule import TensorRule
from hf_dlion.exchange import Wire
from hf_dlion.exchange.batches import by_kind, in_batches
from hf_dlion.exchange.mean import average, average_wire_bytes, mean_of

# Elements per exchange: bounds the temporaries.
BATCH_NUMEL = 1 << 22
# One key of random bits holds for so many elements.
_KEY_NUMEL = 1 << 32


def wire_value(momentum: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a momentum as it travels: cut to the finite range and rounded to nearest.

    Args:
        momentum: Of any floating dtype and shape; not changed. float64 is rounded to float32 first.
        dtype: torch.bfloat16 or torch.float32.
    """
    limit = torch.finfo(dtype).max
    wide = momentum.to(compute_dtype(momentum.dtype)).clamp(-limit, limit)
    return wide.to(torch.float32).to(dtype)


def merged(momentum: Tensor, own: Tensor, mean: Tensor) -> Tensor:
    """Returns mean + (momentum - own), in float32 or float64, within the momentum's finite range.

    Args:
        momentum: This rank's.
        own: Its `wire_value`.
        mean: Of all ranks' wire values.
    """
    rest = momentum.to(compute_dtype(momentum.dtype), copy=True).sub_(own)
    return saturate(rest.add_(mean), momentum.dtype)


def synchronized(momenta: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns every rank's momentum after a synchronisation: the rule in one process.

    Args:
        momenta: Of all ranks, of one shape and dtype; not changed.
        dtype: On the wire, torch.bfloat16 or torch.float32.

    Returns:
        float32, or float64 for float64; a narrower momentum is then rounded (rule S1).
    """
    own = [wire_value(momentum, dtype) for momentum in momenta]
    mean = mean_of(own)
    return [merged(*pair, mean) for pair in zip(momenta, own, strict=True)]


@dataclass(frozen=True)
class Held:
    """What a rank holds of one parameter's momentum.

    Attributes:
        index: Of the parameter.
        exp_avg: Contiguous; changed in place.
        start: Where in the parameter it begins, in elements.
    """

    index: int
    exp_avg: Tensor
    start: int = 0


def synchronize_slice(
    momenta: Sequence[Held],
    part: int,
    parts: int,
    rules: Mapping[int, TensorRule],
    dtype: torch.dtype,
    wire: Wire,
) -> None:
    """Averages one slice of momenta over the ranks, in place; every rank must call this.

    Bytes per rank: those of `average`, for each 2**22 elements of the slice and for the rest (for
    each device).

    Args:
        momenta: In one order, of the same lengths and devices on all ranks.
        part: Number of the slice, counted from 0.
        parts: Number of slices, which differ in length by one element at most.
        rules: Constants of the step by parameter index, for the rounding of narrow momenta.
        dtype: On the wire, torch.bfloat16 or torch.float32.
        wire: The ranks.
    """
    for batch in _batches(_slice(momenta, part, parts)):
        own = torch.cat([wire_value(piece.exp_avg, dtype) for piece in batch])
        mean = average(own, wire, "momenta")
        start = 0
        for piece in batch:
            here = slice(start, start + piece.exp_avg.numel())
            value = merged(piece.exp_avg, own[here], mean[here])
            # Rounded alike on all ranks: what they have in common stays so.
            store(piece.exp_avg, value, piece.start, rules[piece.index], COMMON_STREAM)
            start = here.stop


def _slice(momenta: Sequence[Held], part: int, parts: int) -> Iterator[Held]:
    """Yields the pieces of a slice, none of which crosses a multiple of 2**32."""
    total = sum(held.exp_avg.numel() for held in momenta)
    first, last = part * total // parts, (part + 1) * total // parts
    position = 0
    for held in momenta:
        flat = held.exp_avg.view(-1)
        begin, end = max(first - position, 0), min(last - position, flat.numel())
        while begin < end:
            stop = min(end, begin + _KEY_NUMEL - (held.start + begin) % _KEY_NUMEL)
            yield Held(held.index, flat[begin:stop], held.start + begin)
            begin = stop
        position += flat.numel()


def _batches(pieces: Iterator[Held]) -> list[list[Held]]:
    """Returns the pieces, cut again, in batches of one device and `BATCH_NUMEL` elements."""
    cut: list[Held] = []
    filled: Counter[torch.device] = Counter()
    for piece in pieces:
        flat, start = piece.exp_avg, piece.start
        while flat.numel():
            # To the end of the batch.
            taken = flat[: BATCH_NUMEL - filled[flat.device] % BATCH_NUMEL]
            cut.append(Held(piece.index, taken, start))
            filled[flat.device] += taken.numel()
            flat, start = flat[taken.numel() :], start + taken.numel()
    tensor_of = operator.attrgetter("exp_avg")
    return in_batches(by_kind(cut, tensor_of), BATCH_NUMEL, tensor_of)


def slice_wire_bytes(numel: int, parts: int, world_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes that a rank sends for the longest slice of momenta on one device.

    Args:
        numel: Elements of all slices.
        parts: Number of slices.
        world_size: Number of ranks.
        dtype: On the wire.
    """
    batches, rest = divmod(-(-numel // parts), BATCH_NUMEL)
    return batches * average_wire_bytes(BATCH_NUMEL, world_size, dtype) + average_wire_bytes(
        rest, world_size, dtype
    )
