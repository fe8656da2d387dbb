"""Ranks that are threads have for themselves what processes have, and say what went wrong."""

from __future__ import annotations

import os
import random
import warnings

import numpy as np
import pytest
import torch

from hf_dlion import DistributedLion
from hf_dlion.options.warn_once import warn_once
from tests.support import spawn
from tests.support.spawn import RanksFailedError
from tests.support.threads import ThreadPool


def _hand_over() -> None:
    """Lets every other rank run."""
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    DistributedLion([param]).step()


def _draw(rank: int, world_size: int) -> list[float]:
    drawn = []
    for _ in range(3):
        drawn += [random.random(), float(np.random.rand()), float(torch.rand(()))]
        _hand_over()
    return drawn


def _keep_apart(rank: int, world_size: int, shared: list[int]) -> list[str]:
    shared.append(rank)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(spawn, "GRACE_S", rank)
        patch.setenv("OWN", str(rank))
        _hand_over()
        warn_once("apart", f"warned by {rank}")
        _hand_over()
        own = [str(w.message) for w in caught]
        return [*own, os.environ["OWN"], os.environ["RANK"], str(spawn.GRACE_S), str(shared)]


def _fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the error of rank one")
    _hand_over()


def test_every_rank_draws_from_the_same_seed_in_every_call() -> None:
    pool = ThreadPool(3)
    before = random.getstate()
    first, second, third = pool.run(_draw)
    assert first == second == third == pool.run(_draw)[2]
    assert random.getstate() == before
    pool.close()


def test_ranks_do_not_see_one_another_s_patches_warnings_and_arguments() -> None:
    pool, grace = ThreadPool(2), spawn.GRACE_S
    assert pool.run(_keep_apart, []) == [
        [f"warned by {rank}", str(rank), str(rank), str(rank), f"[{rank}]"] for rank in range(2)
    ]
    assert spawn.GRACE_S == grace
    assert "OWN" not in os.environ
    pool.close()


def test_a_failure_shows_the_traceback_of_each_rank_and_the_pool_goes_on() -> None:
    pool = ThreadPool(2)
    with pytest.raises(RanksFailedError) as failure:
        pool.run(_fail_on_rank_1)
    text = str(failure.value)
    assert "ValueError: the error of rank one" in text.split("rank 1:")[1]
    assert "LostRank: another rank of this process failed" in text.split("rank 1:")[0]
    assert len(pool.run(_draw)) == 2
    pool.close()
