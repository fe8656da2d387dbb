"""The constants of a step and the shape of a verdict (rule S4, S5, S7)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dlion.codec.ties import TieRule, tie_rule, zero_phase, zero_word
from hf_dlion.options import Aggregation, LevelScale, Ties
from hf_dlion.options.groups import Groups, group_values


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """What is the same for every parameter in one step.

    Attributes:
        step: Number of the step, 1 for the first.
        rank: This rank, or its node: the r of the rule.
        world_size: Number of ranks, or of nodes, that vote: the N of the rule.
        aggregation: "majority" or "average".
        ties: "alternate" or "zero".
        stochastic_rounding: Whether tensors below float32 are rounded stochastically.
        seed: Seed of that rounding.
        bits: Of a vote, per element.
        level_scale: "word" or "tensor".
    """

    step: int
    rank: int
    world_size: int
    aggregation: Aggregation
    ties: Ties
    stochastic_rounding: bool
    seed: int
    bits: int = 1
    level_scale: LevelScale = "word"

    @property
    def planes(self) -> int:
        """Bits per parameter of a verdict."""
        return verdict_planes(self.aggregation, self.ties, self.world_size)[0]

    @property
    def tie(self) -> TieRule:
        """What a tie becomes."""
        return tie_rule(self.ties, self.step)

    @property
    def zero_phase(self) -> int:
        """0 or 1: this rank sends an isolated exact zero as +1 where k + this is even."""
        return zero_phase(self.step, self.rank, self.world_size)

    @property
    def zero_word(self) -> int:
        """The same as a word, int64: bit k is 1 where this rank sends a zero as -1."""
        return zero_word(self.step, self.rank, self.world_size)


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """What holds for one parameter in one step.

    Attributes:
        step_rule: The step's constants.
        index: Position of the parameter in the flattened groups.
        lr: Learning rate.
        betas: Decay factors of the direction and of the momentum.
        weight_decay: Decoupled weight decay.
    """

    step_rule: StepRule
    index: int
    lr: float
    betas: tuple[float, float]
    weight_decay: float

    @property
    def decay(self) -> float:
        """Returns the factor 1 - lr * weight_decay, in double precision."""
        return 1.0 - self.lr * self.weight_decay

    def moves(self, dtype: torch.dtype) -> Tensor:
        """Returns fl(lr * v) for each sum of votes, on the CPU; do not write to it.

        Args:
            dtype: float32 or float64, in which v and the product are rounded.

        Returns:
            Shape (2 n + 1,), entry n + s for the sum s: n is 1 under majority (v = s), and
            the world size under average (v = s / n).
        """
        majority = self.step_rule.aggregation == "majority"
        return _moves(1 if majority else self.step_rule.world_size, self.lr, dtype)


def tensor_rules(groups: Groups, indices: set[int], step_rule: StepRule) -> dict[int, TensorRule]:
    """Returns the constants of one step for the parameters `indices`, by index."""
    rules: dict[int, TensorRule] = {}
    index = 0
    for group, values in zip(groups, group_values(groups), strict=True):
        del values["exchange"]
        for _ in group["params"]:
            if index in indices:
                rules[index] = TensorRule(step_rule=step_rule, index=index, **values)
            index += 1
    return rules


@functools.lru_cache(maxsize=64)
def _moves(n: int, lr: float, dtype: torch.dtype) -> Tensor:
    sums = torch.arange(-n, n + 1, dtype=dtype, device="cpu")
    # A division of two tensors is rounded correctly everywhere; one by a scalar is not.
    return sums / torch.full_like(sums, n) * torch.tensor(lr, dtype=dtype, device="cpu")


# Of a part of a message.
NO_SUMS = torch.zeros(2, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class Verdict:
    """What every rank applies to a shard of a message, or to a stretch of a parameter.

    Attributes:
        planes: int64, shape (P, words), rows contiguous, bit-sliced. Majority: plane 0 is 1 where
            the verdict is -1, and under ties="zero" plane 1 is 1 where it is not 0. Average: the
            binary digits, lowest first, of the number of ranks that voted -1.
        counts: int32, shape (rows,). Average: how many ranks voted on the row. Majority: 1 if
            any did, else 0.
        sums: int64, shape (2,), of a whole shard. The sum over the elements of |sum of the votes|,
            and what that were if all ranks agreed: with one bit the number of ranks for each
            element of a row on which any voted, with more the sum over ranks, too, of |vote|.
    """

    planes: Tensor
    counts: Tensor
    sums: Tensor = NO_SUMS


class MessageVerdict(NamedTuple):
    """The verdict on a message, in the segments in which it was received.

    Attributes:
        planes: int64, shape (P, K, S), the words of a segment one after another: those of
            `Verdict.planes`, word w in segment w // S. The last segments may hold fewer, or none.
        counts: int32, shape (rows,), as `Verdict.counts`.
        sums: int64, shape (2,), as `Verdict.sums`.
    """

    planes: Tensor
    counts: Tensor
    sums: Tensor

    @staticmethod
    def of(whole: Verdict) -> MessageVerdict:
        """Returns a verdict on a message that lies in one piece."""
        return MessageVerdict(whole.planes.unsqueeze(1), whole.counts, whole.sums)


def verdict_planes(aggregation: Aggregation, ties: Ties, world_size: int) -> tuple[int, int]:
    """Returns the bits per parameter and the bits per row of a verdict."""
    if aggregation == "average":
        return world_size.bit_length(), world_size.bit_length()
    return 1 + tie_rule(ties, 0).to_zero, 1
