"""Rules that turn votes into a verdict, the majority or the average; and those for ties and zeros.

On GPUs, `gpu.kernels` decides on votes of one bit, and moves. It gets the rule's `name`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.core.codec import (
    TOP,
    WORD,
    alternating_word,
    compare,
    divided,
    numbers_of,
    tally,
    unpack,
)
from hf_dlion.options import Options


class Majority:
    """The sign of the sum of the votes (Liu et al. 2024, Algorithm 1, "MaVo").

    Args:
        ties: Value of a tie: "alternate" applies +1 and -1 in turns, "zero" doesn't move.
    """

    def __init__(self, ties: str) -> None:
        self.name, self._zero = ties, ties == "zero"
        self.plane_count = 2 if self._zero else 1

    def decide(self, sums: list[Tensor], total: int | Tensor, phase: int) -> Tensor:
        """Returns the verdict: a plane of the positive elements, and with "zero" one of the ties.

        Args:
            sums: Planes of the sum of all ranks' codes, int64, shape (W,) each.
            total: Number of active ranks times the largest code, one number or one per word, int64,
                shape (W,).
            phase: Number whose parity decides ties.
        """
        greater, equal = compare(sums, total)
        if self._zero:
            return torch.stack([greater, equal])
        # A tied k is +1 if k + phase is even.
        return (greater | (equal & alternating_word(phase))).unsqueeze(0)

    def decode(self, planes: Tensor, active: Tensor | None, factor: float, out: Tensor) -> Tensor:
        """Returns factor * v for every element, exactly: v is -1, 0, or 1.

        Args:
            planes: Planes of the verdict, int64, shape (planes, W), each contiguous.
            active: Number of active ranks by word, int64, shape (W,); None if all are active.
            factor: Learning rate, or the unit of a level.
            out: Output, float32 or float64, shape (64 * W,), overwritten.
        """
        unpack(planes[0], -factor, factor, out)
        if self._zero:
            # Not a product, which may be -0 and would turn a weight of -0 into 0.
            out.masked_fill_(unpack(planes[1], 0.0, 1.0, torch.empty_like(out)) != 0, 0.0)
        if active is not None:
            out.view(-1, WORD).masked_fill_((active == 0).view(-1, 1), 0.0)
        return out


class Average:
    """The mean of the votes, 0 for a rank that abstains (Liu et al. 2024, Algorithm 1, "Avg").

    Args:
        voters: Number of voters N.
        bits: Bits per vote.
    """

    def __init__(self, voters: int, bits: int) -> None:
        self.name = "average"
        self.voters = voters
        self.top = TOP[bits]
        self.plane_count = (voters * self.top).bit_length()

    def decide(self, sums: list[Tensor], total: int | Tensor, phase: int) -> Tensor:
        """Returns the verdict: the planes of the sum itself; see `Majority.decide`."""
        missing = self.plane_count - len(sums)
        return torch.stack([*sums, *(torch.zeros_like(sums[0]) for _ in range(missing))])

    def decode(self, planes: Tensor, active: Tensor | None, factor: float, out: Tensor) -> Tensor:
        """Returns factor * v; v = (2 * sum - n * top) / N and factor * v are rounded once each."""
        numbers_of(planes, out).mul_(2.0)
        if active is None:
            out.sub_(self.voters * self.top)
        else:
            out.view(-1, WORD).sub_((active * self.top).view(-1, 1))
        if self.voters > 1:
            divided(out, self.voters)
        return out if factor == 1.0 else out.mul_(factor)


# Both have `plane_count`, that of a verdict, and a `name` for kernels.
Rule = Majority | Average


def rule_of(options: Options, voters: int) -> Rule:
    """Returns the rule of votes between so many voters."""
    if options.aggregation == "average":
        assert options.bits is not None, "the options have set it"
        return Average(voters, options.bits)
    return Majority(options.ties)


def verdict_planes(
    planes: Sequence[Sequence[Tensor]], active: Tensor | None, rule: Rule, phase: int
) -> Tensor:
    """Returns the planes of the verdict on some words, int64, shape (planes, W).

    Args:
        planes: Planes of each rank's codes, int64, shape (W,) each; 0 where the rank abstains.
        active: Number of active ranks by word, int64, shape (W,); None if all are active.
        rule: Rule that decides.
        phase: Number whose parity decides ties.
    """
    bits = len(planes[0])
    total = (len(planes) if active is None else active) * TOP[bits]
    return rule.decide(tally(planes, bits), total, phase)


def tie_phase(step: int) -> int:
    """Returns the number whose parity decides ties, so that they cancel out at any rhythm of use.

    Every pair of steps has both parities, in an order by the Golay-Rudin-Shapiro sequence. With the
    parity of the step, ties of a parameter that moves in every second step were all alike.
    """
    pair = step >> 1
    return step + (pair & pair >> 1).bit_count()


def zero_phase(step: int, voter: int, voters: int, *, breaks_ties: bool) -> int:
    """Returns the number whose parity decides a voter's votes for exact zeros.

    They oppose the tie-break, except those of some voters, who take turns by the golden ratio:
    half, rounded down, and of an even number one less if ties are broken, because that is half a
    vote. So zeros cancel out, and a voter that alone isn't zero decides, of two always.
    """
    shift = (0x9E3779B9 * step % (1 << 32)) * voters >> 32
    follows = (voter + shift) % voters < (voters - breaks_ties) // 2
    return tie_phase(step) + follows
