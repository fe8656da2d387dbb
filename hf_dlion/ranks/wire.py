"""The collectives of the optimizer. It counts bytes and names lost ranks."""

from __future__ import annotations

import atexit
import datetime
import functools
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

import hf_dlion.ranks.lost_ranks as lost_ranks
from hf_dlion.ranks.stats import WireStats

# torch 2.13 renamed this function and warns about the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Largest number of ranks that an error message lists before it shortens the list.
_MOST_NAMED = 8


# Longest time in which gloo connects.
_CONNECT = datetime.timedelta(seconds=60)
# Errors of this rank's own device, which aren't those of a lost rank.
_OWN_ERRORS = torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
# Seconds for which a process waits when it ends.
_EXIT_WAIT_S = 0.1


@functools.cache
def _wait_at_exit() -> None:
    """Lets gloo's threads free their last collectives before Python ends.

    For that they need the GIL. If Python ends meanwhile, it ends the thread, and C++ then aborts a
    process that has done its work. Seen with torch 2.13 and Python 3.11, also with AdamW.
    """
    atexit.register(time.sleep, _EXIT_WAIT_S)


class LostRank(RuntimeError):
    """Raised if another rank ended, or stalled for longer than the process group's timeout.

    Each waiting rank raises it. Some parameters and momenta may have moved, so restart all ranks
    from a checkpoint.
    """


@dataclass(frozen=True)
class Pending:
    """A collective that was started."""

    work: dist.Work
    what: str
    group: dist.ProcessGroup
    blocks: bool  # Whether `work.wait()` makes the host wait, as gloo does, and not a stream.

    def wait(self) -> None:
        """Waits until the collective is done; raises LostRank if another rank ended or stalled."""
        try:
            if self.blocks and len(dist.get_process_group_ranks(self.group)) > 2:
                self._wait_with_the_others()
            self.work.wait()
        except _OWN_ERRORS:
            raise
        except RuntimeError as error:
            raise lost(self.what, self.group, error) from error

    def _wait_with_the_others(self) -> None:
        """Waits, but not after another rank has lost one, which may not be this rank's neighbor."""
        while not self.work.is_completed():
            try:
                self.work.wait(datetime.timedelta(seconds=lost_ranks.LOOK_S))
            except RuntimeError:  # Not yet, or the error that `wait` raises next.
                if not self.work.is_completed() and lost_ranks.was_reported(self.group):
                    raise RuntimeError("another rank of the group has raised LostRank") from None


class Wire:
    """Collectives of one process group, with every byte counted.

    Every rank of the group must make the same calls in the same order, with contiguous tensors of
    the same shape and dtype. Wait for a `Pending` before you read its output. `what` names the data
    for the message if a rank is lost.

    `global_ranks` has the numbers of the group's ranks in the default group. `neighbors` is the
    number of other ranks in the group that are on this rank's node.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        stats: WireStats,
        *,
        in_node: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Doesn't communicate.

        If `in_node`, all ranks of the group are on one node, so bytes count as `node_bytes_sent`.
        `device` is that of the parameters, for control messages in a group without CPU backend
        (default: the device that init_process_group was given).
        """
        self.group, self.stats = group, stats
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.global_ranks: list[int] = dist.get_process_group_ranks(group)
        self.neighbors = self.world_size - 1 if in_node else 0
        self._device = device or group.bound_device_id or torch.device("cpu")
        # For example {"cpu": "gloo", "cuda": "nccl"}.
        config = str(dist.get_backend_config(group))
        self._backends = dict(part.split(":", 1) for part in config.split(","))
        self._cpu_group = group  # That sends tensors on a CPU.
        if "gloo" in self._backends.values():
            _wait_at_exit()

    @property
    def needs_gloo(self) -> bool:
        """Whether the group has several ranks, and a backend that doesn't find what gloo does.

        NCCL doesn't notice that ranks send different sizes, and ends processes at a timeout.
        """
        has_it = {"gloo", "mpi"}.intersection(self._backends.values())  # torch can't join MPI's.
        return self.world_size > 1 and not has_it and dist.is_gloo_available()

    def new_gloo_group(self) -> dist.ProcessGroup:
        """Returns a gloo group of the same ranks in ascending order, which must all call this.

        Raises:
            RuntimeError: If gloo can't connect, in less time than others wait for this rank.
        """
        timeout = connect = timeout_of(self.group) or distributed_c10d.default_pg_timeout
        # There, torch wraps gloo, and can't set its timeout later.
        if is_plain := distributed_c10d.get_debug_level() != distributed_c10d.DebugLevel.DETAIL:
            connect = min(timeout / 2, _CONNECT)
        group: dist.ProcessGroup = dist.new_group(
            self.global_ranks, backend="gloo", timeout=connect, use_local_synchronization=True
        )
        if is_plain:
            distributed_c10d._set_pg_timeout(timeout, group)
        return group

    def use_gloo(self, group: dist.ProcessGroup) -> None:
        """Sends tensors on a CPU by a gloo group of the same ranks, and so all control messages."""
        self._cpu_group, self._backends["cpu"] = group, "gloo"
        self.__dict__.pop("control_device", None)  # Of the other backend.
        _wait_at_exit()

    def device_for(self, device: torch.device) -> torch.device:
        """Returns the device from which the group sends tensors that are on `device`.

        Raises:
            RuntimeError: If the group has no backend for `device` or for the CPU.
        """
        backend = self._backends.get(device.type)
        if backend is not None and (device.type == "cpu" or backend not in ("gloo", "mpi")):
            return device
        if "cpu" in self._backends:
            return torch.device("cpu")
        raise RuntimeError(
            f"the process group's backend {dist.get_backend(self.group)!r} cannot send tensors on "
            f"{device}: initialize torch.distributed with backend='cpu:gloo,cuda:nccl', or move "
            f"the model"
        )

    @functools.cached_property
    def control_device(self) -> torch.device:
        """Device of small control messages: the CPU if the group has a backend for it."""
        # Not the current device, which is cuda:0 on every rank until the user sets it.
        return torch.device("cpu") if "cpu" in self._backends else self.device_for(self._device)

    def all_gather(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        """Starts gathering every rank's tensor into `out`, shape (N, *tensor.shape).

            rank 0: a     ->  rank 0: a b
            rank 1: b         rank 1: a b

        Bytes per rank: (N - 1) * bytes of `tensor`.
        """
        self._count_to_each(tensor.numel() * tensor.element_size())
        return self._start(what, _all_gather_single, out.view(-1), tensor.view(-1))

    def all_to_all(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        """Starts sending segment j of `tensor`, shape (N, ...), to rank j, into `out`.

            rank 0: a0 a1  ->  rank 0: a0 b0
            rank 1: b0 b1      rank 1: a1 b1

        Bytes per rank: (N - 1) / N * bytes of `tensor`.
        """
        self._count_to_each(tensor[0].numel() * tensor.element_size())
        return self._start(what, dist.all_to_all_single, out.view(-1), tensor.view(-1))

    def all_reduce(self, tensor: Tensor, what: str) -> Pending:
        """Starts summing `tensor` over the ranks, in place.

        Bytes per rank, as a ring: 2 * (N - 1) * ceil(numel / N) elements.
        """
        # As many bytes as two segments to every other rank, though a ring sends to the next one.
        self._count_to_each(2 * -(-tensor.numel() // self.world_size) * tensor.element_size())
        return self._start(what, dist.all_reduce, tensor)

    def named(self, ranks: Sequence[int]) -> str:
        """Returns ranks of the group for a message, by their numbers in the default group."""
        return named_ranks([self.global_ranks[rank] for rank in ranks])

    def by_value(self, values: Sequence[object]) -> str:
        """Returns the values of all ranks for a message: "rank 0: 3, ranks 1 and 2: 4"."""
        ranks_of: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            ranks_of.setdefault(repr(value), []).append(rank)
        return ", ".join(f"{self.named(ranks)}: {value}" for value, ranks in ranks_of.items())

    def gather_words(self, words: Sequence[int] | Tensor, what: str) -> Tensor:
        """Returns every rank's n words of 64 bits, in rank order: int64, shape (N, n), on the CPU.

        All ranks must pass the same number of words. Bytes per rank: 8 * (N - 1) * n.
        """
        sent = torch.as_tensor(words, dtype=torch.int64, device=self.control_device)
        gathered = sent.new_empty((self.world_size, sent.numel()))
        self.all_gather(gathered, sent, what).wait()
        return gathered.cpu()

    def gather_objects(self, value: object) -> list[Any]:
        """Returns every rank's `value` after a trip through JSON, in rank order.

        Tuples become lists, and objects that JSON doesn't know become their `repr`. It is slow, so
        steps use `gather_words`. Bytes per rank: (N - 1) * (8 + bytes of the longest JSON).
        """
        data = torch.frombuffer(bytearray(as_json(value)), dtype=torch.uint8)
        sizes = self.gather_words([data.numel()], "a description").view(-1).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.control_device)
        padded[: data.numel()] = data
        gathered = padded.new_empty((self.world_size, padded.numel()))
        self.all_gather(gathered, padded, "a description").wait()
        rows = zip(gathered.cpu(), sizes, strict=True)
        return [json.loads(row[:size].numpy().tobytes()) for row, size in rows]

    def new_group(self, members: Sequence[int]) -> dist.ProcessGroup:
        """Returns a new process group of some of the ranks, which must all call this.

        `members` are numbers in this wire's group, and include this rank.

        Raises:
            NotImplementedError: If torch needs ranks outside of this wire's group for it.
            LostRank: If a member ended or stalled.
        """
        world = dist.group.WORLD
        assert world is not None, "the wire's group exists"
        # With device_id, torch splits the default group's communicator, which needs all ranks.
        if world.bound_device_id is not None and self.world_size < world.size():
            raise NotImplementedError(
                f"process_group has {self.world_size} of {world.size()} ranks, and "
                f"init_process_group was given device_id={world.bound_device_id}: leave out "
                f"device_id, or train with all ranks"
            )
        try:
            group: dist.ProcessGroup = dist.new_group(
                [self.global_ranks[rank] for rank in members],
                backend=",".join(map(":".join, self._backends.items())),
                timeout=timeout_of(self.group),
                use_local_synchronization=True,
            )
        except _OWN_ERRORS:
            raise
        except RuntimeError as error:
            raise lost("a new process group", self.group, error) from error
        return group

    def _start(self, what: str, collective: Callable[..., Any], *tensors: Tensor) -> Pending:
        kind = tensors[0].device.type
        group = self._cpu_group if kind == "cpu" else self.group
        try:
            for own in (self.group, group):
                dist.get_process_group_ranks(own)
        except KeyError:
            raise RuntimeError(
                "the process group of this optimizer was destroyed: step and save before "
                "destroy_process_group(). In a new group, make a new optimizer, and load "
                "state_dict() of this one"
            ) from None
        try:
            work = collective(*tensors, group=group, async_op=True)
        except dist.DistError as error:
            raise lost(what, group, error) from error
        return Pending(work, what, group, blocks=self._backends.get(kind) == "gloo")

    def _count_to_each(self, size: int) -> None:
        """Counts `size` bytes to every other rank."""
        self.stats.node_bytes_sent += size * self.neighbors
        self.stats.bytes_sent += size * (self.world_size - 1 - self.neighbors)


def as_json(value: object) -> bytes:
    """Returns a plain value as JSON, the same bytes for the same value on every rank."""
    return json.dumps(value, default=_repr).encode()


def digest(value: object) -> int:
    """Returns a 64-bit hash of a value's JSON as int64, the same on every rank."""
    data = hashlib.blake2b(as_json(value), digest_size=8).digest()
    return int.from_bytes(data, "little", signed=True)


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # Other ranks wait for an answer.
        return f"<{type(value).__name__}>"


def lost(what: str, group: dist.ProcessGroup, error: BaseException) -> LostRank:
    """Returns the error that replaces a backend's error while this rank waited for `what`.

    It names the ranks that haven't lost one themselves.
    """
    silent, world_size = lost_ranks.report(group), len(dist.get_process_group_ranks(group))
    named = named_ranks(silent)
    if not silent or len(silent) == world_size - 1 > 1:  # No rank has reported.
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        named = f"one of {named_ranks(others)}"
    return LostRank(
        f"rank {dist.get_rank()} lost {named} while waiting for {what}: a rank "
        f"can't be reached, ended, left the training loop, skipped a step, waits in another "
        f"collective (such as a barrier on one rank only), or stalled for longer than the process "
        f"group's timeout of {timeout_of(group)}. Read the output of the rank that ended first, "
        f"and give every rank the same number of steps. Parameters may have moved in part, so "
        f"restart all ranks from a checkpoint. torch says: {error}"
    )


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Returns a group's timeout; None if its backend doesn't have one."""
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
