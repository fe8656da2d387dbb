"""What moves in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from hf_dlion.codec.rule import StepRule, TensorRule


@dataclass(frozen=True)
class Ballot:
    """The parameters that move in a step, and by which constants.

    Whatever exchanges and applies takes from it the parameters that are its own.

    Attributes:
        voting: `exp_avg`, or this rank's stretch of it, of every parameter, by index, on which this
            rank, or its node, votes.
        rules: The step's constants of every parameter on which any rank votes, by index.
        rule: The step's constants.
        full: `exp_avg`, and the number of ranks that have a gradient, of every parameter, by index,
            that moves by the mean gradient.
    """

    voting: Mapping[int, Tensor]
    rules: Mapping[int, TensorRule]
    rule: StepRule
    full: Mapping[int, tuple[Tensor, int]] = field(default_factory=dict)
