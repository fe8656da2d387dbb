"""What the arithmetic of one step needs in addition to its tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_dlion.core.idle_rows import update_age
from hf_dlion.core.layout import Piece, Scratch
from hf_dlion.core.rounding import random_bits
from hf_dlion.core.rule import tie_phase, zero_phase
from hf_dlion.core.slot import Slot
from hf_dlion.options import Options


class Rates(NamedTuple):
    """The hyperparameters of a parameter group in a step; p decays to p * decay."""

    lr: float
    beta1: float
    beta2: float
    decay: float


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The step, and what its arithmetic needs in addition to the layout.

    `number` is that of the step, 1 for the first one, or of an exchange of local steps. `voter` is
    the number of this rank's voter among `voters`. `ages` are those of `idle_rows`, by parameter.
    """

    number: int
    voter: int
    voters: int
    options: Options
    groups: list[dict[str, Any]]
    scratch: Scratch
    ages: MutableMapping[Tensor, Tensor] = field(default_factory=dict)

    @property
    def bits(self) -> int:
        """Bits per vote, or per displacement."""
        assert self.options.bits is not None, "the options have set it"
        return self.options.bits

    @functools.cached_property
    def rates(self) -> list[Rates]:
        """The hyperparameters by group, read once: a GPU would wait for each that is a tensor."""
        found = []
        for group in self.groups:
            (beta1, beta2), lr = map(float, group["betas"]), float(group["lr"])
            found.append(Rates(lr, beta1, beta2, decay=1 - lr * float(group["weight_decay"])))
        return found

    @functools.cached_property
    def phase(self) -> int:
        """Number whose parity decides ties, see `rule.tie_phase`."""
        return tie_phase(self.number)

    @functools.cached_property
    def zero_phase(self) -> int:
        """Number whose parity decides this voter's votes for exact zeros, see `rule.zero_phase`."""
        breaks_ties = self.options.aggregation == "majority" and self.options.ties == "alternate"
        return zero_phase(self.number, self.voter, self.voters, breaks_ties=breaks_ties)

    def random(self, stream: int, piece: Piece) -> Tensor:
        """Returns a piece's random bits of a stream of `rounding`."""
        words = self.scratch("random", piece.size // 2, torch.int32, piece.device)
        return random_bits(piece.size, piece.first, self.number, self.options.seed, stream, words)

    def age_rows(self, slots: Iterable[Slot]) -> None:
        """Counts an update of the slots' momenta, and notes the old rows, in which u is 0."""
        for slot in slots:
            slot.old = None
            if slot.grad is not None:
                beta2 = self.rates[slot.group].beta2
                slot.old = update_age(self.ages, slot.param, slot.idle, beta2)
