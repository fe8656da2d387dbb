"""A rank that drops gradients and goes on without a step is a batch apart: all ranks are told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import DistributedLion
from hf_dlion.ranks.agreement import Disagreement
from tests.support.spawn import RankPools

BATCHES = 4
# What a loop calls to drop gradients.
DROPS: dict[str, Callable[[nn.Module, DistributedLion], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def _batch(rank: int, t: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * t + rank))


def _skipping(
    rank: int, world_size: int, drop: str, wrapper: str | None, options: dict[str, Any]
) -> tuple[str, int, int]:
    """Returns the error, the batch in which it came, and the steps taken."""
    model = _model()
    # Nothing else may keep a wrapper: a reducer that outlives its process group aborts.
    holder = [model if wrapper is None else DistributedDataParallel(model, **WRAPPERS[wrapper])]
    optimizer = DistributedLion(model.parameters(), lr=0.01, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.9**t)
    for t in range(BATCHES):
        loss = holder[0](_batch(rank, t)).square().mean()
        if rank == 1 and t == 2:
            loss = loss * float("nan")
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not math.isfinite(norm):
            DROPS[drop](model, optimizer)
            continue
        try:
            optimizer.step()
        except Disagreement as error:
            return str(error), t, optimizer.steps
        scheduler.step()
        DROPS[drop](model, optimizer)
    return "", BATCHES, optimizer.steps


@pytest.mark.parametrize("drop", DROPS)
def test_a_step_that_one_rank_skips_raises_on_all(ranks: RankPools, drop: str) -> None:
    _told(ranks(3).run(_skipping, drop, None, {}, timeout=20))


@pytest.mark.multiproc
@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["in the step", "overlap"])
def test_a_step_that_one_rank_skips_under_ddp_raises_on_all(
    ranks: RankPools, drop: str, wrapper: str, options: dict[str, Any]
) -> None:
    _told(ranks(2).run(_skipping, drop, wrapper, options, timeout=20))


def _told(results: list[tuple[str, int, int]]) -> None:
    for rank, (message, t, steps) in enumerate(results):
        assert "rank 1 dropped gradients and went on to another batch" in message, message
        assert "if not isfinite(norm): continue" in message
        # Rank 1 has read one batch more.
        assert (t, steps) == (3 if rank == 1 else 2, 2)


def _backward(model: nn.Module, rank: int, t: int) -> None:
    model(_batch(rank, t)).square().mean().backward()


def _accumulates(model: nn.Module, optimizer: DistributedLion, rank: int, drop: Any) -> None:
    """More passes on one rank than on another, clipped in between."""
    for t in range(BATCHES):
        for k in range(1 + rank):
            _backward(model, rank, 10 * t + k)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        drop(model, optimizer)


def _drops_alike(model: nn.Module, optimizer: DistributedLion, rank: int, drop: Any) -> None:
    """All ranks skip a step, by a number that they share."""
    for t in range(BATCHES):
        _backward(model, rank, t)
        if t != 1:
            optimizer.step()
        drop(model, optimizer)


def _drops_a_part(model: nn.Module, optimizer: DistributedLion, rank: int, drop: Any) -> None:
    """One rank drops a part of an accumulation, and steps when the others do."""
    for t in range(BATCHES):
        for k in range(3):
            _backward(model, rank, 10 * t + k)
            if rank == 1 and k == 1:
                drop(model, optimizer)
        optimizer.step()
        drop(model, optimizer)


def _abstains(model: nn.Module, optimizer: DistributedLion, rank: int, drop: Any) -> None:
    """One rank drops what it accumulated before the step that it takes all the same."""
    for t in range(BATCHES):
        for _ in range(1 + rank):
            _backward(model, rank, t)
        if rank == 1 and t == 1:
            drop(model, optimizer)
        optimizer.step()
        drop(model, optimizer)


def _resets_often(model: nn.Module, optimizer: DistributedLion, rank: int, drop: Any) -> None:
    """Nothing has been delivered when gradients are reset, on one rank more often."""
    for t in range(BATCHES):
        for _ in range(1 + rank):
            drop(model, optimizer)
        loss = model(_batch(rank, t)).square().mean()
        drop(model, optimizer)
        loss.backward()
        optimizer.step()


def _perturbs(model: nn.Module, optimizer: DistributedLion, rank: int, drop: Any) -> None:
    """Two passes a step, of which the second alone counts, as in SAM; and one more at the end."""
    for t in range(BATCHES):
        _backward(model, rank, t)
        drop(model, optimizer)
        _backward(model, rank, t + 1)
        optimizer.step()
        drop(model, optimizer)
    _backward(model, rank, 0)
    drop(model, optimizer)
    _backward(model, rank, 0)
    optimizer.step()


def _looks(model: nn.Module, optimizer: DistributedLion, rank: int, drop: Any) -> None:
    """One rank alone looks at gradients between steps, through the bare model."""
    for t in range(BATCHES):
        if rank == 1:
            _backward(getattr(model, "module", model), rank, t)
            drop(model, optimizer)
        _backward(model, rank, t)
        optimizer.step()
        drop(model, optimizer)


def _drops_unreduced(model: nn.Module, optimizer: DistributedLion, rank: int, drop: Any) -> None:
    """One rank drops what it accumulated under no_sync() and begins its batch again."""
    for t in range(BATCHES):
        for k in range(3 + rank):
            with model.no_sync():  # type: ignore[operator]
                _backward(model, rank, k)
            if rank == 1 and k == 1:
                drop(model, optimizer)
        _backward(model, rank, t)
        optimizer.step()
        drop(model, optimizer)


LOOPS = [_accumulates, _drops_alike, _drops_a_part, _abstains, _resets_often, _perturbs]


def _trained(rank: int, world_size: int, loop: Any, drop: str, wrapper: str | None) -> int:
    model = _model()
    holder = [model if wrapper is None else DistributedDataParallel(model, **WRAPPERS[wrapper])]
    optimizer = DistributedLion(model.parameters(), lr=0.01)
    loop(holder[0], optimizer, rank, DROPS[drop])
    return optimizer.steps


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_whose_ranks_stay_together_train(ranks: RankPools, loop: Any, drop: str) -> None:
    assert len(set(ranks(2).run(_trained, loop, drop, None, timeout=20))) == 1


@pytest.mark.multiproc
@pytest.mark.parametrize("drop", ["optimizer", "model", "model to zeros"])
@pytest.mark.parametrize(
    ("wrapper", "loop"),
    [
        pytest.param(wrapper, loop, id=f"{wrapper}-{loop.__name__}")
        for wrapper in WRAPPERS
        for loop in [*LOOPS, _looks, _drops_unreduced]
        # DDP's own buckets want as many passes of every rank.
        if wrapper != "views" or loop not in (_accumulates, _abstains)
    ],
)
def test_loops_whose_ranks_stay_together_train_under_ddp(
    ranks: RankPools, wrapper: str, loop: Any, drop: str
) -> None:
    assert len(set(ranks(2).run(_trained, loop, drop, wrapper, timeout=20))) == 1


def _joins(rank: int, world_size: int) -> int:
    """Two passes a step, on one rank of fewer batches, whose last is not complete."""
    model = _model()
    optimizer = DistributedLion(model.parameters(), lr=0.01)
    with Join([optimizer]):
        for t in range(BATCHES - 2 * rank):
            _backward(model, rank, t)
            optimizer.zero_grad()
            _backward(model, rank, t + 1)
            optimizer.step()
        if rank == 1:
            _backward(model, rank, 0)
    return optimizer.steps


@pytest.mark.multiproc
def test_a_rank_without_data_is_not_compared(ranks: RankPools) -> None:
    assert ranks(2).run(_joins, timeout=20) == [BATCHES] * 2


def _told_once(rank: int, world_size: int) -> tuple[int, int]:
    """Returns how often it was told, and the steps taken; the ranks go on after an error."""
    model, told = _model(), 0
    optimizer = DistributedLion(model.parameters(), lr=0.01)
    for t in range(6):
        _backward(model, rank, t)
        if rank == 1 and t == 1:
            optimizer.zero_grad()
            _backward(model, rank, t)
        try:
            optimizer.step()
        except Disagreement:
            told += 1
        optimizer.zero_grad()
    return told, optimizer.steps


def test_ranks_that_were_told_can_go_on(ranks: RankPools) -> None:
    assert ranks(2).run(_told_once, timeout=20) == [(1, 5)] * 2
