"""The process groups of an optimizer: all ranks, the voters, and the ranks of a node.

node 0: ranks a b      node    {a b} {c d}: gradients are averaged, verdicts shared
node 1: ranks c d      voters  {a c} {b d}: votes are exchanged
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hf_dlion.ranks.header import Disagreement, Kind, gather_headers
from hf_dlion.ranks.stats import WireStats
from hf_dlion.ranks.wire import Wire
from hf_dlion.user_warning import defer_warning

_SIZE, _PLACE = "LOCAL_WORLD_SIZE", "LOCAL_RANK"
SAME_IN_NODE = (
    "Change them the same way on all ranks of a node, for example with the same random seed"
)

# Groups created from a process group's ranks, reused because each has sockets and threads.
_created_groups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()
# The key of the gloo group of all ranks among them, which no group of members has.
_GLOO = ()
# Groups of which gloo failed on a rank; the same on all of them.
_without_gloo: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_INTERFACE = (
    "Set GLOO_SOCKET_IFNAME on every node to the interface that leads to the others, or start with "
    "hf-dlion run"
)


class Topology:
    """Collectives of all ranks, of the voters, and of this rank's node.

    Every rank votes until `form` was called.

    Attributes:
        everyone: All ranks, which exchange headers; by gloo, also if the group has NCCL only.
        voters: The ranks that exchange votes with this one.
        node: The ranks of this rank's node; None if every rank votes.
        local_size: Ranks per node; 1 if every rank votes.
        voter_of_rank: Number of each rank's voter, which is a rank, a node, or a replica.
        voter: Number of this rank's voter.
        same_parts: Groups of ranks that hold the same parts of the parameters.
        is_formed: Whether `form` was called.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        local_group: Literal["node"] | int | None = None,
        stats: WireStats | None = None,
        *,
        replicate: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Doesn't communicate. torch.distributed must be initialized.

        `local_group` is the number of consecutive ranks that form a node and vote as one, and
        "node" reads LOCAL_WORLD_SIZE. `replicate` is the group of the ranks that hold the same
        FSDP2 shards as this rank, which are its voters; not both. By default, every rank votes. For
        `device` see `Wire`.
        """
        group = process_group or dist.group.WORLD
        assert group is not None, "torch.distributed is initialized"
        self._stats, self._device = stats or WireStats(), device
        self._local_group, self._replicate = local_group, replicate
        self.is_formed = False
        self.everyone = self.voters = Wire(group, self._stats, device=device)
        self.node: Wire | None = None
        self.local_size = 1
        self.voter_of_rank = list(range(self.everyone.world_size))
        self.voter = self.everyone.rank
        self.same_parts = [list(range(self.everyone.world_size))]

    def form(self) -> None:
        """Creates the groups of nodes, or gathers the ranks of each replica, at the first call.

        All ranks must call this together. Bytes per rank: 64 * (N - 1) with nodes or replicas, and
        with NCCL as many, and a `gather_objects`, for the gloo group of headers.

        Raises:
            Disagreement: On every rank, if the ranks can't form groups.
        """
        if not self.is_formed:
            if self.everyone.needs_gloo and self.everyone.group not in _without_gloo:
                self._form_gloo()
            if self._replicate is not None:
                self._form_replicas(self._replicate)
            elif self._local_group is not None:
                self._form_nodes(self._local_group)
            self.voter = self.voter_of_rank[self.everyone.rank]
            self.is_formed = True

    def unequal_node(self, values: Sequence[int]) -> list[int]:
        """Returns the ranks of the first node whose ranks have different values; [] if none has.

        `values` has one of each rank.
        """
        for voter in range(self.voters.world_size if self.node is not None else 0):
            ranks = [rank for rank, votes_as in enumerate(self.voter_of_rank) if votes_as == voter]
            if len({values[rank] for rank in ranks}) > 1:
                return ranks
        return []

    def _form_gloo(self) -> None:
        """Creates the gloo group that headers take, once per group; if gloo fails, they don't."""
        everyone = self.everyone
        groups = _created_groups.setdefault(everyone.group, {})
        failure, group = "", groups.get(_GLOO)
        count = len(distributed_c10d._world.pg_names)
        _, counts, *_ = gather_headers(everyone, Kind.GLOO, [count, 0])
        if everyone.global_ranks != sorted(everyone.global_ranks):
            failure = "the ranks of the process group aren't in ascending order"
        elif len(set(counts)) > 1:
            failure = f"ranks are members of different numbers of process groups, {counts}"
        elif group not in distributed_c10d._world.pg_map:  # None, or the user has destroyed it.
            try:
                group = groups[_GLOO] = everyone.new_gloo_group()
            except Exception as error:  # The other ranks wait for this one.
                why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                failure = f"{why}. {_INTERFACE}"
        failures = [text for text in everyone.gather_objects(failure) if text]
        if group is not None and not failures:
            everyone.use_gloo(group)
            return
        _without_gloo.add(everyone.group)
        if (group := groups.pop(_GLOO, None)) in distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)  # So all ranks have equally many groups.
        if everyone.rank == 0:
            defer_warning(
                f"headers take {dist.get_backend(everyone.group)}, which may hang where ranks "
                f"differ, and names no lost rank, because gloo can't be used: {failures[0]}"
            )

    def _form_replicas(self, group: dist.ProcessGroup) -> None:
        voters = Wire(group, self._stats, device=self._device)
        # Ranks that hold the same parts send the same first rank.
        first, size = min(voters.global_ranks), voters.world_size
        _, firsts, sizes, *_ = gather_headers(self.everyone, Kind.REPLICATE, [first, size])
        same_parts = [
            [rank for rank, other in enumerate(firsts) if other == first]
            for first in dict.fromkeys(firsts)
        ]
        if len(set(sizes)) > 1 or any(len(ranks) != sizes[0] for ranks in same_parts):
            raise Disagreement(
                f"replicate groups must be as large on every rank and share no rank, but their "
                f"sizes are {sizes} and their first ranks {firsts} in rank order: pass each rank's "
                f"own group of one device mesh that contains all ranks"
            )
        self.voters, self.same_parts = voters, same_parts
        for ranks in same_parts:
            for number, rank in enumerate(ranks):
                self.voter_of_rank[rank] = number

    def _form_nodes(self, local_group: Literal["node"] | int) -> None:
        everyone = self.everyone
        size = 0
        place = 0
        failure = None
        try:
            size, place = _place_in_node(local_group, os.environ)
        except ValueError as error:  # The other ranks wait for this one.
            failure = error
        # torch derives a new group's name from the number of groups that its members are in.
        group_count = len(distributed_c10d._world.pg_names)
        _, sizes, places, group_counts, *_ = gather_headers(
            everyone, Kind.NODES, [size, place, group_count], failure=failure, what="local_group"
        )
        size = _checked_size(sizes, places, group_counts)
        if size == 1:
            return
        # First nodes, then voters: one order on every rank, so no two ranks wait for each other.
        first = everyone.rank - everyone.rank % size
        node = _group(everyone, range(first, first + size))
        voters = _group(everyone, range(everyone.rank % size, everyone.world_size, size))
        everyone.neighbors = size - 1
        self.node = Wire(node, self._stats, in_node=True, device=self._device)
        self.voters = Wire(voters, self._stats, device=self._device)
        self.local_size = size
        self.voter_of_rank = [rank // size for rank in self.voter_of_rank]


def _place_in_node(
    local_group: Literal["node"] | int, environment: Mapping[str, str]
) -> tuple[int, int]:
    """Returns the size of this rank's node, and its place in it, -1 if it isn't known."""
    if local_group != "node":
        return local_group, -1
    size, place = environment.get(_SIZE), environment.get(_PLACE)
    for name, text in ((_SIZE, size), (_PLACE, place)):
        if text is not None and not text.isdecimal():
            raise ValueError(f"{name} must be a number (got {text!r})")
    if size is None:
        raise ValueError(
            f"local_group='node' reads {_SIZE}, which is not set: start the ranks with torchrun or "
            f"accelerate launch, or set local_group to the number of ranks per node"
        )
    return int(size), -1 if place is None else int(place)


def _checked_size(sizes: Sequence[int], places: Sequence[int], group_counts: Sequence[int]) -> int:
    """Returns the number of ranks per node, or raises Disagreement on every rank.

    Sizes and places are those of `_place_in_node`. `group_counts` are numbers of process groups.
    """
    size = sizes[0]
    if len(set(sizes)) > 1:
        raise Disagreement(
            f"nodes must have the same number of ranks (local_group or {_SIZE}), got {sizes} in "
            f"rank order"
        )
    if size < 1 or len(sizes) % size:
        raise Disagreement(
            f"{len(sizes)} ranks cannot be divided into nodes of {size} ranks (local_group or "
            f"{_SIZE}): start the same number of ranks on every node"
        )
    if any(place not in (-1, rank % size) for rank, place in enumerate(places)):
        raise Disagreement(
            f"the ranks of a node must be consecutive, {size} by {size}, but {_PLACE} is {places} "
            f"in rank order: number the ranks node by node, as torchrun does"
        )
    if len(set(group_counts)) > 1:
        raise Disagreement(
            f"ranks are members of different numbers of process groups, {group_counts} in rank "
            f"order, so torch cannot create groups of nodes: take the first step before you create "
            f"other groups, or make every rank a member of the same number of groups"
        )
    return size


def _group(everyone: Wire, members: Sequence[int]) -> dist.ProcessGroup:
    """Returns the group of some of everyone's ranks, created once; its members must call this."""
    groups, key = _created_groups.setdefault(everyone.group, {}), tuple(members)
    # The user may have destroyed the group.
    if groups.get(key) not in distributed_c10d._world.pg_map:
        groups[key] = everyone.new_group(key)
    return groups[key]
