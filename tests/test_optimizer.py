"""Real ranks take steps that equal the definition in NumPy, and fail together."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_optimizer import Lion
from torch import nn

from hf_dlion.exchange.routes import wire_bytes
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.meeting import Disagreement
from tests.support.definition import Lions
from tests.support.forms import form
from tests.support.gradients import KINDS, gradients, pair, shuffled
from tests.support.spawn import RankPools, on_ranks
from tests.support.training import error_of, filled, same

pytestmark = pytest.mark.multiproc

Change = Callable[[nn.Linear, DistributedLion], Any]


def equals_the_definition(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    kinds: list[torch.dtype],
    seed: int,
    faults: bool,
    name: str = "cpu",
) -> tuple[int, int, int]:
    """Compares a form with the definition; see `_equals_the_definition`."""
    with form(name) as device:
        return _equals_the_definition(rank, world_size, options, kinds, seed, faults, device)


def _equals_the_definition(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    kinds: list[torch.dtype],
    seed: int,
    faults: bool,
    device: str,
) -> tuple[int, int, int]:
    """Compares five steps with the definition; returns steps, bytes sent, and bytes by formula."""
    shapes = shuffled(seed)
    dtypes = [kinds[k % len(kinds)] for k in range(len(shapes))]
    lions, optimizer, params = pair(Lions, world_size, shapes, dtypes, options, device)
    # The first step compares layouts, and gradients of attached models and of others.
    expected = (24 + 2 * 16) * (world_size - 1)
    for step in range(5):
        grads = gradients(seed + step, world_size, shapes, dtypes, faults=faults)
        for param, grad in zip(params, grads[rank], strict=True):
            param.grad = None if grad is None else grad.clone().to(device)
        before = lions.t
        lions.step(grads)
        optimizer.step()
        assert optimizer.steps == lions.t
        for k, (param, wanted) in enumerate(zip(params, lions.params, strict=True)):
            assert torch.equal(param.cpu(), wanted), (step, shapes[k], param.dtype)
            if param in optimizer.state:
                momentum = optimizer.state[param]["exp_avg"]
                assert torch.equal(momentum.cpu(), lions.momenta[rank][k]), (step, shapes[k])
        if not faults and lions.t > before:
            expected += 64 * (world_size - 1)
            for own in optimizer._layout.messages:  # type: ignore[union-attr]
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


@pytest.mark.parametrize("kinds", [[torch.float32], [torch.bfloat16], KINDS[:2]], ids=str)
@pytest.mark.parametrize("case", [*CASES[:6], CASES[-1]], ids=str)
def test_kernels_equal_the_definition(
    pools: RankPools, case: dict[str, Any], kinds: list[torch.dtype]
) -> None:
    pools(2).run(equals_the_definition, case, kinds, 7, True, "kernels", timeout=300)


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


def set_lr(lr: float | None) -> Change:
    return lambda model, optimizer: optimizer.param_groups[0].update(lr=lr)


def give_wrong_state(model: nn.Linear, optimizer: DistributedLion) -> None:
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(64, 3)


# What the last rank changes between two steps, the error of the others, and its own, if another.
LATER: dict[str, tuple[Change, str, str]] = {
    "lr": (set_lr(0.2), "first in 'group 0 lr': rank 0: 0.1, rank 1: 0.2", ""),
    "no lr": (
        set_lr(None),
        "step failed on 1 of 2 ranks: rank 1: TypeError: float() argument",
        "TypeError: float() argument",
    ),
    "lr of nan": (
        set_lr(math.nan),
        "rank 1: ValueError: lr of group 0 must be finite and at least 0 (got nan)",
        "ValueError: lr of group 0 must",
    ),
    "frozen": (
        lambda model, _: model.bias.requires_grad_(False),
        "trainable parameters, first in 'parameter 1'",
        "",
    ),
    "state": (
        give_wrong_state,
        "rank 1: RuntimeError: a momentum of shape (64, 3)",
        "RuntimeError: a momentum of shape (64, 3)",
    ),
}


def differs_later(rank: int, world_size: int, what: str) -> str:
    """Changes something on the last rank after a step; returns the error of the next one."""
    torch.manual_seed(0)
    model = nn.Linear(64, 3)
    optimizer = DistributedLion(model.named_parameters(), lr=0.1)
    for step in range(2):
        model(torch.ones(2, 64)).sum().backward()
        if step == 0:
            optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    if rank == 1:
        LATER[what][0](model, optimizer)
    said = error_of(optimizer.step)
    assert same(before, list(model.parameters()))
    return said


@pytest.mark.parametrize("what", LATER)
def test_ranks_that_differ_raise_together_before_anything_moves(
    pools: RankPools, what: str
) -> None:
    first, second = pools(2).run(differs_later, what)
    _, text, own = LATER[what]
    assert text in first
    assert second.startswith(own) if own else second == first


# What the last rank has otherwise when it creates its optimizer, and the error of all ranks.
APART = {
    "options": "first in 'ties': rank 0: 'alternate', rank 1: 'zero'",
    "values": "replicas differ in 2 of 2 parameters, first in 'weight'",
    "names": "first in 'parameter 0': rank 0: 'weight (3, 64)",
    "forward": "first in 'weight': rank 1 from rank 0 (no majority). Replicas must start equal",
}


@pytest.mark.parametrize("what", APART)
@on_ranks(2)
def test_ranks_that_begin_differently_raise_together(rank: int, what: str) -> None:
    torch.manual_seed(rank if what == "values" else 0)
    model = nn.Linear(64, 3)
    other = "other." if rank and what == "names" else ""
    named = [(other + name, param) for name, param in model.named_parameters()]
    options: Any = {"ties": "zero"} if rank and what == "options" else {}
    if what == "forward":  # Each rank shortens the row that it reads.
        model = nn.Embedding(2, 64, max_norm=0.1)
        named = list(model.named_parameters())
    optimizer = DistributedLion(named, lr=0.1, **options)
    model(torch.tensor([rank]) if what == "forward" else torch.ones(2, 64)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(Disagreement, match=re.escape(APART[what])) as caught:
        optimizer.step()
    assert what != "forward" or "set max_norm=None in nn.Embedding" in str(caught.value)
    assert same(before, list(model.parameters()))


@on_ranks(2)
def test_ranks_that_step_different_optimizers_raise_together(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 3)
    optimizers = [DistributedLion(model.named_parameters(), lr=0.1) for _ in range(2)]
    model(torch.ones(2, 64)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    with pytest.raises(Disagreement, match="different optimizers"):
        optimizers[rank].step()


def fails_in_a_closure(rank: int, world_size: int) -> str:
    param = filled(1.0)
    optimizer = DistributedLion([param], lr=0.1)
    assert optimizer.step(lambda: 0.25) == 0.25
    before = param.detach().clone()
    said = error_of(optimizer.step, (lambda: 1 / 0) if rank == 1 else (lambda: 0.0))
    assert torch.equal(param, before)
    return said


def test_a_failing_closure_raises_on_all_ranks(pools: RankPools) -> None:
    first, second = pools(2).run(fails_in_a_closure)
    assert "step failed on 1 of 2 ranks: rank 1: ZeroDivisionError" in first
    assert second.startswith("ZeroDivisionError")


@on_ranks(2)
def test_all_ranks_raise_if_one_abstains_too_often(rank: int) -> None:
    param = filled(1.0)
    optimizer = DistributedLion([param], lr=0.1, max_abstained_steps=2)
    param.grad[5] = torch.inf if rank == 1 else 1.0
    optimizer.step()
    with pytest.raises(RuntimeError, match="gradients of rank 1 held a NaN or an Inf in 2 steps"):
        optimizer.step()


@on_ranks(2)
def test_agreement_is_the_share_of_this_ranks_votes_that_equal_the_verdict(rank: int) -> None:
    param = filled(1.0)
    optimizer = DistributedLion([param], lr=0.1)
    assert math.isnan(optimizer.wire.agreement)
    found = []
    for other in (1.0, -1.0):
        optimizer.state.clear()
        param.grad = torch.full_like(param, other if rank == 1 else 1.0)
        optimizer.step()
        found.append(optimizer.wire.agreement)
    assert found == [1.0, 0.5]  # Half of the ties go each way.


@on_ranks(3)
def test_drifted_replicas_are_found(rank: int) -> None:
    model = nn.Linear(64, 3)
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    optimizer = DistributedLion(model.named_parameters(), lr=0.1, check_replicas_every=2)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    if rank == 1:
        model.bias.data[0] += 1
    text = "after step 2 in 1 of 2 parameters, first in 'bias': rank 1 from ranks 0"
    with pytest.raises(Disagreement, match=text):
        optimizer.step()


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
