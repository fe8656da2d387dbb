"""Whose gradients DDP leaves local follows the program alone, and no other optimizer uses them."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import DistributedLion
from tests.support.ddp_training import alike, batches, bits_of, new_model, optimizer_of, released
from tests.support.spawn import RankPools

pytestmark = pytest.mark.multiproc


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_with(
    wrapper: Any, optimizer: torch.optim.Optimizer, rank: int, steps: int = 2
) -> str | None:
    """Trains a few steps; returns the error that ended it."""
    for (tokens,) in batches(rank, 1)[:steps]:
        wrapper(tokens).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        finally:
            optimizer.zero_grad()
    return None


def change_to_adamw(rank: int, world_size: int, lion: str) -> dict[str, Any]:
    """Trains with AdamW where a DistributedLion was made, and perhaps trained, before."""
    model = new_model()
    optimizer: Any = optimizer_of(model)
    holder = [DistributedDataParallel(model)]
    with released(holder):
        if lion != "unused":
            train_with(holder[0], optimizer, rank)
        if lion == "deleted_on_rank_0" and rank == 0:
            del optimizer
            gc.collect()
        before = bits_of(model)
        adamw = adamw_of(model)
        error = train_with(holder[0], adamw, rank)
        moved = not all(map(torch.equal, bits_of(model), before))
        # The error has given the gradients back.
        again = train_with(holder[0], adamw, rank)
        equal = alike(*bits_of(model))
    return {"error": error, "moved": moved, "again": again, "equal": equal}


@pytest.mark.parametrize(
    "lion", [pytest.param("unused", marks=pytest.mark.smoke), "trained", "deleted_on_rank_0"]
)
def test_another_optimizer_does_not_step_gradients_that_were_kept_local(
    ranks: RankPools, lion: str
) -> None:
    for result in ranks(2).run(change_to_adamw, lion):
        assert "AdamW.step(): DDP has not averaged these gradients" in result["error"]
        assert "detach()" in result["error"]
        assert not result["moved"]
        assert result["again"] is None
        assert result["equal"]


def step_after(rank: int, world_size: int, how: str) -> tuple[str | None, bool]:
    """AdamW steps some of what a DistributedLion has just stepped; its error, whether all agree."""
    model = new_model()
    optimizer = optimizer_of(model)
    if how == "handed_over":
        groups = [
            {"params": list(model.first.named_parameters(prefix="first"))},
            {"params": list(model.second.named_parameters(prefix="second"))},
        ]
        optimizer = DistributedLion(groups, lr=1e-2)
        model.embedding.requires_grad_(False)
    holder = [DistributedDataParallel(model)]
    error = None
    with released(holder):
        train_with(holder[0], optimizer, rank)
        if how == "handed_over":
            del optimizer.param_groups[1]
        adamw = torch.optim.AdamW(model.second.parameters(), lr=1e-2)
        for number, (tokens,) in enumerate(batches(rank, 1)[2:4]):
            holder[0](tokens).backward()
            optimizer.step()
            if how == "dropped_between":
                optimizer.zero_grad(set_to_none=number == 0)
            try:
                adamw.step()
            except RuntimeError as raised:
                error = str(raised)
                break
            model.zero_grad()
        return error, alike(*bits_of(model))


@pytest.mark.parametrize("how", ["same", "handed_over", "dropped_between"])
def test_nor_those_that_a_distributed_lion_has_stepped_before(ranks: RankPools, how: str) -> None:
    for error, equal in ranks(2).run(step_after, how):
        assert equal
        if how == "dropped_between":
            assert error is None
        else:
            assert error is not None
            assert "DDP has not averaged these gradients" in error


def go_on_after(rank: int, world_size: int) -> tuple[bool, bool]:
    """One rank alone has gradients left, is refused and goes on; whether it was, and replicas."""
    model = new_model()
    optimizer = optimizer_of(model)
    holder, refused = [DistributedDataParallel(model)], False
    with released(holder):
        train_with(holder[0], optimizer, rank, steps=1)
        (tokens,) = batches(rank, 1)[1]
        holder[0](tokens).backward()
        optimizer.step()
        if rank == 1:
            model.zero_grad()
        try:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        except RuntimeError:
            refused = True
        optimizer.zero_grad()
        train_with(holder[0], optimizer, rank)
        return refused, alike(*bits_of(model))


def test_a_rank_that_is_refused_alone_can_go_on_with_the_others(ranks: RankPools) -> None:
    assert ranks(2).run(go_on_after, timeout=30) == [(True, True), (False, True)]


def reduce_by_hand(rank: int, world_size: int, waited: bool) -> list[Tensor]:
    """Gradients of the sum over ranks, by a collective that may still be under way in `step()`."""
    model = new_model()
    optimizer = optimizer_of(model)
    holder = [DistributedDataParallel(model)]
    with released(holder):
        for (tokens,) in batches(rank, 1)[:2]:
            holder[0](tokens).backward()
            for param in model.parameters():
                assert param.grad is not None
                total: Any = funcol.all_reduce(param.grad, "sum", dist.group.WORLD)
                param.grad = total.wait() if waited else total
            optimizer.step()
            optimizer.zero_grad()
        return bits_of(model)


def test_a_gradient_that_a_collective_still_makes_is_waited_for(ranks: RankPools) -> None:
    expected, found = (ranks(2).run(reduce_by_hand, waited) for waited in (True, False))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


def detach_and_go_on(rank: int, world_size: int, detach: bool) -> list[Tensor]:
    """AdamW after a detached DistributedLion, or from the same weights in a wrapper of its own."""
    model = new_model()
    optimizer = optimizer_of(model)
    holder = [DistributedDataParallel(model)]
    with released(holder):
        train_with(holder[0], optimizer, rank)
        if detach:
            optimizer.detach()
        else:
            model = copy.deepcopy(model)
            holder[0] = DistributedDataParallel(model)
        assert train_with(holder[0], adamw_of(model), rank) is None
        return bits_of(model)


def test_a_detached_wrapper_trains_as_one_that_was_never_attached(ranks: RankPools) -> None:
    detached = ranks(2).run(detach_and_go_on, True)
    fresh = ranks(2).run(detach_and_go_on, False)
    for bits in (*detached, *fresh):
        assert all(map(torch.equal, bits, fresh[0]))


def detach_between(rank: int, world_size: int) -> tuple[list[bool], bool]:
    """Whether gradients are local before, after `detach()`, and after the step that follows."""
    model = new_model()
    optimizer = optimizer_of(model)
    holder = [DistributedDataParallel(model)]
    local = []
    with released(holder):
        for number, (tokens,) in enumerate(batches(rank, 1)[:3]):
            if number == 1:
                optimizer.detach()
            holder[0](tokens).backward()
            local.append(not alike(model.first.weight.grad))
            optimizer.step()
            optimizer.zero_grad()
        return local, alike(*bits_of(model))


def detach_the_second(rank: int, world_size: int) -> tuple[str | None, bool]:
    """Two optimizers, one after another; the second one is detached, the first one is kept."""
    model = new_model()
    kept = [optimizer_of(model)]
    holder = [DistributedDataParallel(model)]
    with released(holder):
        train_with(holder[0], kept[0], rank)
        kept.append(optimizer_of(model))
        train_with(holder[0], kept[1], rank)
        kept[1].detach()
        holder[0] = DistributedDataParallel(model)
        return train_with(holder[0], adamw_of(model), rank), alike(*bits_of(model))


def test_an_optimizer_that_lost_its_parameters_takes_none_that_are_given_up(
    ranks: RankPools,
) -> None:
    assert ranks(2).run(detach_the_second) == [(None, True)] * 2


def test_a_step_takes_the_gradients_back(ranks: RankPools) -> None:
    assert ranks(2).run(detach_between) == [([True, False, True], True)] * 2


def train_in_two_phases(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Two live optimizers over one wrapper, one after the other, and the first one once more."""
    model = new_model()
    holder = [DistributedDataParallel(model)]
    # What stands at which address differs between the ranks.
    ballast = [object() for _ in range(1000 * (rank + 1))]
    first = optimizer_of(model, **options)
    del ballast
    second = optimizer_of(model, **options)
    overlapped = []
    with released(holder):
        for optimizer in (first, second, first):
            before = optimizer.wire.overlapped
            train_with(holder[0], optimizer, rank, steps=4)
            overlapped.append(optimizer.wire.overlapped - before)
        equal = alike(*bits_of(model))
    return {"overlapped": overlapped, "equal": equal}


def test_the_optimizer_that_steps_overlaps_and_the_other_does_not(ranks: RankPools) -> None:
    for result in ranks(2).run(train_in_two_phases, {"overlap": True}):
        assert result["equal"]
        # A first step agrees on messages, and the step after a change votes anew.
        assert all(steps >= 2 for steps in result["overlapped"]), result["overlapped"]


def test_two_optimizers_over_one_wrapper_join_their_nodes_in_one_order(ranks: RankPools) -> None:
    for result in ranks(4).run(train_in_two_phases, {"local_group": 2}):
        assert result["equal"]


class Around(torch.optim.Optimizer):
    """An optimizer around another one, which it steps, as Lookahead and SAM are."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.bases = {"base": base}

    def step(self, closure: Any = None) -> None:
        self.bases["base"].step()


def step_through_another(rank: int, world_size: int) -> tuple[str | None, bool]:
    model = new_model()
    optimizer = Around(Around(optimizer_of(model)))
    holder = [DistributedDataParallel(model)]
    with released(holder):
        return train_with(holder[0], optimizer, rank), alike(*bits_of(model))


def test_an_optimizer_that_steps_a_distributed_lion_is_none_of_the_others(
    ranks: RankPools,
) -> None:
    assert ranks(2).run(step_through_another) == [(None, True)] * 2


def test_a_constructor_that_fails_and_a_copy_claim_nothing_of_another() -> None:
    model = new_model()
    optimizer = optimizer_of(model)
    claims = optimizer._engine.hooks._claim  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="full_precision"):
        DistributedLion(model.named_parameters(), full_precision="no_such_name")
    twin = copy.copy(optimizer)
    assert claims.whole
    model(torch.zeros(1, 1, dtype=torch.int64)).backward()
    twin.step()
    assert not claims.whole


def train_parts_in_turns(rank: int, world_size: int, thaw: bool, lion: bool) -> list[bool]:
    """Half of a wrapper's parameters are DistributedLion's, the others AdamW's; one half is frozen.

    Either is, in turns, or with `thaw` the second half first and then the other one.
    """
    torch.manual_seed(0)
    first, second = nn.Linear(4, 6), nn.Linear(6, 1)
    model = nn.Sequential(first, second)
    holder = [DistributedDataParallel(model, find_unused_parameters=True)]
    optimizers = [
        DistributedLion(first.parameters()) if lion else adamw_of(first),
        adamw_of(second),
    ]
    with released(holder):
        for step in range(8):
            turn = step // 4 if thaw else step % 2
            first.requires_grad_(turn == 0)
            second.requires_grad_(turn == 1)
            holder[0](torch.full((4, 4), rank + 1.0)).square().sum().backward()
            optimizers[turn].step()
            optimizers[turn].zero_grad()
        return [alike(*half.parameters()) for half in (first, second)]


@pytest.mark.parametrize("lion", [True, False])
@pytest.mark.parametrize("thaw", [False, True])
def test_what_another_optimizer_trains_while_ours_is_frozen_is_averaged(
    ranks: RankPools, thaw: bool, lion: bool
) -> None:
    assert ranks(2).run(train_parts_in_turns, thaw, lion) == [[True, True]] * 2
