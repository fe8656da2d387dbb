"""Ranks vote alone, as nodes of consecutive ranks, or with the same part of FSDP2's parameters."""

from __future__ import annotations

import os
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Disagreement
from hf_dlion.ranks.stats import WireStats
from hf_dlion.ranks.topology import Topology
from tests.support.spawn import on_ranks
from tests.support.training import replicas_of_shards


def described(topology: Topology) -> tuple[Any, ...]:
    node = topology.node
    return (
        topology.voters.global_ranks,
        None if node is None else node.global_ranks,
        topology.local_size,
    )


@pytest.mark.parametrize("local_group", [None, 1])
@on_ranks(3)
def test_every_rank_votes_without_nodes(local_group: int | None) -> None:
    stats = WireStats()
    topology = Topology(None, local_group, stats)
    topology.form()
    assert topology.voters is topology.everyone
    assert topology.same_parts == [[*range(topology.everyone.world_size)]]
    assert topology.everyone.group is dist.group.WORLD
    assert described(topology) == ([0, 1, 2], None, 1)
    assert (stats.bytes_sent > 0) == (local_group is not None)


@pytest.mark.smoke
@pytest.mark.parametrize("size", [2, 4])
@on_ranks(4)
def test_consecutive_ranks_form_nodes(rank: int, size: int) -> None:
    stats = WireStats()
    topology = Topology(None, size, stats)
    assert stats.bytes_sent == 0
    topology.form()
    assert topology.same_parts == [[*range(topology.everyone.world_size)]]
    node = list(range(rank - rank % size, rank - rank % size + size))
    voters = list(range(rank % size, 4, size))
    assert described(topology) == (voters, node, size)
    assert topology.voters.rank == rank // size
    before = stats.bytes_sent, stats.node_bytes_sent
    assert topology.node is not None
    assert topology.node.gather_words([rank], "a word").view(-1).tolist() == node
    assert topology.voters.gather_words([rank], "a word").view(-1).tolist() == voters
    topology.everyone.gather_words([rank], "a word")
    sent = stats.bytes_sent - before[0], stats.node_bytes_sent - before[1]
    assert sent == ((8 + 2 * 8, 8 + 8) if size == 2 else (0, 2 * 24))
    again = Topology(None, size)
    again.form()
    assert again.voters.group is topology.voters.group


def form_a_node(**variables: str) -> tuple[Any, ...]:
    """Forms the nodes of a launcher's variables, and returns them."""
    with mock.patch.dict(os.environ):
        for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        os.environ.update(variables)
        topology = Topology(None, "node")
        topology.form()
    return described(topology)


@pytest.mark.parametrize("launcher", [["0", "1", "0", "1"], None], ids=["all", "size"])
@on_ranks(4)
def test_node_reads_what_a_launcher_sets(rank: int, launcher: list[str] | None) -> None:
    place = {"LOCAL_RANK": launcher[rank]} if launcher else {}
    found = form_a_node(LOCAL_WORLD_SIZE="2", **place)
    assert found == ([rank % 2, rank % 2 + 2], [rank - rank % 2, rank - rank % 2 + 1], 2)


@pytest.mark.parametrize(
    ("sizes", "places", "expected"),
    [
        (
            "2211", "0100",
            "nodes must have the same number of ranks (local_group or LOCAL_WORLD_SIZE), got "
            "[2, 2, 1, 1] in rank order",
        ),
        ("3333", "0120", "4 ranks cannot be divided into nodes of 3 ranks"),
        ("0000", "0000", "4 ranks cannot be divided into nodes of 0 ranks"),
        ("2222", "0011", "the ranks of a node must be consecutive, 2 by 2"),
    ],
)  # fmt: skip
@on_ranks(4)
def test_ranks_that_form_no_equal_nodes_raise_one_error(
    rank: int, sizes: str, places: str, expected: str
) -> None:
    with pytest.raises(Disagreement, match=f"^{re.escape(expected)}"):
        form_a_node(LOCAL_WORLD_SIZE=sizes[rank], LOCAL_RANK=places[rank])


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        ({}, "local_group='node' reads LOCAL_WORLD_SIZE, which is not set: "),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE must be a number (got 'two')"),
        ({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "-1"}, "LOCAL_RANK must be a number (got '-1')"),
    ],
)
@on_ranks(2)
def test_a_rank_that_does_not_know_its_node_raises_and_is_named(
    rank: int, mine: dict[str, str], expected: str
) -> None:
    error, text, variables = ValueError, expected, mine
    if rank == 0:
        error, variables = Disagreement, {"LOCAL_WORLD_SIZE": "1"}
        text = f"local_group failed on 1 of 2 ranks: rank 1: ValueError: {expected}"
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        form_a_node(**variables)


@on_ranks(2)
def test_a_group_of_a_node_that_was_destroyed_is_created_again(rank: int) -> None:
    for _ in range(2):
        topology = Topology(None, 2)
        topology.form()
        assert topology.node is not None
        assert topology.node.gather_words([rank], "a word").view(-1).tolist() == [0, 1]
        dist.destroy_process_group(topology.node.group)


@on_ranks(4)
def test_groups_that_torch_would_name_differently_are_refused() -> None:
    dist.new_group([0, 1])
    group = dist.new_group()
    text = "ranks are members of different numbers of process groups"
    with pytest.raises(Disagreement, match=text):
        Topology(group, 2).form()


@pytest.mark.smoke
@on_ranks(4)
def test_the_ranks_of_a_replicate_dimension_vote(rank: int) -> None:
    stats = WireStats()
    topology = Topology(replicate=replicas_of_shards(2, 2)["replicate"].get_group(), stats=stats)
    topology.form()
    assert topology.node is None
    assert topology.everyone.world_size == 4
    assert topology.same_parts == [[0, 2], [1, 3]]
    assert topology.local_size == 1
    voters = topology.voters.gather_words([rank], "a word").view(-1).tolist()
    assert voters == topology.same_parts[rank % 2]
    assert stats.bytes_sent == 64 * 3 + 8


@on_ranks(1)
def test_control_messages_travel_from_the_parameters_device() -> None:
    # As after init_process_group("nccl"): no backend for the CPU, and no device_id.
    with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"), FakeTensorMode():
        param = torch.nn.Parameter(torch.empty(4, device="cuda"))
        optimizer = DistributedLion([param])
        assert optimizer.peers.topology().everyone.control_device == param.device


@on_ranks(3)
def test_replicas_of_different_sizes_are_refused(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    text = r"sizes are \[2, 2, 1\] and their first ranks \[0, 0, 2\] in rank order"
    with pytest.raises(Disagreement, match=text):
        Topology(replicate=groups[rank == 2]).form()
