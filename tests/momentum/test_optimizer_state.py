"""State dicts, pickles and copies continue with the same bits."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_dlion import DistributedLion
from tests.support.oracle import same_bits
from tests.support.random_training import (
    DTYPES,
    SIXTEEN_BITS,
    all_same_bits,
    mixed_params,
    random_param,
    take_steps,
)


@pytest.mark.parametrize("momentum_dtype", [None, torch.float32, *SIXTEEN_BITS])
@pytest.mark.parametrize("through_file", [False, True])
def test_a_loaded_run_continues_with_the_same_bits(
    momentum_dtype: torch.dtype | None, through_file: bool
) -> None:
    options = {"lr": 3e-3, "weight_decay": 0.1, "momentum_dtype": momentum_dtype}
    straight = mixed_params()
    optimizer = DistributedLion(straight, **options, seed=11)
    take_steps(optimizer, straight, range(6))

    first = mixed_params()
    optimizer = DistributedLion(first, **options, seed=11)
    take_steps(optimizer, first, range(3))
    state = optimizer.state_dict()
    if through_file:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
    second = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = DistributedLion(second, **options)
    resumed.load_state_dict(state)
    assert resumed.steps == 3
    take_steps(resumed, second, range(3, 6))
    assert all_same_bits(straight, second)


@pytest.mark.parametrize("momentum_dtype", [torch.float32, *SIXTEEN_BITS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_momentum_dtype_survives_loading(
    dtype: torch.dtype, momentum_dtype: torch.dtype
) -> None:
    p = random_param(30, dtype=dtype)
    optimizer = DistributedLion([p], momentum_dtype=momentum_dtype)
    take_steps(optimizer, [p], range(3))
    before = optimizer.state[p]["exp_avg"].clone()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[p]["exp_avg"].dtype == momentum_dtype
    assert same_bits(optimizer.state[p]["exp_avg"], before)


def test_state_dict_has_torch_s_shape_and_shares_no_more_than_torch_does() -> None:
    params = [random_param(3), random_param(4)]
    optimizer = DistributedLion(params, lr=0.1)
    take_steps(optimizer, params, range(2))
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "dlion"}
    assert set(state["state"]) == {0, 1}
    assert set(state["state"][0]) == {"exp_avg"}
    assert state["param_groups"][0]["params"] == [0, 1]
    assert state["dlion"]["version"] == 1
    assert state["dlion"]["steps"] == 2


def test_loading_takes_the_hyperparameters_of_the_state() -> None:
    p, q = random_param(3), random_param(3)
    source = DistributedLion([p], lr=0.25, betas=(0.5, 0.6), weight_decay=0.7)
    target = DistributedLion([q])
    target.load_state_dict(source.state_dict())
    group = target.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (0.25, (0.5, 0.6), 0.7)


def test_a_loaded_state_is_a_copy() -> None:
    p, q = random_param(3), random_param(3)
    source, target = DistributedLion([p], lr=0.1), DistributedLion([q], lr=0.1)
    take_steps(source, [p], range(1))
    target.load_state_dict(source.state_dict())
    kept = source.state[p]["exp_avg"].clone()
    take_steps(target, [q], range(5))
    assert torch.equal(source.state[p]["exp_avg"], kept)


def test_an_empty_state_is_loaded_silently() -> None:
    # Accelerate's prepare does this.
    p = random_param(3)
    optimizer = DistributedLion([p], lr=0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    fresh = torch.optim.SGD([random_param(3)], lr=0.1).state_dict()
    groups = [{**optimizer.state_dict()["param_groups"][0]}]
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    assert fresh["state"] == {}
    take_steps(optimizer, [p], range(1))


def _adamw_state(p: nn.Parameter) -> dict[str, Any]:
    adamw = torch.optim.AdamW([p], lr=0.1)
    take_steps(adamw, [p], range(1))
    return adamw.state_dict()


def _lion_state(shapes: list[tuple[int, ...]], **changes: Any) -> dict[str, Any]:
    params = [random_param(*shape) for shape in shapes]
    lion = DistributedLion(params, lr=0.1)
    take_steps(lion, params, range(1))
    state = lion.state_dict()
    state["dlion"] |= changes
    return state


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _adamw_state(random_param(3)), "DistributedLion"),
        (lambda: _lion_state([(4,)]), "shape"),
        (lambda: _lion_state([(3,), (3,)]), "parameters"),
        (lambda: _lion_state([(3,)], version=2), "version"),
        (lambda: _lion_state([(3,)], steps=-1), "steps"),
        (lambda: _lion_state([(3,)], steps="many"), "steps"),
        (dict, "state"),
    ],
    ids=["adamw", "shape", "number", "version", "steps", "steps type", "empty dict"],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    make: Callable[[], dict[str, Any]], words: str
) -> None:
    p = random_param(3)
    optimizer = DistributedLion([p], lr=0.1)
    take_steps(optimizer, [p], range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(make())
    after = optimizer.state_dict()
    assert torch.equal(after["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
    assert after["param_groups"] == before["param_groups"]
    assert after["dlion"] == before["dlion"]


def _continue(optimizer: DistributedLion, params: list[nn.Parameter]) -> list[nn.Parameter]:
    take_steps(optimizer, params, range(3, 6))
    return params


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
def test_a_copied_optimizer_continues_with_the_same_bits(how: str) -> None:
    params = mixed_params()
    optimizer = DistributedLion(params, lr=3e-3, seed=4, momentum_dtype=torch.bfloat16)
    take_steps(optimizer, params, range(3))
    if how == "pickle":
        copied = pickle.loads(pickle.dumps(optimizer))
    elif how == "deepcopy":
        copied = copy.deepcopy(optimizer)
    else:
        buffer = io.BytesIO()
        torch.save(optimizer, buffer)
        buffer.seek(0)
        copied = torch.load(buffer, weights_only=False)
    theirs = [p for group in copied.param_groups for p in group["params"]]
    assert theirs[0] is not params[0]
    assert copied.steps == 3
    assert copied.options == optimizer.options
    assert all_same_bits(_continue(copied, theirs), _continue(optimizer, params))


def test_a_model_and_its_optimizer_stay_together_when_copied() -> None:
    model = nn.Linear(3, 2)
    optimizer = DistributedLion(model.parameters(), lr=0.1)
    model_copy, copied = copy.deepcopy((model, optimizer))
    before = model_copy.weight.detach().clone()
    model_copy(torch.ones(1, 3)).sum().backward()
    copied.step()
    assert not torch.equal(model_copy.weight, before)


def test_named_parameters_give_the_groups_names() -> None:
    model = nn.Linear(3, 2)
    optimizer = DistributedLion(model.named_parameters(), lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    pickle.loads(pickle.dumps(optimizer))


def test_repr_shows_the_groups() -> None:
    text = repr(DistributedLion([random_param(3)], lr=0.25))
    assert text.startswith("DistributedLion (")
    assert "lr: 0.25" in text


def test_synchronize_momentum_does_nothing_on_one_rank() -> None:
    p = random_param(3)
    optimizer = DistributedLion([p], lr=0.1)
    optimizer.synchronize_momentum()
    take_steps(optimizer, [p], range(1))
    before = optimizer.state[p]["exp_avg"].clone()
    optimizer.synchronize_momentum()
    assert torch.equal(optimizer.state[p]["exp_avg"], before)


def _named(*names: str) -> DistributedLion:
    return DistributedLion([(name, random_param(3)) for name in names], lr=0.1)


def test_equal_parameters_in_another_order_are_refused_by_name() -> None:
    saved, other = _named("a", "b"), _named("b", "a")
    take_steps(saved, [p for group in saved.param_groups for p in group["params"]], range(2))
    state = saved.state_dict()
    with pytest.raises(ValueError, match="parameter 0 of group 0 is 'a' in the state and 'b' in"):
        other.load_state_dict(state)
    assert other.steps == 0
    assert not other.state
    del state["param_groups"][0]["param_names"]
    other.load_state_dict(state)
    assert other.steps == 2


def test_a_wrapper_s_prefix_does_not_make_another_name() -> None:
    saved, other = (
        _named("module.a", "c._checkpoint_wrapped_module.b"),
        _named("a", "_orig_mod.c.b"),
    )
    other.load_state_dict(saved.state_dict())
