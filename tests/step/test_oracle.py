"""The single-process simulation of the rule is Lion where docs/rule.md says so."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.oracle import OracleGroup, OracleLion, same_bits

SIXTEEN_BITS = [torch.bfloat16, torch.float16]
NARROW_AND_WIDE = [torch.float32, torch.float64, *SIXTEEN_BITS]


def _lion(
    p: np.ndarray, m: np.ndarray, g: np.ndarray, lr: float, b1: float, b2: float, wd: float
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 2 of the Lion paper (Chen et al., arXiv 2302.06675), four lines."""
    c = b1 * m + (1 - b1) * g
    p = p - lr * (np.sign(c) + wd * p)
    m = b2 * m + (1 - b2) * g
    return p, m


def _normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _groups(*params: Tensor, **options: Any) -> list[OracleGroup]:
    return [OracleGroup(list(params), **options)]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_one_rank_is_lion(dtype: torch.dtype, rtol: float) -> None:
    p0 = _normal(0, 6, 11, dtype=dtype)
    options = {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.1}
    oracle = OracleLion(_groups(p0, **options), world_size=1)
    p, m = p0.numpy().copy(), np.zeros((6, 11), dtype=p0.numpy().dtype)
    for t in range(30):
        g = _normal(t + 1, 6, 11, dtype=dtype)
        g[0, :] = 0  # An exact zero direction does not move Lion.
        oracle.step([[g]])
        p, m = _lion(p, m, g.numpy(), 0.01, 0.9, 0.98, 0.1)
    np.testing.assert_allclose(oracle.params[0].numpy(), p, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(oracle.exp_avg[0][0].numpy(), m, rtol=rtol, atol=rtol)
    assert oracle.steps == 30


@pytest.mark.parametrize("aggregation", ["majority", "average"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_gradients_are_lion(
    dtype: torch.dtype, world_size: int, aggregation: Any
) -> None:
    p0 = _normal(0, 70, dtype=dtype)
    many = OracleLion(_groups(p0, lr=0.01), world_size, aggregation=aggregation)
    one = OracleLion(_groups(p0, lr=0.01), 1)
    for t in range(20):
        g = _normal(t + 1, 70, dtype=dtype)
        many.step([[g]] * world_size)
        one.step([[g]])
        assert same_bits(many.params[0], one.params[0])
    assert many.agreement == 1.0


@pytest.mark.parametrize("ties", ["alternate", "zero"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_row_without_any_gradient_is_untouched_except_for_decay(
    world_size: int, ties: Any
) -> None:
    p0 = _normal(0, 4, 8)
    for decay in (0.0, 0.5):
        oracle = OracleLion(_groups(p0, lr=0.1, weight_decay=decay), world_size, ties=ties)
        expected = p0.clone()
        for t in range(10):
            grads = [_normal(10 * t + r, 4, 8) for r in range(world_size)]
            for g in grads:
                g[2] = 0
            oracle.step([[g] for g in grads])
            expected = expected * torch.tensor(1.0 - 0.1 * decay)
        assert torch.equal(oracle.params[0][2], expected[2])
        assert not torch.equal(oracle.params[0][[0, 1, 3]], expected[[0, 1, 3]])


def test_a_tie_moves_nothing_or_alternates() -> None:
    g = torch.ones(4)
    still = OracleLion(_groups(torch.zeros(4), lr=1.0), 2, ties="zero")
    moving = OracleLion(_groups(torch.zeros(4), lr=1.0), 2)
    seen = []
    for _ in range(4):
        still.step([[g], [-g]])
        moving.step([[g], [-g]])
        seen.append(moving.params[0].tolist())
    assert still.params[0].tolist() == [0.0] * 4
    # t = 1: verdict -1 at even elements, which moves them up.
    up, none = [1.0, -1.0, 1.0, -1.0], [0.0] * 4
    assert seen == [up, none, up, none]
    assert still.agreement == moving.agreement == 0.0


@pytest.mark.parametrize("aggregation", ["majority", "average"])
def test_the_ranks_have_equal_weight(aggregation: Any) -> None:
    # Without zeros no rank matters more than another, at any step and not only in the mean.
    ends = []
    for order in itertools.permutations(range(3)):
        oracle = OracleLion(_groups(_normal(0, 65), lr=0.01), 3, aggregation=aggregation)
        for t in range(5):
            grads = [[_normal(100 * t + r, 65)] for r in range(3)]
            oracle.step([grads[r] for r in order])
        ends.append(oracle.params[0])
    assert all(same_bits(end, ends[0]) for end in ends)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_rank_that_is_not_finite_abstains_from_everything(bad: float) -> None:
    p, q = _normal(0, 5), _normal(1, 7)
    grads = [[_normal(10 * r + k, n) for k, n in enumerate((5, 7))] for r in range(3)]
    grads[1][1][3] = bad
    with_bad = OracleLion(_groups(p, q, lr=0.1), 3)
    without = OracleLion(_groups(p, q, lr=0.1), 3)
    with_bad.step(grads)
    without.step([grads[0], [None, None], grads[2]])
    for a, b in zip(with_bad.params, without.params, strict=True):
        assert same_bits(a, b)
    assert not with_bad.exp_avg[1][0].any()
    assert with_bad.exp_avg[0][0].any()
    assert with_bad.abstentions == [0, 1, 0]


def test_when_all_abstain_nothing_changes_and_the_step_does_not_count() -> None:
    bad = torch.full((5,), float("nan"))
    p = _normal(0, 5)
    oracle = OracleLion(_groups(p, lr=0.1, weight_decay=0.5), 2, max_abstained_steps=3)
    for _ in range(2):
        oracle.step([[bad], [bad]])
    assert oracle.steps == 0
    assert same_bits(oracle.params[0], p)
    oracle.step([[_normal(1, 5)]] * 2)
    assert oracle.steps == 1
    assert oracle.abstentions == [0, 0]


def test_too_many_abstentions_in_a_row_of_one_rank_are_an_error() -> None:
    bad, good = torch.full((5,), float("nan")), torch.ones(5)
    oracle = OracleLion(_groups(torch.zeros(5)), 2, max_abstained_steps=3)
    for grads in ([[good], [bad]], [[good], [bad]], [[bad], [good]], [[good], [bad]]):
        oracle.step(grads)
    oracle.step([[good], [bad]])
    with pytest.raises(RuntimeError, match="3 times in a row"):
        oracle.step([[good], [bad]])


def test_a_parameter_that_no_rank_used_is_untouched_and_does_not_decay() -> None:
    p, q = torch.ones(5), torch.ones(3)
    oracle = OracleLion(_groups(p, q, lr=0.1, weight_decay=0.5), 2)
    oracle.step([[torch.ones(5), None], [None, None]])
    assert same_bits(oracle.params[1], q)
    assert oracle.params[0][0] < 0.9
    assert oracle.exp_avg[0][0].any()
    assert not oracle.exp_avg[1][0].any()


def test_groups_have_their_own_lr_betas_and_decay() -> None:
    p = _normal(0, 9)
    groups = [
        OracleGroup([p], lr=0.1, betas=(0.5, 0.6)),
        OracleGroup([p], lr=0.2, weight_decay=0.3),
    ]
    both = OracleLion(groups, 2)
    alone = [OracleLion([group], 2) for group in groups]
    for t in range(5):
        grads = [[_normal(t, 9)] * 2, [_normal(t + 50, 9)] * 2]
        both.step(grads)
        for k in range(2):
            alone[k].step([[grads[r][k]] for r in range(2)])
    for k in range(2):
        assert same_bits(both.params[k], alone[k].params[0])


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_stochastic_rounding_moves_where_nearest_rounding_stalls(dtype: torch.dtype) -> None:
    p0 = torch.ones(10_000, dtype=dtype)
    ends = {}
    for stochastic in (True, False):
        oracle = OracleLion(_groups(p0, lr=1e-5), 2, stochastic_rounding=stochastic)
        for _ in range(10):
            oracle.step([[torch.ones_like(p0)]] * 2)
        ends[stochastic] = oracle.params[0].double().mean().item()
    assert ends[False] == 1.0
    assert ends[True] == pytest.approx(1.0 - 10 * 1e-5, abs=2e-5)


@pytest.mark.parametrize("momentum_dtype", [None, torch.float32, *SIXTEEN_BITS])
@pytest.mark.parametrize("dtype", NARROW_AND_WIDE)
def test_momentum_has_its_dtype_and_tracks_the_gradient(
    dtype: torch.dtype, momentum_dtype: torch.dtype | None
) -> None:
    oracle = OracleLion(_groups(torch.zeros(2000, dtype=dtype)), 2, momentum_dtype=momentum_dtype)
    for _ in range(50):
        oracle.step([[torch.full((2000,), 0.5, dtype=dtype)]] * 2)
    for exp_avg in (oracle.exp_avg[0][0], oracle.exp_avg[1][0]):
        assert exp_avg.dtype == (momentum_dtype or dtype)
        # Nearest rounding to 16 bits would stall far below.
        assert exp_avg.double().mean().item() == pytest.approx(0.5 * (1 - 0.99**50), rel=2e-3)
    if (momentum_dtype or dtype) in SIXTEEN_BITS:
        # Each rank rounds with random bits of its own, so that errors do not add up in the votes.
        assert not torch.equal(oracle.exp_avg[0][0], oracle.exp_avg[1][0])


def test_zero_dimensional_and_empty_parameters_step() -> None:
    p = [torch.tensor(1.0), torch.zeros(0), torch.zeros(3, 0)]
    oracle = OracleLion(_groups(*p, lr=0.5), 2)
    oracle.step([[torch.ones_like(q) for q in p]] * 2)
    assert oracle.params[0].item() == 0.5
    assert [tuple(q.shape) for q in oracle.params] == [(), (0,), (3, 0)]
