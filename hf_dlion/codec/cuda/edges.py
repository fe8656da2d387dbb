"""The rows that shards cut, told and heard with a Triton kernel each; no wait for the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.codec.cuda import tables
from hf_dlion.codec.cuda.launch import Kernels, on_device, run
from hf_dlion.codec.cuda.tables import Entry, table_of
from hf_dlion.codec.edges import Ends, votes_on_zeros
from hf_dlion.codec.layout import WORD_BITS
from hf_dlion.codec.rule import StepRule


class TritonEdges:
    """Implements `hf_dlion.codec.edges.Edges`; the tables go up once, when it is made."""

    def __init__(self, found: Kernels, ends: Sequence[Ends], device: torch.device) -> None:
        """Takes the kernels, the ends of each message, and where the votes are."""
        self._found = found
        self._block = tables.BLOCK
        entries = []
        for one in ends:
            for row, part, begin, end in one.spans():
                word = begin // WORD_BITS
                entries.append(
                    Entry(
                        # Kernels take words of 32 bits.
                        words=2 * (one.word + one.bits * (part.word + word)),
                        rows=one.row + row,
                        numel=end - word * WORD_BITS,
                        skipped=begin - word * WORD_BITS,
                    )
                )
        self._on = table_of(entries, device, self._block)
        # All that an end hears of, in one line: other ends, and last, once or more, itself.
        most = max(len(sharing) for one in ends for sharing in one.sharing)
        lines = [
            [*sharing, *[one.own + end] * (most - len(sharing) + 1)]
            for one in ends
            for end, sharing in enumerate(one.sharing)
        ]
        self._sharing = torch.tensor(lines, dtype=torch.int64, device=device)
        told = [(row, one.told + end) for one in ends for end, row in enumerate(one.rows())]
        self._told = torch.tensor(told, dtype=torch.int64, device=device)

    def tell(self, active: Tensor, out: Tensor) -> None:
        """See `Edges.tell`."""
        here = out if out.device == active.device else torch.zeros_like(out, device=active.device)
        count = len(self._told)
        with on_device(active.device):
            run(
                self._found.edges.tell, -(-count // self._block), active.view(torch.uint8),
                self._told, count, here, BLOCK=self._block,
            )  # fmt: skip
        if here is not out:
            out.copy_(here)

    def hear(self, words: Tensor, active: Tensor, everyone: Tensor, rule: StepRule) -> None:
        """See `Edges.hear`."""
        on = self._on
        with on_device(words.device):
            run(
                self._found.edges.hear, on.blocks, on.jobs, on.job_of, words.view(torch.uint32),
                active.view(torch.uint8), everyone.to(words.device, non_blocking=True),
                self._sharing, self._sharing.shape[1],
                _zeros(rule, words.device).view(torch.uint32), BITS=rule.bits, BLOCK=self._block,
            )  # fmt: skip


def _zeros(rule: StepRule, device: torch.device) -> Tensor:
    """Returns the votes on 64 zeros, on the device; there are two of them."""
    return _held(rule.bits, rule.zero_phase, tuple(votes_on_zeros(rule, _CPU).tolist()), device)


_CPU = torch.device("cpu")


@functools.lru_cache(maxsize=64)
def _held(bits: int, phase: int, words: tuple[int, ...], device: torch.device) -> Tensor:
    del bits, phase  # they only tell tables apart
    return torch.tensor(words, dtype=torch.int64, device=device)
