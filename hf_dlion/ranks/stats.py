"""Counts of the bytes that an optimizer sent, and of its time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dlion.core.layout import Message
from hf_dlion.core.votes import Verdict, Votes

# Words of a message that `agreement` looks at.
SAMPLE = 1024


@dataclass
class WireStats:
    """Counts of the bytes that an optimizer sent, and of its time.

    Bytes are those that a rank passes to a collective for other ranks. An all-reduce counts as a
    ring. Without `local_group` every rank is a node. Times are seconds of the host, or on a GPU of
    its stream, which are added when the next step has begun.

    Attributes:
        bytes_sent: Bytes that this rank sent to other nodes.
        last_bytes_sent: Bytes that this rank sent to other nodes in the last step.
        node_bytes_sent: Bytes that this rank sent to other ranks of its node.
        last_node_bytes_sent: Bytes that this rank sent inside its node in the last step.
        exchanges: Number of steps in which ranks exchanged votes.
        abstentions: Number of ranks that abstained, summed over steps; with local steps, those of a
            period are added when it ends.
        encode_s: Seconds spent on encoding votes and updating momenta.
        exchange_s: Seconds spent on waiting for votes and verdicts, and counting votes.
        apply_s: Seconds spent on moving parameters; with local steps also on updating momenta.
        sample: Words of this rank's votes and planes of the verdict in the last exchange, int64,
            and whether this rank voted there; None before the first exchange, with more than one
            bit, and with aggregation="average".
        drift: With local steps, sums of `note_displacements` for each message of the last exchange.
    """

    bytes_sent: int = 0
    last_bytes_sent: int = 0
    node_bytes_sent: int = 0
    last_node_bytes_sent: int = 0
    exchanges: int = 0
    abstentions: int = 0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    apply_s: float = 0.0
    sample: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)
    drift: list[Tensor] = field(default_factory=list, repr=False)
    _marks: list[tuple[str, torch.device, Any]] = field(default_factory=list, repr=False)

    def lap(self, name: str, device: torch.device) -> None:
        """Ends a lap of work on a device, and adds its time to a count such as "encode_s".

        Without a name, or if the lap began on another device, nothing is added. On a GPU, where
        NCCL's collectives let the stream wait rather than the host, laps end with events, and are
        added once the GPU has reached these.
        """
        mark: Any = _event(device) if device.type == "cuda" else time.perf_counter()
        self._marks.append((name, device, mark))
        while len(self._marks) > 1:
            (_, before, begun), (name, after, ended) = self._marks[:2]
            if after.type == "cuda" and not ended.query():
                break
            if name and before == after:
                is_gpu = after.type == "cuda"
                seconds = begun.elapsed_time(ended) / 1e3 if is_gpu else ended - begun
                setattr(self, name, getattr(self, name) + seconds)
            del self._marks[0]

    def note_votes(self, message: Message, votes: Votes, verdict: Verdict) -> None:
        """Notes the first words of the layout's first message, for `agreement`."""
        if message.pieces[0].first == 0:
            voting = votes.active.to(message.device)[votes.rows.of_word[:SAMPLE]]
            voting &= message.unpadded[:SAMPLE]
            planes = verdict.planes[:, :SAMPLE].clone()
            self.sample = votes.planes[0, :SAMPLE].clone(), planes, voting

    def note_displacements(self, w: Tensor, d: Tensor) -> None:
        """Notes sums over elements that this rank moved by w, for `agreement`.

        They are the sums of sign(w) * sign(d), where d is the mean of what all voters sent, and of
        1.
        """
        sign = w.sign()  # 0 in padding and in rows that abstain
        terms = sign * d.sign(), sign.abs()
        self.drift.append(torch.stack([term.sum(dtype=torch.float64) for term in terms]))

    @property
    def agreement(self) -> float:
        """Share of the sampled votes of this rank that equal the verdict; NaN without one.

        It is 1 if all ranks agree, and near 0.5 if the noise of many ranks' batches decides. With
        ties="zero", a tie counts half. With local steps, it is the share of sampled elements that
        this rank and the mean moved in the same direction, where a mean of 0 counts half.
        """
        if self.drift:
            same, moved = torch.stack([sums.cpu() for sums in self.drift]).sum(dim=0)
            return float(0.5 + 0.5 * same / moved)
        if self.sample is None:
            return math.nan
        votes, planes, voting = self.sample
        mine, decided, *ties = [words[voting].cpu().numpy() for words in (votes, *planes)]
        if not mine.size:
            return math.nan
        tied = ties[0] if ties else np.zeros_like(mine)
        masks = ((mine ^ decided) & ~tied, tied)
        differs, halves = (float(np.unpackbits(mask.view(np.uint8)).mean()) for mask in masks)
        return 1.0 - differs - 0.5 * halves


def _event(device: torch.device) -> torch.cuda.Event:
    """Returns an event in a GPU's current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
