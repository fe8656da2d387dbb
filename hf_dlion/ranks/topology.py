"""Which ranks vote, which form a node, and the process groups between and inside nodes.

node 0: ranks a b      node    {a b} {c d}: gradients are averaged, verdicts shared
node 1: ranks c d      voters  {a c} {b d}: votes are exchanged
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hf_dlion.exchange.wire import Wire, WireStats
from hf_dlion.ranks.agreement import Disagreement, check_kinds, raise_together
from hf_dlion.ranks.header import Header, Kind

_SIZE, _PLACE = "LOCAL_WORLD_SIZE", "LOCAL_RANK"

# Groups that were made of a process group's ranks: each has sockets and threads, so it is reused.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


class Topology:
    """The ranks of an optimizer, as collectives of all, of the voters, and of this rank's node.

    `form` communicates: it makes the process groups of nodes, or gathers who is in which replica.
    All ranks must call it together, after a meeting of `everyone` has found that their options are
    equal. The first use of `voters`, `node`, or `alike` also does it.

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
        """Communicates nothing.

        Args:
            process_group: All ranks (default: the default group).
            local_group: Ranks per node, which vote as one; "node" reads LOCAL_WORLD_SIZE. The
                ranks of a node are consecutive (default: every rank votes).
            stats: Receives the counts.
            replicate: The ranks that hold the same part of FSDP2's parameters as this rank; they
                vote.
            device: As for `Wire`.

        Raises:
            RuntimeError: If torch.distributed is not initialized.
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
        self._alike: list[list[int]] | None = None

    def form(self) -> None:
        """Makes or gathers the groups, at the first call; all ranks must call this together."""
        _ = self.voters

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
        """The ranks of this rank's node, None if every rank votes."""
        self.form()
        return self._node

    @functools.cached_property
    def alike(self) -> list[list[int]] | None:
        """Groups of ranks that hold the same parts, None if all ranks hold whole parameters."""
        if self._replicate is not None:
            self.form()
        return self._alike

    @functools.cached_property
    def voter_of_rank(self) -> list[int] | None:
        """Number of each rank's voter, its node or its replica; None if every rank votes."""
        self.form()
        if self.alike is not None:
            number = {rank: own for column in self.alike for own, rank in enumerate(column)}
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
        """Finds which ranks hold the same parts. Bytes per rank: 64 * (N - 1)."""
        voters = Wire(group, self._stats, device=self._device)
        # Ranks with the same parts name the same first rank. The words are a header's, so a rank
        # that was given no `replicate` and sends its header is found.
        header = Header(
            kind=Kind.REPLICATE, optimizer=min(voters.ranks), step=voters.world_size,
            finite=True, failed=False,
        )  # fmt: skip
        table = self.everyone.gather_words(header.packed(), "the replicas").tolist()
        headers = [Header.unpacked(words) for words in table]
        check_kinds([header.kind for header in headers])
        firsts, sizes = [h.optimizer for h in headers], [h.step for h in headers]
        columns = [[r for r, own in enumerate(firsts) if own == f] for f in dict.fromkeys(firsts)]
        if len(set(sizes)) > 1 or any(len(column) != sizes[0] for column in columns):
            raise Disagreement(
                f"replicate groups must be as large on every rank and share no rank, but their "
                f"sizes are {sizes} and their first ranks {firsts} in rank order: pass each rank's "
                f"own group of one device mesh that holds all ranks"
            )
        self._alike = columns
        return voters

    def _with_nodes(self, local_group: Literal["node"] | int) -> Wire:
        """Makes the groups of nodes and of voters. Bytes per rank: two `gather_objects`."""
        everyone = self.everyone
        claim, failure = {}, None
        try:
            claim = _claim(local_group, os.environ)
        except ValueError as error:  # The other ranks wait for a claim.
            failure = error
        raise_together(failure, everyone, "local_group")
        # torch names a new group after the number of groups that its members are in.
        groups = len(distributed_c10d._world.pg_names)
        claims = everyone.gather_objects({**claim, "groups": groups})
        size = _checked_size(claims)
        if size == 1:
            return everyone
        first = everyone.rank - everyone.rank % size
        members = range(first, first + size)
        peers = range(everyone.rank % size, everyone.world_size, size)
        self.local_size = size
        everyone.neighbors = size - 1
        # All nodes, then all voters: one order on every rank, so no two wait for each other.
        node = _group(everyone, members)
        self._node = Wire(node, self._stats, in_node=True, device=self._device)
        return Wire(_group(everyone, peers), self._stats, device=self._device)


def _claim(local_group: Literal["node"] | int, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns what this rank says about its node.

    Raises:
        ValueError: If this rank cannot tell.
    """
    if local_group != "node":
        return {"size": local_group, "place": None}
    found = {name: environment.get(name) for name in (_SIZE, _PLACE)}
    for name, text in found.items():
        if text is not None and not text.isdecimal():
            raise ValueError(f"{name} must be a number (got {text!r})")
    size, place = found[_SIZE], found[_PLACE]
    if size is None:
        raise ValueError(
            f"local_group='node' reads {_SIZE}, which is not set: start the ranks with torchrun or "
            f"accelerate launch, or set local_group to the number of ranks per node"
        )
    return {"size": int(size), "place": None if place is None else int(place)}


def _checked_size(claims: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of ranks per node.

    Raises:
        Disagreement: The same on every rank, if the claims don't fit together.
    """
    sizes, places = ([claim[key] for claim in claims] for key in ("size", "place"))
    size: int = sizes[0]
    if len(set(sizes)) > 1:
        raise Disagreement(
            f"nodes must have the same number of ranks (local_group or {_SIZE}), got {sizes} in "
            f"rank order"
        )
    if size < 1 or len(claims) % size:
        raise Disagreement(
            f"{len(claims)} ranks cannot be divided into nodes of {size} ranks (local_group or "
            f"{_SIZE}): start the same number of ranks on every node"
        )
    if any(place not in (None, rank % size) for rank, place in enumerate(places)):
        raise Disagreement(
            f"the ranks of a node must be consecutive, {size} by {size}, but {_PLACE} is {places} "
            f"in rank order: number the ranks node by node, as torchrun does"
        )
    counts = [claim["groups"] for claim in claims]
    if len(set(counts)) > 1:
        raise Disagreement(
            f"ranks are members of different numbers of process groups, {counts} in rank order, "
            f"and torch then cannot make groups of nodes: take the first step before you make "
            f"other groups, or let every rank be a member of the same number of groups"
        )
    return size


def _group(everyone: Wire, members: Sequence[int]) -> dist.ProcessGroup:
    """Returns the group of some of everyone's ranks, made once; its members must call this."""
    made, key = _made.setdefault(everyone.group, {}), tuple(members)
    # The user may have destroyed all groups since then.
    if made.get(key) not in distributed_c10d._world.pg_map:
        made[key] = everyone.new_group(key)
    return made[key]
