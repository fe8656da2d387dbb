"""How far the ranks' momenta differ, measured from samples, and which to synchronise for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hf_dlion.exchange import Wire
from hf_dlion.momentum.slices import Held

# Elements that stand for a parameter: a power of two.
SAMPLES = 256
# 2**32 over the golden ratio, an odd number: multiples of it fill 0 to 2**32 - 1 evenly.
_SPREAD = 2_654_435_769


def measure(momenta: Sequence[Held], wire: Wire) -> dict[int, float]:
    """Returns each momentum's divergence by parameter index, the same on all ranks.

    It is the variance across the ranks over the mean square, in up to 256 elements from all over
    it: 0 where the ranks have one momentum, near 1 - 1/N where they have nothing in common, 1 where
    they cancel. Every rank must call this. Bytes per rank: 1024 * (N - 1) for each parameter.

    Args:
        momenta: Of the same parameters on all ranks; not changed.
        wire: The process group.
    """
    table = torch.zeros((len(momenta), SAMPLES), dtype=torch.float32, device=wire.control_device)
    for row, held in zip(table, momenta, strict=True):
        sample = _sample(held.exp_avg)
        row[: sample.numel()] = sample
    everyone = torch.empty((wire.world_size, *table.shape), dtype=table.dtype, device=table.device)
    wire.all_gather(everyone, table, "samples of the momenta").wait()
    values = divergence_of(everyone.cpu().unbind()).tolist()
    return {held.index: value for held, value in zip(momenta, values, strict=True)}


def divergence_of(tables: Sequence[Tensor]) -> Tensor:
    """Returns the divergence of each row, float64, computed alike on every kind of processor.

    Args:
        tables: Each rank's samples, shape (rows, 256), in rank order.
    """
    wide = [table.to(torch.float64) for table in tables]
    total, square = torch.zeros_like(wide[0]), torch.zeros_like(wide[0])
    for table in wide:
        total += table
        square += table * table
    mean = total / torch.full_like(total, len(wide))
    variance = torch.zeros_like(mean)
    for table in wide:
        variance += (table - mean).square()
    # Ranks must agree to the last bit: sums are folded, since the order of torch's own depends on
    # the processor.
    found = _folded(variance) / _folded(square)
    return found.nan_to_num(0.0)


def _folded(rows: Tensor) -> Tensor:
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _sample(momentum: Tensor) -> Tensor:
    flat = momentum.view(-1)
    count = min(SAMPLES, flat.numel())
    if count == 0:
        return flat
    # One of each stretch, not always its first: those are in one column where widths are even.
    place = torch.arange(count, device=flat.device)
    within = place * _SPREAD % 2**32 * (flat.numel() // count) // 2**32
    return flat[place * flat.numel() // count + within]


def choose(
    divergence: Mapping[int, float], numels: Mapping[int, int], fits: Callable[[int], bool]
) -> list[int]:
    """Returns the most divergent parameters that fit together, as ascending indices.

    One that does not fit any more is passed over for smaller ones that differ less.

    Args:
        divergence: By parameter index.
        numels: Elements of each parameter that may be chosen.
        fits: Returns whether so many elements are within the budget.
    """
    chosen: list[int] = []
    total = 0
    for index in sorted(numels, key=lambda index: (-divergence.get(index, 0.0), index)):
        if divergence.get(index, 0.0) > 0.0 and fits(total + numels[index]):
            chosen.append(index)
            total += numels[index]
    return sorted(chosen)


def by_kind(divergence: Mapping[str, float]) -> dict[str, float]:
    """Returns the mean divergence of parameters whose names differ in numbers only.

    >>> by_kind({"layers.0.mlp.weight": 0.2, "layers.1.mlp.weight": 0.4, "norm.weight": 0.0})
    {'layers.*.mlp.weight': 0.30000000000000004, 'norm.weight': 0.0}
    """
    kinds: dict[str, list[float]] = {}
    for name, value in divergence.items():
        kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name), []).append(value)
    return {kind: sum(values) / len(values) for kind, values in kinds.items()}
