"""DistributedLion keeps the contract of torch.optim.Optimizer, on one process."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch

from hf_dlion import DistributedLion
from tests.support.oracle import same_bits
from tests.support.random_training import (
    DTYPES,
    all_same_bits,
    backward,
    ignored_warnings,
    random_param,
    take_steps,
)


def test_a_group_uses_its_own_values_and_defaults_fill_the_rest() -> None:
    p, q = random_param(5), random_param(6)
    optimizer = DistributedLion(
        [{"params": [p], "lr": 0.5}, {"params": [q], "betas": (0.5, 0.6)}], lr=0.1
    )
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.1]
    assert [g["betas"] for g in optimizer.param_groups] == [(0.9, 0.99), (0.5, 0.6)]
    p0, q0 = p.detach().clone(), q.detach().clone()
    grads = backward([p, q], 1)
    optimizer.step()
    torch.testing.assert_close((p - p0).abs(), torch.full((5,), 0.5))
    torch.testing.assert_close((q - q0).abs(), torch.full((6,), 0.1))
    assert grads[1] is not None
    torch.testing.assert_close(optimizer.state[q]["exp_avg"], grads[1] * 0.4)


def test_a_group_added_later_is_trained_like_one_given_at_once() -> None:
    a, b = ([random_param(5, seed=1), random_param(6, seed=2)] for _ in range(2))
    whole = DistributedLion([{"params": [a[0]]}, {"params": [a[1]], "lr": 0.2}], lr=0.1)
    grown = DistributedLion([b[0]], lr=0.1)
    grown.add_param_group({"params": b[1], "lr": 0.2})
    take_steps(whole, a, range(3))
    take_steps(grown, b, range(3))
    assert all_same_bits(a, b)


def test_a_group_added_between_steps_starts_without_momentum() -> None:
    p, q = random_param(5), random_param(6)
    optimizer = DistributedLion([p], lr=0.1)
    take_steps(optimizer, [p], range(3))
    optimizer.add_param_group({"params": [q]})
    (_, g) = backward([p, q], 9)
    optimizer.step()
    assert g is not None
    torch.testing.assert_close(optimizer.state[q]["exp_avg"], g * 0.01)


def test_a_scheduler_changes_the_next_step() -> None:
    p = random_param(4)
    optimizer = DistributedLion([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    moves = []
    for seed in range(3):
        before = p.detach().clone()
        backward([p], seed)
        optimizer.step()
        scheduler.step()
        moves.append(float((p.detach() - before).abs().max().round(decimals=4)))
    assert moves == [1.0, 0.5, 0.25]


@pytest.mark.parametrize("dtype", DTYPES)
def test_lr_may_be_a_tensor(dtype: torch.dtype) -> None:
    a, b = [random_param(50, dtype=dtype)], [random_param(50, dtype=dtype)]
    with_float = DistributedLion(a, lr=0.125, weight_decay=0.1)
    with_tensor = DistributedLion(b, lr=torch.tensor(0.125), weight_decay=0.1)
    take_steps(with_float, a, range(3))
    take_steps(with_tensor, b, range(3))
    assert all_same_bits(a, b)
    with_tensor.param_groups[0]["lr"].fill_(0.0)
    with_float.param_groups[0]["lr"] = 0.0
    take_steps(with_float, a, range(1))
    take_steps(with_tensor, b, range(1))
    assert all_same_bits(a, b)


def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned() -> None:
    p = random_param(3)
    optimizer = DistributedLion([p], lr=0.1)
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return loss.item()

    before = p.detach().clone()
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss == pytest.approx(before.square().sum().item())
    torch.testing.assert_close(p.detach(), before - 0.1 * before.sign())
    assert optimizer.step() is None


def test_step_hooks_run_before_and_after() -> None:
    p = random_param(3)
    optimizer = DistributedLion([p], lr=0.1)
    seen: list[tuple[str, float]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("pre", p[0].item())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("post", p[0].item())))
    before = p[0].item()
    take_steps(optimizer, [p], range(1))
    assert seen == [("pre", before), ("post", p[0].item())]
    assert p[0].item() != before


def test_state_dict_hooks_see_the_whole_state() -> None:
    p = random_param(3)
    optimizer = DistributedLion([p], lr=0.1)
    take_steps(optimizer, [p], range(2))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mark": 7})
    assert optimizer.state_dict()["mark"] == 7
    assert optimizer.state_dict()["dlion"]["steps"] == 2


def test_a_load_state_dict_pre_hook_may_replace_the_state() -> None:
    p = random_param(3)
    optimizer = DistributedLion([p], lr=0.1)
    take_steps(optimizer, [p], range(2))

    def double(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {0: {"exp_avg": 2 * state["state"][0]["exp_avg"]}}}

    expected = 2 * optimizer.state[p]["exp_avg"]
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[p]["exp_avg"], expected)


def test_the_autograd_hooks_go_with_the_optimizer() -> None:
    p = random_param(3)
    for _ in range(3):
        optimizer = DistributedLion([p], lr=0.1)
        take_steps(optimizer, [p], range(1))
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
    assert not p._post_accumulate_grad_hooks


def test_it_works_under_a_grad_scaler() -> None:
    a, b = [random_param(5)], [random_param(5)]
    plain, scaled = DistributedLion(a, lr=0.1), DistributedLion(b, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for seed in range(4):
        (g,) = backward(a, seed)
        assert g is not None
        plain.step()
        scaled.zero_grad()
        scaler.scale((b[0] * g).sum()).backward()
        if seed % 2:
            scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
    assert all_same_bits(a, b)
    assert scaled.steps == 4


@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_under_a_grad_scaler_is_an_abstention(unscale: bool) -> None:
    p = random_param(5)
    before = p.detach().clone()
    optimizer = DistributedLion([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((p * torch.tensor([1.0, math.inf, 1.0, 1.0, 1.0])).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with ignored_warnings():
        scaler.step(optimizer)
    scaler.update()
    assert same_bits(p, before)
    assert optimizer.steps == 0
    assert scaler.get_scale() == 4.0


def test_a_compiled_step_is_not_needed_but_a_profiled_one_has_a_name() -> None:
    p = random_param(5)
    optimizer = DistributedLion([p], lr=0.1)
    backward([p], 0)
    with torch.profiler.profile() as profile:
        optimizer.step()
    names = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#DistributedLion.step" in names
