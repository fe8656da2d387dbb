"""Selective momentum synchronization (Lion Cub, Ishikawa et al. 2024, arXiv 2411.16462)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Message, Piece, messages_of
from hf_dlion.core.quantized_mean import Mean, Scale
from hf_dlion.core.rounding import SYNCHRONIZED
from hf_dlion.core.slot import Field, Slot
from hf_dlion.ranks.routes import run_as_pipeline
from hf_dlion.ranks.topology import Topology
from hf_dlion.steps.means import average_message, set_without_infs

# Levels of 4 bits reach 3.2 means of |m|. What is larger stays in a rank's own momentum.
SCALE = Scale(4, of_largest=False, factor=1.6)
# Elements per voter that are averaged at a time in 16 bits, which takes 10 bytes of memory each.
PART = 1 << 22


def synchronize(slots: Sequence[Slot], context: StepContext, ranks: Topology) -> None:
    """Averages the momenta that are due; every rank must call this after the same step.

    With `vote_every=1` that is a slice of them in every step, as bfloat16. With local steps it is
    all of them in every n-th exchange, whose number the context has, in 4 bits. The momenta are
    those that `momentum_sync` selects, in the same order on all ranks. They are changed in place.
    Bytes per rank: those of `average_momenta` or `average_in_bits`.
    """
    every = context.options.momentum_sync_every
    if context.options.vote_every == 1:
        momenta = [slot.momentum for slot in slots if slot.momentum is not None]
        total = sum([momentum.numel() for momentum in momenta])
        average_momenta(momenta, ranks, *slice_of(total, every, context.number))
    elif context.number % every == 0:
        average_in_bits(slots, context, ranks)


def average_in_bits(slots: Sequence[Slot], context: StepContext, ranks: Topology) -> None:
    """Averages the slots' momenta, of which each voter sends 4 bits, in place.

    Every rank must call this. With q what a voter sends of its m, and d the mean of all q, m
    becomes (m + d) - q, so what the bits leave out stays in the voter's own m (docs/rule.md,
    section 9). Bytes per rank: 8 (N - 1) per momentum, and those of `ranks.routes`.
    """
    if not slots:
        return
    messages, source = messages_of(slots), partial(read_momentum, context=context)
    amounts = SCALE.amounts(slots, messages, source, context)
    words = torch.tensor(amounts, dtype=torch.float64, device="cpu").view(torch.int64)
    table = ranks.voters.gather_words(words, "means of momenta").view(torch.float64)
    SCALE.set_magnitudes(slots, table.tolist())
    ranks.voters.stats.lap("", slots[0].device)
    run_as_pipeline(
        average_message(message, SCALE, source, apply_mean, context, ranks) for message in messages
    )


def read_momentum(piece: Piece, context: StepContext) -> Tensor:
    """Returns a piece's momentum."""
    return piece.read(Field.MOMENTUM, context.scratch)


def apply_mean(message: Message, mean: Mean) -> None:
    """Replaces what this voter sent of its momenta by the mean."""
    context = mean.context
    random = partial(context.random, SYNCHRONIZED + context.voter)
    for piece in message.pieces:
        m = piece.read(Field.MOMENTUM, context.scratch).add_(mean.of(piece)).sub_(mean.sent(piece))
        piece.write(Field.MOMENTUM, m, random, without_infs=True)


def average_momenta(momenta: Sequence[Tensor], ranks: Topology, start: int, stop: int) -> None:
    """Averages a slice of momenta over the voters, in place; every rank must call this.

    The flat momenta count as one sequence, and the slice is its elements `start` to `stop` - 1.
    With q the momentum rounded to bfloat16 and M the mean of all q, rounded to bfloat16, m becomes
    M + (m - q), so each rank keeps its own rounding error. If nodes vote, each of the L ranks of a
    node averages one L-th. Bytes per rank, for n elements with s = ceil(n / (L N)): 4 (N - 1) s to
    other nodes, and 2 (L - 1) N s inside the node.
    """
    size = PART * ranks.voters.world_size
    for first in range(start, stop, size):
        _average_part(momenta, ranks, first, min(first + size, stop))


def _average_part(momenta: Sequence[Tensor], ranks: Topology, start: int, stop: int) -> None:
    at, parts = 0, []
    for momentum in momenta:
        part = momentum[max(start - at, 0) : max(stop - at, 0)]
        at += momentum.numel()
        if part.numel():
            parts.append(part)
    sizes, device = [part.numel() for part in parts], parts[0].device
    wire, node = ranks.voters, ranks.node
    shape = ranks.local_size, wire.world_size
    rounded = torch.zeros(
        *shape, -(-sum(sizes) // math.prod(shape)), dtype=torch.bfloat16, device=device
    )
    rounded_parts = torch.split(rounded.view(-1)[: sum(sizes)], sizes)
    torch._foreach_copy_(list(rounded_parts), parts)
    sent = rounded[0 if node is None else node.rank].to(wire.device_for(device))
    received = torch.empty_like(sent)
    wire.all_to_all(received, sent, "momenta").wait()
    mean = received.float().mean(dim=0).to(torch.bfloat16)
    means = torch.empty_like(sent)
    wire.all_gather(means, mean, "momenta").wait()
    if node is not None:
        of_rank, means = means, means.new_empty(rounded.shape)
        node.all_gather(means, of_rank, "momenta").wait()
    mean_parts = torch.split(means.to(device).view(-1)[: sum(sizes)], sizes)
    for part, mean_part, rounded_part in zip(parts, mean_parts, rounded_parts, strict=True):
        wide = torch.promote_types(part.dtype, torch.float32)
        left = part.to(wide) - rounded_part.to(part.device, wide)
        set_without_infs(part, mean_part.to(part.device, wide) + left)


def slice_of(total: int, every: int, step: int) -> tuple[int, int]:
    """Returns the slice of elements, start and stop, that a step averages: all in `every` steps."""
    number = step % every
    return total * number // every, total * (number + 1) // every
