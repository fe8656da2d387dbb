"""A bad option is refused when it is given, by its name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from random_training import (
    random_param,
)
from torch import nn

from hf_dlion import DistributedLion

BAD_OPTIONS: list[tuple[str, Any, type[Exception]]] = [
    ("lr", -1e-3, ValueError),
    ("lr", math.nan, ValueError),
    ("lr", math.inf, ValueError),
    ("lr", "0.1", TypeError),
    ("lr", None, TypeError),
    ("lr", torch.ones(2), TypeError),
    ("betas", (1.0, 0.99), ValueError),
    ("betas", (0.9, 1.0), ValueError),
    ("betas", (-0.1, 0.99), ValueError),
    ("betas", (0.9, math.nan), ValueError),
    ("betas", 0.9, TypeError),
    ("betas", (0.9,), TypeError),
    ("betas", (0.9, 0.99, 0.999), TypeError),
    ("betas", ("0.9", 0.99), TypeError),
    ("weight_decay", -0.1, ValueError),
    ("weight_decay", math.nan, ValueError),
    ("weight_decay", "0.1", TypeError),
    ("aggregation", "median", ValueError),
    ("aggregation", 3, TypeError),
    ("ties", "random", ValueError),
    ("ties", None, TypeError),
    ("exchange", "ring", ValueError),
    ("exchange", True, TypeError),
    ("stochastic_rounding", 1, TypeError),
    ("stochastic_rounding", "yes", TypeError),
    ("momentum_dtype", torch.int8, ValueError),
    ("momentum_dtype", torch.complex64, ValueError),
    ("momentum_dtype", "bfloat16", TypeError),
    ("process_group", "gloo", TypeError),
    ("process_group", 0, TypeError),
    ("seed", -1, ValueError),
    ("seed", 2**64, ValueError),
    ("seed", 1.5, TypeError),
    ("seed", True, TypeError),
    ("max_abstained_steps", 0, ValueError),
    ("max_abstained_steps", -1, ValueError),
    ("max_abstained_steps", 2.0, TypeError),
    ("checkpoint", "rank0", ValueError),
    ("checkpoint", None, TypeError),
    ("check_replicas_every", -1, ValueError),
    ("check_replicas_every", True, TypeError),
    ("check_replicas_every", None, TypeError),
    ("on_divergence", "ignore", ValueError),
    ("on_divergence", None, TypeError),
]


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


@pytest.mark.parametrize("option", ["bits", "momentum", "eps", "learning_rate"])
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
