"""The one place that hands bytes to a collective, and counts them."""

from __future__ import annotations

import contextlib
import datetime
import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it and warns about the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LostRank(RuntimeError):
    """Raised on every rank that waits for one that ended or stalled.

    Parameters and momenta may have moved in part.
    """


@dataclass
class WireStats:
    """What an optimizer sent and received so far, and where its time went.

    Bytes are those handed to a collective that another rank must receive; an all-reduce counts as
    a ring. Times are host seconds: on a GPU they hold what the host waited for.

    Attributes:
        bytes_sent: Bytes that this rank sent to other nodes.
        bytes_received: Bytes that this rank received from other nodes.
        last_bytes_sent: Bytes sent to other nodes in the last step.
        node_bytes_sent: Bytes that this rank sent to other ranks of its node.
        last_node_bytes_sent: Those of the last step.
        exchanges: Steps in which votes were exchanged.
        abstentions: Ranks that abstained from a whole step, summed over ranks and steps.
        encode_s: Seconds spent on directions, momenta and votes.
        exchange_s: Seconds spent waiting for votes and counting them.
        apply_s: Seconds spent moving parameters.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    last_bytes_sent: int = 0
    node_bytes_sent: int = 0
    last_node_bytes_sent: int = 0
    exchanges: int = 0
    abstentions: int = 0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    apply_s: float = 0.0
    _before: tuple[int, int] = (0, 0)

    def end_step(self) -> None:
        """Sets the bytes of the last step."""
        self.last_bytes_sent = self.bytes_sent - self._before[0]
        self.last_node_bytes_sent = self.node_bytes_sent - self._before[1]
        self._before = (self.bytes_sent, self.node_bytes_sent)


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
            LostRank: If another rank ended or stalled.
        """
        with naming_losses(self._what, self._group):
            self._work.wait()


class Wire:
    """Collectives of one process group, with every byte counted.

    Every rank of the group must make the same calls in the same order.

    Args:
        group: The process group.
        stats: Receives the counts.
        in_node: Whether the ranks share a node, so bytes count as `node_bytes_sent`.

    Attributes:
        group: The process group.
        stats: Receives the counts.
        rank: This rank in the group.
        world_size: Number of ranks in the group.
    """

    def __init__(
        self, group: dist.ProcessGroup, stats: WireStats, *, in_node: bool = False
    ) -> None:
        """Communicates nothing."""
        self.group, self.stats, self._in_node = group, stats, in_node
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        config = dist.get_backend_config(group)
        self._backends = dict(part.split(":") for part in str(config).split(",") if ":" in part)

    def device_for(self, device: torch.device) -> torch.device:
        """Returns where a message of tensors on `device` must lie to be sent.

        Raises:
            RuntimeError: If the group has no backend for `device` nor for the CPU.
        """
        backend = self._backends.get(device.type)
        if backend is not None and (device.type == "cpu" or backend not in ("gloo", "mpi")):
            return device
        if "cpu" in self._backends:
            return torch.device("cpu")
        raise RuntimeError(
            f"the process group's backend {dist.get_backend(self.group)!r} can't send tensors on "
            f"{device}; initialize torch.distributed with backend='cpu:gloo,cuda:nccl', or move "
            f"the model"
        )

    @property
    def control_device(self) -> torch.device:
        """Where headers lie: the CPU if the group can send from it, else this rank's GPU."""
        if "cpu" in self._backends:
            return torch.device("cpu")
        return torch.device(next(iter(self._backends)), torch.cuda.current_device())

    def all_gather(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        """Starts to gather every rank's tensor.

            rank 0: a     ->  rank 0: a b
            rank 1: b         rank 1: a b

        Bytes per rank: (N - 1) * bytes of `tensor`.

        Args:
            out: Shape (N, *tensor.shape), receives all; don't touch it until the work is done.
            tensor: Contiguous, same shape and dtype on every rank.
            what: What is gathered, for the message if a rank is lost.
        """
        self._count((self.world_size - 1) * tensor.numel() * tensor.element_size())
        with naming_losses(what, self.group):
            work = _all_gather_single(
                out.view(-1), tensor.view(-1), group=self.group, async_op=True
            )
        return Pending(work, what, self.group)

    def all_to_all(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        """Starts to exchange segments: segment j of `tensor` goes to rank j.

            rank 0: a0 a1  ->  rank 0: a0 b0
            rank 1: b0 b1      rank 1: a1 b1

        Bytes per rank: (N - 1) / N * bytes of `tensor`.

        Args:
            out: Shape of `tensor`, receives; don't touch it until the work is done.
            tensor: Contiguous, shape (N, ...), same shape and dtype on every rank.
            what: As for `all_gather`.
        """
        self._count((self.world_size - 1) * tensor[0].numel() * tensor.element_size())
        with naming_losses(what, self.group):
            work = dist.all_to_all_single(
                out.view(-1), tensor.view(-1), group=self.group, async_op=True
            )
        return Pending(work, what, self.group)

    def all_reduce(self, tensor: Tensor, what: str) -> Pending:
        """Starts to sum a tensor over the ranks, in place.

        Bytes per rank, as a ring: 2 (N - 1) ceil(numel / N) elements.

        Args:
            tensor: Contiguous, same shape and dtype on every rank.
            what: As for `all_gather`.
        """
        share = -(-tensor.numel() // self.world_size)
        self._count(2 * (self.world_size - 1) * share * tensor.element_size())
        with naming_losses(what, self.group):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return Pending(work, what, self.group)

    def gather_words(self, words: Sequence[int] | Tensor, what: str) -> Tensor:
        """Returns every rank's words, in rank order: int64, shape (N, n), on the CPU.

        Bytes per rank: 8 (N - 1) n.
        """
        mine = torch.as_tensor(words, dtype=torch.int64).to(self.control_device)
        out = mine.new_empty(self.world_size, mine.numel())
        self.all_gather(out, mine, what).wait()
        return out.cpu()

    def gather_objects(self, value: object) -> list[Any]:
        """Returns every rank's plain value (None, numbers, text, and lists, tuples, dicts of them).

        Every rank must call this. Bytes per rank: 8 (N - 1), and (N - 1) times the longest value's
        pickled length.
        """
        data = pickle.dumps(value)
        sizes = self.gather_words([len(data)], "a length").view(-1).tolist()
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        mine = mine.to(self.control_device)
        out = mine.new_empty(self.world_size, mine.numel())
        self.all_gather(out, mine, "a value").wait()
        rows = out.cpu()
        return [
            _PlainUnpickler(io.BytesIO(row[:size].numpy().tobytes())).load()
            for row, size in zip(rows, sizes, strict=True)
        ]

    def _count(self, size: int) -> None:
        """Counts bytes; ranks send as much as they receive."""
        if self._in_node:
            self.stats.node_bytes_sent += size
        else:
            self.stats.bytes_sent += size
            self.stats.bytes_received += size


class _PlainUnpickler(pickle.Unpickler):
    """Refuses everything but plain values: what another rank sends runs no code here."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


@contextlib.contextmanager
def naming_losses(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Turns a backend's error into one that says what was waited for.

    Raises:
        LostRank: In place of any RuntimeError, which is its cause, but for a lack of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        me = dist.get_rank()
        others = [str(r) for r in dist.get_process_group_ranks(group) if r != me]
        ranks = f"rank{'s' * (len(others) > 1)} {', '.join(others)}"
        raise LostRank(
            f"rank {me} lost {ranks} while waiting for {what}: a rank ended, skipped a step that "
            f"the others took, or stalled for longer than the process group's timeout of "
            f"{timeout_of(group)}. See the output of the rank that ended first, and start all "
            f"ranks again from a checkpoint, since parameters may have moved in part. torch says: "
            f"{error}"
        ) from error


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Returns a group's timeout, None if its backend doesn't have one."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None
