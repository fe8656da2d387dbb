"""Steps with torch.amp.GradScaler."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Disagreement
from tests.support.spawn import on_ranks
from tests.support.steps import plain, single
from tests.support.training import batch, filled


def test_scaled_gradients_of_float16_are_refused() -> None:
    param = nn.Parameter(torch.ones(4, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = DistributedLion([param], lr=0.01)
    scaler.scale(param.sum()).backward()
    with pytest.raises(ValueError, match="GradScaler scaled float16 gradients"):
        scaler.step(optimizer)
    optimizer.step()  # Without a scaler, which left its scale when the step raised.
    assert optimizer.steps == 1


@pytest.mark.parametrize("where", ["a gradient", "the parameters"])
def test_a_step_that_raises_leaves_no_scale(where: str) -> None:
    weight = nn.Embedding(4, 64, sparse=where == "a gradient").weight
    again = nn.Parameter(weight.detach()) if where == "the parameters" else filled(1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = DistributedLion([weight, again], lr=0.01)
    for _ in range(2):  # GradScaler squares a scale that it finds.
        looked_up = nn.functional.embedding(torch.tensor([1]), weight, sparse=where == "a gradient")
        scaler.scale(looked_up.sum() + again.sum()).backward()
        with pytest.raises((NotImplementedError, ValueError), match=r"must be dense|share memory"):
            scaler.step(optimizer)
        assert optimizer.grad_scale == 1.0
        scaler.update()
        optimizer.zero_grad()


@on_ranks(2)
def test_a_scaled_step_accepts_a_rank_without_gradients(rank: int) -> None:
    """Rank 0 has no gradient in a step in which rank 1 has some."""
    model, optimizer = plain()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if rank == 1:
        scaler.scale(model(batch(0, rank)).square().sum()).backward()
    else:
        scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert optimizer.steps == 1


@on_ranks(2)
def test_gradients_are_unscaled_once_if_a_step_that_raised_is_taken_again(rank: int) -> None:
    param = nn.Parameter(torch.ones(128))
    optimizer = DistributedLion([param], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = []
    for number in range(3):
        scaler.scale((param * 2.0).sum()).backward()
        if number == 1:
            optimizer.param_groups[0]["lr"] = 0.02 if rank == 1 else 0.01
            with pytest.raises(Disagreement):
                scaler.step(optimizer)
            optimizer.param_groups[0]["lr"] = 0.01
        scaler.step(optimizer)
        assert param.grad is not None
        found.append(float(param.grad[0]))
        scaler.update()
        optimizer.zero_grad()
    assert found == [2.0] * 3


@pytest.mark.parametrize("clips", [False, True])
@on_ranks(2)
def test_an_inf_of_a_step_that_raised_is_forgotten(rank: int, clips: bool) -> None:
    param, optimizer = single()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale((param * torch.inf).sum()).backward()
    if clips:
        scaler.unscale_(optimizer)
    optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank)
    with pytest.raises(Disagreement):
        scaler.step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.01
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.wire.abstentions == 0
