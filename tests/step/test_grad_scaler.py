"""A GradScaler on every rank: an overflow on one of them is that rank's abstention alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_dlion import DistributedLion
from tests.support.oracle import OracleGroup, OracleLion, same_bits
from tests.support.random_training import ignored_warnings, normal, random_param
from tests.support.spawn import RankPools

pytestmark = pytest.mark.multiproc

STEPS = 6
OVERFLOW_STEP = 2


def _gradient(rank: int, world_size: int, t: int) -> Tensor:
    gradient = normal(9, 8, seed=10 * t + rank)
    if t == OVERFLOW_STEP and rank == world_size - 1:
        gradient[3, 3] = float("inf")
    return gradient


def _train(rank: int, world_size: int, unscale: bool) -> tuple[list[Tensor], float, bool]:
    from accelerate.optimizer import AcceleratedOptimizer

    from accelerate import Accelerator

    Accelerator(cpu=True)
    p = random_param(9, 8)
    # A power of two, so that scaling and unscaling change no bit.
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    inner = DistributedLion([p], lr=0.1)
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    ends, skipped = [], False
    for t in range(STEPS):
        optimizer.zero_grad()
        scaler.scale((p * _gradient(rank, world_size, t)).sum()).backward()
        if unscale:  # as gradient clipping does
            scaler.unscale_(inner)
        with ignored_warnings():
            optimizer.step()
        skipped = skipped or optimizer.step_was_skipped
        ends.append(p.detach().clone())
    return ends, scaler.get_scale(), skipped


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_other_ranks_go_on_and_no_schedule_pauses(
    ranks: RankPools, world_size: int, unscale: bool
) -> None:
    results = ranks(world_size).run(_train, unscale)
    oracle = OracleLion([OracleGroup([random_param(9, 8)], lr=0.1)], world_size)
    for t in range(STEPS):
        oracle.step([[_gradient(rank, world_size, t)] for rank in range(world_size)])
        for ends, _, _ in results:
            assert same_bits(ends[t], oracle.params[0]), f"step {t}"
    assert [scale for _, scale, _ in results] == [8.0] * (world_size - 1) + [4.0]
    # One rank alone says that it skipped would pause one rank's learning rate schedule.
    assert not any(skipped for _, _, skipped in results)


@pytest.mark.filterwarnings("ignore")
def test_a_scaler_that_saw_no_gradient_lets_the_step_be() -> None:
    p = random_param(9, 8)
    optimizer = DistributedLion([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(p.sum())
    scaler.step(optimizer)
    assert optimizer.wire.abstentions == 0


def test_a_step_that_raised_leaves_no_scale_to_the_next_one() -> None:
    p = random_param(9, 8)
    optimizer = DistributedLion([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(p.sum()).backward()
    optimizer.param_groups[0]["lr"] = "large"
    with pytest.raises(TypeError):
        scaler.step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p.grad, torch.ones_like(p)), "nothing is divided by the scale"
