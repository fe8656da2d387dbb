"""Training with votes of 2, 4 and 8 bits on real ranks; the zoo's cases are in other modules."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_dlion import DistributedLion, Options
from hf_dlion.codec.reference import levels as reference_levels
from tests.support import zoo
from tests.support.oracle import same_bits
from tests.support.random_training import backward, random_param
from tests.support.spawn import RankPools
from tests.support.zoo import train_zoo


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "options",
    [{"exchange": "two_phase", "bits": 4}, {"bits": 2}, {"bits": 2, "level_scale": "tensor"}],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_votes_that_leave_during_backward_follow_the_rule(
    ranks: RankPools, world_size: int, options: dict[str, Any]
) -> None:
    options = {**options, "overlap": True}
    records = ranks(world_size).run(train_zoo, 15, options, {"find_unused_parameters": True})
    zoo.replay(records, options)
    assert max(len(record.foreseen) for mine in records for record in mine) > 5


def train(rank: int, world_size: int, steps: int, options: dict[str, Any]) -> list[list[Tensor]]:
    """Trains on the same gradients on every rank; returns the parameters after each step."""
    params = [random_param(40, 30, seed=k, dtype=d) for k, d in enumerate(DTYPES)]
    optimizer = DistributedLion(params, lr=0.01, weight_decay=0.1, **options)
    ends = []
    for t in range(steps):
        backward(params, t)
        optimizer.step()
        ends.append([p.detach().clone() for p in params])
    if world_size > 1:
        assert optimizer.wire.agreement == 1.0
    return ends


DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("world_size", [2, 3])
def test_with_2_bits_identical_gradients_are_lion(ranks: RankPools, world_size: int) -> None:
    # Equal momenta must stay equal, so momenta below float32 are not rounded stochastically here.
    options = {"momentum_dtype": torch.float32}
    alone = ranks(1).run(train, 8, options)[0]
    for together in ranks(world_size).run(train, 8, {**options, "bits": 2}):
        for a, b in zip(itertools.chain(*alone), itertools.chain(*together), strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ties", ["alternate", "zero"])
def test_identical_gradients_are_lion_but_for_ties_where_they_are_rounded_to_zero(
    ranks: RankPools, ties: str, bits: Any
) -> None:
    options = {"momentum_dtype": torch.float32}
    (alone,) = ranks(1).run(train, 1, options)[0]
    (together,) = ranks(2).run(train, 1, {**options, "bits": bits, "ties": ties})[0]
    params = [random_param(40, 30, seed=k, dtype=d) for k, d in enumerate(DTYPES)]
    backward(params, 0)
    tied = 0
    for a, b, param in zip(alone, together, params, strict=True):
        assert param.grad is not None
        u = (param.grad.double() * 0.1).numpy()
        scale = reference_levels.mean_magnitudes_of_words(u).reshape(u.shape)
        near = np.abs(u) / scale * reference_levels.LARGEST[bits] / 2 < 0.5
        tied += int(near.sum())
        kept = torch.from_numpy(~near)
        assert same_bits(a[kept], b[kept])
        decayed = param.detach().double() * (1 - 0.01 * 0.1)
        moved = (b.double() - decayed).numpy()[near]
        if ties == "zero":
            assert np.abs(moved).max(initial=0) < 0.008
        else:
            even = (np.arange(near.size).reshape(near.shape)[near] + 1) % 2 == 0
            assert (np.sign(moved) == np.where(even, -1, 1)).all()
    assert tied > 0


def permuted(rank: int, world_size: int, order: tuple[int, ...], bits: int) -> list[Tensor]:
    params = [random_param(9, 8, seed=k, dtype=d) for k, d in enumerate(DTYPES[:2])]
    optimizer = DistributedLion(params, lr=0.01, bits=bits)
    for t in range(6):
        backward(params, 10 * t + order[rank])
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_it_does_not_matter_which_rank_has_which_data(ranks: RankPools, bits: int) -> None:
    ends = [ranks(3).run(permuted, order, bits)[0] for order in itertools.permutations(range(3))]
    for end in ends:
        assert all(same_bits(a, b) for a, b in zip(end, ends[0], strict=True))


def test_more_bits_are_refused_where_they_mean_nothing() -> None:
    with pytest.raises(ValueError, match="aggregation='average' is the mean of votes of one bit"):
        Options(bits=4, aggregation="average")
    for group in (2, "node"):
        with pytest.raises(NotImplementedError, match="level_scale='tensor' with local_group"):
            Options(bits=8, level_scale="tensor", local_group=group)
        assert Options(bits=8, local_group=group).bits == 8
    assert Options(bits=8, level_scale="tensor", local_group=1).bits == 8
