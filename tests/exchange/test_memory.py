"""Ranks that are threads: what each gets, and what happens where they part ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dlion import DistributedLion
from hf_dlion.exchange import LostRank, Wire, WireStats
from hf_dlion.exchange.memory import Hub
from hf_dlion.exchange.wire import connect


def connected(world_size: int) -> tuple[Hub, list[Wire]]:
    hub = Hub(world_size)
    return hub, [connect(group, WireStats(), torch.device("cpu")) for group in hub.groups]


def test_a_rank_that_fails_ends_the_others_with_its_own_error():
    hub, wires = connected(2)
    out = torch.empty(2, 1)

    def waits() -> None:
        with pytest.raises(LostRank):
            wires[0].all_gather(out, torch.zeros(1), "votes").wait()
        raise LostRank("after it")

    def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        hub.run([waits, fails])
    hub.close()


def test_ranks_that_begin_different_collectives_are_told():
    hub, wires = connected(2)

    def of_size(wire: Wire, size: int) -> None:
        wire.all_gather(torch.empty(2, size), torch.zeros(size), "votes").wait()

    with pytest.raises(RuntimeError, match=r"rank . began all_gather of . torch.float32 where"):
        hub.run([lambda: of_size(wires[0], 1), lambda: of_size(wires[1], 2)])
    hub.close()


def test_memory_gives_every_rank_what_a_network_would():
    hub, wires = connected(3)
    found: dict[int, dict[str, Any]] = {}

    def work(wire: Wire) -> None:
        own = torch.arange(3.0) + 10 * wire.rank
        to_all, reduced, sent = torch.empty(3), own.clone(), own.clone()
        wire.all_to_all(to_all, own, "segments").wait()
        wire.all_reduce(reduced, "sums")
        wire.broadcast(sent, 2)
        found[wire.rank] = {
            "segments": to_all.tolist(),
            "sums": reduced.tolist(),
            "broadcast": sent.tolist(),
            "objects": wire.gather_objects(f"rank {wire.rank}"),
        }

    hub.run([lambda wire=wire: work(wire) for wire in wires])
    hub.close()
    for rank in range(3):
        assert found[rank] == {
            "segments": [rank, 10 + rank, 20 + rank],
            "sums": [30, 33, 36],
            "broadcast": [20, 21, 22],
            "objects": ["rank 0", "rank 1", "rank 2"],
        }


def test_groups_of_some_ranks_have_collectives_of_their_own():
    hub, wires = connected(4)
    found: dict[int, list[Any]] = {}

    def work(wire: Wire) -> None:
        members = (0, 2) if wire.rank % 2 == 0 else (1, 3)
        half = connect(wire.subgroup(members), WireStats(), torch.device("cpu"), neighbours=1)
        found[wire.rank] = [half.gather_objects(wire.rank), wire.gather_objects(half.rank)]
        assert half.stats.bytes_sent == 0 < half.stats.node_bytes_sent

    hub.run([lambda wire=wire: work(wire) for wire in wires])
    hub.close()
    assert [found[rank][0] for rank in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(places == [0, 0, 1, 1] for _, places in found.values())


def test_a_rank_that_ends_early_is_not_waited_for():
    hub, wires = connected(2)
    with pytest.raises(LostRank, match=r"rank 0 ended before all_gather of 1 torch\.int64"):
        hub.run([lambda: None, lambda: wires[1].gather_objects("anybody?")])
    hub.close()


def test_inside_a_run_an_optimizer_finds_its_ranks_by_itself():
    hub = Hub(2)
    found = []

    def work() -> None:
        param = torch.nn.Parameter(torch.zeros(3))
        optimizer = DistributedLion([param], lr=0.5)
        param.grad = torch.tensor([1.0, -1.0, 1.0])
        optimizer.step()
        found.append((optimizer.rank, optimizer.world_size, param.tolist()))

    hub.run([work, work])
    hub.close()
    assert sorted(found) == [(rank, 2, [-0.5, 0.5, -0.5]) for rank in range(2)]
    assert DistributedLion([torch.nn.Parameter(torch.zeros(3))]).world_size == 1
