"""Waiting for other ranks, and what to say when they do not come."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


class LostRank(RuntimeError):
    """Raised where a rank waits for others in vain: one died, or stalled beyond the timeout.

    Every rank that waits raises it by itself. Parameters and momenta may have moved in part.
    """


class Pending:
    """A collective on its way.

    Args:
        work: torch's handle.
        what: What it brings from the other ranks, for an error message.
        group: The process group.
    """

    def __init__(self, work: dist.Work, what: str, group: dist.ProcessGroup) -> None:
        """Takes a collective that was started."""
        self._work, self._what, self._group = work, what, group

    def wait(self) -> None:
        """Waits until the collective is done.

        Raises:
            LostRank: If another rank died or stalled.
        """
        with naming_losses(self._what, self._group):
            self._work.wait()

    def get_future(self) -> torch.futures.Future[Tensor]:
        """Returns a future of the first tensor that the collective fills; fails as `wait`."""

        def first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            with naming_losses(self._what, self._group):
                return done.value()[0]

        future: torch.futures.Future[Tensor] = self._work.get_future().then(first)
        return future


@contextlib.contextmanager
def naming_losses(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Turns a backend's error into one that says what was waited for.

    Args:
        what: Comes from the other ranks.
        group: The process group.

    Raises:
        LostRank: In place of any RuntimeError, which is its cause, but for a lack of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        others = [rank for rank in ranks if rank != dist.get_rank()]
        raise LostRank(
            f"rank {dist.get_rank()} waited in vain for {what} from rank{'s' * (len(others) > 1)} "
            f"{', '.join(map(str, others))}: a rank ended, or stalled for longer than the process "
            f"group's timeout of {timeout_of(group)}; see the output of the one that ended "
            f"first. Parameters may have moved in part: start all ranks again from a checkpoint. "
            f"torch says: {error}"
        ) from error


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Returns a group's timeout, None where its backend does not tell."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None
