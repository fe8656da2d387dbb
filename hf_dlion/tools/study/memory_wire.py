"""Ranks that are threads of one process: an optimizer's collectives without a network.

`DistributedLion` hands every byte to `hf_dlion.exchange.wire.Wire`. Here each of N optimizers gets
a `MemoryWire` in its place, and all else is the product's own code. One thread runs at a time, and
hands on where it waits for others, so that threads cost no more than the work in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hf_dlion.exchange import LostRank, Wire, WireStats
from hf_dlion.exchange.pending import Pending
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options.groups import Groups
from hf_dlion.ranks.abstention import Abstentions
from hf_dlion.ranks.group import Ranks


class Hub:
    """Where the ranks of one process meet, and their turns.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        """Starts the threads when they are first needed."""
        self.world_size = world_size
        self._turn = threading.Condition()
        self._slots: dict[int, _Slot] = {}
        self._failed = False
        threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(world_size, "rank", lambda: torch.set_num_threads(threads))

    def run(self, works: Sequence[Callable[[], Any]]) -> None:
        """Calls one function per rank, each in a thread, and waits for all.

        Raises:
            Exception: What one of them raised first; the others then end with a LostRank.
        """
        self._failed = False
        futures = [self._pool.submit(self._take_turn, work) for work in works]
        errors = [error for future in futures if (error := future.exception()) is not None]
        self._slots.clear()
        if errors:
            # What a rank raised, and not that others waited for it.
            raise next((e for e in errors if not isinstance(e, LostRank)), errors[0])

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()

    def deliver(self, number: int, rank: int, kind: str, tensor: Tensor) -> None:
        """Takes what a rank sends; its tensor may be overwritten afterwards.

        Args:
            number: How many collectives the rank began before.
            rank: Which rank.
            kind: Of the collective, and of the tensor; must be the same on all ranks.
            tensor: Copied.
        """
        slot = self._slots.setdefault(number, _Slot(kind))
        if slot.kind != kind:
            raise RuntimeError(f"rank {rank} began {kind} where another one began {slot.kind}")
        slot.sent[rank] = tensor.clone()
        if len(slot.sent) == self.world_size:
            self._turn.notify_all()

    def collect(self, number: int) -> list[Tensor]:
        """Returns what all ranks sent, in rank order, and lets other ranks run until they have.

        Raises:
            LostRank: If one of them failed.
        """
        slot = self._slots[number]
        while len(slot.sent) < self.world_size:
            if self._failed:
                raise LostRank("another rank of this process failed")
            self._turn.wait()
        slot.readers += 1
        if slot.readers == self.world_size:
            del self._slots[number]
        return [slot.sent[rank] for rank in range(self.world_size)]

    def _take_turn(self, work: Callable[[], Any]) -> None:
        with self._turn:
            try:
                work()
            except BaseException:
                self._failed = True
                self._turn.notify_all()
                raise


class _Slot:
    """One collective."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.sent: dict[int, Tensor] = {}
        self.readers = 0


class _Delivery(Pending):
    """A collective on its way through memory."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        self._finish()

    def get_future(self) -> NoReturn:
        raise NotImplementedError("votes during backward (overlap=True) take real ranks")


class MemoryWire(Wire):
    """A rank's collectives, answered by the other threads; bytes are counted as on a network."""

    def __init__(self, hub: Hub, rank: int) -> None:
        """Takes no process group."""
        self.hub, self.rank, self.world_size = hub, rank, hub.world_size
        self.stats, self.neighbours = WireStats(), 0
        self._begun = 0

    def device_for(self, device: torch.device) -> torch.device:
        """Returns `device`: memory carries all."""
        return device

    @property
    def control_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def all_gather(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        """As `Wire.all_gather`."""
        self._count_to_each(tensor.numel() * tensor.element_size())

        def finish(sent: list[Tensor]) -> None:
            torch.stack(sent, out=out.view(len(sent), -1))

        return self._begin("all_gather", tensor.view(-1), finish)

    def all_to_all(self, out: Tensor, tensor: Tensor, what: str) -> Pending:
        """As `Wire.all_to_all`."""
        self._count_to_each(tensor[0].numel() * tensor.element_size())

        def finish(sent: list[Tensor]) -> None:
            mine = [other.view(self.world_size, -1)[self.rank] for other in sent]
            torch.stack(mine, out=out.view(self.world_size, -1))

        return self._begin("all_to_all", tensor.view(-1), finish)

    def start_all_reduce(self, tensor: Tensor, what: str) -> Pending:
        """As `Wire.start_all_reduce`; adds in the order of the ranks."""
        per_rank = -(-tensor.numel() // self.world_size)
        size = 2 * (self.world_size - 1) * per_rank * tensor.element_size()
        self._count(size, inside=False, rounds=2 * (self.world_size - 1))

        def finish(sent: list[Tensor]) -> None:
            total = sent[0].clone()
            for other in sent[1:]:
                total += other
            tensor.view(-1).copy_(total)

        return self._begin("all_reduce", tensor.view(-1), finish)

    def broadcast(self, tensor: Tensor, source: int, *, near: bool = False) -> None:
        """As `Wire.broadcast`."""
        size = tensor.numel() * tensor.element_size()
        if self.rank == source:
            self._count(size * (self.world_size - 1), inside=False, received=0, rounds=1)
        else:
            self._count(0, inside=False, received=size, rounds=1)
        data = tensor.as_strided((tensor.numel(),), (1,))
        self._begin("broadcast", data, lambda sent: data.copy_(sent[source])).wait()

    def meet(self) -> None:
        """There is nothing to connect."""

    def sibling(self) -> NoReturn:
        """Refuses.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("votes during backward (overlap=True) take real ranks")

    def subgroup(self, members: Sequence[int]) -> NoReturn:
        """Refuses.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("nodes that vote as one (local_group) take real ranks")

    def _begin(self, kind: str, flat: Tensor, finish: Callable[[list[Tensor]], Any]) -> Pending:
        number, self._begun = self._begun, self._begun + 1
        self.hub.deliver(number, self.rank, f"{kind} of {flat.numel()} {flat.dtype}", flat)
        return _Delivery(lambda: finish(self.hub.collect(number)))


class _MemoryRanks(Ranks):
    """The ranks of an optimizer whose wire is memory."""

    def __init__(self, wire: MemoryWire, limit: int) -> None:
        super().__init__(None, None, limit)
        self._wire: Wire = wire
        self.abstentions = Abstentions(wire.world_size, limit)

    def look_up(self, groups: Groups, stats: WireStats) -> tuple[Wire, bool]:
        return self._wire, False


def simulated(model: nn.Module, wire: MemoryWire, **options: Any) -> DistributedLion:
    """Returns the optimizer of one rank, which votes through memory.

    Args:
        model: The rank's own replica.
        wire: The rank's own; its `stats` become the optimizer's.
        options: Of `DistributedLion`.
    """
    params = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    optimizer = DistributedLion(params, **options)
    wire.stats = optimizer.wire
    optimizer._engine.ranks = _MemoryRanks(wire, optimizer.options.max_abstained_steps)
    return optimizer
