"""The rows that the shards of a message cut, where each rank of a node encodes one shard.

A row abstains only if its direction is zero everywhere (rule S3), and of a row that is cut a rank
sees a part. Where such a row votes in another shard only, the zeros of the part in this one vote by
their rule. Only the first and the last row of a shard can be cut: its two ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_dlion.codec.bits import pack_bits
from hf_dlion.codec.layout import WORD_BITS, Run, Shard
from hf_dlion.codec.levels import pack_codes, zero_codes
from hf_dlion.codec.rule import StepRule


@dataclass(frozen=True)
class Ends:
    """The two ends of this rank's shard.

    Attributes:
        shard: The shard, not empty.
        bits: Of a vote.
        rank: This rank in its node.
        sharing: For each of the two ends, those that lie in the same row, itself included: numbers
            2 * rank for a shard's first row, and 2 * rank + 1 for its last.
    """

    shard: Shard
    bits: int
    rank: int
    sharing: tuple[Sequence[int], Sequence[int]]

    def spans(self) -> list[tuple[int, Run, int, int]]:
        """Returns row, run, begin and end of both ends: the elements, within the run, of the row.

        Rows are counted in the shard.
        """
        found = []
        for row, run in ((0, self.shard.runs[0]), (self.shard.rows - 1, self.shard.runs[-1])):
            first = (run.first_row + row - run.row) * run.row_numel
            begin = max(run.start, first) - run.start
            found.append((row, run, begin, min(run.stop, first + run.row_numel) - run.start))
        return found


class Edges(Protocol):
    """Tells the ranks of a node of the ends of a shard, and hears of the others'."""

    def tell(self, active: Tensor, out: Tensor) -> None:
        """Writes whether the two ends vote.

        Args:
            active: bool, shape (rows of the shard,).
            out: uint8, shape (2,).
        """

    def hear(self, words: Tensor, active: Tensor, everyone: Tensor, rule: StepRule) -> None:
        """Makes the votes of the ends those of whole rows, in place.

        Args:
            words: int64, this rank's votes; 0 where its part of a row is zero everywhere.
            active: bool, the rows of this rank's shard; of a cut row, whether its part votes.
            everyone: uint8, shape (ranks of the node, 2): what all of them told.
            rule: The step's constants.
        """


class TorchEdges:
    """Implements `Edges` with torch operations; the host looks at what it heard."""

    def __init__(self, ends: Ends) -> None:
        """Takes the ends."""
        self._ends = ends

    def tell(self, active: Tensor, out: Tensor) -> None:
        """See `Edges.tell`."""
        out.copy_(torch.stack([active[0], active[-1]]))

    def hear(self, words: Tensor, active: Tensor, everyone: Tensor, rule: StepRule) -> None:
        """See `Edges.hear`."""
        told, bits = everyone.view(-1).tolist(), self._ends.bits
        for end, (row, run, begin, stop) in enumerate(self._ends.spans()):
            if told[2 * self._ends.rank + end] or not any(
                told[other] for other in self._ends.sharing[end]
            ):
                continue
            own = words[bits * run.word : bits * (run.word + run.words)]
            _vote_zeros(own, run, begin, stop, rule)
            active[row] = True


def _vote_zeros(words: Tensor, run: Run, begin: int, end: int, rule: StepRule) -> None:
    """Makes the votes on a row of a stretch, where all directions are 0, those of a row that votes.

    Args:
        words: int64, shape (bits * run.words,), changed in place; 0 for the elements of the row.
        run: The stretch.
        begin: First element of the row, within the stretch.
        end: One past its last.
        rule: The step's constants.
    """
    first, last = begin // WORD_BITS, (end - 1) // WORD_BITS
    by_word, zeros = words.view(run.words, rule.bits), votes_on_zeros(rule, words.device)
    by_word[first + 1 : last] |= zeros
    element = torch.arange(WORD_BITS, device=words.device)
    for word in {first, last}:
        here = element + WORD_BITS * word
        flags = (here >= begin) & (here < end)
        by_word[word] |= zeros & _mask(flags, rule.bits)


def votes_on_zeros(rule: StepRule, device: torch.device) -> Tensor:
    """Returns the votes on 64 directions that are 0 in a row that votes, int64 of shape (bits,)."""
    if rule.bits == 1:
        return torch.tensor([rule.zero_word], device=device)
    return zero_codes(rule.bits, rule.zero_phase, device)


def _mask(flags: Tensor, bits: int) -> Tensor:
    """Returns ones in the places of the votes on some of 64 elements, int64 of shape (bits,).

    Args:
        flags: bool, shape (64,).
        bits: Of a vote.
    """
    if bits == 1:
        return pack_bits(flags)
    mask = torch.empty(bits, dtype=torch.int64, device=flags.device)
    pack_codes(flags.to(torch.uint8) * (2**bits - 1), bits, mask)
    return mask
