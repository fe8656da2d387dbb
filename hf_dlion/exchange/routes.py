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

Both also send one bit per row, set if the rank votes on the row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dlion.exchange.rule import Rule
from hf_dlion.exchange.wire import Pending, Wire
from hf_dlion.options import ExchangeName
from hf_dlion.vote.codec import TOP, WORD, pack, spread, tally, unpack


class Rows:
    """The rows of a message, each of complete words.

    Args:
        lengths: Stretches of rows of one length: the number of rows, and words per row.
        device: Device of `of_word`.
        words: Slice of the words that `of_word` covers (default: all words).

    Attributes:
        count: Number of rows R.
    """

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        device: torch.device,
        words: slice = slice(None),
    ) -> None:
        """Leaves `of_word` to its first use, because most messages never need it."""
        self._lengths, self._device, self._words = lengths, device, words
        self.count = sum(count for count, _ in lengths)

    @functools.cached_property
    def of_word(self) -> Tensor:
        """Index of each word's row, int32, shape (W,), on `device`."""
        words = torch.cat([torch.full((count,), words) for count, words in self._lengths])
        rows = torch.arange(self.count, dtype=torch.int32)
        return torch.repeat_interleave(rows, words)[self._words].to(self._device)

    def part(self, words: slice) -> Rows:
        """Returns the same rows, with `of_word` for a slice of the words."""
        return Rows(self._lengths, self._device, words)


@dataclass(frozen=True)
class Votes:
    """A rank's votes of one message.

    Attributes:
        planes: Planes of the codes, int64, shape (bits, W); 0 in rows on which the rank abstains.
        active: Whether the rank votes on each row, bool, shape (R,).
        rows: Rows of the message.
    """

    planes: Tensor
    active: Tensor
    rows: Rows


@dataclass(frozen=True)
class Verdict:
    """The result of the votes on one message, equal on all ranks.

    Attributes:
        planes: Planes of the verdict, int64, shape (W,) each, contiguous.
        voters: Number of active ranks by row, int64, shape (R,); None if all are active.
    """

    planes: list[Tensor]
    voters: Tensor | None


class Exchange:
    """Votes that were sent; `complete` calls the methods in this order."""

    def receive(self) -> None:
        """Waits for the votes. With two_phase, counts this rank's words and sends the verdict."""

    def end_between_nodes(self) -> None:
        """Waits for the verdict on this rank's words, if nodes vote."""

    def begin_in_node(self) -> None:
        """Starts to gather the verdict inside the node, if nodes vote."""

    def verdict(self) -> Verdict:
        """Returns the verdict; waits for it."""
        raise NotImplementedError


def complete(under_way: Sequence[Exchange]) -> Iterator[Verdict]:
    """Yields the verdict of every message, in order; every rank must exhaust the iterator.

    All collectives between nodes end before those inside a node begin, because NCCL needs the same
    order of two groups' collectives on every rank.
    """
    for phase in ("receive", "end_between_nodes", "begin_in_node"):
        for exchange in under_way:
            getattr(exchange, phase)()
    for exchange in under_way:
        yield exchange.verdict()


def wire_bytes(name: str, *, ranks: int, words: int, rows: int, bits: int, planes: int) -> int:
    """Returns the bytes that a rank sends for one message; the module has the formulas."""
    if name == "gather":
        return 8 * (ranks - 1) * (-(-rows // WORD) + bits * words)
    return 8 * (ranks - 1) * (-(-rows // WORD) + (bits + planes) * -(-words // ranks))


def start(
    votes: Votes,
    name: ExchangeName,
    wire: Wire,
    rule: Rule,
    step: int,
    node: Wire | None = None,
) -> Exchange:
    """Sends this rank's votes of a message; every rank must call this for the same message.

    Args:
        votes: Votes of this rank.
        name: Name of the route; "auto" takes the one that sends fewer bytes, gather if both send
            the same.
        wire: Collectives of the voters.
        rule: Rule that turns votes into a verdict.
        step: Number of the step.
        node: Collectives of this rank's node, whose ranks vote as one (default: every rank votes).
    """
    if node is not None:
        return _InNode(votes, name, wire, node, rule, step)
    if name == "auto":
        bits, words = votes.planes.shape
        two_phase_words = (bits + rule.planes) * -(-words // wire.world_size)
        name = "two_phase" if two_phase_words < bits * words else "gather"
    return (_TwoPhase if name == "two_phase" else _Gather)(votes, wire, rule, step)


class _InNode(Exchange):
    """Votes of a node: each of its L ranks exchanges one L-th of the words.

        rank a: v0 v1  ->  v0 w0 (with c)  ->  verdict x0  ->  x0 x1 (with b)     node 0: a b
        rank b: v0 v1  ->  v1 w1 (with d)  ->  verdict x1  ->  x0 x1 (with a)     node 1: c d

    Bytes per rank to other nodes: those of the module for ceil(W / L) words and all R rows. Bytes
    per rank inside the node: 8 (L - 1) v ceil(W / L).

    Args:
        votes: Votes of the node, equal on its ranks.
        name: Name of the route between nodes, see `start`.
        voters: Collectives of the ranks that have this rank's place in their nodes.
        node: Collectives of the ranks of the node.
        rule: Rule that turns votes into a verdict.
        step: Number of the step.
    """

    def __init__(
        self, votes: Votes, name: ExchangeName, voters: Wire, node: Wire, rule: Rule, step: int
    ) -> None:
        """Sends this rank's words."""
        self._node, self._words = node, votes.planes.shape[1]
        self._words_each = -(-self._words // node.world_size)
        words = _share(node.rank, self._words_each, self._words)
        part = Votes(votes.planes[:, words].contiguous(), votes.active, votes.rows.part(words))
        self._between_nodes = start(part, name, voters, rule, step)
        self._device = votes.planes.device

    def receive(self) -> None:
        """See `Exchange`."""
        self._between_nodes.receive()

    def end_between_nodes(self) -> None:
        """See `Exchange`."""
        self._partial = self._between_nodes.verdict()

    def begin_in_node(self) -> None:
        """See `Exchange`."""
        planes = _padded(self._partial.planes, self._words_each)
        self._sent = planes.to(self._node.device_for(self._device))
        self._all = self._sent.new_empty(self._node.world_size, *planes.shape)
        self._pending = self._node.all_gather(self._all, self._sent, "a verdict")

    def verdict(self) -> Verdict:
        """See `Exchange`."""
        self._pending.wait()
        return Verdict(_joined(self._all.to(self._device), self._words), self._partial.voters)


class _Gather(Exchange):
    """All ranks gather all votes, and each rank counts all of them."""

    def __init__(self, votes: Votes, wire: Wire, rule: Rule, step: int) -> None:
        self._votes, self._rule, self._step = votes, rule, step
        device = votes.planes.device
        self._sent = torch.cat([_packed_rows(votes.active), votes.planes.view(-1)])
        self._sent = self._sent.to(wire.device_for(device))
        self._all = self._sent.new_empty(wire.world_size, self._sent.numel())
        self._pending = wire.all_gather(self._all, self._sent, "votes")

    def receive(self) -> None:
        self._pending.wait()

    def verdict(self) -> Verdict:
        bits, words = self._votes.planes.shape
        everyone = self._all.to(self._votes.planes.device)
        rows = everyone.shape[1] - bits * words
        voters = _voters(everyone[:, :rows], self._votes)
        votes = [list(sent[rows:].view(bits, words)) for sent in everyone]
        total = _total(voters, self._votes, len(votes), slice(0, words))
        sums = tally(votes, bits)
        return Verdict(self._rule.decide(sums, total, self._step), voters)


class _TwoPhase(Exchange):
    """Each rank counts one N-th of the words, and all ranks gather the verdict."""

    def __init__(self, votes: Votes, wire: Wire, rule: Rule, step: int) -> None:
        self._votes, self._wire, self._rule, self._step = votes, wire, rule, step
        bits, words = votes.planes.shape
        ranks = wire.world_size
        self._words_each = -(-words // ranks)
        padded = torch.nn.functional.pad(votes.planes, (0, ranks * self._words_each - words))
        device = wire.device_for(padded.device)
        # Segment j goes to rank j.
        self._sent = (
            padded.view(bits, ranks, self._words_each).transpose(0, 1).contiguous().to(device)
        )
        self._received = torch.empty_like(self._sent)
        self._active = _packed_rows(votes.active).to(device)
        self._all_active = self._active.new_empty(ranks, self._active.numel())
        self._pending: list[Pending] = [
            wire.all_gather(self._all_active, self._active, "votes"),
            wire.all_to_all(self._received, self._sent, "votes"),
        ]

    def receive(self) -> None:
        for pending in self._pending:
            pending.wait()
        device, words = self._votes.planes.device, self._votes.planes.shape[1]
        self._voters = _voters(self._all_active.to(device), self._votes)
        counted = _share(self._wire.rank, self._words_each, words)
        received = self._received.to(device)[:, :, : counted.stop - counted.start]
        total = _total(self._voters, self._votes, len(received), counted)
        sums = tally([list(sent) for sent in received], received.shape[1])
        planes = _padded(self._rule.decide(sums, total, self._step), self._words_each)
        self._sent = planes.to(self._wire.device_for(device))
        self._received = self._sent.new_empty(self._wire.world_size, *planes.shape)
        self._pending = [self._wire.all_gather(self._received, self._sent, "a verdict")]

    def verdict(self) -> Verdict:
        self._pending[0].wait()
        received = self._received.to(self._votes.planes.device)
        return Verdict(_joined(received, self._votes.planes.shape[1]), self._voters)


def _share(rank: int, words_each: int, words: int) -> slice:
    """Returns the words that a rank counts; the last ranks may have fewer, or none."""
    first = min(rank * words_each, words)
    return slice(first, min(first + words_each, words))


def _padded(planes: Sequence[Tensor], words: int) -> Tensor:
    """Returns planes with zeros after their end, int64, shape (planes, words)."""
    padded = planes[0].new_zeros(len(planes), words)
    for out, plane in zip(padded, planes, strict=True):
        out[: plane.numel()] = plane
    return padded


def _joined(shares: Tensor, words: int) -> list[Tensor]:
    """Returns planes of `words` words from every rank's share, shape (ranks, planes, share)."""
    # Contiguous before it is flat: reshape() may keep strides that make no view as bytes.
    return list(shares.transpose(0, 1).contiguous().flatten(1)[:, :words])


def _packed_rows(active: Tensor) -> Tensor:
    """Returns one bit per row, int64, shape (ceil(R / 64),)."""
    padded = torch.nn.functional.pad(active, (0, -active.numel() % WORD))
    out = torch.empty(padded.numel() // WORD, dtype=torch.int64, device=active.device)
    pack(padded, 0, out)
    return out


def _voters(packed: Tensor, votes: Votes) -> Tensor | None:
    """Returns the number of ranks that vote on each row; None if all do, checked on a CPU only."""
    rows = votes.rows.count
    bits = torch.empty(packed.shape[1] * WORD, dtype=torch.float32, device=packed.device)
    counts = torch.zeros(rows, dtype=torch.int64, device=packed.device)
    for flags in packed:
        counts += unpack(flags.contiguous(), 0.0, 1.0, bits)[:rows].to(torch.int64)
    if packed.device.type == "cpu" and bool((counts == len(packed)).all()):
        return None
    return counts


def _total(voters: Tensor | None, votes: Votes, ranks: int, words: slice) -> int | list[Tensor]:
    """Returns the number of active ranks times `top`: one number, or its planes by word."""
    top = TOP[votes.planes.shape[0]]
    if voters is None:
        return ranks * top
    total_of_word = voters[votes.rows.of_word[words]] * top
    return spread(total_of_word, (ranks * top).bit_length())
