"""DistributedLion on real ranks equals the single-process simulation of the rule, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dlion import DistributedLion
from tests.support import zoo
from tests.support.oracle import bits_of
from tests.support.random_training import backward, random_param
from tests.support.rule_cases import CASES, bytes_of_words, rows_of_words, words_of
from tests.support.spawn import RankPools

# For the plain tier: each option once, and more than two ranks.
QUICK = [
    (3, "default"),
    *((2, case) for case in ("gather", "two_phase-zero", "two_phase-average", "gather-2-bits")),
    *((2, case) for case in ("two_phase-4-bits-tensor", "two_phase-8-bits-zero", "nearest")),
]
STEPS = {(4, "default"): 50, (4, "two_phase-average"): 50}
FEWER_STEPS = 16


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        pytest.param(n, case, marks=[] if (n, case) in QUICK else pytest.mark.full)
        for n in (1, 2, 3, 4)
        for case in CASES
    ],
)
def test_every_step_equals_the_simulation(ranks: RankPools, world_size: int, case: str) -> None:
    options, steps = CASES[case], STEPS.get((world_size, case), FEWER_STEPS)
    records = ranks(world_size).run(zoo.train, steps, options)
    oracle = zoo.replay(records, options)
    assert oracle.steps == steps - (2 if world_size == 1 else 1)
    _assert_unseen_rows_only_decayed(oracle.params[0], oracle.steps)


@pytest.mark.multiproc
@pytest.mark.smoke
def test_real_ranks_take_the_same_steps(ranks: RankPools) -> None:
    zoo.replay(ranks(2).run(zoo.train, FEWER_STEPS, {}), {})


def _assert_unseen_rows_only_decayed(embedding: torch.Tensor, steps: int) -> None:
    expected = zoo.Zoo().embedding.detach()
    factor = torch.tensor(1.0 - zoo.GROUPS[0]["lr"] * zoo.GROUPS[0]["weight_decay"])
    for _ in range(steps):
        expected = expected * factor
    assert bits_of(embedding[zoo.UNSEEN_ROWS]) == bits_of(expected[zoo.UNSEEN_ROWS])


@pytest.mark.multiproc
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "ddp",
    [
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "bucket_cap_mb": 1e-4},
    ],
    ids=["default", "bucket_view", "many_buckets"],
)
def test_training_in_ddp_equals_the_simulation(
    ranks: RankPools, world_size: int, exchange: str, ddp: dict[str, Any]
) -> None:
    options = {"exchange": exchange}
    zoo.replay(ranks(world_size).run(zoo.train_ddp, 15, options, ddp), options)


@pytest.mark.multiproc
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
@pytest.mark.parametrize("members", [[[1, 3], [0, 2]], [[1, 2, 3], [0]]], ids=str)
def test_a_process_group_of_some_ranks_trains_by_itself(
    ranks: RankPools, members: list[list[int]], exchange: str
) -> None:
    options = {"exchange": exchange}
    records = ranks(4).run(zoo.train_in_subgroups, 15, options, members)
    for group in members:
        zoo.replay([records[rank] for rank in group], options)


@pytest.mark.parametrize(
    "case", ["default", pytest.param("two_phase-average", marks=pytest.mark.full)]
)
def test_both_exchanges_make_the_same_bytes(ranks: RankPools, case: str) -> None:
    ends = [
        ranks(3).run(zoo.train, 10, {**CASES[case], "exchange": exchange})
        for exchange in ("gather", "two_phase", "auto")
    ]
    for end in ends[1:]:
        assert [r.params for r in end[0]] == [r.params for r in ends[0][0]]


@pytest.mark.parametrize(
    ("exchange", "aggregation", "ties", "bits"),
    [
        ("gather", "majority", "alternate", 1),
        ("gather", "average", "alternate", 1),
        ("gather", "majority", "alternate", 4),
        ("two_phase", "majority", "alternate", 1),
        ("two_phase", "majority", "zero", 1),
        ("two_phase", "majority", "alternate", 2),
        ("two_phase", "majority", "zero", 8),
        ("two_phase", "average", "alternate", 1),
    ],
)
@pytest.mark.parametrize(
    "world_size", [1, 2, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4))]
)
def test_bytes_sent_in_a_step_are_the_documented_formula(
    ranks: RankPools, world_size: int, exchange: str, aggregation: str, ties: str, bits: int
) -> None:
    options = {"exchange": exchange, "aggregation": aggregation, "ties": ties, "bits": bits}
    steps = zoo.ALL_INF_STEP + 2
    for records in ranks(world_size).run(zoo.train, steps, options):
        shapes = [p.shape for group in zoo.Zoo().groups() for p in group]
        header = 8 * (world_size - 1) * (6 + words_of(len(shapes)))
        words = rows_of_words(shapes)
        votes = bytes_of_words(words, world_size, exchange, aggregation, ties, bits)
        # The first step also agrees on the layout.
        assert records[0].bytes_sent >= header + votes
        for t in range(1, steps):
            abstained = t == zoo.ALL_INF_STEP
            assert records[t].bytes_sent == header + (0 if abstained else votes), f"step {t}"


def rounds_of_a_step(rank: int, world_size: int, options: dict[str, Any]) -> int:
    params = [random_param(70, 3)]
    optimizer = DistributedLion(params, **options)
    rounds = [0]
    for t in range(3):
        backward(params, t)
        optimizer.step()
        rounds.append(optimizer.wire.rounds)
    return rounds[-1] - rounds[-2]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("options", "collectives"),
    [
        # The header is one, and a comparison of hashes.
        ({"exchange": "gather"}, 2),
        ({"exchange": "two_phase"}, 3),
        ({"exchange": "two_phase", "check_replicas_every": 1}, 4),
        # A mean is scattered and gathered.
        ({"warmup_full_steps": 9}, 3),
    ],
    ids=str,
)
def test_every_collective_takes_a_message_to_each_other_rank(
    ranks: RankPools, world_size: int, options: dict[str, Any], collectives: int
) -> None:
    found = ranks(world_size).run(rounds_of_a_step, options)
    assert found == [collectives * (world_size - 1)] * world_size
