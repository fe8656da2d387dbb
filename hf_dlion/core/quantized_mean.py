"""What the voters send of a tensor in a few bits, and its mean (docs/rule.md, section 9).

Local steps average how far the ranks moved (`steps.displacement`), and momenta
(`steps.momentum_sync`). A voter sends the level of each element of w, relative to a magnitude that
all voters have agreed on:

    w  ->  levels of this voter  ->  V, the sum over the voters  ->  d = unit * (V / N)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dlion.core.codec import WORD
from hf_dlion.core.context import StepContext
from hf_dlion.core.flat import numbers
from hf_dlion.core.layout import Message, Piece
from hf_dlion.core.lion import Source, tensor_maxima, tensor_sums
from hf_dlion.core.rule import Average
from hf_dlion.core.slot import Slot
from hf_dlion.core.votes import Verdict, Votes


@dataclass(frozen=True)
class Scale:
    """What the levels of a tensor are relative to: a magnitude a, the same on all voters.

    Attributes:
        bits: Bits per element.
        of_largest: True if a is a multiple of the voters' largest |w|, False if of their mean |w|.
        factor: That multiple.
    """

    bits: int
    of_largest: bool
    factor: float

    def unit(self, slot: Slot) -> float:
        """Returns the unit of a tensor's levels.

        With 1, 2, 4, and 8 bits, the largest level is 1, 3, 14, and 254 units: a, 2.25 a, 2 a, and
        2 a.
        """
        a = float(slot.magnitude)
        return {1: a, 2: 0.75 * a, 4: a / 7, 8: a / 127}[self.bits]

    def amounts(
        self,
        slots: Sequence[Slot],
        messages: Sequence[Message],
        source: Source,
        context: StepContext,
    ) -> list[float]:
        """Returns the largest |w| of each slot on this rank, or the mean of |w|.

        The mean is that of the rows in which w has an element other than zero. An amount is NaN or
        Inf if an element is. `source` returns w.
        """
        if self.of_largest:
            return numbers(tensor_maxima(slots, messages, source))
        sums, counts = map(numbers, tensor_sums(slots, messages, source, context))
        return [total / count for total, count in zip(sums, counts, strict=True)]

    def set_magnitudes(self, slots: Sequence[Slot], by_voter: Iterable[Sequence[float]]) -> None:
        """Sets each slot's magnitude to a, from the `amounts` of each voter.

        The mean over voters leaves out those whose amount is 0, which abstain, or isn't finite.
        """
        for slot, amounts in zip(slots, zip(*by_voter, strict=True), strict=True):
            positive = [amount for amount in amounts if 0.0 < amount < math.inf]
            if self.of_largest:
                amount = max(positive, default=0.0)
            else:
                amount = math.fsum(positive) / max(len(positive), 1)
            slot.magnitude = self.factor * amount


@dataclass(frozen=True)
class Mean:
    """What the voters sent of a message, equal on all of them but for `votes`, this voter's."""

    votes: Votes
    verdict: Verdict
    rule: Average
    scale: Scale
    context: StepContext

    def of(self, piece: Piece) -> Tensor:
        """Returns d of a piece, in scratch memory."""
        out, rows = piece.memory("mean of votes", self.context.scratch), self.votes.rows
        active = None
        if self.verdict.row_voters is not None:
            active = rows.by_word(self.verdict.row_voters, piece.words)
        return self._decoded(piece, self.rule, self.verdict.planes, active, out)

    def sent(self, piece: Piece) -> Tensor:
        """Returns unit * q of a piece, which this voter sent, in scratch memory."""
        out, row_flags = piece.memory("sent", self.context.scratch), self.votes.active
        active = self.votes.rows.by_word(row_flags.to(piece.device, torch.int64), piece.words)
        # The mean of one voter's levels are the levels.
        return self._decoded(piece, Average(1, self.scale.bits), self.votes.planes, active, out)

    def _decoded(
        self, piece: Piece, rule: Average, planes: Tensor, active: Tensor | None, out: Tensor
    ) -> Tensor:
        units = [self.scale.unit(stretch.slot) for stretch in piece.stretches]
        # A single tensor's unit goes into `decode`, which saves a pass.
        unit = units[0] if len(units) == 1 else 1.0
        rule.decode(planes[:, piece.words], active, unit, out)
        if len(units) > 1:
            out.view(-1, WORD).mul_(piece.by_word(units, out).view(-1, 1))
        return out
