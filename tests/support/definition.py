"""The rule of docs/rule.md in NumPy, written to be read: what the codec must equal.

Nothing here is fast, and nothing imports the package. Only the direction and the momentum come
from torch.lerp, since a rank's own direction is its own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
TOP = {1: 1, 2: 3, 4: 14, 8: 254}


@dataclass
class Layout:
    """Positions of elements if all tensors are placed one after the other, in complete words.

    Tensors of `full_precision` come last in the numbers on which rounding depends.
    """

    shapes: Sequence[tuple[int, ...]]
    full: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.sizes = [int(np.prod(shape)) for shape in self.shapes]
        words = [-(-size // 64) * 64 for size in self.sizes]
        self.starts = np.cumsum([0, *words])
        order = sorted(range(len(words)), key=lambda i: i in self.full)
        ends = np.cumsum([words[i] for i in order])
        self.firsts = {i: int(end) - words[i] for i, end in zip(order, ends, strict=True)}
        rows: list[int] = []  # of every element, padding included
        self.row_sizes: list[int] = []  # without padding
        self.tensor_of_row: list[int] = []
        for number, (shape, size) in enumerate(zip(self.shapes, self.sizes, strict=True)):
            length = size // shape[0] if shape and shape[0] else size
            count = shape[0] if length and length % 64 == 0 else min(size, 1)
            for _ in range(count):
                padded = length if count > 1 else -(-size // 64) * 64
                rows += padded * [len(self.row_sizes)]
                self.row_sizes.append(length if count > 1 else size)
                self.tensor_of_row.append(number)
        self.row_of_element = np.array(rows, dtype=np.int64)

    def flat(self, tensors: Sequence[Array | None], dtype: Any) -> Array:
        """Places tensors one after the other; None is zeros."""
        out = np.zeros(int(self.starts[-1]), dtype=dtype)
        for start, size, tensor in zip(self.starts, self.sizes, tensors, strict=False):
            if tensor is not None:
                out[start : start + size] = tensor.reshape(-1)
        return out

    def spread(self, numbers: Sequence[float]) -> Array:
        """Gives every element its tensor's number, float64."""
        return np.repeat(np.array(numbers, dtype=np.float64), np.diff(self.starts))

    def split(self, flat: Array) -> list[Array]:
        return [
            flat[start : start + size].reshape(shape)
            for start, size, shape in zip(self.starts, self.sizes, self.shapes, strict=False)
        ]


def codes_of(
    u: Array,
    layout: Layout,
    *,
    phase: int,
    bits: int = 1,
    scale: str = "word",
    magnitudes: Array | None = None,
) -> tuple[Array, Array]:
    """Returns a rank's codes (0 where it abstains) and which rows it votes on."""
    active = np.zeros(len(layout.row_sizes), dtype=bool)
    np.logical_or.at(active, layout.row_of_element, u != 0)
    a = mean_magnitudes(u, layout, active, scale) if magnitudes is None else magnitudes
    k = np.arange(u.size)
    z = np.where((k + phase) % 2 == 0, 0.0, -(2.0**-126)).astype(u.dtype)
    sign = u > z
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if bits == 1:
            codes = sign.astype(np.int64)
        elif bits == 2:
            far = np.abs(u) > a * u.dtype.type(1.5)
            codes = np.where(sign, 2 + far, 1 - far.astype(np.int64))
        else:
            half = TOP[bits] // 2
            factor = np.minimum(u.dtype.type(half / 2) / a, np.finfo(u.dtype).max)
            factor = np.where(a > 0, factor, 0).astype(u.dtype)
            codes = np.round(np.clip(u * factor, -half, half)).astype(np.int64) + half
    return np.where(active[layout.row_of_element], codes, 0), active


def mean_magnitudes(u: Array, layout: Layout, active: Array, scale: str) -> Array:
    """Returns the mean magnitude that each element is measured by, dtype of u."""
    if scale == "word":
        counts = (u.reshape(-1, 64) != 0).sum(axis=1)
        return np.repeat(word_sums(u) / np.maximum(counts, 1).astype(u.dtype), 64)
    return layout.spread(tensor_means(u, layout, active)).astype(u.dtype)


def word_sums(u: Array) -> Array:
    """Returns the sum of |u| in each word, elements k and k + 32 first, dtype of u."""
    sums = np.abs(u.reshape(-1, 64))
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        with np.errstate(over="ignore"):
            sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def tensor_means(u: Array, layout: Layout, active: Array) -> list[float]:
    """Returns each tensor's mean of |u| over its active rows."""
    words, means = word_sums(u).astype(np.float64), []
    for number in range(len(layout.sizes)):
        first, last = layout.starts[number] // 64, layout.starts[number + 1] // 64
        rows = [r for r, tensor in enumerate(layout.tensor_of_row) if tensor == number]
        voted = sum(layout.row_sizes[row] for row in rows if active[row])
        means.append(tree(words[first:last]) / max(voted, 1))
    return means


def tree(values: Array) -> float:
    """Returns the sum of neighbors, of neighboring sums, and so on."""
    while len(values) > 1:
        values = np.append(values, np.zeros(len(values) % 2))
        values = values[::2] + values[1::2]
    return float(values[0]) if len(values) else 0.0


def phase_of(t: int) -> int:
    """Returns tau of section 3."""
    return t + sum(a + b == "11" for a, b in pairwise(f"{t // 2:b}"))


def zero_phase(t: int, r: int, ranks: int, breaks_ties: bool) -> int:
    """Returns tau + f of section 3."""
    shift = int(ranks * (0x9E3779B9 * t % 2**32) / 2**32)
    half = ranks // 2 - (1 if breaks_ties and ranks % 2 == 0 else 0)
    return phase_of(t) + (1 if (r + shift) % ranks in range(half) else 0)


def verdict(
    codes: Sequence[Array],
    active: Sequence[Array],
    layout: Layout,
    *,
    phase: int,
    bits: int = 1,
    aggregation: str = "majority",
    ties: str = "alternate",
) -> Array:
    """Returns v, the same for all ranks: -1, 0, 1, or the mean of the votes."""
    voters = np.sum(active, axis=0)[layout.row_of_element]
    total = 2 * np.sum(codes, axis=0) - TOP[bits] * voters
    if aggregation == "average":
        return total.astype(np.float64) / len(codes)
    k = np.arange(total.size)
    tied = np.where((k + phase) % 2 == 0, 1, -1) if ties == "alternate" else 0
    return np.where(voters == 0, 0, np.where(total == 0, tied, np.sign(total)))


def apply_verdict(p: Array, v: Array, lr: float, weight_decay: float) -> Array:
    """Returns the moved parameter, float32 or float64: two roundings, nothing fused."""
    kind = p.dtype.type
    keep = kind(1 - lr * weight_decay)
    return (p * keep) - (kind(lr) * v.astype(p.dtype))


def random_bits(count: int, first: int, step: int, seed: int, stream: int) -> Array:
    """Returns 16 random bits of elements first, first + 1, ..., as int64."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    words = numbers >> np.uint64(1)
    out = np.empty(count, dtype=np.uint32)
    for high in np.unique(words >> np.uint64(32)):
        key = np.zeros(1, dtype=np.uint32)
        for word in (seed, seed >> 32, step, step >> 32, stream, int(high)):
            key = _mix((key ^ np.uint32(word & 0xFFFFFFFF)) + np.uint32(0x9E3779B9))
        chosen = words >> np.uint64(32) == high
        out[chosen] = _mix(words[chosen].astype(np.uint32) * np.uint32(0x9E3779B9) + key)
    half = np.where(numbers % np.uint64(2) == 0, out & np.uint32(0xFFFF), out >> np.uint32(16))
    return half.astype(np.int64)


def _mix(x: Array) -> Array:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def rounded(x: Array, dtype: torch.dtype, random: Array) -> Array:
    """Returns float32 numbers rounded stochastically to bfloat16 or float16, as float32."""
    cut = 16 if dtype == torch.bfloat16 else 13  # bits that are cut off
    added = np.where(np.isnan(x), 0, random >> (16 - cut)).astype(np.uint32)
    normal = ((x.view(np.uint32) + added) >> np.uint32(cut) << np.uint32(cut)).view(np.float32)
    if dtype == torch.bfloat16:
        return normal
    is_small = np.abs(x) < 2.0**-14
    steps = np.trunc(np.where(is_small, np.abs(x), 0) * np.float32(2.0**40)).astype(np.int64)
    steps = (steps + random) >> 16
    small = np.copysign(steps.astype(np.float32) * np.float32(2.0**-24), x)
    with np.errstate(over="ignore"):
        return np.where(is_small, small, normal).astype(np.float16).astype(np.float32)


@dataclass
class Lions:
    """All ranks of Distributed Lion in one process.

    Args:
        params: Parameters, equal on every rank; float32, float64, bfloat16 or float16.
        ranks: Number of ranks.
        lrs: Learning rate of each parameter.
        decays: Weight decay of each parameter.
        betas: Momentum coefficients of each parameter (default: (0.9, 0.98)).
    """

    params: list[torch.Tensor]
    ranks: int
    lrs: Sequence[float]
    decays: Sequence[float]
    betas: Sequence[tuple[float, float]] = ()
    bits: int = 1
    aggregation: str = "majority"
    ties: str = "alternate"
    level_scale: str = "word"
    seed: int = 0
    momentum_dtype: torch.dtype | None = None
    t: int = 0

    def __post_init__(self) -> None:
        self.betas = self.betas or [(0.9, 0.98)] * len(self.params)
        dtype = self.momentum_dtype
        self.momenta = [
            [torch.zeros(p.shape, dtype=dtype or p.dtype) for p in self.params]
            for _ in range(self.ranks)
        ]
        # Updates of the momentum since the last gradient other than zero, by rank and row.
        rows = len(Layout([tuple(p.shape) for p in self.params]).row_sizes)
        self.ages = np.zeros((self.ranks, rows), dtype=np.int64)

    def step(self, grads: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """Takes a step on the gradients of each rank, by rank and parameter."""
        finite = [all(g is None or bool(g.isfinite().all()) for g in own) for own in grads]
        if not any(finite):
            return
        self.t += 1
        layout = Layout([tuple(p.shape) for p in self.params])
        used = [
            any(finite[rank] and grads[rank][i] is not None for rank in range(self.ranks))
            for i in range(len(self.params))
        ]
        ballots = [
            self._vote(layout, rank, grads[rank] if finite[rank] else [None] * len(self.params))
            for rank in range(self.ranks)
        ]
        v = verdict(
            [codes for codes, _ in ballots],
            [active for _, active in ballots],
            layout,
            phase=phase_of(self.t),
            bits=self.bits,
            aggregation=self.aggregation,
            ties=self.ties,
        )
        for i, (p, own) in enumerate(zip(self.params, layout.split(v), strict=True)):
            if not used[i]:
                continue
            wide = p.double() if p.dtype == torch.float64 else p.float()
            moved = apply_verdict(wide.numpy(), own, self.lrs[i], self.decays[i])
            p.copy_(self._round(moved, p.dtype, layout.firsts[i], 0))

    def _round(
        self, x: Array, dtype: torch.dtype, first: int, stream: int, t: int | None = None
    ) -> torch.Tensor:
        if dtype in (torch.bfloat16, torch.float16):
            random = random_bits(x.size, first, self.t if t is None else t, self.seed, stream)
            flat = np.ascontiguousarray(x.reshape(-1)).astype(np.float32)
            x = rounded(flat, dtype, random).reshape(x.shape)
        return torch.from_numpy(np.asarray(x))

    def _vote(
        self, layout: Layout, rank: int, grads: Sequence[torch.Tensor | None]
    ) -> tuple[Array, Array]:
        dtype = np.float64 if any(p.dtype == torch.float64 for p in self.params) else np.float32
        u = layout.flat(self._directions(layout, rank, grads), dtype)
        breaks_ties = self.aggregation == "majority" and self.ties == "alternate"
        phase = zero_phase(self.t, rank, self.ranks, breaks_ties)
        return codes_of(u, layout, phase=phase, bits=self.bits, scale=self.level_scale)

    def _directions(
        self, layout: Layout, rank: int, grads: Sequence[torch.Tensor | None]
    ) -> list[Array | None]:
        """Returns each tensor's u, None without a gradient, and moves this rank's momenta."""
        parts: list[Array | None] = []
        for i, (p, g) in enumerate(zip(self.params, grads, strict=True)):
            if g is None:
                parts.append(None)
                continue
            m, kind = self.momenta[rank][i], torch.float64 if p.dtype == torch.float64 else None
            wide, g = m.to(kind or torch.float32), g.to(kind or torch.float32)
            beta1, beta2 = self.betas[i]
            u = torch.lerp(wide, g, 1 - beta1).numpy()
            for row, number in enumerate(np.flatnonzero(np.array(layout.tensor_of_row) == i)):
                own = slice(row * layout.row_sizes[number], (row + 1) * layout.row_sizes[number])
                is_zero = not g.reshape(-1)[own].any()
                self.ages[rank][number] = self.ages[rank][number] + 1 if is_zero else 0
                if self.ages[rank][number] >= round(1 / (1 - beta2)):
                    u.reshape(-1)[own] = 0
            parts.append(u)
            new = torch.lerp(wide, g, 1 - beta2)
            if m.dtype in (torch.bfloat16, torch.float16):
                largest = torch.finfo(m.dtype).max
                new = new.clamp(-largest, largest)
            m.copy_(self._round(new.numpy(), m.dtype, layout.firsts[i], 1 + rank))
        return parts
