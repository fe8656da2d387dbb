"""How often the verdict of 1-bit votes is what Lion would have done with everybody's gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dlion.optimizer import DistributedLion
from hf_dlion.options.groups import names_of


class SignAgreement:
    """Compares, in some steps, how parameters moved with the sign of the mean direction.

    The mean direction is b1 * (mean momentum) + (1 - b1) * (mean gradient); elements where it is 0
    do not count. A verdict of 0 agrees with nothing.

    Args:
        voters: The optimizers of all workers; where there are none nothing is measured.
    """

    def __init__(self, voters: Sequence[DistributedLion]) -> None:
        """Starts with no measurement."""
        self._voters = voters
        self._equal: Counter[int] = Counter()
        self._counted: Counter[int] = Counter()
        self._expected: list[tuple[Tensor, Tensor, float]] = []

    def before(self, lr: float) -> None:
        """Notes what is expected of the coming step; gradients are there.

        Args:
            lr: Of the step.
        """
        self._expected = []
        for copies, group in self._params():
            direction = torch.zeros_like(copies[0], dtype=torch.float64)
            beta = group["betas"][0]
            for voter, copy in zip(self._voters, copies, strict=True):
                momentum = voter.state.get(copy, {}).get("exp_avg")
                if copy.grad is not None:
                    direction.add_(copy.grad, alpha=1.0 - beta)
                if momentum is not None:
                    direction.add_(momentum.view(copy.shape), alpha=beta)
            decayed = copies[0].detach().double() * (1.0 - lr * group["weight_decay"])
            # Of N votes the smallest average that is not 0 moves by lr / N.
            self._expected.append((decayed, direction.sign(), lr / (2 * len(self._voters))))

    def after(self) -> None:
        """Compares, after the step."""
        for index, (copies, _) in enumerate(self._params()):
            decayed, sign, least = self._expected[index]
            moved = decayed - copies[0].detach().double()
            verdict = torch.where(moved.abs() > least, moved.sign(), torch.zeros_like(moved))
            counts = sign != 0
            self._equal[index] += int(((verdict == sign) & counts).sum())
            self._counted[index] += int(counts.sum())

    def by_parameter(self) -> dict[str, float]:
        """Returns the share of equal elements, by parameter name."""
        if not self._voters:
            return {}
        names = names_of(self._voters[0].param_groups)
        return {names[i]: self._equal[i] / count for i, count in self._counted.items() if count}

    def _params(self) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]:
        """Yields, for each parameter, the replicas of all workers and their group."""
        for groups in zip(*(voter.param_groups for voter in self._voters), strict=True):
            for copies in zip(*(group["params"] for group in groups), strict=True):
                yield copies, groups[0]
