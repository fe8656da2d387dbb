"""How often the verdict of 1-bit votes is what Lion would have done with everybody's gradients."""

from __future__ import annotations

from collections.abc import Sequence
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
        """Has measured nothing."""
        self._voters = voters
        self._equal: dict[int, int] = {}
        self._counted: dict[int, int] = {}
        self._expected: dict[int, tuple[Tensor, Tensor, float]] = {}

    def before(self, lr: float) -> None:
        """Notes what is expected of the coming step; gradients are there.

        Args:
            lr: Of the step.
        """
        self._expected = {}
        for index, (copies, group) in enumerate(zip(self._copies(), self._groups(), strict=True)):
            param = copies[0]
            direction = torch.zeros_like(param, dtype=torch.float64)
            beta = group["betas"][0]
            for voter, copy in zip(self._voters, copies, strict=True):
                momentum = voter.state.get(copy, {}).get("exp_avg")
                if copy.grad is not None:
                    direction.add_(copy.grad, alpha=1.0 - beta)
                if momentum is not None:
                    direction.add_(momentum.view(copy.shape), alpha=beta)
            decayed = param.detach().double() * (1.0 - lr * group["weight_decay"])
            # Of N votes the smallest average that is not 0 moves by lr / N.
            self._expected[index] = decayed, direction.sign(), lr / (2 * len(self._voters))

    def after(self) -> None:
        """Compares, after the step."""
        for index, copies in enumerate(self._copies()):
            decayed, sign, least = self._expected[index]
            moved = decayed - copies[0].detach().double()
            verdict = torch.where(moved.abs() > least, moved.sign(), torch.zeros_like(moved))
            counts = sign != 0
            equal = int(((verdict == sign) & counts).sum())
            self._equal[index] = self._equal.get(index, 0) + equal
            self._counted[index] = self._counted.get(index, 0) + int(counts.sum())

    def by_parameter(self) -> dict[str, float]:
        """Returns the share of equal elements, by parameter name."""
        if not self._voters:
            return {}
        names = names_of(self._voters[0].param_groups)
        return {
            names[index]: self._equal[index] / count
            for index, count in self._counted.items()
            if count
        }

    def _copies(self) -> list[tuple[Tensor, ...]]:
        """Returns, for each parameter, the replicas of all workers."""
        each = [[p for group in v.param_groups for p in group["params"]] for v in self._voters]
        return list(zip(*each, strict=True))

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the group of each parameter."""
        own = self._voters[0].param_groups if self._voters else []
        return [group for group in own for _ in group["params"]]
