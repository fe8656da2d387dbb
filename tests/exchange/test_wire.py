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

import hf_dlion.exchange.wire as wire_module
from hf_dlion.exchange.wire import LostRank, Wire, WireStats, named_ranks
from tests.support.spawn import RankPools, on_ranks

pytestmark = pytest.mark.multiproc

WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3])


def wire_of(**options: Any) -> Wire:
    assert dist.group.WORLD is not None
    return Wire(dist.group.WORLD, WireStats(), **options)


def counts(stats: WireStats) -> tuple[int, int, int]:
    return stats.bytes_sent, stats.bytes_received, stats.node_bytes_sent


@on_ranks(2)
def test_a_process_with_gloo_waits_once_when_it_ends() -> None:
    wire_module._wait_at_exit.cache_clear()
    with mock.patch("atexit.register") as register:
        for _ in range(2):
            wire_of()
    assert [call.args for call in register.call_args_list] == [(time.sleep, 0.1)]


def gathered(rank: int, world_size: int) -> Any:
    wire = wire_of()
    mine = torch.arange(6, dtype=torch.float32).view(2, 3) + 10 * rank
    out = torch.empty(world_size, 2, 3)
    wire.all_gather(out, mine, "votes").wait()
    return out, counts(wire.stats)


@pytest.mark.smoke
@WORLD_SIZES
def test_all_gather_gives_every_rank_all_tensors(pools: RankPools, world_size: int) -> None:
    wanted = torch.stack([torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(world_size)])
    sent = (world_size - 1) * 24
    for out, counted in pools(world_size).run(gathered):
        assert torch.equal(out, wanted)
        assert counted == (sent, sent, 0)


def scattered(rank: int, world_size: int) -> Any:
    wire = wire_of()
    mine = torch.arange(world_size * 2, dtype=torch.int64).view(world_size, 2) + 100 * rank
    out = torch.empty_like(mine)
    wire.all_to_all(out, mine, "votes").wait()
    return out, counts(wire.stats)


@WORLD_SIZES
def test_all_to_all_sends_segment_j_to_rank_j(pools: RankPools, world_size: int) -> None:
    sent = (world_size - 1) * 16
    for rank, (out, counted) in enumerate(pools(world_size).run(scattered)):
        assert out.tolist() == [
            [100 * r + 2 * rank, 100 * r + 2 * rank + 1] for r in range(world_size)
        ]
        assert counted == (sent, sent, 0)


def summed(rank: int, world_size: int, in_node: bool) -> Any:
    wire = wire_of(in_node=in_node)
    waited = torch.full((5,), float(rank + 1))
    wire.all_reduce(waited, "gradients").wait()
    return waited, counts(wire.stats)


@WORLD_SIZES
@pytest.mark.parametrize("in_node", [False, True])
def test_all_reduce_counts_the_bytes_of_a_ring(
    pools: RankPools, world_size: int, in_node: bool
) -> None:
    total = world_size * (world_size + 1) / 2
    sent = 2 * (world_size - 1) * math.ceil(5 / world_size) * 4
    for tensor, counted in pools(world_size).run(summed, in_node):
        assert tensor.tolist() == [total] * 5
        assert counted == ((0, 0, sent) if in_node else (sent, sent, 0))


@on_ranks(3)
def test_bytes_inside_the_node_are_counted_separately() -> None:
    stats = WireStats()
    assert dist.group.WORLD is not None
    inside = Wire(dist.group.WORLD, stats, in_node=True)
    inside.gather_words([1, 2], "a word")
    partly = Wire(dist.group.WORLD, stats)
    partly.neighbors = 1
    partly.gather_words([1], "a word")
    assert counts(stats) == (8, 8, 2 * 16 + 8)


def words(rank: int, world_size: int) -> Any:
    wire = wire_of()
    listed = wire.gather_words([rank, -(2**63), 2**63 - 1], "words")
    tensor = wire.gather_words(torch.tensor([rank]), "words")
    return listed, tensor, counts(wire.stats), wire.control_device


@WORLD_SIZES
def test_gather_words_keeps_64_bits_in_rank_order(pools: RankPools, world_size: int) -> None:
    for listed, tensor, counted, device in pools(world_size).run(words):
        assert listed.tolist() == [[rank, -(2**63), 2**63 - 1] for rank in range(world_size)]
        assert tensor.tolist() == [[rank] for rank in range(world_size)]
        assert counted[0] == 8 * (world_size - 1) * 4
        assert device == torch.device("cpu")


class Mute:
    def __repr__(self) -> str:
        raise ValueError("no words")


def objects(rank: int, world_size: int) -> Any:
    values = [None, {"a": (1, True, 0.1), "b": torch.float32}, ["ä\ud800" * 40, math.inf, Mute()]]
    wire = wire_of()
    found = wire.gather_objects(values[rank])
    return found, counts(wire.stats)


@pytest.mark.smoke
def test_gather_objects_returns_plain_values_of_different_lengths(pools: RankPools) -> None:
    wanted = [
        None,
        {"a": [1, True, 0.1], "b": "torch.float32"},
        ["ä\ud800" * 40, math.inf, "<Mute>"],
    ]
    results = pools(3).run(objects)
    assert [found for found, _ in results] == [wanted] * 3
    longest = len('["') + 12 * 40 + len('", Infinity, "<Mute>"]')
    assert results[0][1][0] == 2 * (8 + longest)


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


def lost(rank: int, world_size: int) -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    assert group is not None
    wire = Wire(group, WireStats())
    wire.gather_words([0], "a first word")
    if rank != 0:
        return ""
    # The other ranks have left by now.
    with pytest.raises(LostRank) as caught:
        wire.gather_words([0], "votes")
    assert caught.value.__cause__ is not None
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "others"), [(2, "rank 1"), (3, "ranks 1 and 2")])
def test_a_lost_rank_is_named(pools: RankPools, world_size: int, others: str) -> None:
    text = pools(world_size).run(lost)[0]
    assert text.startswith(f"rank 0 lost {others} while waiting for votes: ")
    assert "timeout of 0:00:02" in text
    assert "skipped a step" in text
    assert "left the training loop" in text


def grouped(rank: int, world_size: int) -> Any:
    wire = wire_of()
    members = [0, 2] if rank != 1 else [1]
    group = wire.new_group(members)
    own = Wire(group, wire.stats)
    found = own.gather_words([rank], "a word").view(-1).tolist()
    return found, own.rank, own.ranks, group._get_backend(torch.device("cpu")).options._timeout


def test_a_new_group_has_its_members_and_the_timeout_of_the_old_one(pools: RankPools) -> None:
    (a, *of_0), (b, *of_1), (c, *of_2) = pools(3).run(grouped)
    assert (a, b, c) == ([0, 2], [1], [0, 2])
    timeout = datetime.timedelta(seconds=180)
    assert of_0 == [0, [0, 2], timeout]
    assert of_1 == [0, [1], timeout]
    assert of_2 == [1, [0, 2], timeout]


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
