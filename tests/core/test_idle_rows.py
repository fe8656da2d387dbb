"""Rows without a gradient: which they are, and when a voter stops to vote on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_dlion import load_momentum, save_momentum
from hf_dlion.core.idle_rows import silence, survey, update_age, zero_rows
from hf_dlion.core.slot import Slot
from hf_dlion.optimizer import DistributedLion
from tests.support.gradients import KINDS
from tests.support.spawn import on_ranks
from tests.support.steps import drawn
from tests.support.training import is_equal_everywhere, warned


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("row", [64, 0], ids=["rows", "one row"])
def test_a_row_is_zero_if_all_of_its_elements_are(dtype: torch.dtype, row: int) -> None:
    grad = torch.zeros(6, 64, dtype=dtype)
    grad[1, 63] = torch.finfo(dtype).smallest_normal / 2  # a subnormal number
    grad[2] = -0.0
    grad[3, 5] = torch.nan
    grad[4] = 1.0
    expected = [True, False, True, False, False, True]
    if row:
        assert zero_rows(grad.view(-1), row).tolist() == expected
        assert zero_rows(grad[4], row) is None
    else:
        found = [zero_rows(own[:63], 0) for own in grad]
        assert [mark is not None for mark in found] == [True, True, True, False, False, True]


def test_a_survey_marks_rows_of_finite_gradients() -> None:
    slots = [Slot.of(torch.empty(shape), 0) for shape in ((2, 64), (0, 4), (5,), (3, 64), (2,))]
    for slot in slots[:4]:
        slot.grad = torch.ones(slot.size)
    slots[2].grad[:] = 0.0
    slots[3].grad[64:128] = 0.0
    assert survey(slots)
    assert [None if slot.idle is None else slot.idle.tolist() for slot in slots] == [
        *(None, None, [True], [False, True, False], None)
    ]
    slots[2].grad[3] = torch.inf
    assert not survey(slots)
    assert [slot.idle for slot in slots] == [None] * 5  # Nothing stays of the last survey.


def test_large_gradients_whose_sum_overflows_are_finite() -> None:
    slot = Slot.of(torch.empty(64), 0)
    slot.grad = torch.full((64,), 3e38)
    assert survey([slot])


def test_ages_of_other_rows_are_forgotten() -> None:
    """As of a parameter that was put into another memory format."""
    param = torch.zeros(1)
    ages = {param: torch.full((3,), 5, dtype=torch.int32)}
    update_age(ages, param, torch.tensor([True]), 0.98)
    assert ages[param].tolist() == [1]


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 256), (128, 256), (64, 128), (64, 192), (192, 320)]
)
def test_rows_are_silenced_wherever_a_piece_is_cut(start: int, stop: int) -> None:
    """Rows of 128 elements, of which 1 and 2 are old."""
    whole = torch.ones(384)
    whole[128:] = 0.0
    u = torch.ones(64 + stop - start)
    silence(u[64:], start, torch.tensor([False, True, True]), 128)
    assert torch.equal(u, torch.cat([torch.ones(64), whole[start:stop]]))


def moves(steps: range, options: dict[str, Any], rank: int) -> tuple[list[float], DistributedLion]:
    """Returns how far two rows moved in units of lr: one used once on rank 0, one used always."""
    param = nn.Parameter(torch.zeros(3, 64))
    optimizer = DistributedLion([("p", param)], lr=1.0, **options)
    for step in steps:
        param.grad = torch.zeros(3, 64)
        param.grad[2] = 1.0
        if step == 0 and rank == 0:
            param.grad[1] = -1.0
        optimizer.step()
    optimizer.exchange_now()
    assert not param[0].any()
    return param.detach()[1:, 0].tolist(), optimizer


def test_a_row_moves_for_as_long_as_the_momentum_remembers() -> None:
    assert moves(range(49), {}, 0)[0] == [49.0, -49.0]
    (once, always), optimizer = moves(range(300), {}, 0)
    assert (once, always) == (50.0, -300.0)
    (age,) = optimizer.params.ages.values()
    assert age.tolist() == [50, 50, 0]
    assert moves(range(300), {"betas": (0.9, 0.5)}, 0)[0] == [2.0, -300.0]


def test_a_momentum_may_remember_more_steps_than_an_age_counts() -> None:
    """1 / (1 - beta2) is above 2^31, and ages are int32."""
    assert moves(range(3), {"betas": (0.9, 1 - 1e-12)}, 0)[0] == [3.0, -3.0]


@pytest.mark.parametrize(
    ("options", "distance"),
    [
        ({}, 50.0),
        ({"full_precision": "*"}, 50.0),
        ({"bits": 4, "betas": (torch.tensor(0.9), torch.tensor(0.99))}, 100.0),
        # Own steps of rank 0 alone count half in the mean.
        ({"vote_every": 4, "bits": 8}, 25.0),
        ({"vote_every": 4, "full_precision": "*"}, 25.0),
    ],
    ids=str,
)
@on_ranks(2)
def test_a_rank_stops_voting_on_a_row_that_it_used_once(
    rank: int, options: dict[str, Any], distance: float
) -> None:
    (once, always), _ = moves(range(400), options, rank)
    assert once == pytest.approx(distance, rel=0.02)
    assert always == pytest.approx(-400.0, rel=0.02)


def test_a_momentum_file_keeps_ages_and_a_state_dict_does_not(tmp_path: Path) -> None:
    _, optimizer = moves(range(120), {}, 0)
    save_momentum(optimizer, tmp_path)
    param = nn.Parameter(torch.zeros(3, 64).bfloat16())
    other = DistributedLion([("p", param)], lr=1.0)
    other.params.ages[param] = torch.full((3,), 7, dtype=torch.int32)
    other.load_state_dict(optimizer.state_dict())
    assert other.params.ages == {}
    with warned():  # The model has other weights.
        load_momentum(other, tmp_path)
    assert other.params.ages[param].dtype == torch.int32
    param.grad = torch.zeros_like(param)
    other.step()
    assert other.params.ages[param].tolist() == [50, 50, 1]


@pytest.mark.parametrize("every", [1, 4])
@on_ranks(2)
def test_pruned_elements_stay_zero_in_full_precision(rank: int, every: int) -> None:
    weight = nn.Parameter(torch.randn(8, 100))
    used = weight.detach() > 0
    weight.detach().mul_(used)
    optimizer = DistributedLion([("w", weight)], lr=0.1, full_precision="*", vote_every=every)
    for step in range(6):
        weight.grad = drawn((8, 100), step, rank) * used
        optimizer.step()
    assert not weight[~used].any()
    assert weight[used].all()


@on_ranks(2)
def test_averaged_momenta_start_with_equal_ages(rank: int) -> None:
    """A rank that stops earlier than others would drift away with `full_precision`."""
    param = nn.Parameter(torch.zeros(3, 64))
    param.grad = torch.full((3, 64), float(rank + 1))
    voted = DistributedLion([("p", param)])
    voted.step()
    averaged = DistributedLion([("p", param)], full_precision="*")
    averaged.load_state_dict(voted.state_dict())
    averaged.params.ages[param] = torch.tensor([0, 50 * rank, 0], dtype=torch.int32)
    param.grad[1] = 0.0
    for _ in range(60):
        averaged.step()
    assert is_equal_everywhere(param)
