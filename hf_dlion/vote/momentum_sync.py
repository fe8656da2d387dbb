"""Selective momentum synchronization (Lion Cub, Ishikawa et al. 2024, arXiv 2411.16462)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_dlion.exchange.wire import Wire
from hf_dlion.options import Options
from hf_dlion.ranks.topology import Topology

# Elements that stand for a momentum when ranks measure how far it differs: a power of two.
SAMPLES = 256
# With "auto", steps between two measurements, rounded up to whole periods of momentum_sync_every.
MEASURE_EVERY = 50
# A momentum that is synchronized differs less for it. It counts as this share of what it was, or
# it would be dropped as soon as synchronizing helps, and chosen again after that.
KEPT = 0.9
# 2^32 over the golden ratio, an odd number: multiples of it fill 0 to 2^32 - 1 evenly.
_SPREAD = 2_654_435_769


@dataclass(frozen=True)
class Momentum:
    """A momentum that may be synchronized.

    Attributes:
        flat: This rank's part, flat.
        state: The optimizer's state of the parameter; "auto" keeps the divergence in it.
    """

    flat: Tensor
    state: dict[str, Any]

    @property
    def divergence(self) -> float:
        """How far the ranks' momenta differ, as last measured; 0 if never."""
        return float(self.state.get("divergence", 0.0))


def synchronize(momenta: Sequence[Momentum], options: Options, ranks: Topology, step: int) -> None:
    """Averages the slice of momenta that is due; every rank must call this after the same step.

    Bytes per rank: those of `average_momenta`, and of `measure` in steps that measure.

    Args:
        momenta: Those that `momentum_sync` selects, in one order on all ranks; changed in place.
        options: momentum_sync, momentum_sync_every and momentum_sync_budget.
        ranks: Several ranks.
        step: Number of the step that was taken.
    """
    every, voters = options.momentum_sync_every, ranks.voters
    if options.momentum_sync == "auto":
        period = -(-MEASURE_EVERY // every) * every
        if (step - 1) % period == 0 or not any(["divergence" in m.state for m in momenta]):
            # What was measured first was the noise of one gradient.
            synced = _most_divergent(momenta, options, voters) if step > 1 + period else []
            kept = {id(m): KEPT * m.divergence for m in synced}
            for m, value in zip(momenta, measure([m.flat for m in momenta], ranks), strict=True):
                m.state["divergence"] = max(value, kept.get(id(m), 0.0))
        momenta = _most_divergent(momenta, options, voters)
    total = sum([m.flat.numel() for m in momenta])
    average_momenta([m.flat for m in momenta], voters, *slice_of(total, every, step))


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


def average_whole(momenta: Sequence[Tensor], voters: Wire) -> None:
    """Replaces momenta by their means over the voters; every voter must call this.

    Bytes per rank: 8 (N - 1) / N an element.
    """
    for momentum in momenta:
        total = momentum.to(voters.device_for(momentum.device), torch.float32, copy=True)
        voters.all_reduce(total, "momenta").wait()
        momentum.copy_(total.div_(voters.world_size))


def slice_of(total: int, every: int, step: int) -> tuple[int, int]:
    """Returns first and last + 1 of the elements that a step averages: all of them in `every`."""
    number = step % every
    return total * number // every, total * (number + 1) // every


def measure(momenta: Sequence[Tensor], ranks: Topology) -> list[float]:
    """Returns how far the ranks' momenta differ, the same on all ranks, which all must call this.

    It is the variance over the voters relative to the mean square, in up to 256 elements from all
    over a momentum: 0 if the voters have one momentum, about 1 - 1/N if they have nothing in
    common, 1 if they cancel. Bytes per rank and momentum: 1024 * (N - 1) to other voters, and
    16 * (N - 1) to all ranks if nodes or replicas vote.

    Args:
        momenta: Flat, of the same parameters on all ranks; not changed.
        ranks: Who is where.
    """
    wire = ranks.voters
    table = torch.zeros(len(momenta), SAMPLES, device=wire.control_device)
    for row, momentum in zip(table, momenta, strict=True):
        sample = _sample(momentum)
        row[: sample.numel()] = sample
    gathered = table.new_empty(wire.world_size, *table.shape)
    wire.all_gather(gathered, table, "samples of the momenta").wait()
    sums = _variance_and_square(gathered.cpu().double())
    if wire is not ranks.everyone:
        # Every rank has a part of each momentum, or the node's: all ranks choose by all parts.
        words = sums.view(torch.int64).view(-1)
        every = ranks.everyone.gather_words(words, "divergences").view(torch.float64)
        sums = torch.zeros_like(sums)
        for own in every:
            sums += own.view_as(sums)
    return (sums[0] / sums[1]).nan_to_num(0.0).tolist()


def _variance_and_square(gathered: Tensor) -> Tensor:
    """Returns sums over voters and samples, float64, shape (2, rows), bit-equal on all ranks."""
    total, square = torch.zeros_like(gathered[0]), torch.zeros_like(gathered[0])
    for own in gathered:
        total += own
        square += own * own
    mean = total / torch.full_like(total, len(gathered))
    variance = torch.zeros_like(mean)
    for own in gathered:
        variance += (own - mean).square()
    # In halves, since the order of torch's own sums depends on the processor.
    sums = torch.stack([variance, square])
    while sums.shape[2] > 1:
        half = sums.shape[2] // 2
        sums = sums[:, :, :half] + sums[:, :, half:]
    return sums[:, :, 0].contiguous()


def _sample(flat: Tensor) -> Tensor:
    """Returns one element of each of 256 equal stretches."""
    count = min(SAMPLES, flat.numel())
    if count == 0:
        return flat
    # Not always a stretch's first element: those are in one column where widths are even.
    place = torch.arange(count, device=flat.device)
    within = place * _SPREAD % 2**32 * (flat.numel() // count) // 2**32
    return flat[place * flat.numel() // count + within]


def _most_divergent(momenta: Sequence[Momentum], options: Options, wire: Wire) -> list[Momentum]:
    """Returns the momenta that differ most and fit into the budget together, in their order."""
    every, budget = options.momentum_sync_every, options.momentum_sync_budget
    if budget is None:
        budget = sum([m.flat.numel() for m in momenta]) // 8
    chosen, total = set(), 0
    # One that doesn't fit is passed over for smaller ones that differ less.
    for k in sorted(range(len(momenta)), key=lambda k: (-momenta[k].divergence, k)):
        numel = total + momenta[k].flat.numel()
        in_a_step = -(-numel // every)
        sent = 4 * (wire.world_size - 1) * -(-in_a_step // wire.world_size)
        if momenta[k].divergence > 0.0 and sent <= budget:
            chosen.add(k)
            total = numel
    return [m for k, m in enumerate(momenta) if k in chosen]
