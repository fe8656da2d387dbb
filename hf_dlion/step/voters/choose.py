"""Which kind of voters a rank belongs to."""

from __future__ import annotations

from hf_dlion.exchange import Wire
from hf_dlion.ranks.node import Node
from hf_dlion.ranks.shards import Replica
from hf_dlion.step.voters.every_rank import EveryRank
from hf_dlion.step.voters.interface import Voters
from hf_dlion.step.voters.node import NodeVoters
from hf_dlion.step.voters.replica import ReplicaVoters


def voters_of(wire: Wire, node: Node | None) -> Voters:
    """Returns who votes as one among several ranks.

    Args:
        wire: All ranks.
        node: This rank's node with `local_group`, its replica where parameters are sharded, None
            where every rank votes.
    """
    if isinstance(node, Replica):
        return ReplicaVoters(wire, node)
    return EveryRank(wire) if node is None else NodeVoters(wire, node)
