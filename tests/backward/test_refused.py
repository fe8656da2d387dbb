"""Ways of averaging gradients in which there is no place for our hook are refused in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import DistributedLion
from tests.support.spawn import RankPools


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def run_replicated(rank: int, world_size: int, how: str) -> str:
    model = new_model()
    optimizer = DistributedLion(model.parameters())
    called: nn.Module = replicate(model[0] if how == "a part" else model)
    if how == "a part":
        called = model
    elif how == "compiled":
        called = torch.compile(called, backend="eager")
    elif how == "compiled in place":
        called.compile(backend="eager")
    with pytest.raises(NotImplementedError) as caught:
        called(torch.ones(1, 4))
    assert optimizer.steps == 0
    return str(caught.value)


@pytest.mark.parametrize("how", ["whole", "a part", "compiled", "compiled in place"])
def test_composable_replicate_is_refused_at_the_first_forward(ranks: RankPools, how: str) -> None:
    for said in ranks(2).run(run_replicated, how):
        assert said.startswith("torch.distributed._composable.replicate averages the gradients of")
        assert "wrap the model in torch.nn.parallel.DistributedDataParallel" in said


def test_attaching_a_replicated_model_is_refused_in_the_same_words() -> None:
    model = new_model()
    optimizer = DistributedLion(model.parameters())
    with pytest.raises(NotImplementedError, match=r"_composable.replicate averages"):
        optimizer.attach(replicate(model))


def test_a_replicated_model_that_does_not_train_here_is_none_of_our_business() -> None:
    optimizer = DistributedLion(new_model().parameters())
    teacher = replicate(new_model())
    # It goes on to torch, which finds no process group.
    with pytest.raises(ValueError, match="process group"):
        teacher(torch.ones(1, 4))
    assert optimizer.steps == 0


def reduce_in_python(rank: int, world_size: int) -> str:
    model = new_model()
    optimizer = DistributedLion(model.parameters())
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        wrapped = DistributedDataParallel(model)
    with pytest.raises(NotImplementedError) as caught:
        wrapped(torch.ones(1, 4))
    assert optimizer.steps == 0
    return str(caught.value)


@pytest.mark.multiproc
def test_a_reducer_in_python_is_refused_at_the_first_forward(ranks: RankPools) -> None:
    for said in ranks(2).run(reduce_in_python):
        assert "optimize_ddp='python_reducer'" in said
        assert "set torch._dynamo.config.optimize_ddp = True before" in said


def delay_the_average(rank: int, world_size: int, of: str) -> str | None:
    model = new_model()
    part = {"all": model, "a part": model[1]}[of]
    optimizer = DistributedLion(part.parameters())
    model[0].requires_grad_(of == "all")
    wrapped = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=list(model.named_parameters())[-1:],
        param_to_hook_all_reduce=model[1].weight,
    )
    with pytest.raises(NotImplementedError) as caught:
        wrapped(torch.ones(1, 4))
    assert optimizer.steps == 0
    return str(caught.value)


@pytest.mark.multiproc
@pytest.mark.parametrize("of", ["all", "a part"])
def test_an_average_beside_the_comm_hook_is_refused(ranks: RankPools, of: str) -> None:
    for said in ranks(2).run(delay_the_average, of):
        assert "make it without delay_all_reduce_named_params" in said
