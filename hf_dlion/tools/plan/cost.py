"""The cost model: pure functions of bytes, elements and constants. All times are in seconds.

A collective costs `rounds * latency + bytes / rate`, where the bytes are those that leave the
busiest network card (the alpha-beta model of Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005, whose rounds these are). Work on a rank costs
a constant per element, measured by `machine`. The wire carries one collective at a time, in the
order in which they are handed to it, and runs beside the rank's own work at no cost to it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

# Of an Ethernet frame of 1538 bytes on the line, 1448 are TCP's payload. Acknowledgements and the
# congestion control take more or less besides, which only a measurement tells.
TCP_EFFICIENCY = 1448 / 1538
# Backward computes two products for every one of forward (Kaplan et al., arXiv 2001.08361, 2.1).
FORWARD_SHARE = 1 / 3
# torch's DDP: the first bucket closes at 1 MiB, the others at `bucket_cap_mb`.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins a node to the others.

    Attributes:
        bits_per_s: Nominal rate of a node's network card, each way.
        latency_s: Time from one rank to another of a message without size, host software included.
        efficiency: Payload bytes per byte of the nominal rate.
        restart_s: What a long transfer that begins on an idle link loses, once: TCP's slow start,
            and packets that are lost where a queue overflows.
        nccl: Whether the collectives are NCCL's: its all-reduces also go through trees, where rings
            have many rounds.
    """

    bits_per_s: float
    latency_s: float
    efficiency: float = TCP_EFFICIENCY
    restart_s: float = 0.0
    nccl: bool = False

    def seconds(self, wire_bytes: float, rounds: int) -> float:
        """Returns the time of a collective.

        Args:
            wire_bytes: Bytes that leave the busiest network card.
            rounds: Messages that wait for one another.
        """
        if not wire_bytes:
            return 0.0
        return rounds * self.latency_s + 8 * wire_bytes / (self.bits_per_s * self.efficiency)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Who takes part.

    Attributes:
        ranks: Number of ranks.
        ranks_per_node: Ranks that share a network card; neighbours in rank order.

    Raises:
        ValueError: If all ranks are on one node, or the last node is not full.
    """

    ranks: int
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if self.ranks_per_node < 1 or self.ranks <= self.ranks_per_node:
            raise ValueError(
                f"{self.ranks} ranks with {self.ranks_per_node} per node are not on two nodes: "
                f"nothing would cross the link; give more --ranks or fewer --ranks-per-node"
            )
        if self.ranks % self.ranks_per_node:
            raise ValueError(
                f"{self.ranks} ranks do not fill nodes of {self.ranks_per_node}: give a multiple"
            )

    @property
    def nodes(self) -> int:
        """Number of network cards."""
        return self.ranks // self.ranks_per_node


def all_reduce_rounds(ranks: int, tree: bool) -> int:
    """Returns the rounds of an all-reduce: 2 (N - 1) of a ring, or 2 log2(N) of trees if fewer.

    Two trees, each for half of the data, send as many bytes as a ring (Sanders, Speck and Traeff,
    2009).
    """
    ring = 2 * (ranks - 1)
    return min(ring, 2 * math.ceil(math.log2(ranks))) if tree else ring


# The times of three collectives, in which every rank sends `rank_bytes`.


def all_reduce_s(rank_bytes: int, cluster: Cluster, link: Link) -> float:
    """Returns the time of an all-reduce; a ring of all ranks crosses each card once."""
    return link.seconds(rank_bytes, all_reduce_rounds(cluster.ranks, link.nccl))


def all_gather_s(rank_bytes: int, cluster: Cluster, link: Link) -> float:
    """Returns the time of an all-gather: a ring, as in gloo and NCCL, crosses each card once."""
    return link.seconds(rank_bytes, cluster.ranks - 1)


def all_to_all_s(rank_bytes: int, cluster: Cluster, link: Link) -> float:
    """Returns the time of an all-to-all: N - 1 rounds of pairs.

    Every rank of a node sends through the node's card whatever is for other nodes.
    """
    outside = (cluster.ranks - cluster.ranks_per_node) / (cluster.ranks - 1)
    return link.seconds(rank_bytes * outside * cluster.ranks_per_node, cluster.ranks - 1)


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """What goes over the wire together: a bucket of gradients, or a message of votes.

    Attributes:
        ready_s: When the rank hands it over.
        up_s: Time of its first collective.
        count_s: What the rank then computes, one shipment after another.
        down_s: Time of the second collective, or 0 if there is none.
    """

    ready_s: float
    up_s: float
    count_s: float = 0.0
    down_s: float = 0.0


def arrivals(
    shipments: Sequence[Shipment], counting_from_s: float = 0.0, restart_s: float = 0.0
) -> list[float]:
    """Returns when each shipment is complete.

        rank   encode 0 | encode 1 |         count 0 | count 1 |
        wire              up 0 ---- up 1 ----         down 0 -- down 1 --

    Args:
        shipments: In the order in which they become ready.
        counting_from_s: Before this the rank does not count.
        restart_s: Added to the first transfer (`Link.restart_s`).
    """
    done = [0.0] * len(shipments)
    waiting = [(item.ready_s, 0, place) for place, item in enumerate(shipments)]
    heapq.heapify(waiting)
    wire_free, counter_free = shipments[0].ready_s + restart_s, counting_from_s
    while waiting:
        # Whatever was handed over first has the wire, votes before verdicts.
        ready, second, place = heapq.heappop(waiting)
        item = shipments[place]
        wire_free = max(wire_free, ready) + (item.down_s if second else item.up_s)
        done[place] = wire_free
        if item.count_s and not second:
            done[place] = counter_free = max(counter_free, wire_free) + item.count_s
        if item.down_s and not second:
            heapq.heappush(waiting, (done[place], 1, place))
    return done


def buckets(numels: Sequence[int], element_bytes: int) -> list[list[int]]:
    """Returns the positions of the tensors in each of DDP's buckets, the last tensor first.

    A bucket closes with the tensor that makes it reach its size.

    Args:
        numels: Elements of the trainable tensors, in the order of their registration.
        element_bytes: Bytes per element of a gradient.
    """
    found: list[list[int]] = [[]]
    size, limit = 0, FIRST_BUCKET_BYTES
    for place in reversed(range(len(numels))):
        if size >= limit:
            found.append([])
            size, limit = 0, BUCKET_BYTES
        found[-1].append(place)
        size += numels[place] * element_bytes
    return found


def ready_times(
    numels: Sequence[int], groups: Sequence[Sequence[int]], begin_s: float, backward_s: float
) -> list[float]:
    """Returns when backward has finished each group of tensors.

    Backward spends as long on every element, from the last tensor to the first. So the embedding,
    which is registered first, is ready when backward ends, tied or not.

    Args:
        numels: Elements of the trainable tensors, in the order of their registration.
        groups: Positions of tensors, the last tensor first (`buckets`).
        begin_s: When backward begins.
        backward_s: How long it takes.
    """
    total = sum(numels)
    done, times = 0, []
    for group in groups:
        done += sum(numels[place] for place in group)
        times.append(begin_s + backward_s * done / total)
    return times
