"""The local steps of docs/rule.md, section 9, in NumPy: all ranks in one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests.support.definition import TOP, Array, Layout, Lions, codes_of, tensor_means, zero_phase

# Streams of stochastic rounding, to which the rank is added.
COMPENSATION, SYNCHRONIZED = 1 << 30, 1 << 31
LOW = (torch.bfloat16, torch.float16)


@dataclass
class LocalLions(Lions):
    """Ranks that take `every` steps of their own and then exchange; `params` are the anchors.

    A new lr or decay is put into `lrs` and `decays` between steps. The momenta of `synced` are
    averaged in every `sync_every`-th exchange.
    """

    every: int = 2
    exchanges: int = 0
    taken: int = 0
    full: Sequence[int] = ()
    synced: Sequence[int] = ()
    sync_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layout = Layout([tuple(p.shape) for p in self.params], self.full)
        self._begin()

    def _begin(self) -> None:
        """Begins a period at the common weights."""
        self.own = [[p.clone() for p in self.params] for _ in range(self.ranks)]
        self.c = [[torch.zeros_like(p) for p in self.params] for _ in range(self.ranks)]
        self.used = [False for _ in self.params]
        self.factors = [1.0 for _ in self.params]
        self.taken = 0

    def step(self, grads: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """Takes a step on every rank, and exchanges after every k-th."""
        finite = [all(g is None or bool(g.isfinite().all()) for g in own) for own in grads]
        if self.t == 0 and not any(
            ok and any(g is not None for g in own) for ok, own in zip(finite, grads, strict=True)
        ):
            return  # The ranks meet in the first step, and find this.
        self.t += 1
        self.taken += 1
        for rank, own in enumerate(grads):
            self._move(rank, own if finite[rank] else [None] * len(own))
        self.factors = [
            f * (1 - lr * wd) for f, lr, wd in zip(self.factors, self.lrs, self.decays, strict=True)
        ]
        if self.taken == self.every:
            self.exchange()

    def _move(self, rank: int, grads: Sequence[torch.Tensor | None]) -> None:
        for i, u in enumerate(self._directions(self.layout, rank, grads)):
            if u is None:
                continue
            self.used[i] = True
            p, c = self.own[rank][i], self.c[rank][i]
            move = u.dtype.type(self.lrs[i]) * np.sign(u)
            if p.dtype in LOW:
                most = torch.finfo(p.dtype).max
                y = (p.float() + c.float() - torch.from_numpy(np.asarray(move))).clamp(-most, most)
                p.copy_(y)
                left = (y - p.float()).numpy()
                c.copy_(self._rounded(left, i, COMPENSATION + rank, self.t))
            else:
                p.sub_(torch.from_numpy(np.asarray(move)))

    def write(self, i: int, values: torch.Tensor) -> None:
        """Replaces common weights, as a write in `common_weights()` on every rank does."""
        written = values != self.params[i]
        for rank, own in enumerate(self.own):
            w = torch.from_numpy(self._displacement(rank, i)).to(wide_of(values))
            y = values.to(w) - w
            own[i][written] = y.to(values.dtype)[written]
            if values.dtype in LOW:
                self.c[rank][i][written] = (y - own[i].to(y)).to(values.dtype)[written]
        self.params[i].copy_(values)

    def _rounded(self, x: Array, i: int, stream: int, t: int) -> torch.Tensor:
        return self._round(x, self.params[i].dtype, self.layout.firsts[i], stream, t)

    def exchange(self) -> None:
        """Exchanges how far every rank was moved in the period."""
        if self.taken:
            self.exchanges += 1
            self._exchange()
            if self.sync_every and self.exchanges % self.sync_every == 0:
                self._synchronize()
        self._begin()

    def _exchange(self) -> None:
        wide = np.float64 if self.params[0].dtype == torch.float64 else np.float32
        ws = [
            [self._displacement(rank, i).astype(wide) for i in range(len(self.params))]
            for rank in range(self.ranks)
        ]
        votes = [[None if i in self.full else w for i, w in enumerate(own)] for own in ws]
        factor = {1: 1.0, 2: 4 / 9, 4: 1 / 2, 8: 1 / 2}[self.bits]
        d, _ = self._mean(self.layout, votes, wide, self.bits, factor, of_largest=self.bits > 1)
        for i, p in enumerate(self.params):
            if not self.used[i] and not any(own[i].any() for own in ws):
                continue
            if i in self.full:
                d[i] = sum((own[i] for own in ws[1:]), start=ws[0][i]) / wide(self.ranks)
            x = p.to(torch.float64 if wide is np.float64 else torch.float32).numpy()
            moved = (x - d[i]) * wide(self.factors[i])
            p.copy_(self._rounded(moved, i, 0, self.exchanges))

    def _synchronize(self) -> None:
        """Averages the selected momenta in 4 bits."""
        layout = Layout([tuple(self.params[i].shape) for i in self.synced])
        wide = np.float64 if self.params[0].dtype == torch.float64 else np.float32
        momenta = [
            [own[i].to(wide_of(self.params[i])).numpy().astype(wide) for i in self.synced]
            for own in self.momenta
        ]
        d, levels = self._mean(layout, momenta, wide, 4, 1.6, of_largest=False)
        for rank, own in enumerate(momenta):
            for k, i in enumerate(self.synced):
                m = self.momenta[rank][i]
                new = (own[k] + d[k]) - levels[rank][k]
                if m.dtype in LOW:
                    most = torch.finfo(m.dtype).max
                    new = np.clip(new, -most, most)
                stream = SYNCHRONIZED + rank
                m.copy_(self._round(new, m.dtype, layout.firsts[k], stream, self.exchanges))

    def _mean(
        self, layout: Layout, ws: Sequence[Sequence[Array | None]], wide: type, bits: int,
        factor: float, *, of_largest: bool,
    ) -> tuple[list[Array], list[list[Array]]]:  # fmt: skip
        """Returns the mean of what all ranks sent of their tensors, and what each one sent."""
        e, means, codes, active = self.exchanges, [], [], []
        flats = [layout.flat(own, wide) for own in ws]
        for flat, own in zip(flats, ws, strict=True):
            _, rows = codes_of(flat, layout, phase=0)
            largest = [0.0 if w is None else float(np.abs(w).max(initial=0)) for w in own]
            means.append(largest if of_largest else tensor_means(flat, layout, rows))
        magnitudes = []
        for by_rank in zip(*means, strict=True):
            heard = [mean for mean in by_rank if mean > 0]
            s = math.fsum(heard) / max(len(heard), 1)
            magnitudes.append(factor * (max(heard, default=0.0) if of_largest else s))
        a = layout.spread(magnitudes).astype(wide)
        for rank, flat in enumerate(flats):
            phase = zero_phase(e, rank, self.ranks, breaks_ties=False)
            own_codes, rows = codes_of(flat, layout, phase=phase, bits=bits, magnitudes=a)
            codes.append(own_codes)
            active.append(rows)
        voters = np.sum(active, axis=0)[layout.row_of_element]
        v = (2 * np.sum(codes, axis=0) - TOP[bits] * voters).astype(wide)
        units = [{1: m, 2: 0.75 * m, 4: m / 7, 8: m / 127}[bits] for m in magnitudes]
        unit = layout.spread(units).astype(wide)
        levels = []
        for own_codes, rows in zip(codes, active, strict=True):
            q = np.where(rows[layout.row_of_element], 2 * own_codes - TOP[bits], 0)
            levels.append(layout.split(q.astype(wide) * unit))
        return layout.split((v / wide(self.ranks)) * unit), levels

    def _displacement(self, rank: int, i: int) -> Array:
        x, p, c = self.params[i], self.own[rank][i], self.c[rank][i]
        if p.dtype in LOW:
            return np.asarray(((x.float() - p.float()) - c.float()).numpy())
        return np.asarray((x - p).numpy())


def wide_of(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which a tensor's steps are computed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def lions_of(params: Iterable[torch.Tensor], ranks: int, every: int) -> Lions:
    """Returns the definition of steps with lr=0.01 and weight_decay=0.1, or of local steps."""
    start = [p.detach().clone() for p in params]
    lrs, decays = [0.01] * len(start), [0.1] * len(start)
    if every == 1:
        return Lions(start, ranks, lrs, decays)
    return LocalLions(start, ranks, lrs, decays, every=every, bits=4)
