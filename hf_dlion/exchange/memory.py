"""Ranks that are threads of one process: collectives without a network.

`DistributedLion` hands every byte to a `Wire`. With `process_group=hub.groups[rank]`, or by itself
inside `Hub.run`, it gets a `MemoryWire`, and all else is the product's own code. One thread runs at
a time, and hands on where it waits for others, so threads cost no more than the work in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any, cast

import torch
from torch import Tensor

from hf_dlion.exchange.pending import LostRank, Pending
from hf_dlion.exchange.wire import Wire, WireStats, default_of_thread


class Hub:
    """Where the ranks of one process meet, and their turns.

    Args:
        world_size: Number of ranks.

    Attributes:
        groups: What each rank passes as `process_group`.
    """

    def __init__(self, world_size: int) -> None:
        """Starts the threads when they are first needed."""
        everyone = tuple(range(world_size))
        self.groups = [MemoryGroup(self, everyone, rank) for rank in everyone]
        self._turn = Condition()
        self._slots: dict[Any, _Slot] = {}
        self._begun: dict[Any, int] = {}
        self._ended: set[int] = set()
        self._failed = False
        threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(world_size, "rank", lambda: torch.set_num_threads(threads))

    def run(self, works: Sequence[Callable[[], Any]]) -> None:
        """Calls one function per rank, each in a thread, and waits for all.

        Raises:
            Exception: What one of them raised first; the others then end with a LostRank.
        """
        self._failed = False
        # A failed run leaves collectives that no rank will finish.
        self._slots, self._begun, self._ended = {}, {}, set()
        futures = [self._pool.submit(self._take_turn, *pair) for pair in enumerate(works)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            # What a rank raised, and not that others waited for it.
            raise next((e for e in errors if not isinstance(e, LostRank)), errors[0])

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()

    def deliver(self, group: MemoryGroup, kind: str, tensor: Tensor) -> _Slot:
        """Takes what a rank sends; its tensor may be overwritten afterwards.

        Args:
            group: The rank's; its members begin their collectives in one order.
            kind: Of the collective, and of the tensor; must be the same on all ranks.
            tensor: Copied.

        Returns:
            What `collect` takes.

        Raises:
            NotImplementedError: On a thread beside the rank's own: each would wait for the other.
        """
        rank, place = group.rank, (group.members, group.number)
        if default_of_thread.get() is not self.groups[rank]:
            raise NotImplementedError("votes during backward (overlap=True) take real ranks")
        number = self._begun[place, rank] = self._begun.get((place, rank), -1) + 1
        slot = self._slots.setdefault((place, number), _Slot(kind))
        if slot.kind != kind:
            raise RuntimeError(f"rank {rank} began {kind} where another one began {slot.kind}")
        slot.sent[rank] = tensor.clone()
        if len(slot.sent) == len(group.members):
            # Whoever still reads from it has it.
            del self._slots[place, number]
            self._turn.notify_all()
        return slot

    def collect(self, members: tuple[int, ...], slot: _Slot) -> list[Tensor]:
        """Returns what all ranks sent, in rank order, and lets other ranks run until they have.

        Raises:
            LostRank: If one of them failed, or ended without sending.
        """
        if len(slot.sent) < len(members):
            self.pause(lambda: len(slot.sent) == len(members) or self._lost(members, slot) != "")
        if len(slot.sent) < len(members):
            raise LostRank(self._lost(members, slot))
        return [slot.sent[rank] for rank in members]

    def pause(self, over: Callable[[], bool]) -> None:
        """Lets other ranks run until `over` says so."""
        self._turn.wait_for(over)

    def _lost(self, members: tuple[int, ...], slot: _Slot) -> str:
        """Returns why some rank will never send, or nothing."""
        if self._failed:
            return "another rank of this process failed"
        ended = [rank for rank in members if rank in self._ended and rank not in slot.sent]
        return f"rank {ended[0]} ended before {slot.kind}" if ended else ""

    def _take_turn(self, rank: int, work: Callable[[], Any]) -> None:
        with self._turn:
            before = default_of_thread.set(self.groups[rank])
            try:
                work()
            except BaseException:
                self._failed = True
                raise
            finally:
                default_of_thread.reset(before)
                self._ended.add(rank)
                self._turn.notify_all()


class _Slot:
    """One collective."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.sent: dict[int, Tensor] = {}


class MemoryGroup:
    """Some ranks of a hub, as one of them sees them: a process group in memory.

    Args:
        hub: Where they meet.
        members: Ranks of the hub, the same tuple on all of them.
        rank: This rank in the hub.
        number: Tells groups of the same members apart.
    """

    def __init__(self, hub: Hub, members: tuple[int, ...], rank: int, number: int = 0) -> None:
        """Sends nothing."""
        self.hub, self.members, self.rank, self.number = hub, members, rank, number
        self.siblings = number

    def connect(self, stats: WireStats, device: torch.device, neighbours: int = 0) -> Wire:
        """Returns the rank's wire."""
        return MemoryWire(self, stats, device, neighbours)


class _Delivery(Pending):
    """A collective on its way through memory."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    def wait(self) -> None:
        self._finish()

    def get_future(self) -> torch.futures.Future[Tensor]:
        # Nobody would fill it later: the rank's own thread is the one that waits.
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(self._finish())
        return future


class MemoryWire(Wire):
    """A rank's collectives, answered by the other threads; bytes are counted as on a network."""

    def __init__(
        self, group: MemoryGroup, stats: WireStats, device: torch.device, neighbours: int = 0
    ) -> None:
        """Takes the group as it is; see `Wire`."""
        # What else holds it only asks whether it is the same.
        self.group = cast(Any, group)
        self.ranks = group.members
        self.rank, self.world_size = group.members.index(group.rank), len(group.members)
        self.stats, self.neighbours = stats, neighbours
        self._memory, self._device, self._backends = group, device, {"cpu": "memory"}

    def device_for(self, device: torch.device) -> torch.device:
        """Returns `device`: memory carries all."""
        return device

    def sibling(self) -> Wire:
        """As `Wire.sibling`."""
        group = self._memory
        group.siblings += 1
        fresh = MemoryGroup(group.hub, group.members, group.rank, group.siblings)
        return fresh.connect(self.stats, self._device, self.neighbours)

    def subgroup(self, members: Sequence[int]) -> Any:
        """As `Wire.subgroup`."""
        group = self._memory
        return MemoryGroup(group.hub, tuple(self.ranks[rank] for rank in members), group.rank)

    def _gather(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        def finish(sent: list[Tensor]) -> Tensor:
            return torch.stack(sent, out=out.view(len(sent), -1))

        return self._begin("all_gather", tensor, finish)

    def _scatter(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        def finish(sent: list[Tensor]) -> Tensor:
            mine = [other.view(self.world_size, -1)[self.rank] for other in sent]
            return torch.stack(mine, out=out.view(self.world_size, -1))

        return self._begin("all_to_all", tensor, finish)

    def _reduce(self, tensor: Tensor, what: str) -> Pending:
        def finish(sent: list[Tensor]) -> Tensor:
            total = sent[0].clone()
            for other in sent[1:]:
                total += other
            tensor.view(-1).copy_(total)
            return tensor

        return self._begin("all_reduce", tensor.view(-1), finish)

    def _spread(self, data: Tensor, source: int, what: str) -> Pending:
        return self._begin("broadcast", data, lambda sent: data.copy_(sent[source]))

    def _begin(self, kind: str, flat: Tensor, finish: Callable[[list[Tensor]], Tensor]) -> Pending:
        hub, group = self._memory.hub, self._memory
        slot = hub.deliver(group, f"{kind} of {flat.numel()} {flat.dtype}", flat)
        return _Delivery(lambda: finish(hub.collect(group.members, slot)))
