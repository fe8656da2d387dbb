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

from collections.abc import Generator, Iterable
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from hf_dlion.core.codec import WORD
from hf_dlion.core.context import StepContext
from hf_dlion.core.rule import Rule
from hf_dlion.core.votes import Verdict, Votes
from hf_dlion.gpu import form
from hf_dlion.ranks.topology import Topology
from hf_dlion.ranks.wire import Wire

# What is done with a message. Suspended whenever its data travel.
Task = Generator[None, None, None]


def run_as_pipeline(tasks: Iterable[Task]) -> None:
    """Runs tasks so that each begins while the one before it waits for its data.

        encode 0    encode 1    encode 2    encode 3
                    count 0     count 1     count 2
                                move 0      move 1

    So few messages are in memory at a time. Each task is suspended equally often, on either route,
    so all ranks begin collectives in the same order, also those of two groups, as NCCL needs.
    """
    waiting, under_way = iter(tasks), list[Task]()
    while True:
        under_way = [*islice(waiting, 1), *under_way]
        if not under_way:
            return
        under_way = [task for task in under_way if next(task, task) is not task]


def wire_bytes(name: str, *, ranks: int, words: int, rows: int, bits: int, planes: int) -> int:
    """Returns the bytes that a rank sends for one message; the module has the formulas."""
    if name == "gather":
        return 8 * (ranks - 1) * (-(-rows // WORD) + bits * words)
    return 8 * (ranks - 1) * (-(-rows // WORD) + (bits + planes) * -(-words // ranks))


def bytes_per_word(rule: Rule, bits: int, ranks: int) -> float:
    """Returns the bytes that a rank sends for each word of a long message, by the better route."""
    size = partial(
        wire_bytes, ranks=ranks, words=ranks, rows=0, bits=bits, planes=rule.plane_count
    )  # fmt: skip
    return min(size("gather"), size("two_phase")) / ranks


def exchange_votes(
    votes: Votes, rule: Rule, context: StepContext, ranks: Topology
) -> Generator[None, None, Verdict]:
    """Sends this rank's votes of a message and returns the verdict; every rank must do this.

    It is suspended whenever data travel.

    If nodes vote, each of the L ranks of a node exchanges one L-th of the words:

        rank a: v0 v1  ->  v0 w0 (with c)  ->  verdict x0  ->  x0 x1 (with b)     node 0: a b
        rank b: v0 v1  ->  v1 w1 (with d)  ->  verdict x1  ->  x0 x1 (with a)     node 1: c d

    Bytes per rank to other nodes: those of the module for ceil(W / L) words and all R rows. Bytes
    per rank inside the node: 8 (L - 1) v ceil(W / L).

    The votes must be equal on the ranks of a node. "auto" takes the route that sends fewer bytes,
    gather if both send the same.
    """
    voters, node = ranks.voters, ranks.node
    name, words = context.options.exchange, votes.planes.shape[1]
    if node is not None:
        share = _share(node.rank, -(-words // node.world_size), words)
        planes = votes.planes[:, share].contiguous()
        votes = Votes(planes, votes.active, votes.rows, first=share.start)
    if name == "auto":
        bits, sent = votes.planes.shape
        size = partial(
            wire_bytes, ranks=voters.world_size, words=sent, rows=0, bits=bits,
            planes=rule.plane_count,
        )  # fmt: skip
        name = min("gather", "two_phase", key=size)
    route = _two_phase if name == "two_phase" else _gather
    verdict = yield from route(votes, voters, rule, context.phase)
    if node is not None:
        verdict = yield from _gather_in_node(verdict, node, words)
    return verdict


def _gather_in_node(verdict: Verdict, node: Wire, words: int) -> Generator[None, None, Verdict]:
    """Gathers the verdict on all words, of which each rank of the node has one L-th."""
    device = verdict.planes.device
    planes = _padded(verdict.planes, -(-words // node.world_size)).to(node.device_for(device))
    received = planes.new_empty(node.world_size, *planes.shape)
    pending = node.all_gather(received, planes, "a verdict")
    node.stats.lap("exchange_s", device)
    yield
    pending.wait()
    return Verdict(_joined(received.to(device), words), verdict.row_voters)


def _gather(votes: Votes, wire: Wire, rule: Rule, phase: int) -> Generator[None, None, Verdict]:
    """All ranks gather all votes, and each rank counts all of them."""
    (bits, words), device = votes.planes.shape, votes.planes.device
    flag_words = -(-len(votes.rows) // WORD)
    sent = torch.cat([votes.row_bits, votes.planes.view(-1)]).to(wire.device_for(device))
    received = sent.new_empty(wire.world_size, sent.numel())
    pending = wire.all_gather(received, sent, "votes")
    yield
    pending.wait()
    wire.stats.lap("exchange_s", device)
    yield  # As often as two_phase, see `run_as_pipeline`.
    received = received.to(device)
    active, planes = received[:, :flag_words], received[:, flag_words:]
    planes = planes.reshape(wire.world_size, bits, words)
    message_words = slice(votes.first, votes.first + words)
    return form.count_votes(planes, active, votes.rows, message_words, rule, phase, words)


def _two_phase(votes: Votes, wire: Wire, rule: Rule, phase: int) -> Generator[None, None, Verdict]:
    """Each rank counts one N-th of the words, and all ranks gather the verdict."""
    (bits, words), ranks = votes.planes.shape, wire.world_size
    device, words_each = votes.planes.device, -(-words // ranks)
    on_wire = wire.device_for(device)
    active = votes.row_bits
    # Segment j goes to rank j.
    padded = _padded(votes.planes, ranks * words_each).view(bits, ranks, words_each)
    sent = padded.transpose(0, 1).contiguous().to(on_wire)
    received, active = torch.empty_like(sent), active.to(on_wire)
    all_active = active.new_empty(ranks, active.numel())
    pending = [
        wire.all_gather(all_active, active, "votes"), wire.all_to_all(received, sent, "votes")
    ]  # fmt: skip
    yield
    for each in pending:
        each.wait()
    share = _share(wire.rank, words_each, words, votes.first)
    received, all_active = received.to(device), all_active.to(device)
    shares = form.count_votes(received, all_active, votes.rows, share, rule, phase, words_each)
    sent = _padded(shares.planes, words_each).to(on_wire)
    received = sent.new_empty(ranks, *sent.shape)
    verdict = wire.all_gather(received, sent, "a verdict")
    wire.stats.lap("exchange_s", device)
    yield
    verdict.wait()
    return Verdict(_joined(received.to(device), words), shares.row_voters)


def _share(rank: int, words_each: int, words: int, at: int = 0) -> slice:
    """Returns the words that a rank counts; the last ranks may have fewer, or none."""
    first = min(rank * words_each, words)
    return slice(at + first, at + min(first + words_each, words))


def _padded(planes: Tensor, words: int) -> Tensor:
    """Returns planes with zeros after their end, int64, shape (planes, words), contiguous."""
    missing = words - planes.shape[1]
    # What `_joined` returns isn't contiguous if it is a part.
    return torch.nn.functional.pad(planes, (0, missing)) if missing else planes.contiguous()


def _joined(shares: Tensor, words: int) -> Tensor:
    """Returns planes of `words` words from every rank's share, shape (ranks, planes, share)."""
    # Contiguous before it is flat: reshape() may keep strides that make no view as bytes.
    return shares.transpose(0, 1).contiguous().flatten(1)[:, :words]
