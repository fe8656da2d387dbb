"""Which ranks meet where: everyone for headers, voters for votes, a node for what is inside one.

every rank votes     voters = everyone
local_group=2        voters = ranks with the same place       node = ranks of one machine
                     node 0: a b     voters: a c, b d         node: a b, c d
                     node 1: c d
FSDP2                voters = ranks that hold the same shards (the replicate group)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from hf_dlion.core.exchange.wire import Wire, WireStats, naming_losses, timeout_of
from hf_dlion.core.ranks.agreement import Disagreement


@dataclass(frozen=True)
class Topology:
    """The ranks' groups, from this rank's point of view.

    Attributes:
        everyone: All ranks of the optimizer.
        voters: The ranks with which this rank exchanges votes.
        node: The ranks that cast one vote together, or None.
        voter_of_rank: By rank of `everyone`, the number of its voter.
        place_of_rank: By rank of `everyone`, a number that ranks holding the same values share.
    """

    everyone: Wire
    voters: Wire
    node: Wire | None
    voter_of_rank: list[int]
    place_of_rank: list[int]


def topology(
    group: dist.ProcessGroup,
    local_group: Literal["node"] | int | None,
    replicate: dist.ProcessGroup | None,
    stats: WireStats,
) -> Topology:
    """Returns the groups; every rank must call this. Bytes per rank: 24 (N - 1).

    Args:
        group: All ranks.
        local_group: Ranks per node, "node" for LOCAL_WORLD_SIZE, None if every rank votes.
        replicate: The ranks that hold the same shards, or None.
        stats: Receives the counts.

    Raises:
        Disagreement: On every rank, if ranks ask for nodes of different sizes, or nodes of that
            size can't be filled.
    """
    everyone = Wire(group, stats)
    size = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if local_group == "node" else local_group or 1
    voter, place = everyone.rank // size, 0
    if replicate is not None:
        voter, place = dist.get_rank(replicate), min(dist.get_process_group_ranks(replicate))
    sizes, voters, places = everyone.gather_words([size, voter, place], "nodes").t().tolist()
    if len(set(sizes)) > 1:
        raise Disagreement(
            f"ranks form nodes of different sizes, {sizes} in rank order: pass the same "
            f"local_group on every rank, and start as many processes on each machine"
        )
    if everyone.world_size % size:
        raise Disagreement(
            f"{everyone.world_size} ranks don't fill nodes of {size} (local_group="
            f"{local_group!r}): start as many processes on each machine"
        )
    if replicate is not None:
        return Topology(everyone, Wire(replicate, stats), None, voters, places)
    if size == 1:
        return Topology(everyone, everyone, None, voters, places)
    ranks = dist.get_process_group_ranks(group)
    first = everyone.rank // size * size
    node = _subgroup(group, ranks[first : first + size])
    peers = _subgroup(group, ranks[everyone.rank % size :: size])
    return Topology(everyone, Wire(peers, stats), Wire(node, stats, in_node=True), voters, places)


def _subgroup(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """Returns a new process group of some ranks, which all of them call, and no others."""
    with naming_losses("a process group", group):
        made: dist.ProcessGroup = dist.new_group(
            ranks,
            backend=str(dist.get_backend_config(group)),
            timeout=timeout_of(group),
            use_local_synchronization=True,
        )
    return made
