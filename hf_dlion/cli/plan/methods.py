"""The cost model: bytes and time of a step under each method. All times are in seconds.

A collective costs `rounds * latency + bytes / rate`, where the bytes are those that leave the
busiest network card (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005). A rank's own work costs a constant per element. The wire carries one
collective after another, and doesn't slow down the rank's own work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from hf_dlion.advice import MOMENTA_FROM, vote_every_for
from hf_dlion.cli.plan.machine import POWER_RANK, Machine
from hf_dlion.cli.plan.workload import Workload
from hf_dlion.core.codec import TOP, WORD
from hf_dlion.core.layout import messages_of
from hf_dlion.core.slot import Slot
from hf_dlion.options import LOCAL_BITS
from hf_dlion.ranks.header import HEADER_BYTES
from hf_dlion.ranks.routes import Task, run_as_pipeline, wire_bytes

# Backward computes two products for each one of forward.
FORWARD_SHARE = 1 / 3
# DDP: the first bucket closes at 1 MiB, the others at `bucket_cap_mb`.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
NONE = "AdamW without network"
ALONE = "AdamW on one node"
DLION = "DistributedLion"
HOOK = "AdamW with DDP bf16 hook"
POWER = f"AdamW with PowerSGD rank {POWER_RANK}"
LOCAL_SGD = "LocalSGD"
NODE = f'{DLION}, local_group="node"'
# Ends the name of local steps whose exchanges also average momenta (`momentum_sync_every=1`).
WITH_MOMENTA = " and momenta"

# Bytes that a rank sends in a step, and the seconds of the step by part.
Cost = tuple[int, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Link:
    """The network between nodes."""

    bits_per_s: float  # Rate of a node's network card, each way.
    latency_s: float = 1e-4  # Time of an empty message from one rank to another.
    efficiency: float = 0.94  # Share of the rate that carries payload.

    def seconds(self, sent_bytes: float, rounds: int) -> float:
        """Returns the time of a collective.

        `sent_bytes` leave the busiest network card, in `rounds` messages that wait for one another.
        """
        if not sent_bytes:
            return 0.0
        return rounds * self.latency_s + 8 * sent_bytes / (self.bits_per_s * self.efficiency)


def check_ranks(ranks: int, per_node: int, shard: int, vote_every: int | None) -> None:
    """Raises ValueError unless ranks fill two nodes or more, and take local steps if asked to."""
    if vote_every == 1:
        raise ValueError("--vote-every must be at least 2; each table has a row for 1")
    if shard not in (1, per_node):
        raise ValueError(
            f"--shard {shard} and --ranks-per-node {per_node} must be equal: each node holds one "
            f"copy of the model"
        )
    if ranks <= per_node:
        raise ValueError(
            f"--ranks {ranks} fits on one node of {per_node}, so there is no network traffic to "
            f"predict; use at least {2 * per_node} ranks"
        )
    if ranks % per_node:
        raise ValueError(f"--ranks ({ranks}) must be a multiple of the ranks per node ({per_node})")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything that a prediction depends on."""

    work: Workload
    ranks: int
    per_node: int = 1  # Ranks that share a network card.
    shard: int = 1  # Ranks that shard a model with FSDP2: 1 or `per_node`.
    link: Link
    machine: Machine
    dtype: torch.dtype = torch.float32  # Dtype of trained weights, and of gradients.
    vote_every: int | None = None  # None: see `vote_every_for`.

    @property
    def nodes(self) -> int:
        """Number of network cards, and of voters in local steps."""
        return self.ranks // self.per_node

    @property
    def averages_momenta(self) -> bool:
        """Whether local steps should average momenta."""
        return self.nodes >= MOMENTA_FROM

    def work_s(self, name: str) -> float:
        """Returns the seconds of work on all trainable elements, by its name in `step_work`."""
        return self.machine.each_s[name] * self.work.trainable

    def between_nodes(self) -> Case:
        """Returns the case of the ranks with one place in all nodes, which share cards evenly."""
        link = replace(self.link, bits_per_s=self.link.bits_per_s / self.per_node)
        return replace(self, ranks=self.nodes, per_node=1, shard=1, link=link)

    def gather_s(self, sent_bytes: float) -> float:
        """Returns the time of an all-gather: a ring, which crosses each card once."""
        return self.link.seconds(sent_bytes, self.ranks - 1)

    def reduce_s(self, sent_bytes: float) -> float:
        """Returns the time of an all-reduce: a ring, with NCCL also trees, if they have fewer."""
        rounds = 2 * (self.ranks - 1)
        if self.machine.device == "cuda":
            rounds = min(rounds, 2 * math.ceil(math.log2(self.ranks)))
        return self.link.seconds(sent_bytes, rounds)

    def all_to_all_s(self, sent_bytes: float) -> float:
        """Returns the time of an all-to-all: each rank of a node sends through the node's card."""
        outside = (self.ranks - self.per_node) / (self.ranks - 1)
        return self.link.seconds(sent_bytes * outside * self.per_node, self.ranks - 1)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Bytes, time, and memory of a rank's step with one method."""

    wire_bytes: int  # Bytes that a rank sends; with one vote per node, to other nodes.
    parts: dict[str, float]  # Seconds by part; "network" is what no work hides.
    memory_bytes: float  # Weights, gradients, DDP's buckets, and optimizer state.

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())


class _Clock:
    """A rank's step: its own work, and the wire, which carries one collective after another."""

    def __init__(self) -> None:
        self._now = self._wire_free = 0.0
        self._sent, self._worked = 0, dict[str, float]()

    def work(self, part: str, seconds: float) -> None:
        """Adds work of the rank."""
        self._worked[part] = self._worked.get(part, 0.0) + seconds
        self._now += seconds

    def send(self, sent_bytes: int, seconds: float) -> float:
        """Starts a collective as soon as the wire is free; returns the time at which it ends."""
        self._sent += sent_bytes
        self._wire_free = max(self._wire_free, self._now) + seconds
        return self._wire_free

    def wait(self, time: float) -> None:
        """Makes the rank wait until a time, unless it has passed."""
        self._now = max(self._now, time)

    def cost(self) -> Cost:
        """Returns the cost of the step, in which "network" is the time that the rank waited."""
        # Sums that are equal may differ by a rounding.
        waited = max(self._now - sum(self._worked.values()), 0.0)
        return self._sent, {"compute": self._worked["compute"], "network": waited} | self._worked


def predict(case: Case) -> dict[str, Prediction]:
    """Returns the prediction of each method; the first is a step without communication."""
    sharded = case.shard > 1
    size = case.dtype.itemsize
    voters = case
    if sharded:
        # Each rank exchanges its part of the model with the ranks that hold the same part.
        voters = replace(case.between_nodes(), work=case.work.shard(case.shard))
    copies_s = 0.0 if sharded else 2 * case.work_s("copy")  # Into DDP's buckets, and back.
    weights = case.work.weight_bytes(case.dtype) / case.shard
    trained = size * voters.work.trainable
    # DDP's buckets hold a copy of the gradients. `attach` frees them if every rank votes.
    buckets = 0 if sharded else 1
    found: dict[str, Prediction] = {}

    def add(name: str, cost: Cost, kept: int) -> None:
        """Adds a method with `kept` numbers per trained parameter, including the gradient."""
        memory = weights + kept * trained
        found[name] = Prediction(wire_bytes=cost[0], parts=cost[1], memory_bytes=memory)

    add(NONE, _all_reduce(voters, 0, copies_s), 3 + buckets)
    # One node that accumulates the batches of all nodes. A node with one rank needs no DDP.
    inside_s, in_node = (copies_s, buckets) if case.per_node > 1 else (0.0, 0)
    compute_s = case.nodes * case.machine.compute_s + inside_s
    alone = {"compute": compute_s, "network": 0.0, "optimizer": voters.work_s("adamw")}
    add(ALONE, (0, alone), 3 + in_node)
    kind, half = ("FSDP2", "bf16 reduce") if sharded else ("DDP", "bf16 hook")
    for name, on_wire in ({"bf16": 2} if size == 2 else {"fp32": 4, half: 2}).items():
        cost = _all_reduce(voters, on_wire, copies_s)
        add(f"AdamW with {kind} {name}", cost, 3 + buckets)
    if not sharded:
        add(POWER, _power_sgd(case, copies_s), 4 + buckets)  # It also keeps an error.
    add(DLION, _votes(voters, case.ranks, 1), 2)
    name = DLION
    vote = voters
    share = 1
    kept = 0
    if case.per_node > 1 and not sharded:
        # DDP's buckets carry the gradients inside the node, and each rank exchanges its share.
        name = NODE
        vote = case.between_nodes()
        share = case.per_node
        kept = buckets
        add(name, _votes(vote, case.ranks, 1, share=share, inside_s=inside_s), 2 + kept)
    local_steps = partial(_local_steps, ranks=case.ranks, share=share, inside_s=inside_s)
    every, _ = local_steps(vote, momenta=case.averages_momenta)
    vote = replace(vote, vote_every=every)
    if not sharded and case.per_node == 1:
        add(f"{LOCAL_SGD}, {every} steps of AdamW", _local_sgd(case, every), 3)
    # A second number is the anchor, and with 16 bits a third the compensation.
    kept += 4 if size == 2 else 3
    add(f"{name}, vote_every={every}", local_steps(vote, momenta=False)[1], kept)
    add(f"{name}, vote_every={every}{WITH_MOMENTA}", local_steps(vote, momenta=True)[1], kept)
    return found


def _all_reduce(case: Case, on_wire: int, copies_s: float) -> Cost:
    """Returns the cost of DDP's all-reduce, which begins with the first full bucket.

    `on_wire` is the size of an element on the wire, 0 without network. Half of DDP's copies is done
    as gradients become ready.
    """
    size = case.dtype.itemsize
    numels = case.work.numels
    compute_s = case.machine.compute_s
    if on_wire not in (0, size):
        copies_s += case.work_s("cast")
    clock = _Clock()
    arrival = 0.0
    total = sum(numels)
    forward_s = FORWARD_SHARE * compute_s
    backward_s = compute_s - forward_s + copies_s / 2
    clock.work("compute", forward_s)
    for bucket in _buckets(numels, size):
        # Backward spends as long on every element, from the last tensor to the first.
        clock.work("compute", backward_s * bucket / total)
        sent = 2 * (case.ranks - 1) * -(-bucket // case.ranks) * on_wire
        arrival = clock.send(sent, case.reduce_s(sent))
    clock.wait(arrival)
    clock.work("compute", copies_s / 2)
    clock.work("optimizer", case.work_s("adamw"))
    return clock.cost()


def _buckets(numels: Sequence[int], size: int) -> list[int]:
    """Returns the elements of DDP's buckets, the last tensor's first; a full one closes."""
    found, limit = [0], FIRST_BUCKET_BYTES
    for numel in reversed(numels):
        if found[-1] * size >= limit:
            found.append(0)
            limit = BUCKET_BYTES
        found[-1] += numel
    return found


def _power_sgd(case: Case, copies_s: float) -> Cost:
    """Returns the cost of PowerSGD in one bucket: nothing overlaps with backward.

    Three all-reduces follow one another: what is not compressed, and the two factors.
    """
    numel = sum(power_numel(shape) for shape in case.work.shapes)
    sent = 2 * (case.ranks - 1) * -(-numel // case.ranks) * case.dtype.itemsize
    clock = _Clock()
    clock.work("compute", case.machine.compute_s + copies_s)
    clock.work("encode", case.work_s("power"))
    clock.wait(clock.send(sent, 3 * case.reduce_s(sent / 3)))
    clock.work("optimizer", case.work_s("adamw"))
    return clock.cost()


def _local_sgd(case: Case, every: int) -> Cost:
    """Returns the cost of AdamW on each rank, and of the mean of weights after `every` steps."""
    sent = 2 * (case.ranks - 1) * -(-case.work.trainable // case.ranks) * case.dtype.itemsize
    parts = {"compute": case.machine.compute_s, "network": case.reduce_s(sent) / every}
    return sent // every, parts | {"optimizer": case.work_s("adamw")}


def power_numel(shape: Sequence[int]) -> int:
    """Returns the elements that PowerSGD reduces for a tensor: two factors, or all of it."""
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    factors = (rows + columns) * min(rows, columns, POWER_RANK)
    return factors if factors * 2 < rows * columns else rows * columns


def _votes(
    case: Case, ranks: int, bits: int, *, share: int = 1, planes: int = 1, inside_s: float = 0.0
) -> Cost:
    """Returns the cost of a step of `DistributedLion`.

    `ranks` is the number of all ranks, which exchange headers, and `share` the ranks of a node that
    split each message. `inside_s` is time in addition to forward and backward before the exchange.
    """
    clock = _Clock()
    n = case.ranks
    link = case.link
    encode_s, move_s = case.machine.each_s[f"encode {bits}"], case.machine.each_s["move"]
    count_s = case.machine.count_s(bits, n)
    clock.work("compute", case.machine.compute_s + inside_s)
    clock.work("encode", case.work_s("survey"))
    header_s = link.seconds(HEADER_BYTES * (ranks - 1), ranks - 1)
    clock.wait(clock.send(HEADER_BYTES * (ranks - share), header_s))

    def message(words: int, rows: int) -> Task:
        """Takes the step of one message, as `every_step.vote_on_message` does."""
        clock.work("encode", encode_s * WORD * words)
        mine = -(-words // share)
        size = partial(wire_bytes, ranks=n, rows=rows, bits=bits, planes=planes)
        gather, two_phase = size("gather", words=mine), size("two_phase", words=mine)
        if gather <= two_phase:
            counted = mine
            verdict = 0
            arrival = clock.send(gather, case.gather_s(gather))
        else:
            counted, active = -(-mine // n), size("gather", words=0)
            verdict = 8 * (n - 1) * counted * planes
            votes = two_phase - active - verdict
            up_s = case.gather_s(active) + case.all_to_all_s(votes)
            arrival = clock.send(active + votes, up_s)
        yield
        clock.wait(arrival)
        if verdict:
            clock.work("count", counted * WORD * count_s)
            arrival = clock.send(verdict, case.gather_s(verdict))
        yield
        clock.wait(arrival)
        if not verdict:
            clock.work("count", counted * WORD * count_s)
        clock.work("move", move_s * WORD * words)

    run_as_pipeline(message(words, rows) for words, rows in _messages(case))
    return clock.cost()


def _messages(case: Case) -> list[tuple[int, int]]:
    """Returns words and rows of a step's messages, as the optimizer cuts them."""
    device = torch.device(case.machine.device)
    tensors = [torch.empty(shape, dtype=case.dtype, device="meta") for shape in case.work.shapes]
    cut = messages_of([replace(Slot.of(tensor, 0), device=device) for tensor in tensors])
    return [(m.words, len(m.rows)) for m in cut]


def _local_steps(
    case: Case, *, ranks: int, share: int, inside_s: float, momenta: bool
) -> tuple[int, Cost]:
    """Returns vote_every, and the cost of a step as a mean over a period; see `_votes`.

    With `momenta`, each exchange also averages momenta in as many bits.
    """
    planes = (case.ranks * TOP[LOCAL_BITS]).bit_length()
    voted, vote = _votes(case, ranks, LOCAL_BITS, share=share, planes=planes, inside_s=inside_s)
    # Largest displacements and a hash of anchors go to all ranks, with nodes a second hash.
    words = len(case.work.shapes) + 1 + (share > 1)
    sent = voted + 8 * words * (ranks - share)
    network = vote["network"] + case.link.seconds(8 * words * (ranks - 1), ranks - 1)
    work = case.work_s("exchange") + vote["count"]
    if momenta:
        means = 8 * (case.ranks - 1) * len(case.work.shapes)
        sent += voted - HEADER_BYTES * (ranks - share) + means
        network += vote["network"] + case.gather_s(means)
        work += case.work_s("momenta") + vote["count"]
    step_s, every = case.work_s("survey") + case.work_s("local step"), case.vote_every
    if every is None:
        every = max(vote_every_for(vote["compute"] + step_s, network + work), 2)
    optimizer = step_s + work / every
    parts = {"compute": vote["compute"], "network": network / every, "optimizer": optimizer}
    return every, (sent // every, parts)
