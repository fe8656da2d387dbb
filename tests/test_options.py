"""Options and parameters are checked when the optimizer is made."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

from hf_dlion import DistributedLion
from tests.support.training import filled

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"bits": 3}, ValueError, "bits must be 1, 2, 4, or 8 (got 3)"),
    ({"bits": 2.0}, ValueError, "bits must be 1, 2, 4, or 8 (got 2.0)"),
    ({"ties": "coin"}, ValueError, "ties must be one of 'alternate', 'zero' (got 'coin')"),
    ({"exchange": None}, TypeError, "exchange must be one of 'auto', 'gather', 'two_phase' (got N"),
    ({"vote_every": 0}, ValueError, "vote_every must be between 1 and 2147483647 (got 0)"),
    ({"seed": -1}, ValueError, "seed must be between 0"),
    ({"check_replicas_every": True}, TypeError, "check_replicas_every must be an integer"),
    ({"max_abstained_steps": 0}, ValueError, "max_abstained_steps must be between 1"),
    ({"local_group": "rack"}, ValueError, 'local_group must be "node" or an int'),
    ({"local_group": 0}, ValueError, "local_group must be between 1"),
    ({"momentum_dtype": "bf16"}, TypeError, "momentum_dtype must be None or one of torch.float32"),
    ({"momentum_dtype": torch.float64}, ValueError, "momentum_dtype must be None or one of"),
    ({"full_precision": ";"}, ValueError, "full_precision must not have an empty pattern"),
    ({"full_precision": 1}, TypeError, "full_precision must be a pattern of parameter names"),
    ({"full_precision": "bias"}, ValueError, "no parameter's name matches 'bias'"),
    ({"full_precision": lambda *_: False}, ValueError, "chooses none of the 1 parameters, such"),
    # "all" is a word of momentum_sync only.
    ({"full_precision": "all"}, ValueError, "no parameter's name matches 'all'"),
    # Options without effect, or that don't work together.
    ({"vote_every": 2, "aggregation": "majority"}, ValueError, "needs aggregation='average'"),
    ({"bits": 2, "aggregation": "average"}, ValueError, "use bits=1, or aggregation='majority'"),
    ({"ties": "zero", "aggregation": "average"}, ValueError, "it needs aggregation='majority'"),
    ({"ties": "zero", "vote_every": 2}, ValueError, "it needs aggregation='majority'"),
    ({"level_scale": "tensor"}, ValueError, "it needs bits=2, 4, or 8 and vote_every=1"),
    ({"momentum_sync": "*"}, ValueError, "it needs momentum_sync_every=n"),
    ({"local_group": 2, "replicate": object()}, ValueError, "can't be combined with replicate"),
    # Hyperparameters.
    ({"lr": -1.0}, ValueError, "lr must be finite and at least 0 (got -1.0)"),
    ({"lr": "fast"}, TypeError, "lr must be a number (got 'fast', a str)"),
    ({"lr": torch.ones(2)}, TypeError, "lr must be one number (got a tensor of (2,))"),
    ({"weight_decay": math.nan}, ValueError, "weight_decay must be finite"),
    ({"betas": 0.9}, TypeError, "betas must be a pair of numbers"),
    ({"betas": (0.9, 1.0)}, ValueError, "betas[1] must be at least 0 and below 1 (got 1.0)"),
]


@pytest.mark.parametrize(("options", "error", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_a_bad_option_is_refused(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        DistributedLion([("weight", filled(1.0))], **options)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"vote_every": 2}, "it applies to all groups, so pass it to DistributedLion itself"),
        ({"eps": 1e-8}, "DistributedLion has no such option; a group may have its own lr, betas"),
        ({"lr": math.inf}, "lr must be finite"),
    ],
)
def test_a_bad_option_of_a_group_is_refused_and_the_group_not_added(
    extra: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        DistributedLion([{"params": [filled(1.0)], **extra}])
    optimizer = DistributedLion([filled(1.0)])
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": [filled(1.0)], **extra})
    assert len(optimizer.param_groups) == 1


def test_groups_of_another_optimizer_bring_no_count_of_steps() -> None:
    groups = [{"params": [filled(1.0)], "step": 5}, {"params": [filled(1.0)], "step": 7}]
    assert [group["step"] for group in DistributedLion(groups).param_groups] == [0, 0]


@pytest.mark.parametrize(
    "options",
    [{"full_precision": "*norm*"}, {"momentum_sync": "*norm*", "momentum_sync_every": 1}],
)
def test_an_option_that_selects_by_name_needs_names(options: dict[str, Any]) -> None:
    optimizer = DistributedLion([filled(1.0)], **options)  # Names may come later.
    with pytest.raises(ValueError, match=r"no names: use DistributedLion\(model.named_parameters"):
        optimizer.step()
    assert optimizer.steps == 0


class Chooser:
    """Something that can't be copied, as a Trainer can't."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def choose(self, name: str, param: torch.Tensor) -> bool:
        return name == "norm"


def test_a_method_may_select_parameters() -> None:
    named = [("norm", filled(1.0)), ("weight", filled(1.0))]
    optimizer = DistributedLion(named, full_precision=Chooser().choose)
    optimizer.step()
    assert [slot.full_precision for slot in optimizer.params.fresh_layout().slots] == [True, False]


def test_a_module_instead_of_parameters_is_refused_with_the_call_to_write() -> None:
    with pytest.raises(TypeError, match=r"DistributedLion\(model.named_parameters\(\)"):
        DistributedLion(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_passed_twice_is_refused() -> None:
    param = filled(1.0)
    with pytest.raises(ValueError, match="a parameter is in its group twice"):
        DistributedLion([param, param])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.complex64])
def test_parameters_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.zeros(64, dtype=dtype), requires_grad=False)
    text = rf"16, 32, or 64 bits \(got {dtype}\): pass only those"
    with pytest.raises(TypeError, match=text):
        DistributedLion([param])
    optimizer = DistributedLion([filled(1.0)])
    with pytest.raises(TypeError, match=text):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1


def test_a_parameter_with_gaps_in_memory_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"has gaps in memory.*x.contiguous\(\)"):
        DistributedLion([nn.Parameter(torch.ones(4, 6)[:, :3])])


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(10, 64, sparse=True)
    optimizer = DistributedLion(embedding.named_parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match=r"'weight' must be dense.*sparse=False"):
        optimizer.step()


def test_a_gradient_of_another_shape_is_refused() -> None:
    param = filled(1.0)
    optimizer = DistributedLion([param])
    param.data = torch.ones(64)
    with pytest.raises(RuntimeError, match=r"the shape of its parameter, \(64,\) \(got \(128,\)\)"):
        optimizer.step()
