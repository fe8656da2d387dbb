"""Which ranks share a node, and the process groups between and inside nodes.

    node 0: ranks a b      local groups {a b} {c d}: gradients are averaged, verdicts shared
    node 1: ranks c d      peers        {a c} {b d}: votes are exchanged, one shard per group

A node is what the rule calls a rank, and its gradient is the mean over its ranks.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_dlion.exchange import Wire, WireStats
from hf_dlion.exchange.wire import connect
from hf_dlion.ranks.agreement import Disagreement
from hf_dlion.ranks.group_counts import check_group_counts, group_counts

ENVIRONMENT = "LOCAL_WORLD_SIZE"

LocalGroup = str | int | dist.ProcessGroup | None


@dataclass(frozen=True)
class Undivided:
    """Ranks of which each votes for itself: there are no nodes.

    Attributes:
        voters: How many they are.
        voter: What one of them is called.
        members: Empty.
    """

    voters: int
    voter: ClassVar[str] = "rank"
    members: ClassVar[tuple[tuple[int, ...], ...]] = ()


@dataclass(frozen=True)
class Node:
    """This rank's node among all nodes.

    Attributes:
        voter: What each of them is called.
        members: The ranks of each node, as ranks of the optimizer's process group, ascending.
        index: This rank's node, the r of the rule.
        local: The ranks of this node.
        peers: The ranks with this one's place on all nodes.
    """

    voter: ClassVar[str] = "node"

    members: tuple[tuple[int, ...], ...]
    index: int
    local: Wire
    peers: Wire

    @property
    def voters(self) -> int:
        """The number of nodes."""
        return len(self.members)

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The ranks with the same place on all nodes, by place."""
        return tuple(zip(*self.members, strict=True))

    def start_average(self, gradient: Tensor) -> torch.futures.Future[Tensor]:
        """Starts the averaging of a gradient over the node's ranks, in place, in its own dtype.

        Bytes inside the node, per rank, as a ring: 2 * (L - 1) * ceil(numel / L) elements.

        Args:
            gradient: Contiguous, of the same shape and dtype on all of them.
        """
        # Divided first, because the sum of float16 gradients may overflow where the mean does not.
        gradient.div_(self.local.world_size)
        return self.local.start_all_reduce(gradient, "gradients").get_future()


def claim_of(choice: LocalGroup, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns what this rank says of its node: plain values that all ranks can compare.

    Args:
        choice: The option `local_group`, not None.
        environment: Where LOCAL_WORLD_SIZE and LOCAL_RANK are.

    Raises:
        ValueError: If this rank cannot tell.
    """
    if choice == "node":
        found = {name: environment.get(name) for name in (ENVIRONMENT, "LOCAL_RANK")}
        size, place = found[ENVIRONMENT], found["LOCAL_RANK"]
        if size is None:
            raise ValueError(
                f"local_group='node' reads {ENVIRONMENT}, which is not set: start the ranks with "
                f"torchrun or accelerate launch, or give local_group the number of ranks per node"
            )
        for name, text in found.items():
            if text is not None and not text.isdecimal():
                raise ValueError(f"{name}={text!r} must be a number: it tells the ranks of a node")
        return {"size": int(size), "place": None if place is None else int(place)}
    if isinstance(choice, int) and choice != dist.GroupMember.NON_GROUP_MEMBER:
        return {"size": choice, "place": None}
    if not isinstance(choice, dist.ProcessGroup) or dist.get_rank(choice) < 0:
        raise ValueError(
            "local_group is a process group of which this rank is not a member: give every rank "
            "the group of its own node"
        )
    return {"ranks": dist.get_process_group_ranks(choice)}


def members_of(
    claims: Sequence[Mapping[str, Any]], ranks: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each node from what all ranks claim.

    Args:
        claims: From `claim_of`, in the order of the process group.
        ranks: The process group's ranks as ranks of the whole job.

    Raises:
        Disagreement: If the claims do not fit together; all ranks find the same.
    """
    if any("ranks" in claim for claim in claims):
        return _members_of_groups(claims, ranks)
    sizes = [claim["size"] for claim in claims]
    count = len(claims)
    if len(set(sizes)) > 1:
        raise Disagreement(
            f"nodes must have equally many ranks, but {ENVIRONMENT} is {sizes} in rank order"
        )
    size = sizes[0]
    if size < 1 or count % size:
        raise Disagreement(
            f"{count} ranks cannot be divided into nodes of {size} ({ENVIRONMENT} or local_group): "
            f"start equally many ranks on every node, or pass local_group the ranks per node"
        )
    places = [claim["place"] for claim in claims]
    if any(place not in (None, rank % size) for rank, place in enumerate(places)):
        raise Disagreement(
            f"the ranks of a node must follow one another in the process group, {size} by {size}, "
            f"but LOCAL_RANK is {places} in rank order: pass the node's own process group as "
            f"local_group"
        )
    return tuple(tuple(range(first, first + size)) for first in range(0, count, size))


def _members_of_groups(
    claims: Sequence[Mapping[str, Any]], ranks: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    groups = [tuple(claim.get("ranks", ())) for claim in claims]
    nodes = list(dict.fromkeys(groups))
    told = f"by rank {groups} (ranks of the whole job)"
    if any(own not in group for own, group in zip(ranks, groups, strict=True)):
        raise Disagreement(f"local_group must hold the rank that passes it, got {told}")
    if sorted(rank for node in nodes for rank in node) != sorted(ranks):
        raise Disagreement(
            f"the local groups must share out the ranks {list(ranks)} of the process group, got "
            f"{told}"
        )
    if len({len(node) for node in nodes}) > 1:
        raise Disagreement(f"nodes must have equally many ranks, local_group is {told}")
    place = {rank: position for position, rank in enumerate(ranks)}
    return tuple(sorted(tuple(sorted(place[rank] for rank in node)) for node in nodes))


def find_node(
    choice: LocalGroup,
    wire: Wire,
    agree: Callable[[Exception | None], None],
    stats: WireStats,
    device: torch.device,
) -> Node | Undivided:
    """Returns this rank's node, unless every rank is one; all ranks must call this.

    Args:
        choice: The option `local_group`, not None; a process group is taken as it is.
        wire: The optimizer's process group; hears how many of its ranks are neighbours.
        agree: Raises on every rank together if one of them failed, or if options differ.
        stats: Receives the counts of the groups inside and between nodes.
        device: That of the parameters.

    Raises:
        Disagreement: On every rank, if the ranks cannot be divided into equal nodes, or torch
            cannot make their process groups.
    """
    before, claim, failure = stats.bytes_sent, None, None
    try:
        claim = claim_of(choice)
    except Exception as error:  # Whatever it is, the other ranks wait below.
        failure = error
    agree(failure)
    told = wire.gather_objects((claim, group_counts()))
    members = members_of([theirs for theirs, _ in told], wire.ranks)
    size = len(members[0])
    if size == 1:
        return Undivided(wire.world_size)
    index = next(number for number, own in enumerate(members) if wire.rank in own)
    places = tuple(zip(*members, strict=True))
    place = members[index].index(wire.rank)
    made = _made.setdefault(wire.group, {})
    given = isinstance(choice, dist.ProcessGroup) or members[index] in made
    # What exists does so on all ranks of a group, and each new one counts for every rank.
    fresh = (() if given else members) + (() if places[place] in made else places)
    check_group_counts([counts for _, counts in told], fresh)
    # First all local groups, then all peers: in one order on every rank, so none waits for
    # another one that waits for it.
    local = choice if isinstance(choice, dist.ProcessGroup) else _group(wire, members[index])
    peers = _group(wire, places[place])
    wire.found_neighbours(size - 1, stats.bytes_sent - before)
    return Node(
        members,
        index,
        connect(local, stats, device, neighbours=size - 1),
        connect(peers, stats, device),
    )


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def _group(wire: Wire, members: tuple[int, ...]) -> dist.ProcessGroup:
    """Returns the group of some ranks of a wire, made once: a group keeps sockets and threads."""
    made = _made.setdefault(wire.group, {})
    if members not in made:
        made[members] = wire.subgroup(members)
    return made[members]
