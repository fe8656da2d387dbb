"""Selective momentum synchronization (Lion Cub, Ishikawa et al. 2024, arXiv 2411.16462)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hf_dlion.core.codec import WORD
from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Message, Piece, messages_of
from hf_dlion.core.quantized_mean import Mean, Scale
from hf_dlion.core.rounding import SYNCHRONIZED
from hf_dlion.core.rule import Average
from hf_dlion.core.slot import Field, Slot
from hf_dlion.options import Options, Route
from hf_dlion.ranks.routes import in_lockstep, wire_bytes
from hf_dlion.ranks.topology import Topology
from hf_dlion.ranks.wire import Wire
from hf_dlion.steps.means import average_message, set_without_infs

# Levels of 4 bits reach 3.2 means of |m|. What is larger stays in a rank's own momentum.
SCALE = Scale(4, of_largest=False, factor=1.6)
# Elements per momentum that ranks compare to measure how far it differs, a power of two.
SAMPLES = 256
# Steps between two measurements with "auto", rounded up to a multiple of momentum_sync_every.
MEASURE_EVERY = 50
# Synchronizing a momentum reduces its divergence. It keeps at least this share of the divergence
# before, so it isn't dropped as soon as synchronizing helps, and then chosen again.
KEPT = 0.9
# Elements per voter that are averaged at a time in 16 bits, which takes 10 bytes of memory each.
PART = 1 << 22
# 2^32 over the golden ratio, an odd number: multiples of it fill 0 to 2^32 - 1 evenly.
_SPREAD = 2_654_435_769


def divergence(slot: Slot) -> float:
    """Returns how far the ranks' momenta differed at the last measurement; 0 before the first."""
    return float(slot.state.get("divergence", 0.0))


def synchronize(slots: Sequence[Slot], context: StepContext, ranks: Topology) -> None:
    """Averages the momenta that are due; every rank must call this after the same step.

    With `vote_every=1` that is a slice of them in every step, and with local steps all of them in
    every n-th exchange, whose number the context has. The momenta are those that `momentum_sync`
    selects, or all for "auto", in the same order on all ranks. They are changed in place. Bytes per
    rank: those of `average_momenta` or `average_in_bits`, and of `measure` if it measures.
    """
    options, voters, number = context.options, ranks.voters, context.number
    every, steps = options.momentum_sync_every, options.vote_every
    if steps > 1:
        if number % every:
            return
        number = number // every
        period = -(-MEASURE_EVERY // (every * steps))
    else:
        period = -(-MEASURE_EVERY // every) * every
    if options.momentum_sync == "auto":
        if (number - 1) % period == 0 or not any(["divergence" in s.state for s in slots]):
            # The first measurement is ignored here: it shows the noise of one gradient.
            synced = _most_divergent(slots, options, voters) if number > 1 + period else []
            kept = {slot: KEPT * divergence(slot) for slot in synced}
            for slot, value in zip(slots, measure(_flat(slots), ranks), strict=True):
                slot.state["divergence"] = max(value, kept.get(slot, 0.0))
        slots = _most_divergent(slots, options, voters)
    if options.momentum_sync_bits == 16:
        total = sum([slot.size for slot in slots])
        part = (0, total) if steps > 1 else slice_of(total, every, number)
        average_momenta(_flat(slots), voters, *part)
    else:
        average_in_bits(slots, context, ranks)


def _flat(slots: Sequence[Slot]) -> list[Tensor]:
    return [slot.momentum for slot in slots if slot.momentum is not None]


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
    in_lockstep([
        average_message(message, SCALE, source, apply_mean, context, ranks) for message in messages
    ])  # fmt: skip


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


def average_momenta(momenta: Sequence[Tensor], wire: Wire, start: int, stop: int) -> None:
    """Averages a slice of momenta over the voters, in place; every voter must call this.

    The flat momenta count as one sequence, and the slice is its elements `start` to `stop` - 1.
    With q the momentum rounded to bfloat16 and M the mean of all q, rounded to bfloat16, m becomes
    M + (m - q), so each rank keeps its own rounding error. Bytes per rank, for n elements:
    4 (N - 1) ceil(n / N).
    """
    size = PART * wire.world_size
    for first in range(start, stop, size):
        _average_part(momenta, wire, first, min(first + size, stop))


def _average_part(momenta: Sequence[Tensor], wire: Wire, start: int, stop: int) -> None:
    at, parts = 0, []
    for momentum in momenta:
        part = momentum[max(start - at, 0) : max(stop - at, 0)]
        at += momentum.numel()
        if part.numel():
            parts.append(part)
    sizes, voters = [part.numel() for part in parts], wire.world_size
    share, device = -(-sum(sizes) // voters), parts[0].device
    rounded = torch.zeros(voters, share, dtype=torch.bfloat16, device=device)
    rounded_parts = torch.split(rounded.view(-1)[: sum(sizes)], sizes)
    torch._foreach_copy_(list(rounded_parts), parts)
    sent = rounded.to(wire.device_for(device))
    received = torch.empty_like(sent)
    wire.all_to_all(received, sent, "momenta").wait()
    mean = received.float().mean(dim=0).to(torch.bfloat16)
    means = torch.empty_like(sent)
    wire.all_gather(means, mean, "momenta").wait()
    mean_parts = torch.split(means.to(device).view(-1)[: sum(sizes)], sizes)
    for part, mean_part, rounded_part in zip(parts, mean_parts, rounded_parts, strict=True):
        wide = torch.promote_types(part.dtype, torch.float32)
        left = part.to(wide) - rounded_part.to(part.device, wide)
        set_without_infs(part, mean_part.to(part.device, wide) + left)


def slice_of(total: int, every: int, step: int) -> tuple[int, int]:
    """Returns the slice of elements, start and stop, that a step averages: all in `every` steps."""
    number = step % every
    return total * number // every, total * (number + 1) // every


def measure(momenta: Sequence[Tensor], ranks: Topology) -> list[float]:
    """Returns how far the ranks' flat momenta differ, equal on all ranks, which all must call this.

    The divergence is the variance over the voters relative to the mean square, in a sample of up to
    256 elements per momentum: 0 if the momenta are equal, about 1 - 1/N if they are independent,
    and 1 if their sum is 0. Bytes per rank and momentum: 1024 * (N - 1) to other voters, and
    16 * (N - 1) to all ranks if nodes or replicas vote.
    """
    wire = ranks.voters
    table = torch.zeros(len(momenta), SAMPLES, dtype=torch.float32, device=wire.control_device)
    for row, momentum in zip(table, momenta, strict=True):
        sample = _sample(momentum)
        row[: sample.numel()] = sample
    gathered = table.new_empty(wire.world_size, *table.shape)
    wire.all_gather(gathered, table, "samples of the momenta").wait()
    sums = _variance_and_square(gathered.cpu().double())
    if wire is not ranks.everyone:
        # A rank measured its shard, or its place in the node. The result is the sum over ranks.
        words = sums.view(torch.int64).view(-1)
        by_rank = ranks.everyone.gather_words(words, "divergences").view(torch.float64)
        sums = torch.zeros_like(sums)
        for rank_sums in by_rank:
            sums += rank_sums.view_as(sums)
    return (sums[0] / sums[1]).nan_to_num(0.0).tolist()


def _variance_and_square(gathered: Tensor) -> Tensor:
    """Returns sums over voters and samples, float64, shape (2, rows), bit-equal on all ranks."""
    total, square = torch.zeros_like(gathered[0]), torch.zeros_like(gathered[0])
    for samples in gathered:
        total += samples
        square += samples * samples
    mean = total / torch.full_like(total, len(gathered))
    variance = torch.zeros_like(mean)
    for samples in gathered:
        variance += (samples - mean).square()
    # Summed in halves, because the order of torch.sum depends on the processor.
    sums = torch.stack([variance, square])
    while sums.shape[2] > 1:
        half = sums.shape[2] // 2
        sums = sums[:, :, :half] + sums[:, :, half:]
    return sums[:, :, 0].contiguous()


def _sample(flat: Tensor) -> Tensor:
    """Returns one element of each of up to 256 equal stretches."""
    count = min(SAMPLES, flat.numel())
    if count == 0:
        return flat
    # A stretch's first element would often be in the same column of the matrix.
    place = torch.arange(count, device=flat.device)
    within = place * _SPREAD % 2**32 * (flat.numel() // count) // 2**32
    return flat[place * flat.numel() // count + within]


def _most_divergent(slots: Sequence[Slot], options: Options, wire: Wire) -> list[Slot]:
    """Returns the slots whose momenta differ most and fit into the budget together, in order."""
    budget = options.momentum_sync_budget
    if budget is None:
        budget = sum([slot.largest_part for slot in slots]) // 8
    chosen, total = set(), 0
    # A momentum that doesn't fit is skipped, and smaller ones that differ less may still fit.
    for slot in sorted(slots, key=divergence, reverse=True):
        numel = total + slot.largest_part
        if divergence(slot) > 0.0 and sync_bytes(numel, options, wire.world_size) <= budget:
            chosen.add(slot)
            total = numel
    return [slot for slot in slots if slot in chosen]


def sync_bytes(numel: int, options: Options, voters: int) -> int:
    """Returns about how many bytes a rank sends to average momenta of so many elements.

    With `vote_every=1` that is in one step, and with local steps in one exchange.
    """
    if options.momentum_sync_bits == 16:
        parts = 1 if options.vote_every > 1 else options.momentum_sync_every
        share = -(-numel // parts)
        return 4 * (voters - 1) * -(-share // voters)
    planes = Average(voters, 4).plane_count
    names: tuple[Route, ...] = ("gather", "two_phase")
    chosen = names if options.exchange == "auto" else (options.exchange,)
    words = -(-numel // WORD)
    return min(
        wire_bytes(name, ranks=voters, words=words, rows=0, bits=4, planes=planes)
        for name in chosen
    )
