"""Votes of one message, and their verdict: planes of bits, by the message's rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dlion.core.codec import WORD, pack, unpack
from hf_dlion.core.rule import Rule, verdict_planes


class Rows:
    """The R rows of a message, each of complete words: those of matrices, or complete tensors.

    Attributes:
        lengths: Rows of one length that follow one another: their number, and words per row.
        device: Device of the message.
    """

    def __init__(self, lengths: Sequence[tuple[int, int]], device: torch.device) -> None:
        """Leaves the table to its first use, because most messages never need it."""
        self.lengths, self.device = lengths, device
        self._count = sum(count for count, _ in lengths)

    def __len__(self) -> int:
        """Returns the number of rows R."""
        return self._count

    @functools.cached_property
    def of_word(self) -> Tensor:
        """Index of each word's row, int32, shape (W,), on `device`."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device="cpu")
        counts, row_words = lengths.view(-1, 2).t()
        words = row_words.repeat_interleave(counts)
        rows = torch.arange(len(self), dtype=torch.int32, device="cpu")
        return rows.repeat_interleave(words).to(self.device)

    def by_word(self, by_row: Tensor | None, words: slice = slice(None)) -> Tensor | None:
        """Returns for each word the entry of its row, shape (W,); None if there are no entries."""
        return None if by_row is None else by_row[self.of_word[words]]


@dataclass(frozen=True)
class Votes:
    """A rank's votes of one message.

    `planes` has the planes of the codes, int64, shape (bits, W), with 0 in rows on which the rank
    abstains. `active` tells whether the rank votes on each row, bool, shape (R,). `first` is the
    message's word with which the planes begin.
    """

    planes: Tensor
    active: Tensor
    rows: Rows
    first: int = 0

    @property
    def row_bits(self) -> Tensor:
        """One bit per row, set if the rank votes on it, int64, shape (ceil(R / 64),)."""
        padded = torch.nn.functional.pad(self.active, (0, -self.active.numel() % WORD))
        out = torch.empty(padded.numel() // WORD, dtype=torch.int64, device=self.active.device)
        pack(padded, 0, out)
        return out


@dataclass(frozen=True)
class Verdict:
    """The result of the votes on one message, equal on all ranks.

    Its planes are int64, shape (planes, W), each contiguous. `row_voters` is the number of voters
    that vote on each row, int32 or int64, shape (R,), or None if all do.
    """

    planes: Tensor
    row_voters: Tensor | None


def count_votes(
    planes: Tensor, active: Tensor, rows: Rows, words: slice, rule: Rule, phase: int
) -> Verdict:
    """Returns the verdict of all voters' votes on a slice of the words of `rows`.

    `planes` has shape (N, bits, W), and `active` one bit per row, shape (N, ceil(R / 64)). `phase`
    is the number whose parity decides ties.
    """
    voters, device = len(planes), planes.device
    row_flags = torch.empty(active.shape[1] * WORD, dtype=torch.float32, device=device)
    total = torch.zeros(len(rows), dtype=torch.int64, device=device)
    for packed in active:
        total += unpack(packed.contiguous(), 0.0, 1.0, row_flags)[: len(rows)].to(torch.int64)
    all_vote = device.type == "cpu" and bool((total == voters).all())  # A GPU would wait for it.
    row_voters = None if all_vote else total
    by_voter = [list(of_voter) for of_voter in planes[:, :, : words.stop - words.start]]
    word_voters = rows.by_word(row_voters, words)
    return Verdict(verdict_planes(by_voter, word_voters, rule, phase), row_voters)
