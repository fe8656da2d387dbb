"""Means over the voters: of a few bits of each element, or by an all-reduce in full precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_dlion.core.codec import divided
from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Layout, Message
from hf_dlion.core.lion import Source, encode
from hf_dlion.core.quantized_mean import Mean, Scale
from hf_dlion.core.rule import Average
from hf_dlion.core.slot import Slot
from hf_dlion.ranks.routes import Task, exchange_votes
from hf_dlion.ranks.topology import Topology


def average_message(
    message: Message,
    scale: Scale,
    source: Source,
    move: Callable[[Message, Mean], None],
    context: StepContext,
    ranks: Topology,
) -> Task:
    """Sends what `source` returns of a message's pieces, and calls `move` with the mean.

    Slots have magnitudes. Every voter must do this. It is suspended while data travel.
    """
    stats, rule = ranks.voters.stats, Average(ranks.voters.world_size, scale.bits)
    votes = encode(message, context, source, bits=scale.bits, by_tensor=True)
    stats.lap("encode_s", message.device)
    verdict = yield from exchange_votes(votes, rule, context, ranks)
    stats.lap("exchange_s", message.device)
    move(message, Mean(votes, verdict, rule, scale, context))
    stats.lap("apply_s", message.device)


def set_means(
    layout: Layout,
    source: Callable[[Slot], Tensor | None],
    divisors: Sequence[int],
    ranks: Topology,
) -> None:
    """Sets the slots' means: the sum of `source` over the voters, divided by the slot's divisor.

    Every rank must call this. `source` returns a flat tensor, and None counts as zeros. Means are
    flat, float64 for float64 parameters, else float32. They are None for slots that don't move.
    """
    for slot in layout.slots:
        if slot.full_precision:
            slot.mean = None
            if slot.moves:
                wide = torch.promote_types(slot.dtype, torch.float32)
                slot.mean = torch.zeros_like(slot.p, dtype=wide)
                if (tensor := source(slot)) is not None:
                    slot.mean.copy_(tensor)
    for message in layout.averaged_messages:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        stretches = [stretch for piece in message.pieces for stretch in piece.stretches]
        for slot, start, stop, _ in stretches:
            if slot.mean is not None:
                by_dtype.setdefault(slot.mean.dtype, []).append(slot.mean[start:stop])
        for parts in by_dtype.values():
            flat = sum_over_voters(torch.cat(parts), "tensors in full precision", ranks)
            torch._foreach_copy_(parts, list(torch.split(flat, [part.numel() for part in parts])))
    for slot, divisor in zip(layout.slots, divisors, strict=True):
        if slot.full_precision and slot.mean is not None:
            divided(slot.mean, divisor)


def average_whole(momenta: Sequence[Tensor], ranks: Topology) -> None:
    """Replaces flat momenta by their means over the voters; every rank must call this.

    Bytes per rank: those of `sum_over_voters`, in float32, or float64 for float64 momenta.
    """
    for momentum in momenta:
        wide = momentum.to(torch.promote_types(momentum.dtype, torch.float32))
        total = sum_over_voters(wide, "momenta", ranks)
        set_without_infs(momentum, divided(total, ranks.voters.world_size))


def sum_over_voters(flat: Tensor, what: str, ranks: Topology) -> Tensor:
    """Returns the sum of a flat tensor over the voters, in new memory; every rank must call this.

    If nodes vote, each of the L ranks of a node adds up one L-th, so that all of them have the same
    bits, in whatever order a backend adds. Bytes per rank, for n elements of z bytes, with
    s = ceil(n / L): 2 (N - 1) ceil(s / N) z to other nodes, and (L - 1) s z inside the node.
    """
    wire = ranks.voters
    node = ranks.node
    size = flat.numel()
    total = flat.to(wire.device_for(flat.device), copy=True)
    if node is None:
        wire.all_reduce(total, what).wait()
    else:
        shares = torch.nn.functional.pad(total, (0, -size % ranks.local_size))
        shares = shares.view(ranks.local_size, -1)
        own = shares[node.rank].clone()
        wire.all_reduce(own, what).wait()
        node.all_gather(shares, own, what).wait()
        total = shares.view(-1)[:size]
    return total.to(flat.device)


def set_without_infs(momentum: Tensor, values: Tensor) -> None:
    """Copies values without Infs, which would decide the vote forever."""
    most = torch.finfo(momentum.dtype).max
    momentum.copy_(values.clamp_(-most, most))
