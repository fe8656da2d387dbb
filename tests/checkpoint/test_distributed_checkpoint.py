"""torch.distributed.checkpoint: what it saves of the optimizer is enough to go on with."""

from __future__ import annotations

import copy
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import DistributedLion
from hf_dlion.options import warn_once
from tests.support.spawn import RankPools
from tests.support.tiny import weights_digest

pytestmark = pytest.mark.multiproc


class Run:
    """A DDP model, its optimizer, and batches that differ between steps and ranks."""

    def __init__(self, rank: int, weights_seed: int, **options: Any) -> None:
        warn_once._given.discard("momentum collected")
        torch.manual_seed(weights_seed)
        self.rank, self.model = rank, nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).bfloat16()
        self.ddp: nn.Module | None = DistributedDataParallel(self.model)
        named = list(self.model.named_parameters())
        groups = [{"params": named[:2], "lr": 0.02}, {"params": named[2:]}]
        self.lion = DistributedLion(groups, lr=0.01, weight_decay=0.1, **options)

    def train(self, steps: range) -> str:
        for step in steps:
            torch.manual_seed(1000 * step + self.rank)
            assert self.ddp is not None
            self.ddp(torch.randn(4, 6).bfloat16()).square().sum().backward()
            self.lion.step()
            self.lion.zero_grad()
        return weights_digest(self.model)

    def close(self) -> None:
        self.ddp = None  # gloo aborts a process whose wrapper outlives the group.
        gc.collect()


def interrupted(
    rank: int, world_size: int, folder: str, averaged: bool
) -> tuple[str, str, int, list[str]]:
    first = Run(rank, 0, seed=7)
    first.train(range(3))
    if averaged:
        first.lion.synchronize_momentum()
    model_state, state = get_state_dict(first.model, first.lion)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
    straight = first.train(range(3, 6))
    first.close()

    second = Run(rank, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model_state, state = get_state_dict(second.model, second.lion)
        dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(
            second.model, second.lion, model_state_dict=model_state, optim_state_dict=state
        )
        said = [str(w.message) for w in caught if "synchronize_momentum" in str(w.message)]
    steps, groups = second.lion.steps, second.lion.param_groups
    assert [set(g) for g in groups] == [set(g) for g in first.lion.param_groups]
    resumed = second.train(range(3, 6))
    second.close()
    return straight, resumed, steps, said


def test_a_run_with_equal_momenta_continues_with_the_same_bits(
    ranks: RankPools, tmp_path: Path
) -> None:
    for straight, resumed, steps, said in ranks(2).run(interrupted, str(tmp_path), True):
        assert straight == resumed
        assert steps == 3
        assert said == []


def test_a_run_with_a_momentum_per_rank_says_what_it_lost_and_goes_on_alike(
    ranks: RankPools, tmp_path: Path
) -> None:
    results = ranks(2).run(interrupted, str(tmp_path), False)
    for straight, resumed, steps, said in results:
        assert resumed != straight
        assert resumed == results[0][1]
        assert steps == 3
        assert len(said) == 1


def with_divergence(rank: int, world_size: int, folder: str) -> list[dict[int, float]]:
    options = {"momentum_sync_every": 2, "momentum_sync": "auto"}
    found = []
    for saves in (True, False):
        run = Run(rank, 0, **options)
        run.train(range(3 if saves else 1))
        run.lion.synchronize_momentum()
        _, state = get_state_dict(run.model, run.lion)
        if saves:
            dcp.save({"optimizer": state}, checkpoint_id=folder)
        else:
            dcp.load({"optimizer": state}, checkpoint_id=folder)
            set_optimizer_state_dict(run.model, run.lion, state)
        found.append(run.lion._engine.sync.divergence)
        run.close()
    return found


def test_what_momentum_sync_measured_goes_along(ranks: RankPools, tmp_path: Path) -> None:
    for saved, loaded in ranks(2).run(with_divergence, str(tmp_path)):
        assert len(saved) == 4
        assert loaded == saved


def broadcast(rank: int, world_size: int) -> tuple[str, str]:
    first = Run(rank, 0)
    first.train(range(3))
    first.lion.synchronize_momentum()
    whole = StateDictOptions(full_state_dict=True)
    # A copy, as a file would be: the tensors are the optimizer's own.
    state = copy.deepcopy(get_optimizer_state_dict(first.model, first.lion, options=whole))
    weights = {name: value.clone() for name, value in first.model.state_dict().items()}
    straight = first.train(range(3, 6))
    first.close()
    second = Run(rank, 0)
    second.model.load_state_dict(weights)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = state if rank == 0 else {}
    set_optimizer_state_dict(second.model, second.lion, given, options=from_rank_0)
    resumed = second.train(range(3, 6))
    second.close()
    return straight, resumed


def test_rank_0_may_broadcast_the_whole_state(ranks: RankPools) -> None:
    for straight, resumed in ranks(2).run(broadcast):
        assert straight == resumed


def ask_first(rank: int, world_size: int) -> tuple[str, str, list[Any], str]:
    run = Run(rank, 0)
    before = weights_digest(run.model)
    state = get_optimizer_state_dict(run.model, run.lion)
    after = weights_digest(run.model)
    lrs = [group["lr"] for group in run.lion.param_groups]
    held = [bool(entry["exp_avg"].any()) for entry in state["state"].values()]  # type: ignore[union-attr]
    end = run.train(range(3))
    run.close()
    return before, after, [*lrs, *held], end


def test_asking_for_the_state_before_the_first_step_moves_nothing(ranks: RankPools) -> None:
    results = ranks(2).run(ask_first)
    for before, after, seen, end in results:
        assert before == after
        assert seen == [0.02, 0.01, False, False, False, False]
        assert end == results[0][3]


def test_a_flattened_state_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    lion = DistributedLion(model.named_parameters())
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, lion, options=flat)
    with pytest.raises(ValueError, match="flatten_optimizer_state_dict"):
        set_optimizer_state_dict(model, lion, state, options=flat)
