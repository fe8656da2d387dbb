"""The whole rule (rule S1 to S7, S9 to S11) in one process, for any number of ranks.

Only the arithmetic of `hf_dlion.codec.reference` is used, and votes of more than one bit are added
up without any code; tensors are mere containers here, because NumPy has no bfloat16. Whatever the
optimizer does on N ranks must equal this bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hf_dlion.codec.reference import votes as reference

Array = reference.Array


@dataclass
class OracleGroup:
    """A parameter group: initial parameters and hyperparameters, which may change between steps."""

    params: Sequence[Tensor]
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0


class OracleLion:
    """Distributed Lion on `world_size` simulated ranks.

    Attributes:
        params: The parameters in the order of the flattened groups; one copy, since all replicas
            are equal.
        exp_avg: `exp_avg[rank][index]`, every rank's momentum.
        steps: The number of the last step that changed something.
        agreement: Of the last exchange: the sum of |sum of votes| over the sum of |vote|; with one
            bit over world size times the number of elements in rows where somebody voted.
        abstentions: For each rank, how many steps in a row it has abstained as not finite.
    """

    def __init__(
        self,
        groups: Sequence[OracleGroup],
        world_size: int,
        *,
        aggregation: Literal["majority", "average"] = "majority",
        ties: Literal["alternate", "zero"] = "alternate",
        bits: Literal[1, 2, 4, 8] = 1,
        level_scale: Literal["word", "tensor"] = "word",
        stochastic_rounding: bool = True,
        momentum_dtype: torch.dtype | None = None,
        seed: int = 0,
        max_abstained_steps: int = 20,
        momentum_sync_every: int = 0,
        momentum_sync_dtype: torch.dtype = torch.bfloat16,
        synced: Collection[int] | None = None,
        full: Collection[int] = (),
        warmup_full_steps: int = 0,
    ) -> None:
        self.groups = list(groups)
        self.world_size = world_size
        self.aggregation = aggregation
        self.ties: Literal["alternate", "zero"] = ties
        self.bits = bits
        self.level_scale = level_scale
        self.stochastic_rounding = stochastic_rounding
        self.momentum_dtype = momentum_dtype
        self.seed = seed
        self.max_abstained_steps = max_abstained_steps
        self.params = [p.detach().clone() for group in groups for p in group.params]
        self._group_of = [group for group in self.groups for _ in group.params]
        self.exp_avg = [
            [torch.zeros_like(p, dtype=momentum_dtype or p.dtype) for p in self.params]
            for _ in range(world_size)
        ]
        self.momentum_sync_every = momentum_sync_every
        self.momentum_sync_dtype = momentum_sync_dtype
        self.synced = range(len(self.params)) if synced is None else synced
        self.full, self.warmup_full_steps = frozenset(full), warmup_full_steps
        self.steps = 0
        self.agreement = math.nan
        self.abstentions = [0] * world_size

    def step(
        self,
        grads: Sequence[Sequence[Tensor | None]],
        foreseen: Sequence[Mapping[int, Array]] | None = None,
    ) -> None:
        """Takes one step with `grads[rank][index]`; None where autograd saw no gradient.

        The direction takes `foreseen[rank][index]` instead, where there is one (overlap).

        Raises:
            RuntimeError: If a rank has abstained `max_abstained_steps` times in a row.
        """
        finite = [rank for rank in range(self.world_size) if all(map(_is_finite, grads[rank]))]
        for rank in range(self.world_size):
            self.abstentions[rank] = 0 if rank in finite else self.abstentions[rank] + 1
        if max(self.abstentions) >= self.max_abstained_steps:
            raise RuntimeError(f"a rank abstained {max(self.abstentions)} times in a row")
        voters = {
            index: [rank for rank in finite if grads[rank][index] is not None]
            for index in range(len(self.params))
        }
        if not any(voters.values()):
            return
        self.steps += 1
        agreed = most = 0
        warm = self.steps <= self.warmup_full_steps
        full = set(voters) if warm else self.full
        for index, ranks in voters.items():
            if not ranks:
                continue
            if index in full and self.world_size > 1:
                self._move_in_full(index, ranks, grads)
                continue
            shape = tuple(self.params[index].shape)
            ballots = self._vote(index, ranks, grads, foreseen)
            if self.world_size > 1:
                self._apply(index, self._verdict(index, ballots))
                if self.bits > 1:
                    agreed += int(np.abs(sum(votes for votes, _ in ballots)).sum())
                    most += sum(int(np.abs(votes).sum()) for votes, _ in ballots)
                    continue
                total = np.abs(reference.count_votes(ballots, shape)).reshape(-1)
                counted = np.logical_or.reduce([active for _, active in ballots])
                agreed += int(total.sum())
                most += self.world_size * int(counted[reference.row_of_element(shape)].sum())
        if most:
            self.agreement = agreed / most
        if self.momentum_sync_every and self.world_size > 1 and not warm:
            self._synchronize(sorted(set(self.synced) - full))

    def _move_in_full(
        self, index: int, voters: Sequence[int], grads: Sequence[Sequence[Tensor | None]]
    ) -> None:
        """Takes a step of Lion on the mean gradient of the voters; one momentum on all ranks."""
        dtype = compute_dtype(self.params[index])
        total = None
        for rank in range(self.world_size):
            # Whoever has none sends zeros: of negative zeros alone the sum is one too.
            own = np.zeros(tuple(self.params[index].shape), dtype=dtype)
            if rank in voters:
                grad = grads[rank][index]
                assert grad is not None
                own = widen(grad).astype(dtype)
            # Beyond the largest number the sum is Inf, and what is made of it the largest.
            with np.errstate(over="ignore"):
                total = own if total is None else total + own
        limit = torch.finfo(self.params[index].dtype).max
        exact = np.clip(total / dtype(len(voters)), -limit, limit).astype(dtype)
        mean = to_nearest(exact, self.params[index].dtype)
        assert all(same_bits(other[index], self.exp_avg[0][index]) for other in self.exp_avg)
        beta1, beta2 = self._group_of[index].betas
        g = widen(mean).astype(dtype)
        m = widen(self.exp_avg[0][index]).astype(dtype)
        new = reference.updated_momentum(m, g, beta2)
        momentum_dtype = self.exp_avg[0][index].dtype
        if momentum_dtype.itemsize < new.dtype.itemsize:
            new = reference.saturated(new, torch.finfo(momentum_dtype).max)
        self._store(self.exp_avg[0], index, new, stream=1)
        for other in self.exp_avg[1:]:
            other[index] = self.exp_avg[0][index].clone()
        self._apply(index, np.sign(reference.direction(m, g, beta1)))

    def _synchronize(self, synced: Sequence[int]) -> None:
        """Averages one slice of the momenta, element by element of the whole."""
        numels = [self.params[index].numel() for index in synced]
        every, n = self.momentum_sync_every, sum(numels)
        part = self.steps % every
        due = np.arange(part * n // every, (part + 1) * n // every)
        bounds = np.cumsum([0, *numels])
        for index, first, last in zip(synced, bounds, bounds[1:], strict=False):
            where = due[(due >= first) & (due < last)] - first
            if not where.size:
                continue
            dtype = compute_dtype(self.exp_avg[0][index])
            limit = torch.finfo(self.momentum_sync_dtype).max
            wide = [widen(own[index]).astype(dtype).reshape(-1)[where] for own in self.exp_avg]
            sent = [
                to_nearest(np.clip(m, -limit, limit).astype(np.float32), self.momentum_sync_dtype)
                for m in wide
            ]
            total = widen(sent[0])
            for other in sent[1:]:
                with np.errstate(over="ignore"):
                    total = total + widen(other)
            exact = np.clip(total / np.float32(self.world_size), -limit, limit).astype(np.float32)
            mean = widen(to_nearest(exact, self.momentum_sync_dtype)).astype(dtype)
            for own, m, mine in zip(self.exp_avg, wide, sent, strict=True):
                shape, kind = own[index].shape, own[index].dtype
                values = widen(own[index]).astype(dtype).reshape(-1)
                new = mean + (m - widen(mine).astype(dtype))
                if kind.itemsize < new.dtype.itemsize:
                    new = reference.saturated(new, torch.finfo(kind).max)
                values[where] = new
                before = own[index].reshape(-1).clone()
                self._store(own, index, values.reshape(tuple(shape)), stream=2**32 - 1)
                before[where] = own[index].reshape(-1)[where]
                own[index] = before.reshape(shape)

    def _vote(
        self,
        index: int,
        voters: Sequence[int],
        grads: Sequence[Sequence[Tensor | None]],
        foreseen: Sequence[Mapping[int, Array]] | None,
    ) -> list[Any]:
        """Advances the momenta of the voters and returns their ballots (S1 to S3, S6)."""
        beta1, beta2 = self._group_of[index].betas
        dtype = compute_dtype(self.params[index])
        ballots = []
        for rank in voters:
            grad = grads[rank][index]
            assert grad is not None
            g = widen(grad).astype(dtype)
            m = widen(self.exp_avg[rank][index]).astype(dtype)
            seen = foreseen[rank].get(index, g) if foreseen else g
            u = reference.direction(m, seen, beta1)
            new = reference.updated_momentum(m, g, beta2)
            momentum_dtype = self.exp_avg[rank][index].dtype
            if momentum_dtype.itemsize < new.dtype.itemsize:
                new = reference.saturated(new, torch.finfo(momentum_dtype).max)
            self._store(self.exp_avg[rank], index, new, stream=1 + rank)
            if self.world_size == 1:
                self._apply(index, np.sign(u))
            if self.bits > 1:
                ballots.append(self._levels(u, rank))
                continue
            ballots.append(
                reference.pack_signs(u, t=self.steps, rank=rank, world_size=self.world_size)
            )
        return ballots

    def _levels(self, u: Array, rank: int) -> tuple[Array, Array]:
        """Returns a level per element, and which elements are in rows that vote (S6)."""
        rows = u.reshape(u.shape[0], -1) if u.ndim >= 2 and u.size else u.reshape(1, -1)
        votes = np.broadcast_to(rows.any(axis=1, keepdims=True), rows.shape).reshape(u.shape)
        if not votes.any():
            return np.zeros(u.shape, dtype=np.int64), votes
        magnitudes = np.abs(u).astype(np.float64).reshape(-1)
        mean: Any = np.full(u.shape, tree_sum(magnitudes) / np.float64(votes.sum()))
        if self.level_scale == "word":
            words = np.array_split(magnitudes, range(64, u.size, 64))
            means = [tree_sum(word) / max(np.count_nonzero(word), 1) for word in words]
            mean = np.repeat(means, 64)[: u.size].reshape(u.shape)
        with np.errstate(over="ignore", divide="ignore"):
            if self.bits == 2:
                even = np.arange(u.size) + self.steps // 2 + (rank + self.steps) % self.world_size
                sign = np.where(u == 0, 1 - 2 * (even.reshape(u.shape) % 2), np.sign(u))
                level = sign * np.where(np.abs(u) > (1.5 * mean).astype(u.dtype), 3, 1)
            else:
                most = {4: 7, 8: 127}[self.bits]
                per_unit = np.minimum(most / 2 / mean, float(np.finfo(u.dtype).max))
                level = np.clip(np.rint(u * per_unit.astype(u.dtype)), -most, most)
        return (level * votes).astype(np.int64), votes

    def _verdict(self, index: int, ballots: Sequence[Any]) -> Array:
        """Returns what all ranks apply (S4 to S6)."""
        shape = tuple(self.params[index].shape)
        if self.bits > 1:
            verdict = np.sign(sum(levels for levels, _ in ballots))
            if self.ties == "alternate":
                coin = 1 - 2 * ((np.arange(verdict.size).reshape(shape) + self.steps) % 2)
                tied = (verdict == 0) & np.logical_or.reduce([votes for _, votes in ballots])
                verdict = np.where(tied, coin, verdict)
            return verdict
        if self.aggregation == "majority":
            return reference.majority(ballots, shape, t=self.steps, ties=self.ties)
        dtype = compute_dtype(self.params[index])
        return reference.average(ballots, shape, world_size=self.world_size, dtype=dtype)

    def _apply(self, index: int, verdict: Array) -> None:
        """Moves a parameter by the verdict (S7)."""
        group = self._group_of[index]
        p = widen(self.params[index]).astype(compute_dtype(self.params[index]))
        new = reference.apply_verdict(p, verdict, group.lr, group.weight_decay)
        self._store(self.params, index, new, stream=0)

    def _store(self, tensors: list[Tensor], index: int, values: Array, *, stream: int) -> None:
        """Rounds `values` to the dtype of `tensors[index]` and puts them there."""
        old = tensors[index]
        random = None
        if self.stochastic_rounding:
            random = reference.random_bits(self.seed, self.steps, index, stream, old.numel())
            random = random.reshape(values.shape)
        if old.dtype == torch.bfloat16:
            bits = reference.round_bfloat16(values.astype(np.float32), random)
        elif old.dtype == torch.float16:
            bits = reference.round_float16(values.astype(np.float32), random)
        else:
            tensors[index] = torch.from_numpy(np.array(values)).to(old.dtype)
            return
        tensors[index] = torch.from_numpy(np.array(bits.view(np.int16))).view(old.dtype)


def to_nearest(values: Array, dtype: torch.dtype) -> Tensor:
    """Returns values rounded to a dtype, ties to even, as a tensor of the same shape."""
    if dtype == torch.bfloat16:
        bits = reference.round_bfloat16(values.astype(np.float32), None)
    elif dtype == torch.float16:
        bits = reference.round_float16(values.astype(np.float32), None)
    else:
        return torch.from_numpy(np.array(values)).to(dtype)
    return torch.from_numpy(np.array(bits.view(np.int16))).view(dtype)


def tree_sum(values: Array) -> np.float64:
    """Returns the sum in the order that the rule fixes, not empty.

    Up to 64 numbers are halved across, more of them split where the largest power of two ends.
    """
    with np.errstate(over="ignore"):
        if len(values) > 64:
            split = 1 << (len(values) - 1).bit_length() - 1
            return np.float64(tree_sum(values[:split]) + tree_sum(values[split:]))
        padded = np.zeros(64)
        padded[: len(values)] = values
        for width in (32, 16, 8, 4, 2, 1):
            padded = padded[:width] + padded[width:]
        return np.float64(padded[0])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have the same dtype, shape and bytes (-0 is not 0)."""
    return a.dtype == b.dtype and a.shape == b.shape and bits_of(a) == bits_of(b)


def bits_of(tensor: Tensor) -> bytes:
    """Returns the bytes of a tensor in row-major order."""
    # Not view(-1): a single element passes for contiguous with any stride, and keeps it.
    flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def compute_dtype(param: Tensor) -> type[np.floating[Any]]:
    return np.float64 if param.dtype == torch.float64 else np.float32


def _is_finite(grad: Tensor | None) -> bool:
    return grad is None or bool(np.isfinite(widen(grad)).all())


def widen(tensor: Tensor) -> Array:
    """Returns the values as float32, or as float64 if that is what they are; exact."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        bits = tensor.view(torch.int16).numpy().view(np.uint16)
        bfloat16 = tensor.dtype == torch.bfloat16
        return reference.widen_bfloat16(bits) if bfloat16 else reference.widen_float16(bits)
    result: Array = tensor.numpy()
    return result
