"""Replicas whose ranks share out the parameters, as FSDP2 does, and who votes with whom.

    replica 0: ranks a b      shard groups {a b} {c d}: FSDP gathers parameters, reduces gradients
    replica 1: ranks c d      voting groups {a c} {b d}: votes on the part that both hold

A replica is what the rule calls a rank, and its gradient is the mean over its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hf_dlion.exchange import Wire, WireStats
from hf_dlion.exchange.wire import RankGroup, connect, default_group
from hf_dlion.options import Options
from hf_dlion.options.groups import Groups, flat_params
from hf_dlion.options.parts import TWO_LINES, check_placement, is_sharded, whole_of
from hf_dlion.ranks.agreement import Disagreement
from hf_dlion.ranks.node import Node


class Replica(Node):
    """This rank's replica among all replicas: a node whose ranks hold parts of the parameters."""

    voter = "replica"


def voting_group(process_group: RankGroup | None, replicate: DeviceMesh | None) -> RankGroup | None:
    """Returns the process group of the ranks that vote, which may be given as a mesh.

    Raises:
        TypeError: If both are given, or `replicate` is no mesh.
        ValueError: If it has several dimensions.
    """
    if replicate is None:
        return process_group
    if not isinstance(replicate, DeviceMesh):
        raise TypeError(f"replicate={replicate!r} must be a DeviceMesh; {TWO_LINES}")
    if process_group is not None:
        raise TypeError("replicate=... is a process_group=... as a mesh: pass one of them")
    if replicate.ndim != 1:
        raise ValueError(
            f"replicate={replicate} must have one dimension, that of the replicas, got "
            f"{replicate.ndim}; {TWO_LINES}"
        )
    return replicate.get_group()


def _check_options(options: Options) -> None:
    """Checks that the options go with sharded parameters.

    Raises:
        NotImplementedError: If one does not.
    """
    refused = {
        f"local_group={options.local_group!r}": (
            options.local_group not in (None, 1),
            "the ranks of a replica cast one vote already; leave it out",
        ),
        "level_scale='tensor'": (
            options.level_scale == "tensor",
            "a rank sees the mean of its own rows only; use level_scale='word'",
        ),
        "momentum_sync='auto'": (
            options.momentum_sync_every > 0 and options.momentum_sync == "auto",
            "a rank measures its own rows only; use 'all' or patterns",
        ),
    }
    for name, (found, why) in refused.items():
        if found:
            raise NotImplementedError(f"{name} does not go with sharded parameters: {why}")


def find_replica(
    voting: RankGroup | None,
    groups: Groups,
    options: Options,
    wire: Wire,
    agree: Callable[[Exception | None], None],
    stats: WireStats,
    device: torch.device,
) -> Replica:
    """Returns this rank's replica; all ranks of all replicas must call this.

    Args:
        voting: The process group of the ranks that hold the same parts; None is the default group.
        groups: The parameter groups, some of whose parameters are sharded.
        options: The options.
        wire: All ranks; hears how many of them are neighbours.
        agree: Raises on every rank together if one of them failed, or if options differ.
        stats: Receives the counts of the groups inside and between replicas.
        device: That of the parameters.

    Raises:
        Disagreement: On every rank, if the ranks are no replicas of equally many parts.
    """
    before, claim, failure = stats.bytes_sent, None, None
    try:
        claim = claim_of(voting, groups, options)
    except Exception as error:  # Whatever it is, the other ranks wait below.
        failure = error
    agree(failure)
    members = members_of(wire.gather_objects(claim), wire.ranks)
    index = next(number for number, own in enumerate(members) if wire.rank in own)
    neighbours = len(members[0]) - 1
    wire.found_neighbours(neighbours, stats.bytes_sent - before)
    local = cast(Any, next(_sharded(groups))).device_mesh.get_group()
    return Replica(
        members,
        index,
        connect(local, stats, device, neighbours),
        connect(voting or wire.group, stats, device),
    )


def claim_of(voting: RankGroup | None, groups: Groups, options: Options) -> dict[str, list[int]]:
    """Returns the ranks, as those of the whole job, that vote with this one and that shard with it.

    Nothing is sent, so an optimizer may check this when it is made.

    Raises:
        NotImplementedError: If parameters are sharded otherwise than FSDP2 does inside a replica,
            or an option does not go with that.
        ValueError: If parameters are sharded on several meshes, or the voting group holds other
            parts of this rank's replica.
    """
    _check_options(options)
    meshes = set()
    for param in _sharded(groups):
        check_placement(param)
        meshes.add(tuple(cast(Any, param).device_mesh.mesh.tolist()))
    if len(meshes) > 1:
        raise ValueError(
            f"parameters are sharded on meshes of the ranks {sorted(meshes)}: DistributedLion "
            f"takes one mesh for all of them; {TWO_LINES}"
        )
    group = voting or default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"sharded parameters need a torch.distributed process group, got {group}")
    votes, shards = dist.get_process_group_ranks(group), list(meshes.pop())
    if len(both := sorted(set(votes) & set(shards))) > 1:
        raise ValueError(
            f"the voting group of the ranks {votes} holds several parts of one replica, those of "
            f"ranks {both}: gradients of FSDP2 are averaged between these ranks, and votes belong "
            f"between replicas. {TWO_LINES}"
        )
    return {"votes": votes, "shards": shards}


def _sharded(groups: Groups) -> Iterator[Tensor]:
    return filter(is_sharded, map(whole_of, flat_params(groups)))


def members_of(
    claims: Sequence[Mapping[str, Sequence[int]]], ranks: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each replica, in the order of their votes and parts.

    Args:
        claims: From `claim_of`, in the order of the wire of all ranks.
        ranks: The wire's ranks as ranks of the whole job.

    Raises:
        Disagreement: If the claims do not fit together; all ranks find the same.
    """
    votes = [tuple(claim["votes"]) for claim in claims]
    shards = [tuple(claim["shards"]) for claim in claims]
    place = {rank: position for position, rank in enumerate(ranks)}
    for what, groups in (("voting groups", votes), ("shard groups", shards)):
        found = list(dict.fromkeys(groups))
        shared_out = sorted(rank for group in found for rank in group) == sorted(ranks)
        if not shared_out or len({len(group) for group in found}) > 1:
            raise Disagreement(
                f"the {what} must share out all {len(ranks)} ranks of the job equally, got "
                f"{found}: make one mesh of all ranks; {TWO_LINES}"
            )
    columns = list(dict.fromkeys(votes))
    columns.sort(key=lambda column: shards[place[column[0]]].index(column[0]))
    members = tuple(zip(*columns, strict=True))
    if sorted(members) != sorted(dict.fromkeys(shards)):
        raise Disagreement(
            f"replicas must list their parts, and parts their replicas, in one order: the voting "
            f"groups are {columns}, the shard groups {list(dict.fromkeys(shards))}; {TWO_LINES}"
        )
    return tuple(tuple(place[rank] for rank in row) for row in members)
