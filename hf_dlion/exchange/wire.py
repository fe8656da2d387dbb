"""The one place that hands bytes to a collective, and counts them."""

from __future__ import annotations

import functools
import math
import pickle
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from hf_dlion.exchange.pending import Pending, naming_losses, timeout_of

# torch 2.13 renamed it and warns of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# An overlapped exchange sends from two threads.
_counting = threading.Lock()


class Agreed:
    """How far the ranks agreed in one step; known once the device has got there.

    Attributes:
        mean: `WireStats.agreement`. The first look waits for the device.
    """

    def __init__(self, sums: Sequence[Tensor]) -> None:
        """Takes `Verdict.sums` of every message, which may be overwritten afterwards."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for pair in sums:
            by_device.setdefault(pair.device, []).append(pair)
        self._sums = [torch.stack(pairs).sum(dim=0) for pairs in by_device.values()]

    @functools.cached_property
    def mean(self) -> float:
        """See the class."""
        pairs = [pair.tolist() for pair in self._sums]
        agreement, most = (sum(pair[k] for pair in pairs) for k in range(2))
        return agreement / most if most else math.nan


@dataclass
class WireStats:
    """What an optimizer sent and received so far, and where its time went.

    Bytes are those handed to a collective that another rank must receive; an all-reduce counts as
    a ring. Without `local_group` every rank is a node of its own. Times are host seconds: on a GPU
    they hold what the host waited for.

    Attributes:
        bytes_sent: Bytes that this rank sent to other nodes.
        bytes_received: Bytes that this rank received from other nodes.
        last_bytes_sent: Bytes sent to other nodes in the last step.
        node_bytes_sent: Bytes that this rank sent to the other ranks of its node, the averaging
            of gradients included.
        last_node_bytes_sent: Those since the end of the step before the last.
        rounds: Messages that waited for one another, as `hf-dlion plan` counts them:
            N - 1 of a gathering or a scattering, 2 (N - 1) of an all-reduce, 1 of a broadcast;
            those inside a node, with its N ranks, count as well.
        exchanges: Steps in which votes were exchanged.
        overlapped: Those of them in which the votes that left during backward held.
        sent_in_backward: Messages of the last step that left during backward.
        repairs: How often parameters that had drifted apart were made equal again.
        abstentions: Ranks that abstained from a whole step, summed over ranks and steps.
        encode_s: Seconds spent on directions, signs and momenta.
        exchange_s: Seconds spent on waiting for collectives and on counting votes.
        apply_s: Seconds spent on moving parameters.
        agreed: How far the ranks agreed in the last exchange; `agreement` as it can be kept.
        agreement: Mean of |sum of the signs| / world_size in the last exchange, over the
            elements of the rows on which any rank voted; with more than one bit, the sum of
            |sum of the votes| over the sum of |vote|. NaN before the first.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    last_bytes_sent: int = 0
    node_bytes_sent: int = 0
    last_node_bytes_sent: int = 0
    rounds: int = 0
    exchanges: int = 0
    overlapped: int = 0
    sent_in_backward: int = 0
    repairs: int = 0
    abstentions: int = 0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    apply_s: float = 0.0
    agreed: Agreed = field(default_factory=lambda: Agreed(()), repr=False)

    @property
    def agreement(self) -> float:
        """How far the ranks agreed; the first look after a step waits for the device."""
        return self.agreed.mean


@runtime_checkable
class ConnectableGroup(Protocol):
    """Ranks that meet elsewhere than in torch.distributed (`exchange.memory`)."""

    def connect(self, stats: WireStats, device: torch.device, neighbours: int = 0) -> Wire:
        """Returns this rank's wire; the arguments are those of `Wire`."""


RankGroup = dist.ProcessGroup | ConnectableGroup

# A rank that is a thread has a default group of its own.
default_of_thread: ContextVar[ConnectableGroup | None] = ContextVar("group", default=None)


def default_group() -> RankGroup | None:
    """Returns the default group, None without torch.distributed."""
    group = default_of_thread.get()
    if group is not None or not (dist.is_available() and dist.is_initialized()):
        return group
    return dist.group.WORLD


def connect(group: RankGroup, stats: WireStats, device: torch.device, neighbours: int = 0) -> Wire:
    """Returns the wire of a group; see `Wire` for the arguments."""
    if isinstance(group, dist.ProcessGroup):
        return Wire(group, stats, device, neighbours)
    return group.connect(stats, device, neighbours)


class Wire:
    """Collectives of one process group, with every byte counted.

    Every rank of the group must make the same calls in the same order.

    Attributes:
        group: The process group.
        stats: Receives the counts.
        rank: This rank in the group.
        world_size: Number of ranks in the group.
        ranks: The group's ranks as ranks of the whole job.
        neighbours: How many of the other ranks are on this rank's node.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        stats: WireStats,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
        neighbours: int = 0,
    ) -> None:
        """Takes the group as it is; communicates nothing.

        Args:
            group: The process group.
            stats: Receives the counts.
            device: That of the parameters; control messages go there where the CPU cannot send.
            neighbours: How many of the other ranks are on this rank's node.
        """
        self.group = group
        self.neighbours = neighbours
        self._device = device
        self.stats = stats
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self._backends = _backends(group)

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
            f"the process group's backend {dist.get_backend(self.group)!r} cannot send tensors on "
            f"{device}; initialise torch.distributed with backend='cpu:gloo,cuda:nccl' or move the "
            f"model"
        )

    def backend_for(self, device: torch.device) -> str:
        """Returns the name of the backend that sends messages of tensors on `device`."""
        return self._backends.get(self.device_for(device).type, "")

    @property
    def control_device(self) -> torch.device:
        """Where small control messages lie: the CPU where the group can send from it.

        Raises:
            RuntimeError: As `device_for`, of parameters on the CPU where only GPUs can send.
        """
        # Never "the current device": that is cuda:0 on every rank until somebody sets it.
        return torch.device("cpu") if "cpu" in self._backends else self.device_for(self._device)

    def sibling(self) -> Wire:
        """Returns a wire of the same ranks in a process group of its own; all ranks call this.

        Collectives of the two need no common order. Check `hf_dlion.ranks.group_counts` before.
        """
        config = dist.get_backend_config(self.group)
        options: dict[str, Any] = {"backend": str(config), "timeout": timeout_of(self.group)}
        if self.group is not dist.group.WORLD:
            _refuse_splitting(self.group)
            options.update(ranks=self.ranks, use_local_synchronization=True)
        with naming_losses("a process group", self.group):
            group = dist.new_group(**options)
        return Wire(group, self.stats, self._device, self.neighbours)

    def meet(self, words: int = 0) -> None:
        """Exchanges something, so a backend connects now and not in the middle of a backward.

        Every rank must call this. Bytes per rank: 8 * (N - 1), and twice 8 * (N - 1) * `words`.

        Args:
            words: Of the longest message, where connections are made at its first use: NCCL's, for
                each pair of ranks and for as many channels as a size takes.
        """
        place = self.device_for(self._device)
        self._gather_words([0], "a first word", place)
        if words:
            mine = torch.zeros((self.world_size, words), dtype=torch.int64, device=place)
            everyone = torch.empty_like(mine)
            self.all_to_all(everyone, mine, "first words").wait()
            self.all_gather(everyone, mine[0], "first words").wait()

    def subgroup(self, members: Sequence[int]) -> dist.ProcessGroup:
        """Returns a new process group of some of the ranks, which all call this, and no other.

        Check `hf_dlion.ranks.group_counts` before.

        Args:
            members: Ranks in this wire's group.

        Raises:
            NotImplementedError: If ranks outside of this group would have to help.
        """
        _refuse_splitting(self.group)
        with naming_losses("a process group", self.group):
            group: dist.ProcessGroup = dist.new_group(
                [self.ranks[rank] for rank in members],
                backend=str(dist.get_backend_config(self.group)),
                timeout=timeout_of(self.group),
                use_local_synchronization=True,
            )
        return group

    def all_gather(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        """Starts the gathering of every rank's tensor.

            rank 0: a     ->  rank 0: a b
            rank 1: b         rank 1: a b

        Bytes per rank: (N - 1) * bytes of `tensor`.

        Args:
            out: Shape (N, *tensor.shape), receives all; do not touch until the work is done.
            tensor: Contiguous, same shape and dtype on every rank.
            what: What is gathered, for the message should a rank be lost.
        """
        self._count_to_each(tensor.numel() * tensor.element_size())
        return self._gather(out.view(-1), tensor.view(-1), what)

    def all_to_all(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        """Starts the exchange of segments: segment j of `tensor` goes to rank j.

            rank 0: a0 a1  ->  rank 0: a0 b0
            rank 1: b0 b1      rank 1: a1 b1

        Bytes per rank: (N - 1) / N * bytes of `tensor`.

        Args:
            out: Shape of `tensor`, receives; do not touch until the work is done.
            tensor: Contiguous, shape (N, ...), same shape and dtype on every rank.
            what: As for `all_gather`.
        """
        self._count_to_each(tensor[0].numel() * tensor.element_size())
        return self._scatter(out.view(-1), tensor.view(-1), what)

    def all_reduce(self, tensor: Tensor, what: str) -> None:
        """Sums `tensor` over the ranks, in place, and waits for it.

        Bytes per rank, as a ring: 2 * (N - 1) * ceil(numel / N) elements.

        Args:
            tensor: Contiguous, same shape and dtype on every rank.
            what: As for `all_gather`.
        """
        self.start_all_reduce(tensor, what).wait()

    def start_all_reduce(self, tensor: Tensor, what: str) -> Pending:
        """Starts `all_reduce`; do not touch `tensor` until the work is done."""
        per_rank = -(-tensor.numel() // self.world_size)
        size = 2 * (self.world_size - 1) * per_rank * tensor.element_size()
        # A ring passes on to the next rank only, which is a neighbour if all others are.
        inside = 0 < self.neighbours == self.world_size - 1
        self._count(size, inside=inside, rounds=2 * (self.world_size - 1))
        return self._reduce(tensor, what)

    def broadcast(self, tensor: Tensor, source: int, *, near: bool = False) -> None:
        """Gives every rank the tensor of one of them, in place, and waits for it.

            rank 0: a     ->  rank 0: b
            rank 1: b         rank 1: b     (source 1)

        Bytes: the source sends (N - 1) * bytes of `tensor`, every other rank receives one of them.

        Args:
            tensor: Contiguous, same shape and dtype on every rank.
            source: The rank whose values all get.
            near: Whether the source is another rank of this rank's node.
        """
        size = tensor.numel() * tensor.element_size()
        if self.rank == source:
            self._count(size * self.neighbours, inside=True)
            others = self.world_size - 1 - self.neighbours
            self._count(size * others, inside=False, received=0, rounds=1)
        else:
            self._count(0, inside=near, received=size, rounds=1)
        # As bytes, which every backend sends whatever they mean.
        data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        self._spread(data, source, "parameters").wait()

    def gather_words(self, words: Sequence[int] | Tensor, what: str) -> Tensor:
        """Returns every rank's words, in rank order: int64, shape (N, n), on the CPU.

        Every rank must call this with as many words. Bytes per rank: 8 * (N - 1) * n.

        Args:
            words: n numbers of 64 bits, as int64 of shape (n,) if they are a tensor.
            what: As for `all_gather`.
        """
        return self._gather_words(words, what, self.control_device)

    def _gather_words(
        self, words: Sequence[int] | Tensor, what: str, place: torch.device
    ) -> Tensor:
        mine = torch.as_tensor(words, dtype=torch.int64, device=place)
        everyone = torch.empty((self.world_size, mine.numel()), dtype=torch.int64, device=place)
        self.all_gather(everyone, mine, what).wait()
        return everyone.cpu()

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's `value`, in rank order: for error messages, not for the hot path.

        Bytes per rank: (N - 1) * (8 + bytes of the longest pickle).

        Args:
            value: A plain picklable object.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.gather_words([data.numel()], "an answer").view(-1).tolist()
        longest = max(sizes)
        mine = torch.zeros(longest, dtype=torch.uint8, device=self.control_device)
        mine[: data.numel()] = data
        everyone = torch.empty((self.world_size, longest), dtype=torch.uint8, device=mine.device)
        self.all_gather(everyone, mine, "an answer").wait()
        rows = zip(everyone.cpu(), sizes, strict=True)
        return [pickle.loads(row[:length].numpy().tobytes()) for row, length in rows]

    def found_neighbours(self, neighbours: int, sent: int) -> None:
        """Counts bytes apart from now on, and those already sent, as many to every other rank.

        Args:
            neighbours: How many of the other ranks are on this rank's node.
            sent: Bytes that were counted as sent to other nodes.
        """
        self.neighbours = neighbours
        inside = sent * neighbours // (self.world_size - 1)
        self._count(-inside, inside=False)
        self._count(inside, inside=True)

    def _gather(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        work = _all_gather_single(out, tensor, group=self.group, async_op=True)
        return self._pending(work, what)

    def _scatter(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        work = dist.all_to_all_single(out, tensor, group=self.group, async_op=True)
        return self._pending(work, what)

    def _reduce(self, tensor: Tensor, what: str) -> Pending:
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return self._pending(work, what)

    def _spread(self, data: Tensor, source: int, what: str) -> Pending:
        work = dist.broadcast(data, self.ranks[source], group=self.group, async_op=True)
        return self._pending(work, what)

    def _pending(self, work: dist.Work | None, what: str) -> Pending:
        assert work is not None, "a member of the group gets a handle for asynchronous work"
        return Pending(work, what, self.group)

    def _count_to_each(self, size: int) -> None:
        """Counts `size` bytes to every other rank."""
        self._count(size * self.neighbours, inside=True)
        others = self.world_size - 1 - self.neighbours
        self._count(size * others, inside=False, rounds=self.world_size - 1)

    def _count(
        self, size: int, *, inside: bool, received: int | None = None, rounds: int = 0
    ) -> None:
        """Counts `size` bytes sent, and as many received unless that is said apart."""
        with _counting:
            self.stats.rounds += rounds
            if inside:
                self.stats.node_bytes_sent += size
            else:
                self.stats.bytes_sent += size
                self.stats.bytes_received += size if received is None else received


def _refuse_splitting(group: dist.ProcessGroup) -> None:
    """Refuses new groups where torch splits the default one's communicator, which takes all ranks.

    Raises:
        NotImplementedError: If the job has ranks outside of `group`; alike on all of its ranks.
    """
    everyone = dist.group.WORLD
    if everyone is None or everyone.bound_device_id is None:
        return
    if dist.get_world_size(group) < dist.get_world_size():
        raise NotImplementedError(
            f"process_group has {dist.get_world_size(group)} of {dist.get_world_size()} ranks, and "
            f"init_process_group was given device_id={everyone.bound_device_id}: torch then makes "
            f"a process group only together with all ranks of the job. Leave out device_id, or "
            f"train with all ranks; overlap=True and local_group need groups of their own"
        )


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Returns the backend of each device type, for example {"cpu": "gloo", "cuda": "nccl"}."""
    config = dist.get_backend_config(group)
    return dict(part.split(":", 1) for part in str(config).split(","))
