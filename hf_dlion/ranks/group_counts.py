"""Whether torch can make process groups of some ranks, which nobody else helps to make.

torch names a new group by a number that each process counts for itself: groups of all ranks by how
many were made, groups that only their members make by how many the process is a member of. Members
that count differently would wait for one another under different names, until the timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from hf_dlion.ranks.agreement import Disagreement


def group_counts() -> tuple[int, int]:
    """Returns how many groups all ranks made, and of how many this process is a member."""
    world = dist.distributed_c10d._world
    return world.group_count, len(world.pg_names)


def check_group_counts(
    counts: Sequence[tuple[int, int]], groups: Iterable[Sequence[int]], *, of_all: bool = False
) -> None:
    """Checks that members of one group to be made count alike; other ranks may differ from them.

    Args:
        counts: From `group_counts`, in the order of a process group that holds all members.
        groups: The members of each group, as ranks of that process group.
        of_all: Whether the groups are of all ranks of the job, which torch counts apart.

    Raises:
        Disagreement: If they do not; all ranks that have the same arguments find the same.
    """
    own = [count[0 if of_all else 1] for count in counts]
    if any(len({own[rank] for rank in members}) > 1 for members in groups):
        what = "made" if of_all else "are members of"
        raise Disagreement(
            f"ranks {what} different numbers of process groups, {own} in rank order, and torch "
            f"would wait for ever for another one: make groups of some ranks on all of them with "
            f"torch.distributed.new_group()"
        )
