"""Gradients that a replayed CUDA graph writes: no hook runs, and no version counter moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_dlion import DistributedLion
from tests.support.spawn import RankPools

SHAPES, STEPS = [(5, 70), (9,)], 5


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if step == 2:
        found[1].zero_()  # As of a parameter that the captured forward did not use.
    return found


def train(rank: int, world_size: int, replayed: bool, reset: str) -> tuple[list[Tensor], list[int]]:
    params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = DistributedLion(params, lr=0.1)
    for param in params:
        param.grad = torch.zeros_like(param)
    moved = []
    for step in range(STEPS):
        before = [param.detach().clone() for param in params]
        if reset == "zero_grad":
            optimizer.zero_grad(set_to_none=not replayed)
        for param, grad in zip(params, gradients(rank, step), strict=True):
            if replayed:
                assert param.grad is not None
                # The memory that the graph was captured with.
                np.copyto(param.grad.numpy(), grad.numpy())
            else:
                param.grad = grad
        optimizer.step()
        moved.append(sum(not torch.equal(p, b) for p, b in zip(params, before, strict=True)))
    return [param.detach() for param in params], moved


@pytest.mark.parametrize("reset", ["zero_grad", "in the graph"])
def test_a_replayed_backward_moves_what_another_one_moves(ranks: RankPools, reset: str) -> None:
    found = ranks(2).run(train, True, reset)
    expected = ranks(2).run(train, False, reset)
    for (params, moved), (others, of_others) in zip(found, expected, strict=True):
        assert moved[0] == moved[1] == moved[3] == moved[4] == len(SHAPES)
        assert moved[2] >= 1
        if reset == "in the graph":
            assert moved == of_others
            assert all(map(torch.equal, params, others))
