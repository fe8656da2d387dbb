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
    """The rows of a message, each of complete words: those of matrices, or complete tensors.

    Attributes:
        lengths: Rows of one length that follow one another: their number, and words per row.
        count: Number of rows R.
        device: Device of the message.
    """

    def __init__(
        self, lengths: Sequence[tuple[int, int]], device: torch.device, words: slice = slice(None)
    ) -> None:
        """Leaves the tables to their first use, because most messages never need them."""
        self.lengths, self.device, self._words = lengths, device, words
        self._slices: dict[tuple[int, int], Rows] = {}
        self.count = sum(count for count, _ in lengths)

    @property
    def first_word(self) -> int:
        """The message's word with which these words begin."""
        first: int = self._words.start or 0
        return first

    @functools.cached_property
    def of_word(self) -> Tensor:
        """Index of each word's row, int32, shape (W,), on `device`."""
        first, end = self._words.start or 0, self._words.stop
        rows_of, word, row = [torch.zeros(0, dtype=torch.int64)], 0, 0
        for rows, words in self.lengths:
            stop = rows * words if end is None else min(end - word, rows * words)
            start = max(first - word, 0)
            if start < stop:
                rows_of.append(row + torch.arange(start, stop) // words)
            word, row = word + rows * words, row + rows
        return torch.cat(rows_of).to(torch.int32).to(self.device)

    def by_word(self, numbers: Tensor | None, words: slice = slice(None)) -> Tensor | None:
        """Returns the number of each word's row, shape (W,); None if there are no numbers."""
        return None if numbers is None else numbers[self.of_word[words]]

    def within(self, words: slice) -> Rows:
        """Returns the same rows, for a slice of the message's words."""
        key = words.start, words.stop
        if key not in self._slices:  # Kept, because each has tables.
            self._slices[key] = Rows(self.lengths, self.device, words)
        return self._slices[key]


# Planes of bits, int64, shape (W,) each, contiguous.
Planes = list[Tensor] | Tensor


@dataclass(frozen=True)
class Votes:
    """A rank's votes of one message.

    `planes` has the planes of the codes, int64, shape (bits, W), with 0 in rows on which the rank
    abstains. `active` tells whether the rank votes on each row, bool, shape (R,). `packed` has one
    bit per row, then the planes, and then zeros, int64; None if nothing has packed them.
    """

    planes: Tensor
    active: Tensor
    rows: Rows
    packed: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """The result of the votes on one message, equal on all ranks.

    Its planes are int64, shape (W,) each, contiguous. `active` is the number of active ranks by
    row, int32 or int64, shape (R,), or None if all are active.
    """

    planes: Planes
    active: Tensor | None


def verdict_on(
    planes: Tensor, active: Tensor, rows: Rows, words: slice, rule: Rule, phase: int
) -> Verdict:
    """Returns the verdict of all ranks' votes on a slice of the words of `rows`.

    `planes` has shape (ranks, bits, W), `active` one bit per row, shape (ranks, ceil(R / 64)).
    `phase` is the number whose parity decides ties.
    """
    ranks, device = len(planes), planes.device
    bits_of_rows = torch.empty(active.shape[1] * WORD, dtype=torch.float32, device=device)
    number = torch.zeros(rows.count, dtype=torch.int64, device=device)
    for flags in active:
        number += unpack(flags.contiguous(), 0.0, 1.0, bits_of_rows)[: rows.count].to(torch.int64)
    all_vote = device.type == "cpu" and bool((number == ranks).all())  # A GPU would wait for it.
    by_row = None if all_vote else number
    by_rank = [list(of_rank) for of_rank in planes[:, :, : words.stop - words.start]]
    return Verdict(verdict_planes(by_rank, rows.by_word(by_row, words), rule, phase), by_row)


def packed_rows(active: Tensor) -> Tensor:
    """Returns one bit per row, int64, shape (ceil(R / 64),)."""
    padded = torch.nn.functional.pad(active, (0, -active.numel() % WORD))
    out = torch.empty(padded.numel() // WORD, dtype=torch.int64, device=active.device)
    pack(padded, 0, out)
    return out
