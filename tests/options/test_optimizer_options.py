"""A bad option is refused when it is given, by its name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hf_dlion import DistributedLion
from hf_dlion.options import Options
from tests.support.option_cases import BAD_OPTIONS
from tests.support.random_training import (
    random_param,
)


@pytest.mark.parametrize(("name", "value", "error"), BAD_OPTIONS, ids=str)
def test_a_bad_option_is_refused_by_name(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        DistributedLion([random_param(2)], **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [case for case in BAD_OPTIONS if case[0] in ("lr", "betas", "weight_decay")],
    ids=str,
)
def test_a_bad_value_in_a_group_is_refused_by_name(
    name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=name):
        DistributedLion([{"params": [random_param(2)], name: value}])
    optimizer = DistributedLion([random_param(2)])
    with pytest.raises(error, match=name):
        optimizer.add_param_group({"params": [random_param(2)], name: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("option", ["votes", "momentum", "eps", "learning_rate"])
def test_an_unknown_option_is_refused_by_name(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        DistributedLion([random_param(2)], **{option: 1})


def test_the_options_may_not_be_given_by_position() -> None:
    with pytest.raises(TypeError):
        DistributedLion([random_param(2)], 1e-4, (0.9, 0.99), 0.0, "majority")  # type: ignore[misc]


@pytest.mark.parametrize("name", ["lr", "weight_decay", "aggregation", "seed"])
def test_an_error_of_an_option_says_what_it_got(name: str) -> None:
    bad = {"lr": -0.125, "weight_decay": -0.125, "aggregation": "medium", "seed": -7}[name]
    with pytest.raises(ValueError, match=str(bad)):
        DistributedLion([random_param(2)], **{name: bad})


def test_no_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedLion([])


def test_a_single_tensor_is_refused() -> None:
    with pytest.raises(TypeError):
        DistributedLion(random_param(3))  # type: ignore[arg-type]


def test_what_is_no_leaf_is_refused() -> None:
    with pytest.raises(ValueError, match="non-leaf"):
        DistributedLion([random_param(3) * 2])


def test_a_parameter_in_two_groups_is_refused() -> None:
    p = random_param(3)
    with pytest.raises(ValueError, match="more than one parameter group"):
        DistributedLion([{"params": [p]}, {"params": [p]}])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.int8])
def test_a_dtype_that_cannot_be_trained_is_refused(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=dtype.is_complex)
    with pytest.raises(TypeError, match=str(dtype)):
        DistributedLion([p])
    optimizer = DistributedLion([random_param(2)])
    with pytest.raises(TypeError, match=str(dtype)):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = DistributedLion(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises((TypeError, RuntimeError), match="sparse"):
        optimizer.step()


def test_tensors_that_hold_no_values_of_their_own_are_refused() -> None:
    def two() -> TwoTensor:
        return TwoTensor(torch.ones(4), torch.ones(4))

    with pytest.raises(TypeError, match="own values, got one of TwoTensor: leave it out"):
        DistributedLion([nn.Parameter(two())])
    frozen, other = nn.Parameter(two(), requires_grad=False), random_param(4)
    optimizer = DistributedLion([frozen, other])
    other.grad = two()
    with pytest.raises(TypeError, match="gradients that hold their own values, got one of TwoT"):
        optimizer.step()


def test_a_gradient_made_in_inference_mode_counts() -> None:
    """As evolution strategies make theirs."""
    param = nn.Parameter(torch.zeros(3))
    optimizer = DistributedLion([param], lr=0.5)
    with torch.inference_mode():
        param.grad = torch.ones(3)
    optimizer.step()
    assert param.tolist() == [-0.5, -0.5, -0.5]


@pytest.mark.parametrize("lazy", ["negated", "zeros"])
def test_a_gradient_that_torch_has_not_written_yet_counts_as_it_will_be(lazy: str) -> None:
    # One element is contiguous, whatever its stride: its memory is read as it is.
    size = 1 if lazy == "negated" else 70
    param = nn.Parameter(torch.zeros(size))
    optimizer = DistributedLion([param], lr=0.5)
    param.grad = torch.ones(size)
    if lazy == "negated":
        param.grad = torch.complex(torch.zeros(1), -torch.ones(1)).conj().imag
        assert param.grad.is_neg()
    optimizer.step()
    moved = param.detach().clone()
    assert torch.equal(moved, torch.full((size,), -0.5))
    if lazy == "zeros":
        # The momentum goes on.
        param.grad = torch._efficientzerotensor(70)
        optimizer.step()
        assert torch.equal(param, 2 * moved)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, True) for name in ("maximize", "capturable", "differentiable", "amsgrad")),
        *((name, True) for name in ("foreach", "fused", "nesterov", "decoupled_weight_decay")),
        *(("eps", 1e-8), ("momentum", 0.9), ("dampening", 0.1)),
        *(("beta1", 0.9), ("beta2", 0.9), ("learning_rate", 0.1)),
        *((field.name, field.default) for field in dataclasses.fields(Options)),
        ("process_group", None),
    ],
    ids=str,
)
def test_what_a_group_cannot_choose_is_refused_and_not_ignored(name: str, value: Any) -> None:
    message = f"{name}=.* in a parameter group would have no effect"
    with pytest.raises(ValueError, match=message):
        DistributedLion([{"params": [random_param(2)], name: value}])
    p = random_param(2)
    optimizer = DistributedLion([p], lr=0.1)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [random_param(2)], name: value})
    assert len(optimizer.param_groups) == 1
    # So it is when a group gets it later.
    optimizer.param_groups[0][name] = value
    before = p.detach().clone()
    p.sum().backward()
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(p, before)


def test_other_keys_of_a_group_are_kept() -> None:
    # Names and scales of a user's own, what schedulers write, what torch fills in.
    own = {"name": "head", "lr_scale": 0.5, "initial_lr": 0.1, "differentiable": False}
    optimizer = DistributedLion([{"params": [random_param(2)], **own}])
    assert own.items() <= optimizer.param_groups[0].items()
    assert own.items() <= optimizer.state_dict()["param_groups"][0].items()


@pytest.mark.parametrize("named", [False, True])
def test_a_parameter_twice_in_a_group_is_refused(named: bool) -> None:
    p, q = random_param(3), random_param(3)
    twice: list[Any] = [("a", p), ("b", q), ("c", p)] if named else [p, q, p]
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),  # torch's own
        pytest.raises(ValueError, match="parameters 0 and 2 of the group are one and the same"),
    ):
        DistributedLion(twice)


@pytest.mark.parametrize(
    ("params", "error"),
    [("weights", TypeError), (["w"], TypeError), ([1, 2], TypeError), ({}, ValueError)],
    ids=str,
)
def test_what_is_no_list_of_tensors_is_refused(params: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        DistributedLion(params)


def test_names_for_some_parameters_only_are_refused() -> None:
    with pytest.raises(ValueError, match="with/without names"):
        DistributedLion([("w", random_param(2)), random_param(3)])  # type: ignore[list-item]


def test_parameters_may_come_from_a_generator() -> None:
    optimizer = DistributedLion(random_param(k) for k in (2, 3))
    assert len(optimizer.param_groups[0]["params"]) == 2


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a real one"])
def test_a_gradient_on_the_meta_device_is_refused(beside: bool) -> None:
    meta, real = nn.Parameter(torch.zeros(3, device="meta")), random_param(2)
    optimizer = DistributedLion([real, meta] if beside else [meta], lr=0.1)
    before = real.detach().clone()
    real.sum().backward()
    meta.grad = torch.zeros_like(meta)
    with pytest.raises(RuntimeError, match="meta device, which holds no values"):
        optimizer.step()
    assert torch.equal(real, before)


@pytest.mark.parametrize("local_group", ["node", 2])
def test_overlap_with_local_group_is_refused_and_the_way_out_named(local_group):
    with pytest.raises(NotImplementedError, match="local_group alone, or overlap=True alone"):
        DistributedLion([torch.nn.Parameter(torch.ones(2))], overlap=True, local_group=local_group)


def test_options_are_fixed_when_the_optimizer_is_made() -> None:
    """Some were obeyed when they were changed later, others not."""
    optimizer = DistributedLion([random_param(2)])
    with pytest.raises(AttributeError, match="options"):
        optimizer.options = Options(bits=4)  # type: ignore[misc]
