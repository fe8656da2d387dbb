"""Ranks and steps without gradients, and parameters that come and go, on several ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dlion import DistributedLion
from tests.support.oracle import OracleGroup, OracleLion, same_bits
from tests.support.random_training import DTYPES, backward, normal, random_param
from tests.support.spawn import RankPools

Grads = list[Tensor | None]


def _params() -> list[nn.Parameter]:
    return [random_param(9, 8, seed=k, dtype=dtype) for k, dtype in enumerate(DTYPES)]


def _replay(
    records: Sequence[list[tuple[Grads, list[Tensor]]]], params: list[nn.Parameter], **options: Any
) -> OracleLion:
    """Takes the steps that every rank recorded as (gradients, parameters after the step)."""
    oracle = OracleLion([OracleGroup(params, lr=0.01, weight_decay=0.1)], len(records), **options)
    for t, ranks in enumerate(zip(*records, strict=True)):
        oracle.step([grads for grads, _ in ranks])
        for rank, (_, ends) in enumerate(ranks):
            for k, end in enumerate(ends):
                assert same_bits(end, oracle.params[k]), f"rank {rank}, step {t}, parameter {k}"
    return oracle


def _thaw_and_add(
    rank: int, world_size: int, exchange: Any
) -> list[tuple[list[Tensor | None], list[Tensor]]]:
    params = _params()
    params[1].requires_grad_(False)
    optimizer = DistributedLion(params[:3], lr=0.01, weight_decay=0.1, exchange=exchange)
    records = []
    for t in range(9):
        if t == 3:
            params[1].requires_grad_(True)
        if t == 5:
            optimizer.add_param_group({"params": [params[3]]})
        if t == 7:
            params[0].requires_grad_(False)
        grads = backward(params, 10 * t + rank)
        if t < 5:
            grads[3] = None
        optimizer.step()
        records.append((grads, [p.detach().clone() for p in params]))
    return records


@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_that_are_thawed_added_and_frozen_keep_to_the_rule(
    ranks: RankPools, world_size: int, exchange: str
) -> None:
    records = ranks(world_size).run(_thaw_and_add, exchange)
    assert _replay(records, _params()).steps == 9


def _idle_rank(
    rank: int, world_size: int, set_to_none: bool
) -> list[tuple[list[Tensor | None], list[Tensor]]]:
    params = _params()
    optimizer = DistributedLion(params, lr=0.01, weight_decay=0.1)
    records = []
    for t in range(6):
        grads: list[Tensor | None] = [None] * len(params)
        if t % 2 == 0 or rank != 1:
            for k, p in enumerate(params):
                (p * normal(*p.shape, seed=100 * t + 10 * k + rank, dtype=p.dtype)).sum().backward()
            grads = [None if p.grad is None else p.grad.clone() for p in params]
        optimizer.step()
        records.append((grads, [p.detach().clone() for p in params]))
        optimizer.zero_grad(set_to_none=set_to_none)
    return records


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rank_that_ran_no_backward_abstains_however_gradients_are_reset(
    ranks: RankPools, set_to_none: bool
) -> None:
    records = ranks(3).run(_idle_rank, set_to_none)
    _replay(records, _params())


def _nobody_has_a_gradient(rank: int, world_size: int) -> tuple[int, bool]:
    params = _params()
    before = [p.detach().clone() for p in params]
    optimizer = DistributedLion(params, lr=0.01, weight_decay=0.1)
    optimizer.step()
    return optimizer.steps, all(same_bits(p, q) for p, q in zip(params, before, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_in_which_nobody_has_a_gradient_changes_nothing_and_does_not_count(
    ranks: RankPools, world_size: int
) -> None:
    assert ranks(world_size).run(_nobody_has_a_gradient) == [(0, True)] * world_size


def _used_by_rank_0_only(rank: int, world_size: int) -> tuple[set[int], Tensor]:
    p, q = random_param(4), random_param(5)
    optimizer = DistributedLion([p, q], lr=0.1)
    backward([p, q] if rank == 0 else [p], 0)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    return set(state), state[1]["exp_avg"]


def test_a_parameter_used_by_one_rank_has_a_momentum_on_all(ranks: RankPools) -> None:
    results = ranks(3).run(_used_by_rank_0_only)
    assert [keys for keys, _ in results] == [{0, 1}] * 3
    assert results[0][1].any()
    assert not results[1][1].any()
    assert not results[2][1].any()


def _synchronize(
    rank: int, world_size: int, momentum_dtype: torch.dtype | None
) -> tuple[list[Tensor], list[Tensor], int]:
    params = _params()
    optimizer = DistributedLion(params, lr=0.01, momentum_dtype=momentum_dtype)
    for t in range(3):
        backward(params, 10 * t + rank)
        optimizer.step()
    before = [optimizer.state[p]["exp_avg"].clone() for p in params]
    optimizer.synchronize_momentum()
    after = [optimizer.state[p]["exp_avg"].clone() for p in params]
    backward(params, 7)
    optimizer.step()
    return before, after, optimizer.steps


@pytest.mark.parametrize("momentum_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_synchronize_momentum_gives_every_rank_the_same_mean(
    ranks: RankPools, world_size: int, momentum_dtype: torch.dtype | None
) -> None:
    results = ranks(world_size).run(_synchronize, momentum_dtype)
    for k in range(len(_params())):
        mean = sum(before[k].double() for before, _, _ in results) / world_size
        for _, after, _ in results:
            assert same_bits(after[k], results[0][1][k])
            assert after[k].dtype == results[0][0][k].dtype
            step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(after[k].dtype, 1e-6)
            torch.testing.assert_close(after[k].double(), mean, rtol=step, atol=1e-7)
    assert [steps for _, _, steps in results] == [4] * world_size


def _identical_gradients(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    params = _params()
    optimizer = DistributedLion(params, lr=0.01, weight_decay=0.1, **options)
    for t in range(10):
        backward(params, t)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("aggregation", ["majority", "average"])
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_identical_gradients_are_lion_on_one_rank(
    ranks: RankPools, exchange: str, aggregation: str
) -> None:
    # Equal momenta must stay equal, so momenta below float32 are not rounded stochastically here.
    options = {"momentum_dtype": torch.float32}
    alone = ranks(1).run(_identical_gradients, options)[0]
    options |= {"exchange": exchange, "aggregation": aggregation}
    for world_size in (2, 3, 4):
        for together in ranks(world_size).run(_identical_gradients, options):
            for a, b in zip(alone, together, strict=True):
                assert same_bits(a, b), (world_size, a.dtype)


def _permuted(rank: int, world_size: int, order: tuple[int, ...], options: Any) -> list[Tensor]:
    params = _params()[:2]  # float32 and float64: no random bits of a rank's own
    optimizer = DistributedLion(params, lr=0.01, **options)
    for t in range(6):
        backward(params, 10 * t + order[rank])
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("aggregation", ["majority", "average"])
@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_it_does_not_matter_which_rank_has_which_data(
    ranks: RankPools, exchange: str, aggregation: str
) -> None:
    options = {"exchange": exchange, "aggregation": aggregation}
    ends = [
        ranks(3).run(_permuted, order, options)[0] for order in itertools.permutations(range(3))
    ]
    for end in ends:
        assert all(same_bits(a, b) for a, b in zip(end, ends[0], strict=True))


def rescaled(rank: int, world_size: int, exchange: str, change: bool = True) -> list[Tensor]:
    """Trains, and may change what levels are relative to on the way."""
    params = [nn.Parameter(torch.ones(shape)) for shape in ((9, 50), (130,))]
    optimizer = DistributedLion(params, lr=0.1, bits=4, exchange=exchange)
    for step in range(4):
        if change and step == 2:
            options = dataclasses.replace(optimizer.options, level_scale="tensor")
            optimizer._engine.options = options
        for k, param in enumerate(params):
            generator = torch.Generator().manual_seed(9 * rank + 3 * step + k)
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach() for param in params]


def test_levels_may_become_relative_to_something_else(ranks: RankPools) -> None:
    expected = ranks(3).run(rescaled, "gather")
    for found in ranks(3).run(rescaled, "two_phase"):
        assert all(map(torch.equal, found, expected[0]))
    unchanged = ranks(3).run(rescaled, "gather", False)[0]
    assert not any(map(torch.equal, unchanged, expected[0]))
