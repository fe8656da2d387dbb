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

from hf_dlion.cli.plan.machine import BITS, POWER_RANK, Machine
from hf_dlion.cli.plan.workload import Workload
from hf_dlion.exchange.routes import wire_bytes
from hf_dlion.vote.codec import WORD
from hf_dlion.vote.local_steps import vote_every_for
from hf_dlion.vote.message import Shape, messages

# Backward computes two products for each one of forward.
FORWARD_SHARE = 1 / 3
# DDP: the first bucket closes at 1 MiB, the others at `bucket_cap_mb`.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
NONE, DLION = "AdamW without network", "DistributedLion"
POWER = f"AdamW with PowerSGD rank {POWER_RANK}"
NODE = f'{DLION}, local_group="node"'
# Bytes of a header for every other rank.
_HEADER_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins a node to the others."""

    bits_per_s: float  # Of a node's network card, each way.
    latency_s: float = 1e-4  # Of a message without size from one rank to another.
    efficiency: float = 0.94  # The share of the rate that carries payload.

    def seconds(self, sent_bytes: float, rounds: int) -> float:
        """Returns the time of a collective.

        Args:
            sent_bytes: Bytes that leave the busiest network card.
            rounds: Number of messages that wait for one another.
        """
        if not sent_bytes:
            return 0.0
        return rounds * self.latency_s + 8 * sent_bytes / (self.bits_per_s * self.efficiency)


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that a prediction needs."""

    work: Workload
    ranks: int
    per_node: int = 1  # Ranks that share a network card.
    shard: int = 1  # Ranks that shard a model with FSDP2: 1 or `per_node`.
    link: Link
    machine: Machine
    compute_s: float  # Forward and backward, without DDP.
    dtype: torch.dtype = torch.float32  # Of weights and gradients.
    vote_every: int | None = None  # Local steps; None: as many as hide the exchange.

    def __post_init__(self) -> None:
        """Checks that the ranks fill two nodes or more.

        Raises:
            ValueError: If they don't.
        """
        if self.shard not in (1, self.per_node):
            raise ValueError(
                f"--shard {self.shard} and --ranks-per-node {self.per_node} must be equal: each "
                f"node holds one copy of the model"
            )
        if self.ranks <= self.per_node:
            raise ValueError(
                f"--ranks {self.ranks} fits on one node of {self.per_node}, so there is no network "
                f"traffic to predict; use at least {2 * self.per_node} ranks"
            )
        if self.ranks % self.per_node:
            raise ValueError(
                f"--ranks ({self.ranks}) must be a multiple of the ranks per node ({self.per_node})"
            )

    @property
    def nodes(self) -> int:
        """Number of network cards."""
        return self.ranks // self.per_node

    def work_s(self, each_s: float) -> float:
        """Returns the seconds of work that takes `each_s` per trainable element."""
        return each_s * self.work.trainable

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
    """What one method costs per step of a rank."""

    wire_bytes: int  # That a rank sends; if nodes vote as one, to other nodes.
    parts: dict[str, float]  # Seconds by part; "network" is what no work hides.
    memory_bytes: float  # Of weights, gradients, and optimizer state.

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())


def predict(case: Case) -> dict[str, Prediction]:
    """Returns a prediction by method, the step without communication first."""
    ranks, own = case.ranks, case
    if case.shard > 1:
        own = replace(case.between_nodes(), work=case.work.shard(case.shard))
    wrapper, size = ("FSDP2" if case.shard > 1 else "DDP"), case.dtype.itemsize
    copies = 0.0 if case.shard > 1 else 2 * own.work_s(own.machine.copy_s)
    adamw = {"optimizer": own.work_s(own.machine.adamw_s)}
    memory = size * case.work.parameters / case.shard, size * own.work.trainable
    adamw_bytes, lion_bytes = (memory[0] + count * memory[1] for count in (3, 2))
    found = {
        NONE: Prediction(
            wire_bytes=0,
            parts={"compute": own.compute_s + copies, **adamw},
            memory_bytes=adamw_bytes,
        )
    }
    reduced = {"bf16": 2} if size == 2 else {"fp32": 4, "bf16 hook": 2}
    for name, on_wire in reduced.items():
        sent, parts = _all_reduce(own, on_wire, copies)
        found[f"AdamW with {wrapper} {name}"] = Prediction(
            wire_bytes=sent, parts={**parts, **adamw}, memory_bytes=adamw_bytes
        )
    if case.shard == 1:
        sent, parts = _power_sgd(case, copies)
        # It keeps the error of what it compressed.
        found[POWER] = Prediction(
            wire_bytes=sent, parts={**parts, **adamw}, memory_bytes=adamw_bytes + memory[1]
        )
    for bits in BITS:
        sent, parts = _votes(own, bits, ranks)
        name = DLION if bits == 1 else f"{DLION}, bits={bits}"
        found[name] = Prediction(wire_bytes=sent, parts=parts, memory_bytes=lion_bytes)
    name, voters, share = DLION, own, 1
    if case.per_node > 1 and case.shard == 1:
        # DDP's buckets carry the gradients inside the node, each rank exchanges its share.
        inside = replace(case.between_nodes(), compute_s=case.compute_s + copies)
        sent, parts = _votes(inside, 1, ranks, case.per_node)
        found[NODE] = Prediction(wire_bytes=sent, parts=parts, memory_bytes=lion_bytes)
        name, voters, share = NODE, inside, case.per_node
    every, sent, parts = _local_steps(voters, ranks, share)
    # The anchor, and with 16 bits the displacement.
    kept = memory[1] * (2 if size == 2 else 1)
    found[f"{name}, vote_every={every}"] = Prediction(
        wire_bytes=sent, parts=parts, memory_bytes=lion_bytes + kept
    )
    return found


def _local_steps(case: Case, ranks: int, share: int) -> tuple[int, int, dict[str, float]]:
    """Returns vote_every, and means over a period: bytes and parts of a step; see `_votes`."""
    machine, planes = case.machine, case.ranks.bit_length()
    sent, vote = _votes(case, 1, ranks, share, planes)
    means = 8 * (case.ranks - 1) * len(case.work.shapes)
    network = vote["network"] + case.gather_s(means)
    # Displacements are read twice, and own weights are moved beside the anchors.
    work = 2 * vote["encode"] + vote["count"] + case.work_s(3 * machine.move_s)
    lion = case.work_s(machine.lion_s)
    every = case.vote_every
    if every is None:
        every = max(vote_every_for(case.compute_s + lion, network + work), 2)
    parts = {
        "compute": case.compute_s,
        "network": network / every,
        "optimizer": lion + work / every,
    }
    return every, (sent + means) // every, parts


def _all_reduce(case: Case, on_wire: int, copies_s: float) -> tuple[int, dict[str, float]]:
    """Returns bytes and parts of DDP's all-reduce, which begins with the first full bucket.

    `on_wire` is the size of an element on the wire. Half of DDP's copies is done as gradients
    become ready.
    """
    size, numels = case.dtype.itemsize, case.work.numels
    if on_wire != size:
        copies_s += case.work_s(case.machine.cast_s)
    forward = FORWARD_SHARE * case.compute_s
    backward = case.compute_s - forward + copies_s / 2
    total, done, wire_free, sent = sum(numels), 0, 0.0, 0
    for bucket in _buckets(numels, size):
        done += bucket
        own = 2 * (case.ranks - 1) * -(-bucket // case.ranks) * on_wire
        sent += own
        # Backward spends as long on every element, from the last tensor to the first.
        wire_free = max(wire_free, forward + backward * done / total) + case.reduce_s(own)
    exposed = max(wire_free - forward - backward, 0.0)
    return sent, {"compute": forward + backward + copies_s / 2, "network": exposed}


def _buckets(numels: Sequence[int], size: int) -> list[int]:
    """Returns the elements of DDP's buckets, the last tensor's first; a full one closes."""
    found, limit = [0], FIRST_BUCKET_BYTES
    for numel in reversed(numels):
        if found[-1] * size >= limit:
            found.append(0)
            limit = BUCKET_BYTES
        found[-1] += numel
    return found


def _power_sgd(case: Case, copies_s: float) -> tuple[int, dict[str, float]]:
    """Returns bytes and parts of PowerSGD in one bucket: nothing overlaps with backward.

    Three all-reduces follow one another: what is not compressed, and the two factors.
    """
    numel = sum(_power_numel(shape) for shape in case.work.shapes)
    sent = 2 * (case.ranks - 1) * -(-numel // case.ranks) * case.dtype.itemsize
    return sent, {
        "compute": case.compute_s + copies_s,
        "encode": case.work_s(case.machine.power_s),
        "network": 3 * case.reduce_s(sent / 3),
    }


def _power_numel(shape: Sequence[int]) -> int:
    """Returns the elements that PowerSGD reduces for a tensor: two factors, or all of it."""
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    factors = (rows + columns) * min(rows, columns, POWER_RANK)
    return factors if factors * 2 < rows * columns else rows * columns


def _votes(
    case: Case, bits: int, ranks: int, share: int = 1, planes: int = 1
) -> tuple[int, dict[str, float]]:
    """Returns bytes and parts of a step as `DistributedLion.step` takes it.

    All messages are encoded and sent, one after another. Then each is counted, where two_phase
    sends a verdict, and then each is applied. `ranks` is the number of all ranks, which exchange
    headers; of each message, a rank exchanges the part that `share` ranks of a node leave it. A
    verdict has `planes` bits.
    """
    machine, n = case.machine, case.ranks
    fixed_s, vote_s = machine.count_s[bits]
    header_s = case.link.seconds(_HEADER_BYTES * (ranks - 1), ranks - 1)
    now = wire_free = case.compute_s + header_s
    own = dict.fromkeys(("encode", "count", "move"), 0.0)
    sent = _HEADER_BYTES * (ranks - share)

    def spend(part: str, word_s: float, words: int) -> None:
        nonlocal now
        own[part] += word_s * words
        now += word_s * words

    under_way: list[tuple[int, int, int, float]] = []
    for all_words, rows in _messages(case):
        words = -(-all_words // share)
        spend("encode", machine.encode_s[bits] * WORD, all_words)
        size = partial(wire_bytes, ranks=n, rows=rows, bits=bits)
        gather, two_phase = (size(x, words=words, planes=planes) for x in ("gather", "two_phase"))
        sent += min(gather, two_phase)
        if two_phase < gather:
            active, counted = size("gather", words=0, planes=planes), -(-words // n)
            verdict = 8 * (n - 1) * counted * planes
            up_s = case.gather_s(active) + case.all_to_all_s(two_phase - active - verdict)
        else:
            verdict, counted, up_s = 0, words, case.gather_s(gather)
        wire_free = max(wire_free, now) + up_s
        under_way.append((all_words, counted, verdict, wire_free))
    arrived = []
    for _, counted, verdict, at in under_way:
        now = max(now, at)
        if verdict:
            spend("count", (fixed_s + n * vote_s) * WORD, counted)
            wire_free = max(wire_free, now) + case.gather_s(verdict)
        arrived.append(wire_free if verdict else at)
    for (all_words, counted, verdict, _), at in zip(under_way, arrived, strict=True):
        now = max(now, at)
        spend("count", (fixed_s + n * vote_s) * WORD, 0 if verdict else counted)
        spend("move", machine.move_s * WORD, all_words)
    # Sums that are equal may differ by a rounding.
    network = max(now - case.compute_s - sum(own.values()), 0.0)
    return sent, {"compute": case.compute_s, "network": network, **own}


def _messages(case: Case) -> list[tuple[int, int]]:
    """Returns words and rows of a step's messages, as the optimizer cuts them."""
    device = torch.device(case.machine.device)
    tensors = [torch.empty(shape, dtype=case.dtype, device="meta") for shape in case.work.shapes]
    cut = messages([replace(Shape.of(tensor, 0), device=device) for tensor in tensors])
    return [(own.words, sum(words // row for _, _, words, row in own.spans)) for own in cut]
