"""One rank is Lion, and equals the simulation, whatever the shape and the dtype."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_dlion import DistributedLion
from tests.support.oracle import OracleGroup, OracleLion, same_bits
from tests.support.random_training import (
    DTYPES,
    SIXTEEN_BITS,
    all_same_bits,
    backward,
    ignored_warnings,
    normal,
    random_param,
    take_steps,
)


def test_one_rank_is_lion_as_in_the_paper() -> None:
    p = random_param(7, 9, dtype=torch.float64)
    theta, m = p.detach().numpy().copy(), np.zeros((7, 9))
    optimizer = DistributedLion([p], lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
    for seed in range(30):
        (g,) = backward([p], seed)
        assert g is not None
        optimizer.step()
        # Algorithm 2 of the Lion paper (Chen et al., arXiv 2302.06675).
        c = 0.9 * m + (1 - 0.9) * g.numpy()
        theta = theta - 0.01 * (np.sign(c) + 0.1 * theta)
        m = 0.98 * m + (1 - 0.98) * g.numpy()
    np.testing.assert_allclose(p.detach().numpy(), theta, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(optimizer.state[p]["exp_avg"].numpy(), m, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("momentum_dtype", [None, torch.float32, *SIXTEEN_BITS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank_equals_the_simulation(
    dtype: torch.dtype, momentum_dtype: torch.dtype | None, stochastic: bool
) -> None:
    params = [random_param(5, 13, seed=k, dtype=dtype) for k in range(2)]
    options = {"momentum_dtype": momentum_dtype, "stochastic_rounding": stochastic, "seed": 5}
    oracle = OracleLion([OracleGroup(params, lr=3e-3, weight_decay=0.1)], 1, **options)
    optimizer = DistributedLion(params, lr=3e-3, weight_decay=0.1, **options)
    for seed in range(10):
        oracle.step([backward(params, seed)])
        optimizer.step()
    for k, p in enumerate(params):
        assert same_bits(p, oracle.params[k])
        assert same_bits(optimizer.state[p]["exp_avg"], oracle.exp_avg[0][k])


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("momentum_dtype", [torch.float32, *SIXTEEN_BITS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_huge_gradient_does_not_decide_an_element_for_ever(
    dtype: torch.dtype, momentum_dtype: torch.dtype, stochastic: bool
) -> None:
    p = nn.Parameter(torch.zeros(2, dtype=dtype))
    options = {"momentum_dtype": momentum_dtype, "stochastic_rounding": stochastic}
    optimizer = DistributedLion([p], lr=0.125, **options)
    oracle = OracleLion([OracleGroup([p], lr=0.125)], 1, **options)
    huge = torch.finfo(dtype).max
    gradients = [huge, *[-huge / 2] * 200]
    for value in gradients:
        g = torch.tensor([value, -value], dtype=dtype)
        p.grad = g.clone()
        optimizer.step()
        oracle.step([[g]])
        assert optimizer.state[p]["exp_avg"].isfinite().all()
    assert same_bits(p, oracle.params[0])
    assert same_bits(optimizer.state[p]["exp_avg"], oracle.exp_avg[0][0])
    assert p[0] > 0 > p[1]


def test_a_gradient_of_zero_does_not_move_a_parameter() -> None:
    p = random_param(4)
    before = p.detach().clone()
    optimizer = DistributedLion([p], lr=0.1)
    (p * 0.0).sum().backward()
    optimizer.step()
    assert torch.equal(p, before)


def test_a_step_that_is_not_finite_changes_nothing_and_warns_once_at_most() -> None:
    p = random_param(4)
    optimizer = DistributedLion([p], lr=0.1, weight_decay=0.1, max_abstained_steps=2)
    take_steps(optimizer, [p], range(1))
    before = copy.deepcopy((p.detach(), optimizer.state[p]["exp_avg"]))
    p.grad = torch.tensor([1.0, math.nan, 1.0, 1.0])
    with ignored_warnings():
        optimizer.step()
    assert same_bits(p, before[0])
    assert same_bits(optimizer.state[p]["exp_avg"], before[1])
    assert optimizer.steps == 1
    assert optimizer.wire.abstentions == 1
    p.grad = torch.tensor([1.0, math.inf, 1.0, 1.0])
    with pytest.raises(RuntimeError, match="max_abstained_steps"):
        optimizer.step()


def test_one_rank_sends_nothing() -> None:
    p = random_param(100)
    optimizer = DistributedLion([p])
    take_steps(optimizer, [p], range(2))
    assert optimizer.wire.bytes_sent == optimizer.wire.bytes_received == 0
    assert optimizer.wire.exchanges == 0
    assert (optimizer.rank, optimizer.world_size) == (0, 1)


def test_a_parameter_without_gradient_is_left_alone_even_by_decay() -> None:
    p, q = random_param(4), random_param(5)
    q0 = q.detach().clone()
    optimizer = DistributedLion([p, q], lr=0.1, weight_decay=0.5)
    take_steps(optimizer, [p], range(2))
    assert same_bits(q, q0)
    assert "exp_avg" not in optimizer.state.get(q, {})


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_resets(set_to_none: bool) -> None:
    p, q = random_param(4), random_param(5)
    optimizer = DistributedLion([p, q], lr=0.1, weight_decay=0.5)
    take_steps(optimizer, [p, q], range(1))
    optimizer.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert p.grad is None
    else:
        assert p.grad is not None
        assert not p.grad.any()


@pytest.mark.parametrize("by", ["optimizer", "module"])
def test_zeros_left_by_zero_grad_are_no_gradient(by: str) -> None:
    """A parameter that is not used in a step is absent whether zero_grad left None or zeros."""
    ends = []
    for set_to_none in (True, False):
        module = nn.ParameterList([random_param(4, seed=1), random_param(5, seed=2)])
        p, q = module
        optimizer = DistributedLion([p, q], lr=0.1, weight_decay=0.5)
        p.sum().backward()
        q.sum().backward()
        optimizer.step()
        (optimizer if by == "optimizer" else module).zero_grad(set_to_none=set_to_none)
        p.sum().backward()
        optimizer.step()
        ends.append([p.detach(), q.detach(), optimizer.state[q]["exp_avg"]])
    assert all(same_bits(a, b) for a, b in zip(*ends, strict=True))


def _copy(p: nn.Parameter, g: Tensor) -> None:
    assert p.grad is not None
    p.grad.data.copy_(g)


def _assign(p: nn.Parameter, g: Tensor) -> None:
    assert p.grad is not None
    p.grad.data = g


def _write(p: nn.Parameter, g: Tensor) -> None:
    assert p.grad is not None
    p.grad.numpy()[...] = g.numpy()


@pytest.mark.parametrize("write", [_copy, _assign, _write])
def test_a_gradient_that_autograd_does_not_see_written_is_used(write: Any) -> None:
    """Into the zeros of zero_grad, whose version does not tell."""
    a, b = [random_param(5)], [random_param(5)]
    by_autograd, by_hand = DistributedLion(a, lr=0.1), DistributedLion(b, lr=0.1)
    b[0].grad = torch.zeros(5)
    for seed in range(3):
        (g,) = backward(a, seed)
        assert g is not None
        by_hand.zero_grad(set_to_none=False)
        write(b[0], g.clone())
        by_autograd.step()
        by_hand.step()
    assert all_same_bits(a, b)


def test_gradients_set_by_hand_are_used() -> None:
    a, b = [random_param(5)], [random_param(5)]
    by_autograd, by_hand = DistributedLion(a, lr=0.1), DistributedLion(b, lr=0.1)
    for seed in range(3):
        (g,) = backward(a, seed)
        b[0].grad = g
        by_autograd.step()
        by_hand.step()
    assert all_same_bits(a, b)


def test_accumulated_gradients_count_as_their_sum() -> None:
    a, b = [random_param(5)], [random_param(5)]
    once, twice = DistributedLion(a, lr=0.1), DistributedLion(b, lr=0.1)
    for seed in range(3):
        g, h = normal(5, seed=seed), normal(5, seed=50 + seed)
        once.zero_grad()
        twice.zero_grad()
        (a[0] * (g + h)).sum().backward()
        (b[0] * g).sum().backward()
        (b[0] * h).sum().backward()
        once.step()
        twice.step()
    assert all_same_bits(a, b)


def test_step_leaves_gradients_alone() -> None:
    p = random_param(6, 7)
    optimizer = DistributedLion([p], lr=0.1)
    (g,) = backward([p], 1)
    optimizer.step()
    assert p.grad is not None
    assert g is not None
    assert same_bits(p.grad, g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(), (1,), (63,), (64,), (65,), (0,), (3, 0), (4, 5), (2, 3, 4, 5)], ids=str
)
def test_every_shape_steps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    p = random_param(*shape, dtype=dtype)
    oracle = OracleLion([OracleGroup([p], lr=0.01)], 1)
    optimizer = DistributedLion([p], lr=0.01)
    for seed in range(2):
        oracle.step([backward([p], seed)])
        optimizer.step()
    assert same_bits(p, oracle.params[0])


@pytest.mark.parametrize("which", ["parameter", "gradient"])
def test_layouts_in_memory_do_not_matter(which: str) -> None:
    plain = random_param(6, 10)
    strided = nn.Parameter(plain.detach().t().contiguous().t())
    odd = strided if which == "parameter" else nn.Parameter(plain.detach().clone())
    one, two = DistributedLion([plain], lr=0.1), DistributedLion([odd], lr=0.1)
    for seed in range(3):
        g = normal(6, 10, seed=seed)
        plain.grad = g
        odd.grad = g.t().contiguous().t() if which == "gradient" else g.clone()
        one.step()
        two.step()
    assert same_bits(odd, plain)
    assert odd.stride() == (strided.stride() if which == "parameter" else plain.stride())


def test_an_expanded_gradient_is_read_right() -> None:
    p = random_param(4, 5)
    before = p.detach().clone()
    optimizer = DistributedLion([p], lr=0.5)
    p.sum().backward()  # autograd may hand over an expanded scalar
    optimizer.step()
    torch.testing.assert_close(p.detach(), before - 0.5)


def test_a_frozen_parameter_stays_and_trains_once_thawed() -> None:
    p, q = random_param(4), random_param(5)
    q.requires_grad_(False)
    optimizer = DistributedLion([p, q], lr=0.1, weight_decay=0.5)
    q0 = q.detach().clone()
    take_steps(optimizer, [p, q], range(2))
    assert same_bits(q, q0)
    q.requires_grad_(True)
    take_steps(optimizer, [p, q], range(2))
    assert not torch.equal(q, q0)
    optimizer.zero_grad(set_to_none=False)
    q1 = q.detach().clone()
    p.sum().backward()
    optimizer.step()
    assert same_bits(q, q1)


def test_a_parameter_frozen_later_stays() -> None:
    p, q = random_param(4), random_param(5)
    optimizer = DistributedLion([p, q], lr=0.1, weight_decay=0.5)
    take_steps(optimizer, [p, q], range(2))
    q.requires_grad_(False)
    q1 = q.detach().clone()
    take_steps(optimizer, [p, q], range(2, 4))
    assert same_bits(q, q1)


def test_training_does_not_depend_on_torch_s_random_numbers_nor_draws_from_them() -> None:
    ends = []
    for seed in (1, 2):
        params = [random_param(40, dtype=torch.bfloat16)]
        optimizer = DistributedLion(params, lr=1e-3)
        for step in range(3):
            backward(params, step)
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            optimizer.step()
            assert torch.equal(torch.get_rng_state(), state)
        ends.append(params)
    assert all_same_bits(*ends)
