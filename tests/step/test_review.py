"""Corners that a review found: each was wrong once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hf_dlion import DistributedLion
from tests.support.spawn import RankPools


def stepped(value: float = 1.0) -> DistributedLion:
    param = nn.Parameter(torch.ones(3))
    optimizer = DistributedLion([param], lr=0.1)
    param.grad = torch.full((3,), value)
    optimizer.step()
    return optimizer


def test_a_learning_rate_may_be_a_numpy_number() -> None:
    optimizer = stepped()
    optimizer.param_groups[0]["lr"] = np.float32(0.5)
    optimizer.param_groups[0]["params"][0].grad.neg_()
    optimizer.step()
    assert optimizer.steps == 2


def test_a_loaded_momentum_is_no_longer_that_of_all_ranks() -> None:
    optimizer, other = stepped(), stepped(2.0)
    optimizer.synchronize_momentum()
    assert optimizer.state_dict()["dlion"]["rank"] is None
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict()["dlion"]["rank"] == 0


def average_float64(rank: int, world_size: int) -> float:
    param = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = DistributedLion([param], betas=(0.9, 0.0))
    param.grad = torch.tensor([1.0 + 2.0**-40 * rank], dtype=torch.float64)
    optimizer.step()
    optimizer.synchronize_momentum()
    return optimizer.state[param]["exp_avg"].item()


def test_momenta_of_float64_are_averaged_in_float64(ranks: RankPools) -> None:
    assert ranks(2).run(average_float64) == [1.0 + 2.0**-41] * 2


def run_out_of_memory(rank: int, world_size: int) -> str:
    param = nn.Parameter(torch.ones(3))
    optimizer = DistributedLion([param])
    param.grad = torch.ones(3)
    zeros = torch.zeros

    def no_momentum(*args: object, **options: object) -> torch.Tensor:
        if rank == 1 and args and args[0] == param.shape:
            raise MemoryError("no room for the momentum")
        return zeros(*args, **options)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", no_momentum)
        try:
            optimizer.step()
        except (MemoryError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return "accepted"


def test_a_rank_without_room_for_its_momentum_tells_the_others(ranks: RankPools) -> None:
    first, second = ranks(2).run(run_out_of_memory, timeout=20)
    assert first.startswith("Disagreement: the step failed on 1 of 2 ranks: rank 1: MemoryError")
    assert second == "MemoryError: no room for the momentum"
