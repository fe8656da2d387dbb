"""One rank differs or fails: all ranks raise before anything moves, or at the next exchange."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Disagreement
from tests.support.spawn import on_ranks
from tests.support.steps import copies, give_gradients, plain, single
from tests.support.training import check_error, error_of, same

# What rank 1 does before a step; it may return another optimizer.
Change = Callable[[nn.Linear, DistributedLion], Any]


def created(prefix: str = "", **options: Any) -> Change:
    def create(model: nn.Linear, _: DistributedLion) -> DistributedLion:
        named = [(prefix + name, param) for name, param in model.named_parameters()]
        return DistributedLion(named, **{"lr": 0.01, "max_abstained_steps": 2, **options})

    return create


def group(**changes: Any) -> Change:
    return lambda _, optimizer: optimizer.param_groups[0].update(changes)


def replace(model: nn.Linear, _: DistributedLion) -> None:
    model.load_state_dict({name: p + 1 for name, p in model.state_dict().items()})


@torch.no_grad()
def shrink(model: nn.Linear, _: DistributedLion) -> None:
    model.weight.clamp_(max=0.0)


def freeze(model: nn.Linear, _: DistributedLion) -> None:
    model.weight.requires_grad_(False)


def unfreeze(model: nn.Linear, _: DistributedLion) -> None:
    model.bias.requires_grad_(True)


def give_wrong_state(model: nn.Linear, optimizer: DistributedLion) -> None:
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(64, 3)


def reload(_: nn.Linear, optimizer: DistributedLion) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def give_nan(model: nn.Linear, optimizer: DistributedLion) -> None:
    def spoil(*_: Any) -> None:
        model.weight.grad.fill_(torch.nan)

    optimizer.register_step_pre_hook(spoil)


def look(model: nn.Linear, optimizer: DistributedLion) -> None:
    model.look = optimizer.common_weights()
    model.look.__enter__()


# Values of vote_every and dtypes.
VOTES, LOCAL, LOCAL_16 = (1, torch.float32), (4, torch.float32), (4, torch.bfloat16)
REPLACED = "7 Disagreement: the weights of 'weight' on rank 1 are farther from"
# What rank 1 changes before which step, and the step and error in which that ends.
CASES: dict[str, tuple[tuple[int, torch.dtype], int, Change, str]] = {
    "vote_every, by which bits differ": (
        VOTES, 0, created(vote_every=2),
        "0 Disagreement: ranks differ, first in 'vote_every': rank 0: '1', rank 1: '2'",
    ),
    "option": (
        VOTES, 0, created(ties="zero"),
        "0 Disagreement: ranks differ, first in 'ties': rank 0: 'alternate', rank 1: 'zero'",
    ),
    "vote_every": (
        LOCAL, 0, created(vote_every=8),
        "0 Disagreement: ranks differ, first in 'vote_every': rank 0: '4', rank 1: '8'",
    ),
    "names": (
        VOTES, 0, created("other."),
        r"0 Disagreement: .* first in 'parameter 0': rank 0: 'weight \(3, 64\)",
    ),
    "values": (
        VOTES, 0, replace,
        "0 Disagreement: replicas differ in 2 of 2 parameters, first in 'weight'",
    ),
    "no parameters": (
        VOTES, 0,
        lambda *_: DistributedLion([{"params": []}], lr=0.01, max_abstained_steps=2),
        "0 Disagreement: ranks differ, first in 'group 0 parameters': rank 0: 2, rank 1: 0",
    ),
    "unfrozen": (
        VOTES, 1, unfreeze,
        "1 Disagreement: ranks differ in trainable parameters, first in 'parameter 1'",
    ),
    "load": (
        VOTES, 1, reload,
        "1 Disagreement: .* first in 'calls of load_state_dict': rank 0: 0, rank 1: 1",
    ),
    "state": (
        VOTES, 1, give_wrong_state,
        r"1 {named}RuntimeError: a momentum of shape \(64, 3\)",
    ),
    "lr": (
        VOTES, 1, group(lr=0.02),
        "1 Disagreement: ranks differ, first in 'group 0 lr': rank 0: 0.01, rank 1: 0.02",
    ),
    "no lr": (VOTES, 1, group(lr=None), "1 {named}TypeError: group 0: lr must be a number"),
    "no step": (VOTES, 1, group(step=None), r"1 {named}TypeError: int\(\) argument"),
    "lr of nan": (
        VOTES, 1, group(lr=math.nan),
        r"1 {named}ValueError: group 0: lr must be finite and at least 0 \(got nan\)",
    ),
    "lr of a local step": (
        LOCAL, 1, group(lr=0.02),
        "3 Disagreement: ranks differ in lr or weight decay of a step since the last exchange, not "
        "in those of now. Give groups the same values",
    ),
    "weight decay of a local step": (
        LOCAL, 1, group(weight_decay=0.5),
        "3 Disagreement: ranks differ in lr or weight decay of a step since the last exchange",
    ),
    "number of exchanges": (
        LOCAL, 5, lambda _, optimizer: setattr(optimizer.local, "exchanges", 7),
        "7 Disagreement: ranks differ, first in 'exchanges': rank 0: 1, rank 1: 7. Take the same",
    ),
    "frozen before an exchange": (
        LOCAL, 3, freeze,
        r"3 Disagreement: .* first in 'frozen parameters': rank 0: \[\], rank 1: \['weight'\]",
    ),
    "NaN": (LOCAL, 0, give_nan, "3 {named}RuntimeError: gradients of rank 1 held a NaN or an Inf"),
    "replaced": (LOCAL, 5, replace, REPLACED),
    "replaced in 16 bits": (LOCAL_16, 5, replace, REPLACED),
    "pruned": (LOCAL_16, 7, shrink, REPLACED),
    "common weights": (
        LOCAL, 3, look,
        r"3 {named}RuntimeError: step\(\) in `with optimizer.common_weights\(\):`",
    ),
    "closure": (
        LOCAL, 3, lambda _, optimizer: optimizer.step(lambda: 1 / 0),
        "3 {named}ZeroDivisionError: division by zero",
    ),
    "exchange_now": (
        LOCAL, 2, lambda _, optimizer: optimizer.exchange_now(),
        "[23] Disagreement: ranks are at different steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
@on_ranks(2)
def test_all_ranks_raise_if_one_differs_or_fails(rank: int, what: str) -> None:
    (vote_every, dtype), when, change, pattern = CASES[what]
    model = nn.Linear(64, 3, dtype=dtype)
    optimizer = created(vote_every=vote_every)(model, None)
    model.bias.requires_grad_(False)

    def step(number: int) -> None:
        nonlocal optimizer, before
        give_gradients(model.parameters(), rank, number)
        optimizer.param_groups[0].update(lr=0.01, weight_decay=0.0)
        if rank == 1 and number == when:
            optimizer = change(model, optimizer) or optimizer
        before = copies(model.parameters())
        optimizer.step()

    before: list[torch.Tensor] = []
    said = (f"{number} {error}" for number in range(12) if (error := error_of(step, number)))
    check_error(next(said), pattern, rank)
    assert vote_every > 1 or same(before, list(model.parameters()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lr": math.nan}, r"group 0: lr must be finite and at least 0 \(got nan\)"),
        ({"weight_decay": -math.inf}, r"group 0: weight_decay must be finite and at least 0"),
        ({"betas": (0.9, 1.0)}, r"group 0: betas\[1\] must be at least 0 and below 1 \(got 1"),
        ({"betas": (0.9, 0.98, 0.5)}, r"group 0: betas must be a pair of numbers"),
    ],
)
def test_what_a_schedule_must_not_set_is_refused(change: dict[str, Any], text: str) -> None:
    _, optimizer = single()
    optimizer.param_groups[0].update(change)
    with pytest.raises((TypeError, ValueError), match=text):
        optimizer.step()
    assert optimizer.steps == 0


@on_ranks(2)
def test_optimizers_that_are_used_in_another_order_on_a_rank_are_refused(rank: int) -> None:
    optimizers = [single()[1] for _ in range(2)]
    for optimizer in optimizers:
        optimizer.step()
    with pytest.raises(Disagreement, match="different optimizers"):
        optimizers[rank].step()


@on_ranks(2)
def test_a_parameter_that_is_unfrozen_within_a_period_is_compared(rank: int) -> None:
    model, optimizer = plain(nn.Linear(64, 3), vote_every=4)
    model.bias.requires_grad_(False)
    for step in range(6):
        give_gradients(model.parameters(), rank, step)
        optimizer.step()
    model.bias.requires_grad_(True)
    model.bias.data += rank
    with pytest.raises(Disagreement, match="replicas differ in 1 of 2 parameters, first in 'bias'"):
        optimizer.step()
