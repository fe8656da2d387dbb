"""Selective momentum synchronization (Lion Cub, Ishikawa et al. 2024, arXiv 2411.16462)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.exchange.wire import Wire


def average_momenta(momenta: Sequence[Tensor], wire: Wire, start: int, stop: int) -> None:
    """Averages a slice of momenta over the voters; every voter must call this.

    With q the momentum rounded to bfloat16 and M the mean of all q, rounded to bfloat16, m becomes
    M + (m - q): each rank keeps what its own rounding left off. Bytes per rank, for n elements:
    4 (N - 1) ceil(n / N).

    Args:
        momenta: Flat tensors, laid end to end, changed in place.
        wire: The voters.
        start: First element of the slice.
        stop: One past its last element.
    """
    at, parts = 0, []
    for momentum in momenta:
        own = momentum[max(start - at, 0) : max(stop - at, 0)]
        at += momentum.numel()
        if own.numel():
            parts.append(own)
    if not parts:
        return
    count, ranks = sum(part.numel() for part in parts), wire.world_size
    share, device = -(-count // ranks), parts[0].device
    sizes = [part.numel() for part in parts]
    rounded = torch.zeros(ranks, share, dtype=torch.bfloat16, device=device)
    old = torch.split(rounded.view(-1)[:count], sizes)
    torch._foreach_copy_(list(old), parts)
    sent = rounded.to(wire.device_for(device))
    received = torch.empty_like(sent)
    wire.all_to_all(received, sent, "momenta").wait()
    mean = received.float().mean(dim=0).to(torch.bfloat16)
    means = torch.empty_like(sent)
    wire.all_gather(means, mean, "momenta").wait()
    new = torch.split(means.to(device).view(-1)[:count], sizes)
    for part, mean_part, rounded_part in zip(parts, new, old, strict=True):
        part.copy_(mean_part.float() + (part.float() - rounded_part.float()))


def slice_of(total: int, every: int, step: int) -> tuple[int, int]:
    """Returns first and last + 1 of the elements that a step averages: all of them in `every`."""
    number = step % every
    return total * number // every, total * (number + 1) // every
