"""Who votes as one, and which stretch of each parameter this rank encodes.

    OneRank        nobody else: plain Lion
    EveryRank      each rank casts a vote of its own
    NodeVoters     the ranks of a node cast one vote, each a part of it
    ReplicaVoters  the same of ranks that hold parts of the parameters (FSDP2)

In: the wire of all ranks and, with `local_group` or sharded parameters, this rank's node. Out: the
rank and number of voters of the rule, and how messages are made. Another kind is another file here.
"""

from hf_dlion.step.voters.choose import voters_of
from hf_dlion.step.voters.every_rank import EveryRank
from hf_dlion.step.voters.interface import Built, Voters
from hf_dlion.step.voters.one_rank import ONE_RANK, OneRank

__all__ = ["ONE_RANK", "Built", "EveryRank", "OneRank", "Voters", "voters_of"]
