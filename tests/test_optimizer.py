"""Real ranks take steps that equal the definition in NumPy, and fail together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_optimizer import Lion
from torch import nn

from hf_dlion.exchange.routes import wire_bytes
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.failures import Disagreement
from tests.support.definition import Lions
from tests.support.gradients import KINDS, gradients, pair, shuffled
from tests.support.spawn import RankPools, on_ranks

pytestmark = pytest.mark.multiproc


def equals_the_definition(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    kinds: list[torch.dtype],
    seed: int,
    faults: bool,
) -> tuple[int, int, int]:
    """Compares five steps with the definition; returns steps, bytes sent, and bytes by formula."""
    shapes = shuffled(seed)
    dtypes = [kinds[k % len(kinds)] for k in range(len(shapes))]
    lions, optimizer, params = pair(Lions, world_size, shapes, dtypes, options)
    # The first step compares layouts, and gradients of attached models and of others.
    expected = (24 + 2 * 16) * (world_size - 1)
    for step in range(5):
        grads = gradients(seed + step, world_size, shapes, dtypes, faults=faults)
        for param, grad in zip(params, grads[rank], strict=True):
            param.grad = None if grad is None else grad.clone()
        before = lions.t
        lions.step(grads)
        optimizer.step()
        assert optimizer.steps == lions.t
        for k, (param, wanted) in enumerate(zip(params, lions.params, strict=True)):
            assert torch.equal(param, wanted), (step, shapes[k], param.dtype)
            if param in optimizer.state:
                momentum = optimizer.state[param]["exp_avg"]
                assert torch.equal(momentum, lions.momenta[rank][k]), (step, shapes[k])
        if not faults and lions.t > before:
            expected += 64 * (world_size - 1)
            for own in optimizer._plan.messages:  # type: ignore[union-attr]
                planes = {"majority": 1, "average": world_size.bit_length()}
                ties = options.get("ties") == "zero"
                sizes = [
                    wire_bytes(
                        name,
                        ranks=world_size,
                        words=own.words,
                        rows=own.rows.count,
                        bits=options.get("bits", 1),
                        planes=2 if ties else planes[options.get("aggregation", "majority")],
                    )
                    for name in ("gather", "two_phase")
                ]
                chosen = options.get("exchange", "auto")
                expected += {"auto": min(sizes), "gather": sizes[0], "two_phase": sizes[1]}[chosen]
    return optimizer.steps, optimizer.wire.bytes_sent, expected


CASES: list[dict[str, Any]] = [
    {"exchange": "gather"},
    {"exchange": "two_phase"},
    {"exchange": "gather", "ties": "zero"},
    {"exchange": "two_phase", "ties": "zero"},
    {"exchange": "gather", "aggregation": "average"},
    {"exchange": "two_phase", "aggregation": "average"},
    {"bits": 2},
    {"exchange": "two_phase", "bits": 4},
    {"exchange": "gather", "bits": 8},
    {"bits": 2, "level_scale": "tensor"},
    {"exchange": "two_phase", "bits": 4, "level_scale": "tensor"},
    {"bits": 8, "ties": "zero", "level_scale": "tensor"},
    {"momentum_dtype": torch.bfloat16},
]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.smoke), 3, 4, 5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_equal_the_definition(pools: RankPools, case: dict[str, Any], ranks: int) -> None:
    for seed in (7 * ranks, 1000 + ranks):
        pools(ranks).run(equals_the_definition, case, [torch.float32], seed, True)


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS[:3]], ids=str)
def test_ranks_equal_the_definition_in_other_dtypes(
    pools: RankPools, kinds: list[torch.dtype]
) -> None:
    pools(3).run(equals_the_definition, {"seed": 2**40 + 1}, kinds, 5, True)
    momentum = {"momentum_dtype": torch.bfloat16}
    pools(2).run(equals_the_definition, momentum, kinds, 6, True)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_equal_the_formula(pools: RankPools, case: dict[str, Any], ranks: int) -> None:
    for steps, sent, expected in pools(ranks).run(
        equals_the_definition, case, [torch.float32], 1, False
    ):
        assert steps == 5
        assert sent == expected


def test_one_rank_is_lion() -> None:
    torch.manual_seed(1)
    models = [torch.nn.Linear(70, 9) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours = DistributedLion(models[0].parameters(), lr=1e-3, weight_decay=0.1)
    theirs = Lion(models[1].parameters(), lr=1e-3, weight_decay=0.1, weight_decouple=True)
    for _ in range(20):
        x = torch.randn(8, 70)
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def differing(rank: int, world_size: int, what: str) -> str:
    """Steps twice, differing from the other ranks in the second; returns the error's text."""
    torch.manual_seed(rank if what == "values" else 0)
    model = torch.nn.Linear(64, 3)
    last = rank == world_size - 1
    options: dict[str, Any] = {"ties": "zero"} if what == "options" and last else {}
    named = list(model.named_parameters())
    if what == "order" and last:
        named.reverse()
    if what == "names" and last:
        named = [(f"other.{name}", param) for name, param in named]
    optimizer = DistributedLion(named, lr=0.1, max_abstained_steps=2, **options)
    other = DistributedLion(model.named_parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    def step(closure: Any = None) -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step(closure)

    try:
        if what not in ("options", "values", "order", "names"):
            step()
            before = [p.detach().clone() for p in model.parameters()]
        if what == "lr" and last:
            optimizer.param_groups[0]["lr"] = 0.2
        if what in ("no lr", "lr of nan") and last:
            optimizer.param_groups[0]["lr"] = None if what == "no lr" else math.nan
        if what == "optimizer":
            other.step()
            before = [p.detach().clone() for p in model.parameters()]
            (other if last else optimizer).step()
        if what == "frozen" and last:
            model.bias.requires_grad_(False)
        if what == "state" and last:
            optimizer.state[model.weight]["exp_avg"] = torch.zeros(64, 3)
        if what == "closure":
            step((lambda: 1 / 0) if last else (lambda: 0.0))
        if what == "nan":
            for _ in range(2):
                model(torch.ones(2, 64)).sum().backward()
                if last:
                    model.weight.grad.view(-1)[5] = torch.inf  # type: ignore[union-attr]
                before = [p.detach().clone() for p in model.parameters()]
                optimizer.step()
        step()
    except (Disagreement, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        if what != "nan":
            for param, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(param, old)
        return f"{type(error).__name__}: {error}"
    return "no error"


TEXTS = {
    "options": ["first in 'ties': rank 0: 'alternate', rank 1: 'zero'"],
    "lr": ["first in 'group 0 lr': rank 0: 0.1, rank 1: 0.2"],
    "no lr": ["step failed on 1 of 2 ranks: rank 1: TypeError: float() argument"],
    "lr of nan": ["rank 1: ValueError: lr of group 0 must be finite and at least 0 (got nan)"],
    "values": ["replicas differ in 2 of 2 parameters, first in 'weight'"],
    "order": ["trainable parameters, first in 'parameter 0'"],
    "names": ["trainable parameters, first in 'parameter 0'", "other.weight"],
    "frozen": ["trainable parameters, first in 'parameter 1'"],
    "optimizer": ["different optimizers"],
    "state": ["rank 1: RuntimeError: a momentum of shape (64, 3)"],
    "closure": ["step failed on 1 of 2 ranks: rank 1: ZeroDivisionError"],
}


@pytest.mark.parametrize("what", TEXTS)
def test_ranks_that_differ_raise_together_before_anything_moves(
    pools: RankPools, what: str
) -> None:
    first, second = pools(2).run(differing, what)
    for text in TEXTS[what]:
        assert text in first
    if what == "closure":
        assert second.startswith("ZeroDivisionError")
    elif what == "no lr":
        assert second.startswith("TypeError: float() argument")
    elif what == "lr of nan":
        assert second.startswith("ValueError: lr of group 0")
    elif what == "state":
        assert second.startswith("RuntimeError: a momentum of shape (64, 3)")
    else:
        assert first == second


def test_all_ranks_raise_if_one_abstains_too_often(pools: RankPools) -> None:
    texts = pools(2).run(differing, "nan")
    assert texts[0] == texts[1]
    assert "gradients of rank 1 held a NaN or an Inf in 2 steps in a row" in texts[0]


def drifted(rank: int, world_size: int) -> str:
    model = torch.nn.Linear(64, 3)
    dist.broadcast(model.weight.data, 0)
    dist.broadcast(model.bias.data, 0)
    optimizer = DistributedLion(model.named_parameters(), lr=0.1, check_replicas_every=2)
    for step in range(2):
        model(torch.ones(2, 64)).sum().backward()
        if step and rank == 1:
            model.bias.data[0] += 1
        try:
            optimizer.step()
        except Disagreement as error:
            return str(error)
    return ""


def test_drifted_replicas_are_found(pools: RankPools) -> None:
    texts = pools(3).run(drifted)
    assert len(set(texts)) == 1
    assert "after step 2 in 1 of 2 parameters, first in 'bias': rank 1 from ranks 0" in texts[0]


@pytest.mark.parametrize("vote_every", [1, 2])
@on_ranks(2)
def test_a_compiled_function_may_step(rank: int, vote_every: int) -> None:
    def trained(compiled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 2)
        optimizer = DistributedLion(model.named_parameters(), lr=0.01, vote_every=vote_every)

        def train(x: torch.Tensor) -> None:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(train, backend="eager") if compiled else train
        for number in range(4):
            generator = torch.Generator().manual_seed(10 * number + rank)
            step(torch.randn(2, 64, generator=generator))
        return model.weight.detach()

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=0)
