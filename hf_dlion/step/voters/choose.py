"""Which kind of voters a rank belongs to."""

from __future__ import annotations

from functools import singledispatch

from hf_dlion.exchange import Wire
from hf_dlion.ranks.node import Node, Undivided
from hf_dlion.ranks.shards import Replica
from hf_dlion.step.voters.every_rank import EveryRank
from hf_dlion.step.voters.interface import Voters
from hf_dlion.step.voters.node import NodeVoters
from hf_dlion.step.voters.replica import ReplicaVoters


@singledispatch
def voters_of(node: Node | Undivided, wire: Wire) -> Voters:
    """Returns who votes as one among several ranks.

    Args:
        node: This rank's node with `local_group`, its replica where parameters are sharded; or
            that every rank votes.
        wire: All ranks.
    """
    raise TypeError(f"{node!r} has no voters")


@voters_of.register
def _(node: Undivided, wire: Wire) -> Voters:
    return EveryRank(wire)


@voters_of.register
def _(node: Node, wire: Wire) -> Voters:
    return NodeVoters(wire, node)


@voters_of.register
def _(node: Replica, wire: Wire) -> Voters:
    return ReplicaVoters(wire, node)
