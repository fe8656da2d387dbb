"""The two routes of a message's votes: gather and two_phase.

    gather       all ranks gather all votes, and each counts them all
                 rank 0: a  ->  a b  ->  verdict
                 rank 1: b      a b  ->  verdict

    two_phase    each rank counts one N-th of the words for all
                 rank 0: a0 a1  ->  a0 b0  ->  v0  ->  v0 v1
                 rank 1: b0 b1      a1 b1  ->  v1      v0 v1

Bytes per rank and message, sent and received, with N ranks, W words, R rows, p bits, and v planes
of the verdict (majority 1, with ties="zero" 2, average ceil(log2(N * top + 1))):

    gather       8 (N - 1) (ceil(R / 64) + p W)
    two_phase    8 (N - 1) (ceil(R / 64) + (p + v) ceil(W / N))

Both also send one bit per row, set if the rank votes on the row. A step's header comes first, in
64 (N - 1) bytes: see `ranks.agreement`.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dlion.exchange import launches
from hf_dlion.exchange.codec import WORD, alternating_word, pack, unpack
from hf_dlion.exchange.launches import MOST_RANKS, Lines, Table, refusal
from hf_dlion.exchange.rule import Rule, count
from hf_dlion.exchange.wire import Wire
from hf_dlion.options import ExchangeName


class Rows:
    """The rows of a message, each of complete words: those of matrices, or complete tensors.

    `lengths` has stretches of rows of one length: the number of rows, and words per row. `count` is
    the number of rows R.
    """

    def __init__(
        self, lengths: Sequence[tuple[int, int]], device: torch.device, words: slice = slice(None)
    ) -> None:
        """Leaves the tables to their first use, because most messages never need them."""
        self._lengths, self._device, self._words = lengths, device, words
        self._parts: dict[tuple[int, int], Rows] = {}
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
        found, word, row = [torch.zeros(0, dtype=torch.int64)], 0, 0
        for rows, words in self._lengths:
            stop = rows * words if end is None else min(end - word, rows * words)
            start = max(first - word, 0)
            if start < stop:
                found.append(row + torch.arange(start, stop) // words)
            word, row = word + rows * words, row + rows
        return torch.cat(found).to(torch.int32).to(self._device)

    @functools.cached_property
    def lines(self) -> Lines:
        """The rows of the complete message, for kernels."""
        return Table(self._device).add_rows(self._lengths)

    def by_word(self, numbers: Tensor | None, words: slice = slice(None)) -> Tensor | None:
        """Returns the number of each word's row, shape (W,); None if there are no numbers."""
        return None if numbers is None else numbers[self.of_word[words]]

    def part(self, words: slice) -> Rows:
        """Returns the same rows, for a slice of the message's words."""
        key = words.start, words.stop
        if key not in self._parts:  # Kept, because each has tables.
            self._parts[key] = Rows(self._lengths, self._device, words)
        return self._parts[key]


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


def wire_bytes(name: str, *, ranks: int, words: int, rows: int, bits: int, planes: int) -> int:
    """Returns the bytes that a rank sends for one message; the module has the formulas."""
    if name == "gather":
        return 8 * (ranks - 1) * (-(-rows // WORD) + bits * words)
    return 8 * (ranks - 1) * (-(-rows // WORD) + (bits + planes) * -(-words // ranks))


def verdict_of(
    votes: Votes, name: ExchangeName, voters: Wire, node: Wire | None, rule: Rule, phase: int
) -> Generator[None, None, Verdict]:
    """Sends this rank's votes of a message and returns the verdict; every rank must do this.

    It is suspended whenever data travel.

    If nodes vote, each of the L ranks of a node exchanges one L-th of the words:

        rank a: v0 v1  ->  v0 w0 (with c)  ->  verdict x0  ->  x0 x1 (with b)     node 0: a b
        rank b: v0 v1  ->  v1 w1 (with d)  ->  verdict x1  ->  x0 x1 (with a)     node 1: c d

    Bytes per rank to other nodes: those of the module for ceil(W / L) words and all R rows. Bytes
    per rank inside the node: 8 (L - 1) v ceil(W / L).

    The votes must be equal on the ranks of a node, and `node` is None if every rank votes. "auto"
    takes the route that sends fewer bytes, gather if both send the same.
    """
    words = votes.planes.shape[1]
    if node is not None:
        share = _share(node.rank, -(-words // node.world_size), words)
        votes = Votes(votes.planes[:, share].contiguous(), votes.active, votes.rows.part(share))
    if name == "auto":
        bits, sent = votes.planes.shape
        two_phase_words = (bits + rule.planes) * -(-sent // voters.world_size)
        name = "two_phase" if two_phase_words < bits * sent else "gather"
    route = _two_phase if name == "two_phase" else _gather
    verdict = yield from route(votes, voters, rule, phase)
    if node is None:
        return verdict
    # Each rank has one L-th of the verdict. All collectives between nodes end before those inside a
    # node begin, because NCCL needs one order of two groups' collectives on every rank.
    yield
    device = verdict.planes[0].device
    planes = _padded(verdict.planes, -(-words // node.world_size)).to(node.device_for(device))
    received = planes.new_empty(node.world_size, *planes.shape)
    pending = node.all_gather(received, planes, "a verdict")
    yield
    pending.wait()
    return Verdict(_joined(received.to(device), words), verdict.active)


def _gather(votes: Votes, wire: Wire, rule: Rule, phase: int) -> Generator[None, None, Verdict]:
    """All ranks gather all votes, and each rank counts all of them."""
    (bits, words), device = votes.planes.shape, votes.planes.device
    rows = -(-votes.rows.count // WORD)
    if votes.packed is None:
        sent = torch.cat([_packed_rows(votes.active), votes.planes.view(-1)])
    else:
        sent = votes.packed[: rows + bits * words]
    sent = sent.to(wire.device_for(device))
    received = sent.new_empty(wire.world_size, sent.numel())
    pending = wire.all_gather(received, sent, "votes")
    yield
    pending.wait()
    yield  # As often as two_phase, see `verdict_of`.
    everyone = received.to(device)
    planes = everyone[:, rows:].reshape(wire.world_size, bits, words)
    return counted(planes, everyone[:, :rows], votes, slice(0, words), words, rule, phase)


def _two_phase(votes: Votes, wire: Wire, rule: Rule, phase: int) -> Generator[None, None, Verdict]:
    """Each rank counts one N-th of the words, and all ranks gather the verdict."""
    (bits, words), ranks = votes.planes.shape, wire.world_size
    device, words_each = votes.planes.device, -(-words // ranks)
    on_wire = wire.device_for(device)
    if votes.packed is None:
        active = _packed_rows(votes.active)
        sent = torch.nn.functional.pad(votes.planes, (0, ranks * words_each - words))
    else:
        active = votes.packed[: -(-votes.rows.count // WORD)]
        sent = votes.packed[active.numel() :][: ranks * words_each]
    # Segment j goes to rank j.
    sent = sent.view(bits, ranks, words_each).transpose(0, 1).contiguous().to(on_wire)
    received, active = torch.empty_like(sent), active.to(on_wire)
    all_active = active.new_empty(ranks, active.numel())
    pending = [
        wire.all_gather(all_active, active, "votes"), wire.all_to_all(received, sent, "votes")
    ]  # fmt: skip
    yield
    for each in pending:
        each.wait()
    share = _share(wire.rank, words_each, words)
    received, all_active = received.to(device), all_active.to(device)
    shares = counted(received, all_active, votes, share, words_each, rule, phase)
    sent = _padded(shares.planes, words_each).to(on_wire)
    received = sent.new_empty(ranks, *sent.shape)
    verdict = wire.all_gather(received, sent, "a verdict")
    yield
    verdict.wait()
    return Verdict(_joined(received.to(device), words), shares.active)


def counted(
    planes: Tensor, active: Tensor, votes: Votes, words: slice, size: int, rule: Rule, phase: int
) -> Verdict:
    """Counts everyone's votes on a slice of the words of `votes`.

    `planes` has shape (ranks, bits, W) and `active` one bit per row, shape (ranks, ceil(R / 64)).
    A kernel returns planes of `size` words, with zeros after the slice.
    """
    ranks, bits, _ = planes.shape
    rows, device, here = votes.rows, planes.device, words.stop - words.start
    if device.type != "cpu" and bits == 1 and ranks <= MOST_RANKS and not refusal(device):
        verdict = planes.new_empty(rule.planes, size)
        number = torch.empty(rows.count, dtype=torch.int32, device=device)
        launches.count(
            rows.lines, planes[:, 0], active, verdict, number,
            first=rows.first_word + words.start, size=here,
            tie=alternating_word(phase), rule=rule.name,
        )  # fmt: skip
        return Verdict(verdict, number)
    bits_of_rows = torch.empty(active.shape[1] * WORD, dtype=torch.float32, device=device)
    number = torch.zeros(rows.count, dtype=torch.int64, device=device)
    for flags in active:
        number += unpack(flags.contiguous(), 0.0, 1.0, bits_of_rows)[: rows.count].to(torch.int64)
    all_vote = device.type == "cpu" and bool((number == ranks).all())  # A GPU would wait for it.
    by_row = None if all_vote else number
    by_rank = [list(of_rank) for of_rank in planes[:, :, :here]]
    return Verdict(count(by_rank, rows.by_word(by_row, words), rule, phase), by_row)


def _share(rank: int, words_each: int, words: int) -> slice:
    """Returns the words that a rank counts; the last ranks may have fewer, or none."""
    first = min(rank * words_each, words)
    return slice(first, min(first + words_each, words))


def _padded(planes: Planes, words: int) -> Tensor:
    """Returns planes with zeros after their end, int64, shape (planes, words)."""
    if isinstance(planes, Tensor) and planes.shape[1] == words:
        return planes.contiguous()  # A part of what `_joined` returns isn't.
    padded = planes[0].new_zeros(len(planes), words)
    for out, plane in zip(padded, planes, strict=True):
        out[: plane.numel()] = plane
    return padded


def _joined(shares: Tensor, words: int) -> Tensor:
    """Returns planes of `words` words from every rank's share, shape (ranks, planes, share)."""
    # Contiguous before it is flat: reshape() may keep strides that make no view as bytes.
    return shares.transpose(0, 1).contiguous().flatten(1)[:, :words]


def _packed_rows(active: Tensor) -> Tensor:
    """Returns one bit per row, int64, shape (ceil(R / 64),)."""
    padded = torch.nn.functional.pad(active, (0, -active.numel() % WORD))
    out = torch.empty(padded.numel() // WORD, dtype=torch.int64, device=active.device)
    pack(padded, 0, out)
    return out
