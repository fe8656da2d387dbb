"""The process groups of an optimizer: all ranks, the voters, and the ranks of a node.

node 0: ranks a b      node    {a b} {c d}: gradients are averaged, verdicts shared
node 1: ranks c d      voters  {a c} {b d}: votes are exchanged
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hf_dlion.exchange.wire import Wire, WireStats
from hf_dlion.ranks.failures import Disagreement, check_kinds, raise_together
from hf_dlion.ranks.header import FAILED, FINITE, WIRE_VERSION, Header, Kind

_SIZE, _PLACE = "LOCAL_WORLD_SIZE", "LOCAL_RANK"

# Groups created from a process group's ranks, reused because each has sockets and threads.
_created_groups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()


class Topology:
    """Collectives of all ranks, of the voters, and of this rank's node.

    `form` communicates: it creates the process groups of nodes, or gathers the ranks of each
    replica. All ranks must call it together, after a meeting of `everyone` has verified that their
    options are equal. The first use of `voters`, `node`, or `same_parts` calls it.

    Attributes:
        everyone: All ranks, which exchange headers.
        local_size: Ranks per node; 1 if every rank votes.
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
        """Doesn't communicate.

        `local_group` is the number of consecutive ranks that form a node and vote as one, and
        "node" reads LOCAL_WORLD_SIZE. `replicate` is the group of the ranks that hold the same
        FSDP2 shards as this rank, which are its voters. By default, every rank votes. For `device`
        see `Wire`.

        Raises:
            RuntimeError: If torch.distributed isn't initialized.
            ValueError: If both `local_group` and `replicate` are given.
        """
        group = process_group or dist.group.WORLD
        if group is None:
            raise RuntimeError("torch.distributed is not initialized: call init_process_group()")
        if local_group is not None and replicate is not None:
            raise ValueError("local_group cannot be combined with FSDP2's replicas")
        self._stats, self._device = stats or WireStats(), device
        self.everyone = Wire(group, self._stats, device=device)
        self.local_size = 1
        self._local_group = local_group
        self._replicate = replicate
        self._node: Wire | None = None
        self._same_parts: list[list[int]] | None = None

    def form(self) -> None:
        """Creates or gathers the groups at the first call; all ranks must call this together."""
        _ = self.voters

    @property
    def is_formed(self) -> bool:
        """Whether the groups exist, on this rank and so on all."""
        return "voters" in vars(self)

    @functools.cached_property
    def voters(self) -> Wire:
        """The ranks that exchange votes with this one; `voters.rank` is the voter's number."""
        if self._replicate is not None:
            return self._with_replicas(self._replicate)
        if self._local_group is not None:
            return self._with_nodes(self._local_group)
        return self.everyone

    @functools.cached_property
    def node(self) -> Wire | None:
        """The ranks of this rank's node; None if every rank votes."""
        self.form()
        return self._node

    @functools.cached_property
    def same_parts(self) -> list[list[int]] | None:
        """Groups of ranks that hold the same parts; None if all ranks hold complete parameters."""
        if self._replicate is not None:
            self.form()
        return self._same_parts

    @functools.cached_property
    def voter_of_rank(self) -> list[int] | None:
        """Number of each rank's voter, its node or its replica; None if every rank votes."""
        self.form()
        if self.same_parts is not None:
            number = {rank: k for ranks in self.same_parts for k, rank in enumerate(ranks)}
            return [number[rank] for rank in range(self.everyone.world_size)]
        if self.local_size == 1:
            return None
        return [rank // self.local_size for rank in range(self.everyone.world_size)]

    @functools.cached_property
    def voter(self) -> int:
        """Number of this rank's voter."""
        rank = self.everyone.rank
        return rank if self.voter_of_rank is None else self.voter_of_rank[rank]

    def _with_replicas(self, group: dist.ProcessGroup) -> Wire:
        """Gathers which ranks hold the same parts. Bytes per rank: 64 * (N - 1)."""
        voters = Wire(group, self._stats, device=self._device)
        # Ranks that hold the same parts send the same first rank. This is a header, so that it
        # matches the header of a rank without `replicate`, and `check_kinds` finds that rank.
        first, size = min(voters.ranks), voters.world_size
        header = Header(WIRE_VERSION, Kind.REPLICATE, optimizer=first, step=size, flags=FINITE)
        table = self.everyone.gather_words(header, "the replicas").tolist()
        headers = [Header(*words) for words in table]
        check_kinds([header.kind for header in headers])
        firsts, sizes = [h.optimizer for h in headers], [h.step for h in headers]
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
        self._same_parts = same_parts
        return voters

    def _with_nodes(self, local_group: Literal["node"] | int) -> Wire:
        """Creates the groups of nodes and of voters. Bytes per rank: 64 * (N - 1)."""
        everyone = self.everyone
        size, place, failure = 0, 0, None
        try:
            size, place = _place_in_node(local_group, os.environ)
        except ValueError as error:  # The other ranks wait for this one.
            failure = error
        # A header, as in `_with_replicas`.
        header = Header(
            WIRE_VERSION,
            Kind.NODES,
            optimizer=size,
            step=place,
            flags=FINITE if failure is None else FAILED,
            # torch derives a new group's name from the number of groups that its members are in.
            options=len(distributed_c10d._world.pg_names),
        )
        table = everyone.gather_words(header, "the nodes").tolist()
        headers = [Header(*words) for words in table]
        check_kinds([header.kind for header in headers])
        if any(header.failed for header in headers):
            raise_together(failure, everyone, "local_group")
        size = _checked_size(headers)
        if size == 1:
            return everyone
        first = everyone.rank - everyone.rank % size
        members = range(first, first + size)
        peers = range(everyone.rank % size, everyone.world_size, size)
        self.local_size = size
        everyone.neighbors = size - 1
        # First nodes, then voters: one order on every rank, so no two ranks wait for each other.
        node = _group(everyone, members)
        self._node = Wire(node, self._stats, in_node=True, device=self._device)
        return Wire(_group(everyone, peers), self._stats, device=self._device)


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


def _checked_size(headers: Sequence[Header]) -> int:
    """Returns the number of ranks per node, or raises Disagreement on every rank.

    The headers have size and place of `_place_in_node` and the number of process groups as
    `optimizer`, `step`, and `options`.
    """
    sizes, places = [header.optimizer for header in headers], [header.step for header in headers]
    size = sizes[0]
    if len(set(sizes)) > 1:
        raise Disagreement(
            f"nodes must have the same number of ranks (local_group or {_SIZE}), got {sizes} in "
            f"rank order"
        )
    if size < 1 or len(headers) % size:
        raise Disagreement(
            f"{len(headers)} ranks cannot be divided into nodes of {size} ranks (local_group or "
            f"{_SIZE}): start the same number of ranks on every node"
        )
    if any(place not in (-1, rank % size) for rank, place in enumerate(places)):
        raise Disagreement(
            f"the ranks of a node must be consecutive, {size} by {size}, but {_PLACE} is {places} "
            f"in rank order: number the ranks node by node, as torchrun does"
        )
    counts = [header.options for header in headers]
    if len(set(counts)) > 1:
        raise Disagreement(
            f"ranks are members of different numbers of process groups, {counts} in rank order, "
            f"so torch cannot create groups of nodes: take the first step before you create other "
            f"groups, or make every rank a member of the same number of groups"
        )
    return size


def _group(everyone: Wire, members: Sequence[int]) -> dist.ProcessGroup:
    """Returns the group of some of everyone's ranks, created once; its members must call this."""
    groups, key = _created_groups.setdefault(everyone.group, {}), tuple(members)
    # The user may have destroyed the group.
    if groups.get(key) not in distributed_c10d._world.pg_map:
        groups[key] = everyone.new_group(key)
    return groups[key]
