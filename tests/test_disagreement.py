"""What would make replicas drift apart is raised on every rank, and no rank waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from spawn import RankPools
from torch import Tensor, nn

from hf_dlion import DistributedLion

pytestmark = pytest.mark.multiproc

WORLD_SIZE = 3


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(4, 5), (7,)]]


def _backward(params: list[nn.Parameter], seed: int) -> None:
    for k, p in enumerate(params):
        p.grad = None
        weight = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + k))
        (p * weight).sum().backward()


def _attempt(step: Callable[[], Any], params: list[nn.Parameter]) -> tuple[str, bool]:
    """Returns the error of a step, and whether it left the parameters alone."""
    before = [p.detach().clone() for p in params]
    try:
        step()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = ""
    return message, all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


def _with_options(
    rank: int, world_size: int, options: dict[str, Any], odd: dict[str, Any]
) -> tuple[str, bool]:
    params = _parameters()
    optimizer = DistributedLion(params, **(odd if rank == 1 else options))
    _backward(params, rank)
    return _attempt(optimizer.step, params)


def _with_group_value(rank: int, world_size: int, key: str, value: Any) -> tuple[str, bool]:
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.1)
    _backward(params, rank)
    optimizer.step()
    if rank == world_size - 1:
        optimizer.param_groups[0][key] = value
    _backward(params, rank)
    return _attempt(optimizer.step, params)


def _raised_everywhere(results: list[tuple[str, bool]], *words: str) -> None:
    for rank, (message, untouched) in enumerate(results):
        assert message, f"rank {rank} raised nothing"
        assert untouched, f"rank {rank} moved its parameters"
        for word in words:
            assert word in message, f"rank {rank}: {message}"


@pytest.mark.parametrize(
    ("name", "value", "odd"),
    [
        ("aggregation", "majority", "average"),
        ("ties", "alternate", "zero"),
        ("exchange", "gather", "two_phase"),
        ("exchange", "auto", "two_phase"),
        ("stochastic_rounding", True, False),
        ("momentum_dtype", None, torch.bfloat16),
        ("seed", 0, 1),
        ("max_abstained_steps", 20, 3),
        ("checkpoint", "per_rank", "mean"),
        ("check_replicas_every", 2, 3),
        ("on_divergence", "raise", "repair"),
    ],
)
def test_an_option_that_differs_on_one_rank(
    ranks: RankPools, name: str, value: Any, odd: Any
) -> None:
    results = ranks(WORLD_SIZE).run(_with_options, {name: value}, {name: odd}, timeout=20)
    _raised_everywhere(results, name, "rank 1")


@pytest.mark.parametrize(
    ("name", "odd"), [("lr", 0.2), ("betas", (0.9, 0.999)), ("weight_decay", 0.5)]
)
def test_a_group_value_that_differs_on_one_rank(ranks: RankPools, name: str, odd: Any) -> None:
    results = ranks(WORLD_SIZE).run(_with_group_value, name, odd, timeout=20)
    _raised_everywhere(results, name, "rank 2")


def _with_layout(rank: int, world_size: int, kind: str, late: bool) -> tuple[str, bool]:
    params = _parameters()
    extra = nn.Parameter(torch.ones(200, 3))
    optimizer = DistributedLion(params, lr=0.1)
    if late:
        _backward(params, rank)
        optimizer.step()
    if rank == 1:
        if kind == "added":
            params.append(extra)
            optimizer.add_param_group({"params": [extra]})
        elif kind == "frozen":
            params[0].requires_grad_(False)
            params[0].grad = None
        elif kind == "shape":
            params[1].data = torch.ones(9)
            params[1].grad = None
        else:
            params[1].data = params[1].data.double()
            params[1].grad = None
    _backward([p for p in params if p.requires_grad], rank)
    return _attempt(optimizer.step, params)


@pytest.mark.parametrize("late", [False, True], ids=["first step", "later"])
@pytest.mark.parametrize("kind", ["added", "frozen", "shape", "dtype"])
def test_parameters_that_differ_on_one_rank(ranks: RankPools, kind: str, late: bool) -> None:
    results = ranks(WORLD_SIZE).run(_with_layout, kind, late, timeout=20)
    _raised_everywhere(results, "parameters", "rank 1")


def _with_values(rank: int, world_size: int, change: float) -> tuple[str, bool]:
    params = _parameters()
    named = [("first", params[0]), ("second", params[1])]
    if rank == 0:
        params[1].data[6] += change
    optimizer = DistributedLion(named, lr=0.1)
    _backward(params, rank)
    return _attempt(optimizer.step, params)


@pytest.mark.parametrize("change", [1.0, 1e-6])
def test_replicas_that_do_not_start_equal(ranks: RankPools, change: float) -> None:
    results = ranks(WORLD_SIZE).run(_with_values, change, timeout=20)
    _raised_everywhere(results, "second", "rank 0")


def _with_sparse_gradient(rank: int, world_size: int, late: bool) -> tuple[str, bool]:
    embedding = nn.Embedding(10, 3, sparse=rank == 1)
    torch.nn.init.zeros_(embedding.weight)
    params = [embedding.weight]
    optimizer = DistributedLion(params, lr=0.1)
    if late:
        _backward(params, rank)
        optimizer.step()
    optimizer.zero_grad()
    embedding(torch.tensor([1, 2])).sum().backward()
    return _attempt(optimizer.step, params)


@pytest.mark.parametrize("late", [False, True], ids=["first step", "later"])
def test_a_sparse_gradient_on_one_rank(ranks: RankPools, late: bool) -> None:
    results = ranks(WORLD_SIZE).run(_with_sparse_gradient, late, timeout=20)
    _raised_everywhere(results, "sparse")


def _with_closure_error(rank: int, world_size: int) -> tuple[str, bool]:
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.1)

    def closure() -> float:
        if rank == 2:
            raise ArithmeticError("the closure of rank two")
        _backward(params, rank)
        return 0.0

    return _attempt(lambda: optimizer.step(closure), params)


def test_a_closure_that_raises_on_one_rank(ranks: RankPools) -> None:
    results = ranks(WORLD_SIZE).run(_with_closure_error, timeout=20)
    _raised_everywhere(results, "the closure of rank two")


def _with_other_step_count(rank: int, world_size: int) -> tuple[str, bool]:
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.1)
    state = optimizer.state_dict()
    if rank == 0:
        state["dlion"]["steps"] = 7
    optimizer.load_state_dict(state)
    _backward(params, rank)
    return _attempt(optimizer.step, params)


def test_ranks_that_loaded_different_steps(ranks: RankPools) -> None:
    results = ranks(WORLD_SIZE).run(_with_other_step_count, timeout=20)
    _raised_everywhere(results, "step", "7")


def _with_stubborn_nan(rank: int, world_size: int) -> list[tuple[str, bool]]:
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.1, max_abstained_steps=3)
    attempts = []
    # Rank 1 fails in steps 0 and 1, recovers, and then fails for good.
    for t in range(6):
        _backward(params, rank)
        if rank == 1 and t != 2:
            assert params[0].grad is not None
            params[0].grad[0, 0] = float("nan")
        attempts.append(_attempt(optimizer.step, params))
    return attempts


def test_a_rank_that_abstains_too_often_in_a_row(ranks: RankPools) -> None:
    results = ranks(WORLD_SIZE).run(_with_stubborn_nan, timeout=20)
    for attempts in results:
        assert [bool(message) for message, _ in attempts] == [False] * 5 + [True]
        assert not any(untouched for _, untouched in attempts[:5])
        assert "max_abstained_steps" in attempts[5][0]
        assert "rank 1" in attempts[5][0]


def _go_on_after_an_error(rank: int, world_size: int) -> list[Tensor]:
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.1)
    _backward(params, 10 + rank)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    _backward(params, 20 + rank)
    with pytest.raises(RuntimeError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert optimizer.steps == 2
    return [p.detach() for p in params]


def _never_err(rank: int, world_size: int) -> list[Tensor]:
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.1)
    for seed in (10, 20):
        _backward(params, seed + rank)
        optimizer.step()
    return [p.detach() for p in params]


def test_a_difference_that_is_mended_leaves_no_trace(ranks: RankPools) -> None:
    mended = ranks(WORLD_SIZE).run(_go_on_after_an_error, timeout=20)
    clean = ranks(WORLD_SIZE).run(_never_err, timeout=20)
    for rank in range(WORLD_SIZE):
        assert all(torch.equal(a, b) for a, b in zip(mended[rank], clean[rank], strict=True))
