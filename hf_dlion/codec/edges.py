"""The rows that the shards of messages cut, where each rank of a node encodes one shard of each.

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
    """The two ends of this rank's shard of one message.

    Attributes:
        shard: The shard, not empty.
        bits: Of a vote.
        word: Where its votes begin among those of several messages.
        row: Where its rows begin among theirs.
        told: Place of its first end in what this rank tells; that of its last end follows.
        own: The same place, in what all ranks tell.
        sharing: For each of the two ends, those that lie in the same row, itself included: places
            in what all ranks tell.
    """

    shard: Shard
    bits: int
    word: int
    row: int
    told: int
    own: int
    sharing: tuple[Sequence[int], Sequence[int]]

    def rows(self) -> tuple[int, int]:
        """Returns the rows of both ends, among those of all messages."""
        return self.row, self.row + self.shard.rows - 1

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
    """Tells the ranks of a node of the ends of shards, and hears of the others'."""

    def tell(self, active: Tensor, out: Tensor) -> None:
        """Writes whether the ends vote.

        Args:
            active: bool, the rows of this rank's shards, one message's after another's.
            out: uint8, two for each message with a row that is cut.
        """

    def hear(self, words: Tensor, active: Tensor, everyone: Tensor, rule: StepRule) -> None:
        """Makes the votes of the ends those of whole rows, in place.

        Args:
            words: int64, this rank's votes; 0 where its part of a row is zero everywhere.
            active: bool, the rows of its shards; of a cut row, whether its part votes.
            everyone: uint8, a line per rank of the node: what all of them told.
            rule: The step's constants.
        """


class TorchEdges:
    """Implements `Edges` with torch operations; the host looks at what it heard."""

    def __init__(self, ends: Sequence[Ends], device: torch.device) -> None:
        """Takes the ends of each message."""
        self._ends = ends
        rows = [row for one in ends for row in one.rows()]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self._places = torch.tensor([one.told + end for one in ends for end in range(2)])

    def tell(self, active: Tensor, out: Tensor) -> None:
        """See `Edges.tell`."""
        out[self._places.to(out.device)] = active[self._rows].to(out)

    def hear(self, words: Tensor, active: Tensor, everyone: Tensor, rule: StepRule) -> None:
        """See `Edges.hear`."""
        told = everyone.view(-1).tolist()
        for one in self._ends:
            for end, (row, run, begin, stop) in enumerate(one.spans()):
                if told[one.own + end] or not any(told[other] for other in one.sharing[end]):
                    continue
                first = one.word + one.bits * run.word
                own = words[first : first + one.bits * run.words]
                _vote_zeros(own, run, begin, stop, rule)
                active[one.row + row] = True


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
