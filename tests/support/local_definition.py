"""The local steps of docs/rule.md, section 9, in NumPy: all ranks in one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests.support.definition import TOP, Array, Layout, Lions, codes_of, tensor_means, zero_phase

# Streams of stochastic rounding, to which the rank is added.
DISPLACEMENT, OWN, EXCHANGED = 1 << 30, 1 << 31, (1 << 30) + (1 << 31)
LOW = (torch.bfloat16, torch.float16)


@dataclass
class LocalLions(Lions):
    """Ranks that take `every` steps of their own and then exchange; `params` are the anchors.

    A new lr or decay is put into `lrs` and `decays` between steps.
    """

    every: int = 2
    exchanges: int = 0
    taken: int = 0
    full: Sequence[int] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.own = [[p.clone() for p in self.params] for _ in range(self.ranks)]
        self.c = [[torch.zeros_like(p) for p in self.params] for _ in range(self.ranks)]
        self.used = [False for _ in self.params]
        self.factors = [1.0 for _ in self.params]
        self.layout = Layout([tuple(p.shape) for p in self.params], self.full)

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
            p = self.own[rank][i]
            if u is not None:
                self.used[i] = True
                move = u.dtype.type(self.lrs[i]) * np.sign(u)
                if p.dtype in LOW:
                    c = self.c[rank][i].float().numpy() + move
                    self.c[rank][i].copy_(self._rounded(c, i, DISPLACEMENT + rank, self.t))
                else:
                    p.sub_(torch.from_numpy(np.asarray(move)))
            self._refresh(rank, i)

    def _refresh(self, rank: int, i: int) -> None:
        """Rounds x - c to p, for parameters of 16 bits."""
        p = self.own[rank][i]
        if p.dtype in LOW:
            difference = (self.params[i].float() - self.c[rank][i].float()).numpy()
            p.copy_(self._rounded(difference, i, OWN + rank, self.t))

    def write(self, i: int, values: torch.Tensor) -> None:
        """Replaces common weights, as a write between `eval` and `train` on every rank does."""
        x, written = self.params[i].clone(), values != self.params[i]
        self.params[i].copy_(values)
        for rank, own in enumerate(self.own):
            if own[i].dtype not in LOW:
                own[i][written] = (values - (x - own[i]))[written]
            self._refresh(rank, i)

    def _rounded(self, x: Array, i: int, stream: int, t: int) -> torch.Tensor:
        return self._round(x, self.params[i].dtype, self.layout.firsts[i], stream, t)

    def exchange(self) -> None:
        """Exchanges how far every rank was moved since the last exchange."""
        if any(self.used):
            self.exchanges += 1
            self._exchange()
        self.taken = 0
        self.used = [False for _ in self.params]
        self.factors = [1.0 for _ in self.params]

    def _exchange(self) -> None:
        layout, e = self.layout, self.exchanges
        wide = np.float64 if self.params[0].dtype == torch.float64 else np.float32
        ws, flats, means, codes, active = [], [], [], [], []
        for rank in range(self.ranks):
            parts = [self._displacement(rank, i).astype(wide) for i in range(len(self.params))]
            votes = [None if i in self.full else w for i, w in enumerate(parts)]
            ws.append(parts)
            flats.append(layout.flat(votes, wide))
            _, rows = codes_of(flats[rank], layout, phase=0)
            largest = [float(np.abs(w).max(initial=0)) for w in parts]
            means.append(largest if self.bits == 8 else tensor_means(flats[rank], layout, rows))
        scales = []
        for i in range(len(self.params)):
            heard = [own[i] for own in means if own[i] > 0]
            mean = math.fsum(heard) / max(len(heard), 1)
            scales.append(max(heard, default=0.0) if self.bits == 8 else mean)
        magnitudes = layout.spread([s / 2 if self.bits == 8 else s for s in scales]).astype(wide)
        for rank, flat in enumerate(flats):
            phase = zero_phase(e, rank, self.ranks, breaks_ties=False)
            own, rows = codes_of(flat, layout, phase=phase, bits=self.bits, magnitudes=magnitudes)
            codes.append(own)
            active.append(rows)
        voters = np.sum(active, axis=0)[layout.row_of_element]
        v = (2 * np.sum(codes, axis=0) - TOP[self.bits] * voters).astype(wide)
        unit = layout.spread(
            [{1: s, 2: 0.625 * s, 4: s / 7, 8: s / 254}[self.bits] for s in scales]
        ).astype(wide)
        d = layout.split((v / wide(self.ranks)) * unit)
        silent = layout.split(voters == 0)
        levels = []
        for own, rows in zip(codes, active, strict=True):
            q = np.where(rows[layout.row_of_element], 2 * own - TOP[self.bits], 0)
            levels.append(layout.split(q.astype(wide) * unit))
        for i, p in enumerate(self.params):
            if not self.used[i]:
                continue
            factor = wide(self.factors[i])
            if i in self.full:
                d[i] = sum((own[i] for own in ws[1:]), start=ws[0][i]) / wide(self.ranks)
            x = p.to(torch.float64 if wide is np.float64 else torch.float32).numpy()
            y = (x - d[i]) * factor
            new = self._rounded(y, i, 0, e)
            for rank in range(self.ranks):
                own = self.own[rank][i]
                left = np.asarray(new.float().numpy() - y if p.dtype in LOW else 0)
                if p.dtype in LOW:
                    if i in self.full:
                        c = left
                    else:
                        c = (ws[rank][i] - levels[rank][i]) * factor
                        c = c + np.where(silent[i], wide(0), left)
                    self.c[rank][i].copy_(self._rounded(c, i, EXCHANGED + rank, e))
                elif i in self.full:
                    own.copy_(new)
                else:
                    moved = (own.numpy() + levels[rank][i] - d[i]) * factor
                    own.copy_(torch.from_numpy(np.asarray(moved)))
            p.copy_(new)
            for rank in range(self.ranks):
                self._refresh(rank, i)

    def _displacement(self, rank: int, i: int) -> Array:
        if not self.used[i]:
            return np.zeros(self.params[i].shape, dtype=np.float64)
        if self.params[i].dtype in LOW:
            return np.asarray(self.c[rank][i].float().numpy())
        return np.asarray((self.params[i] - self.own[rank][i]).numpy())


def lions_of(params: Iterable[torch.Tensor], ranks: int, every: int) -> Lions:
    """Returns the definition of steps with lr=0.01 and weight_decay=0.1, or of local steps."""
    start = [p.detach().clone() for p in params]
    lrs, decays = [0.01] * len(start), [0.1] * len(start)
    if every == 1:
        return Lions(start, ranks, lrs, decays)
    return LocalLions(start, ranks, lrs, decays, every=every)
