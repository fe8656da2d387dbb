"""Collectives give what torch's give, count every byte, and name the ranks that are lost."""

from __future__ import annotations

import datetime
import math
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_dlion.ranks.wire as wire_module
from hf_dlion.ranks.stats import WireStats
from hf_dlion.ranks.wire import LostRank, Wire, named_ranks
from tests.support.spawn import on_ranks

WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3])


def wire_of(**options: Any) -> Wire:
    return Wire(dist.group.WORLD, WireStats(), **options)


def counts(stats: WireStats) -> tuple[int, int]:
    return stats.bytes_sent, stats.node_bytes_sent


@on_ranks(2)
def test_a_process_with_gloo_waits_once_when_it_ends() -> None:
    wire_module._wait_at_exit.cache_clear()
    with mock.patch("atexit.register") as register:
        for _ in range(2):
            wire_of()
    assert [call.args for call in register.call_args_list] == [(time.sleep, 0.1)]


def test_times_on_a_gpu_are_those_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host goes on when NCCL's collectives have been started."""
    reached, now = iter([10.0, 30.0, 2000.0, 2100.0, 2200.0]), [0.0]  # in ms

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self, stream: object) -> None:
            self.at = next(reached)

        def query(self) -> bool:
            return self.at <= now[0]

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    stats, cpu = WireStats(), torch.device("cpu")
    gpu = torch.device("cuda", 0)
    stats.lap("", gpu)
    for name in ("encode_s", "exchange_s", "apply_s"):
        stats.lap(name, gpu)
    assert stats.encode_s == stats.exchange_s == stats.apply_s == 0.0
    now[0] = 2150.0  # The host has waited for the gradients of the next step.
    stats.lap("", gpu)
    stats.lap("apply_s", cpu)  # Of a model on two devices.
    now[0] = 2250.0
    stats.lap("", cpu)
    found = stats.encode_s, stats.exchange_s, stats.apply_s
    assert found == pytest.approx((0.02, 1.97, 0.1))


@WORLD_SIZES
@pytest.mark.parametrize("in_node", [False, True])
@on_ranks("world_size")
def test_all_reduce_counts_the_bytes_of_a_ring(rank: int, world_size: int, in_node: bool) -> None:
    wire = wire_of(in_node=in_node)
    summed = torch.full((5,), float(rank + 1))
    wire.all_reduce(summed, "gradients").wait()
    assert summed.tolist() == [world_size * (world_size + 1) / 2] * 5
    sent = 2 * (world_size - 1) * math.ceil(5 / world_size) * 4
    assert counts(wire.stats) == ((0, sent) if in_node else (sent, 0))


@pytest.mark.smoke
@WORLD_SIZES
@on_ranks("world_size")
def test_gather_words_keeps_64_bits_in_rank_order(rank: int, world_size: int) -> None:
    wire = wire_of()
    listed = wire.gather_words([rank, -(2**63), 2**63 - 1], "words")
    tensor = wire.gather_words(torch.tensor([rank]), "words")
    assert listed.tolist() == [[other, -(2**63), 2**63 - 1] for other in range(world_size)]
    assert tensor.tolist() == [[other] for other in range(world_size)]
    assert wire.stats.bytes_sent == 8 * (world_size - 1) * 4
    assert wire.control_device == torch.device("cpu")


class Mute:
    def __repr__(self) -> str:
        raise ValueError("no words")


@pytest.mark.smoke
@on_ranks(3)
def test_gather_objects_returns_plain_values_of_different_lengths(rank: int) -> None:
    values = [None, {"a": (1, True, 0.1), "b": torch.float32}, ["ä\ud800" * 40, math.inf, Mute()]]
    wire = wire_of()
    assert wire.gather_objects(values[rank]) == [
        None,
        {"a": [1, True, 0.1], "b": "torch.float32"},
        ["ä\ud800" * 40, math.inf, "<Mute>"],
    ]
    longest = len('["') + 12 * 40 + len('", Infinity, "<Mute>"]')
    assert wire.stats.bytes_sent == 2 * (8 + longest)


@on_ranks(2)
def test_gloo_sends_from_the_cpu(rank: int) -> None:
    wire = wire_of()
    found = [wire.device_for(torch.device(kind)).type for kind in ("cpu", "cuda", "mps")]
    group = dist.new_group(backend="cuda:gloo")
    only_gpus = Wire(group, WireStats(), device=torch.device("cuda", 1))
    with pytest.raises(RuntimeError, match=r"cannot send tensors on cuda:1: initialize"):
        only_gpus.device_for(torch.device("cuda", 1))
    wire.gather_words([0], "the end")  # A rank may still connect to the new group.
    assert found == ["cpu", "cpu", "cpu"]


@pytest.mark.parametrize(("world_size", "others"), [(2, "rank 1"), (3, "one of ranks 1 and 2")])
@on_ranks("world_size")
def test_a_lost_rank_is_named(rank: int, others: str) -> None:
    wire = Wire(dist.new_group(timeout=datetime.timedelta(seconds=2)), WireStats())
    wire.gather_words([0], "a first word")
    if rank != 0:
        return
    # The other ranks have left by now.
    with pytest.raises(LostRank, match=f"^rank 0 lost {others} while waiting for votes: ") as lost:
        wire.gather_words([0], "votes")
    assert lost.value.__cause__ is not None
    for text in ("timeout of 0:00:02", "skipped a step", "a barrier on one rank only"):
        assert text in str(lost.value)


@on_ranks(3)
def test_a_new_group_has_its_members_and_the_timeout_of_the_old_one(rank: int) -> None:
    wire = wire_of()
    members = [0, 2] if rank != 1 else [1]
    group = wire.new_group(members)
    own = Wire(group, wire.stats)
    assert own.gather_words([rank], "a word").view(-1).tolist() == own.global_ranks == members
    assert own.rank == members.index(rank)
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    assert timeout == datetime.timedelta(seconds=180)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "rank 0"),
        (2, "ranks 0 and 1"),
        (3, "ranks 0, 1, and 2"),
        (9, "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (9 ranks)"),
    ],
)
def test_many_ranks_are_not_all_listed(count: int, text: str) -> None:
    assert named_ranks(range(count)) == text
