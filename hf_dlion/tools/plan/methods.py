"""The methods, put together from the cost model: bytes per step and predicted step time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from hf_dlion.codec.layout import MessageLayout, shards_of
from hf_dlion.exchange import STRATEGIES
from hf_dlion.exchange.mean import average_wire_bytes
from hf_dlion.exchange.node import choose_node_exchange
from hf_dlion.options import Options
from hf_dlion.ranks.header import header_wire_bytes
from hf_dlion.step.plan import split_into_messages
from hf_dlion.tools.names import BF16, DLION, FP32, NONE, POWER, name_of, power_numel
from hf_dlion.tools.plan.cost import (
    FORWARD_SHARE,
    Cluster,
    Link,
    Shipment,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    arrivals,
    buckets,
    ready_times,
)
from hf_dlion.tools.plan.machine import Machine
from hf_dlion.tools.plan.model import Workload

BF16_NATIVE = "DDP bf16 gradients, AdamW"
PUBLIC = "public distributed-lion"
OVERLAPPED = f"{DLION}, overlap (bound)"
NODE_VOTES = name_of(1, local_group="node")
# Votes during backward read gradient and momentum, and the step reads both and writes the momentum
# (20 bytes per float32 element), where an encoding in the step reads and writes once (12).
OVERLAPPED_ENCODE = 20 / 12

ALL_REDUCES = (FP32, BF16, BF16_NATIVE)
PARTS = ("compute", "encode", "count", "wire", "apply", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one method costs per step.

    Attributes:
        name: The method.
        wire_bytes: Bytes that a rank sends.
        parts: Seconds by part; "wire" is what no work hides.
    """

    name: str
    wire_bytes: int
    parts: dict[str, float]

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that a prediction needs.

    Attributes:
        work: What is trained.
        cluster: Who takes part.
        link: Between the nodes.
        machine: Each rank's own work.
        compute_s: Forward and backward on one rank, without DDP.
        dtype: Of gradients.
        bits: Of a vote; `machine` must have been measured with these.
        sharded: Whether FSDP2 shares the model out among the ranks of each node.
        on_gpu: Whether a GPU encodes.
    """

    work: Workload
    cluster: Cluster
    link: Link
    machine: Machine
    compute_s: float
    dtype: torch.dtype = torch.float32
    bits: int = 1
    sharded: bool = False
    on_gpu: bool = False

    def work_s(self, ns: float) -> float:
        """Returns the seconds of work that takes `ns` per trainable element."""
        return 1e-9 * ns * self.work.trainable


def predict(case: Case) -> dict[str, Prediction]:
    """Returns a prediction, by name, for every method that the case allows.

    It depends on the gradients' dtype, FSDP and the ranks of a node.
    """
    several = case.cluster.ranks_per_node > 1 and not case.sharded
    case = of_parts(case) if case.sharded else case
    if case.dtype.itemsize == 2:
        reduced = [_full(case, BF16_NATIVE, case.dtype)]
    else:
        reduced = [_full(case, FP32, torch.float32), _full(case, BF16, torch.bfloat16)]
    # What takes whole gradients.
    whole = [] if case.sharded else [power_sgd(case), public_lion(case)]
    found = [
        no_communication(case),
        *reduced,
        *whole,
        distributed_lion(case),
        *([node_lion(case)] if several else []),
        overlapped_lion(case),
    ]
    return {prediction.name: prediction for prediction in found}


def of_parts(case: Case) -> Case:
    """Returns what the ranks that hold one part of the model are among themselves: one per node.

    They have a smaller model, and of each node's card the share of one rank, since all parts leave
    at the same time.
    """
    ranks = case.cluster.ranks_per_node
    parts = tuple(
        (-(-shape[0] // ranks), *shape[1:]) if shape else () for shape in case.work.shapes
    )
    return replace(
        case,
        work=replace(case.work, shapes=parts),
        cluster=Cluster(ranks=case.cluster.nodes),
        link=replace(case.link, bits_per_s=case.link.bits_per_s / ranks),
    )


def no_communication(case: Case) -> Prediction:
    """Returns the step of a DDP whose hook sends nothing, as `benchmarks/step_time.py` has it."""
    parts = {"compute": case.compute_s + _copies(case), "optimizer": _adamw(case)}
    return Prediction(name=NONE, wire_bytes=0, parts=parts)


def _full(case: Case, name: str, dtype: torch.dtype) -> Prediction:
    """Returns DDP's all-reduce, which begins with the first full bucket.

    Args:
        case: The case.
        name: Of the method.
        dtype: Of the gradients on the wire.
    """
    numels = case.work.numels
    groups = buckets(numels, case.dtype.itemsize)
    cast = case.work_s(case.machine.cast_ns) if dtype.itemsize != case.dtype.itemsize else 0.0
    forward = FORWARD_SHARE * case.compute_s
    # Of both, one half is done as gradients become ready, the other on what has arrived.
    half = (_copies(case) + cast) / 2
    backward = case.compute_s - forward + half
    ready = ready_times(numels, groups, forward, backward)
    sent = [
        average_wire_bytes(sum(numels[place] for place in group), case.cluster.ranks, dtype)
        for group in groups
    ]
    shipments = [
        Shipment(ready_s=at, up_s=all_reduce_s(size, case.cluster, case.link))
        for at, size in zip(ready, sent, strict=True)
    ]
    arrived = arrivals(shipments, restart_s=case.link.restart_s)[-1]
    exposed = max(arrived - forward - backward, 0.0)
    parts = {"compute": forward + backward + half, "wire": exposed, "optimizer": _adamw(case)}
    return Prediction(name=name, wire_bytes=sum(sent), parts=parts)


def power_sgd(case: Case) -> Prediction:
    """Returns PowerSGD in one bucket (several deadlock on gloo): nothing overlaps with backward.

    Three all-reduces follow one another: what is not compressed, and the two factors.
    """
    numel = sum(power_numel(shape) for shape in case.work.shapes)
    sent = average_wire_bytes(numel, case.cluster.ranks, case.dtype)
    parts = {
        "compute": case.compute_s + _copies(case),
        "encode": case.work_s(case.machine.power_ns),
        "wire": 3 * all_reduce_s(-(-sent // 3), case.cluster, case.link),
        "optimizer": _adamw(case),
    }
    return Prediction(name=POWER, wire_bytes=sent, parts=parts)


def public_lion(case: Case) -> Prediction:
    """Returns kyleliang919/distributed-lion-pytorch under no_sync.

    Eight bits per element, an all-gather for every tensor, which all ranks wait for.
    """
    ranks = case.cluster.ranks
    sizes = [(ranks - 1) * 8 * -(-numel // 8) for numel in case.work.numels]
    own = case.machine.public_ns + ranks * case.machine.public_vote_ns
    parts = {
        "compute": case.compute_s,
        "optimizer": case.work_s(own),
        "wire": sum(all_gather_s(size, case.cluster, case.link) for size in sizes),
    }
    return Prediction(name=PUBLIC, wire_bytes=sum(sizes), parts=parts)


def distributed_lion(case: Case) -> Prediction:
    """Returns DistributedLion in step mode: the header, then the messages.

    One message is encoded while another travels. DDP's buckets stay empty.
    """
    messages = _messages(case.work.shapes, case.cluster.ranks, case.bits, on_gpu=case.on_gpu)
    begin = case.compute_s + _header_s(case)
    per_element = 1e-9 * case.machine.encode_ns
    ready, at = [], begin
    for message in messages:
        at += per_element * message.numel
        ready.append(at)
    return _voted(case, DLION, messages, ready, counting_from_s=at, restart_s=case.link.restart_s)


def node_lion(case: Case) -> Prediction:
    """Returns DistributedLion with `local_group="node"`.

    Each rank of a node encodes and counts its share of every message, and sends that to the ranks
    with its place on other nodes. What goes inside a node, gradients first of all, is not counted.
    """
    ranks, per_node, nodes = case.cluster.ranks, case.cluster.ranks_per_node, case.cluster.nodes
    machine = replace(
        case.machine,
        encode_ns=case.machine.encode_ns / per_node,
        count_ns=case.machine.count_ns / per_node,
        count_vote_ns=case.machine.count_vote_ns / per_node,
    )
    # All places send at once, so each has its share of the card.
    shared = replace(case.link, bits_per_s=case.link.bits_per_s / per_node)
    between = replace(case, cluster=Cluster(ranks=nodes), link=shared, machine=machine)
    messages = _messages(case.work.shapes, nodes, case.bits, per_node=per_node, on_gpu=case.on_gpu)
    # DDP's buckets carry the gradients inside the node.
    now = begin = case.compute_s + _copies(case) + _header_s(case)
    ready = []
    for message in messages:
        now += 1e-9 * machine.encode_ns * message.numel
        ready.append(now)
    found = _voted(
        replace(between, compute_s=begin - _header_s(case)),
        NODE_VOTES, messages, ready, counting_from_s=now, restart_s=case.link.restart_s,
    )  # fmt: skip
    count = len(case.work.shapes)
    headers = header_wire_bytes(count, ranks) - header_wire_bytes(count, per_node)
    own = header_wire_bytes(count, nodes)  # What `_voted` has counted.
    return replace(found, wire_bytes=found.wire_bytes + headers - own)


def overlapped_lion(case: Case) -> Prediction:
    """Returns the bound of DistributedLion with `overlap=True`.

    A message travels as soon as backward has made its gradients, and costs backward nothing but
    the encoding. Only the header, and what is still on the wire when backward ends, is waited for.
    """
    # The last tensor's gradient is taken to be ready first.
    messages = _messages(
        case.work.shapes, case.cluster.ranks, case.bits, last_first=True, on_gpu=case.on_gpu
    )
    machine = replace(case.machine, encode_ns=OVERLAPPED_ENCODE * case.machine.encode_ns)
    case = replace(case, machine=machine)
    forward = FORWARD_SHARE * case.compute_s
    backward = case.compute_s - forward + case.work_s(case.machine.encode_ns)
    groups = [message.places for message in messages]
    ready = ready_times(case.work.numels, groups, forward, backward)
    return _voted(case, OVERLAPPED, messages, ready, after=_header_s(case))


def _voted(
    case: Case,
    name: str,
    messages: Sequence[_Message],
    ready: Sequence[float],
    *,
    counting_from_s: float = 0.0,
    restart_s: float = 0.0,
    after: float = 0.0,
) -> Prediction:
    """Returns the step that ends with the last verdict applied.

    Args:
        case: The case.
        name: Of the method.
        messages: What is sent.
        ready: When each message is encoded.
        counting_from_s: Before this the rank does not count.
        restart_s: What the first message loses on an idle link.
        after: Time of the header, where it follows the gradients.
    """
    ranks, machine = case.cluster.ranks, case.machine
    # Each message's collectives, and between them the count: of all elements, or of a rank's share.
    shipments = []
    for at, message in zip(ready, messages, strict=True):
        if STRATEGIES[message.exchange].rounds == 1:
            up, down = all_gather_s(message.up_bytes, case.cluster, case.link), 0.0
            count = machine.count_s(message.numel, ranks)
        else:
            up = all_to_all_s(message.up_bytes, case.cluster, case.link)
            down = all_gather_s(message.down_bytes, case.cluster, case.link)
            count = machine.count_s(message.numel / ranks, ranks)
        shipments.append(Shipment(ready_s=at, up_s=up, count_s=count, down_s=down))
    parts = {
        "compute": case.compute_s,
        "encode": case.work_s(machine.encode_ns),
        "count": sum(shipment.count_s for shipment in shipments),
        "apply": case.work_s(machine.apply_ns),
    }
    # Whatever overlaps with the wire, a rank does its own work one after another.
    now = sum(parts.values()) - parts["apply"] + after
    arrived = arrivals(shipments, counting_from_s, restart_s)
    for arrival, message in zip(arrived, messages, strict=True):
        now = max(now, arrival) + 1e-9 * machine.apply_ns * message.numel
    # Of sums that are equal one may be larger by a rounding.
    parts["wire"] = max(now - sum(parts.values()), 0.0)
    header = header_wire_bytes(len(case.work.shapes), ranks)
    sent = header + sum(message.up_bytes + message.down_bytes for message in messages)
    return Prediction(name=name, wire_bytes=sent, parts=parts)


def _header_s(case: Case) -> float:
    size = header_wire_bytes(len(case.work.shapes), case.cluster.ranks)
    return all_gather_s(size, case.cluster, case.link)


def _copies(case: Case) -> float:
    """Returns the time of DDP's copies of all gradients, into the buckets and out of them."""
    return 2 * case.work_s(case.machine.copy_ns)


def _adamw(case: Case) -> float:
    return case.work_s(case.machine.adamw_ns)


@dataclass(frozen=True)
class _Message:
    """Positions of its tensors, elements, exchange, and bytes; a gather sends nothing down."""

    places: tuple[int, ...]
    numel: int
    exchange: str
    up_bytes: int
    down_bytes: int


@lru_cache(maxsize=64)
def _messages(
    shapes: tuple[tuple[int, ...], ...],
    ranks: int,
    bits: int,
    *,
    last_first: bool = False,
    per_node: int = 1,
    on_gpu: bool = False,
) -> tuple[_Message, ...]:
    """Returns a step's messages as the package itself cuts them and counts their bytes.

    Args:
        shapes: Of the trainable tensors.
        ranks: Those that exchange votes; nodes, if their ranks vote together.
        bits: Of a vote.
        last_first: Whether the last tensor's gradient is ready first.
        per_node: Ranks that share out each message; the bytes are of the first rank's share, than
            which none is larger.
        on_gpu: Whether a GPU encodes.
    """
    tensors = [(place, torch.empty(shape, device="meta")) for place, shape in enumerate(shapes)]
    ordered = tensors[::-1] if last_first else tensors
    groups = split_into_messages(ordered, ranks * per_node, on_gpu)
    layouts = [MessageLayout.of([(i, tensor.shape) for i, tensor in group]) for group in groups]
    options = Options(bits=bits)
    exchange = choose_node_exchange(layouts, ranks, per_node, options)
    found = []
    for layout in layouts:
        own = layout.part(shards_of(layout, per_node)[0])
        up, down = STRATEGIES[exchange].wire_bytes(own, ranks, options)
        places = tuple(slot.index for slot in layout.slots)
        numel = sum(slot.numel for slot in layout.slots)
        found.append(_Message(places, numel, exchange, up, down))
    return tuple(found)
