"""Waiting for other ranks, and the error that names them if they do not come."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

# Ranks that an error message lists; of more it names the first ones and the number.
_MOST_NAMED = 8


class LostRank(RuntimeError):
    """Raised when another rank ended, or stalled for longer than the process group's timeout.

    Every rank that waits raises it by itself. Parameters and momenta may have moved in part.
    """


class Pending:
    """A collective that was started.

    Args:
        work: The handle from torch.
        what: What the other ranks send, for an error message.
        group: The process group.
    """

    def __init__(self, work: dist.Work, what: str, group: dist.ProcessGroup) -> None:
        self._work, self._what, self._group = work, what, group

    def wait(self) -> None:
        """Waits until the collective is done.

        Raises:
            LostRank: If another rank ended or stalled.
        """
        try:
            self._work.wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise lost(self._what, self._group, error) from error


def lost(what: str, group: dist.ProcessGroup, error: BaseException) -> LostRank:
    """Returns the error that says what this rank waited for, in the place of a backend's error."""
    ranks = dist.get_process_group_ranks(group)
    others = [rank for rank in ranks if rank != dist.get_rank()]
    return LostRank(
        f"rank {dist.get_rank()} lost {named_ranks(others)} while waiting for {what}: a rank "
        f"ended, left the training loop, skipped a step, or stalled for longer than the process "
        f"group's timeout of {timeout_of(group)}. Read the output of the rank that ended first, "
        f"and give every rank the same number of steps. Parameters may have moved in part, so "
        f"restart all ranks from a checkpoint. torch says: {error}"
    )


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Returns a group's timeout, None if its backend does not tell."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None


def named_ranks(ranks: Sequence[int]) -> str:
    """Returns ranks for a message: "rank 1", "ranks 1 and 2", "ranks 1, 2, and 3"."""
    names = [str(rank) for rank in ranks[:_MOST_NAMED]]
    if len(ranks) > _MOST_NAMED:
        return f"ranks {', '.join(names)}, ... ({len(ranks)} ranks)"
    if len(names) < 3:
        return f"rank{'s' * (len(names) > 1)} {' and '.join(names)}"
    return f"ranks {', '.join(names[:-1])}, and {names[-1]}"
