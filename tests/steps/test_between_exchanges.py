"""What may happen within a period of local steps, between two, and what is refused on all ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.checkpoint import load_momentum, save_momentum
from hf_dlion.core.slot import LocalState
from hf_dlion.gpu import form
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Disagreement
from tests.support.spawn import on_ranks
from tests.support.steps import (
    attached,
    backward,
    copies,
    give_gradients,
    plain,
    single,
    take_step,
)
from tests.support.training import (
    batch,
    check_error,
    error_of,
    everyones,
    filled,
    gathered,
    is_equal_everywhere,
    same,
    warned,
)


@on_ranks(2)
def test_parameters_can_be_frozen_added_and_broken_between_exchanges(rank: int) -> None:
    params = [nn.Parameter(torch.randn(2, 64)) for _ in range(3)]
    optimizer = DistributedLion(
        [(str(k), p) for k, p in enumerate(params)], lr=0.01, vote_every=3, check_replicas_every=1
    )
    with warned() as texts:
        for step in range(11):
            if step == 4:
                params[0].requires_grad_(False)
                params.append(nn.Parameter(torch.ones(5)))
                optimizer.add_param_group(
                    {"params": [("new", params[3])], "lr": 0.1, "weight_decay": 0.5}
                )
            give_gradients(params, rank, step)
            if step >= 4:
                params[3].grad = torch.zeros(5)
            if step == 7 and rank == 1:
                with torch.no_grad():
                    params[1].fill_(torch.inf)
            optimizer.step()
            # Frozen in the second period, in whose exchange it takes part.
            assert (params[0] in optimizer.local.states) == (step in (0, 1, 3, 4))
            if step >= 5:
                assert is_equal_everywhere(params[0])
    optimizer.exchange_now()
    for p in params:
        assert bool(p.isfinite().all())
        assert is_equal_everywhere(p)
    # Seven steps with the decay of its group, in three exchanges.
    torch.testing.assert_close(params[3].detach(), torch.full((5,), 0.95**7))
    assert not optimizer.local.states
    assert len(texts) == rank
    assert all("the weights of '1' were not finite on rank 1" in text for text in texts)


@on_ranks(2)
def test_a_weight_of_16_bits_that_is_not_finite_counts_as_not_moved(rank: int) -> None:
    """What rounding left out of it isn't finite, either."""
    param, optimizer = single(1.0, torch.bfloat16, lr=2**-7, vote_every=3)
    param.grad.fill_(1.0 + rank)
    with warned() as texts:
        for step in range(3):
            if step == 1 and rank == 1:
                param.detach().fill_(math.nan)
            optimizer.step()
    assert len(texts) == rank
    assert param.unique().tolist() == [1 - 3 * 2**-7 / 2]  # Half of rank 0's move.


@on_ranks(2)
def test_an_evaluation_or_a_save_of_a_frozen_model_loses_no_step(rank: int, tmp_path: Path) -> None:
    """Freezes a model around an evaluation and a save, as with a GAN's discriminator."""
    results = []
    for freezes in (False, True):
        model, optimizer = plain(vote_every=4)
        for step in range(7):
            take_step(optimizer, model, batch(step, rank))
            model.requires_grad_(not freezes)
            if step == 1:
                save_momentum(optimizer, tmp_path)
            if rank == 0:  # It is local to the rank.
                with optimizer.common_weights():
                    pass
            if step < 6:
                model.requires_grad_(True)
        optimizer.exchange_now()
        results.append(copies(model.parameters()))
    assert same(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_a_change_on_all_ranks_before_a_rank_uses_a_parameter_is_a_move(
    rank: int, dtype: torch.dtype
) -> None:
    """The rank has an anchor from the first step on, as the others do."""
    param, optimizer = single(dtype=dtype, vote_every=4)
    other = filled(1.0, dtype)
    optimizer.add_param_group({"params": [("other", other)]})
    for step in range(8):
        other.grad = None if rank == 1 and step < 2 else torch.ones_like(other)
        optimizer.step()
        with torch.no_grad():
            other.data.mul_(0.99)
    optimizer.exchange_now()
    assert is_equal_everywhere(param)
    assert is_equal_everywhere(other)


@on_ranks(2)
def test_tensors_of_one_shape_can_be_trained_in_turns() -> None:
    """Trains two tensors of one shape in turns, as some low-memory recipes do."""
    params = [nn.Parameter(torch.randn(2, 64)) for _ in range(2)]
    optimizer = DistributedLion(params, lr=0.01, vote_every=3, check_replicas_every=1)
    starts = copies(params)
    for step in range(12):
        trained, frozen = params if step % 4 < 2 else params[::-1]
        trained.requires_grad_(True)
        frozen.requires_grad_(False)
        # A gradient that was left from earlier steps doesn't move a frozen tensor.
        trained.grad, before = torch.ones(2, 64), frozen.detach().clone()
        optimizer.step()
        if step % 3 < 2:
            assert torch.equal(frozen, before)
    for p, start in zip(params, starts, strict=True):
        assert is_equal_everywhere(p)
        # Six steps each, all down on all ranks.
        torch.testing.assert_close(p.detach(), start - 0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_a_parameter_that_is_frozen_for_an_exchange_only_goes_on(
    rank: int, dtype: torch.dtype
) -> None:
    param, optimizer = single(dtype=dtype, vote_every=2)
    optimizer.add_param_group({"params": [("other", filled(1.0, dtype))]})
    for step in range(6):
        param.requires_grad_(step != 1)
        give_gradients([param], step, rank)
        optimizer.step()
        if step == 1:
            before = param.detach().clone()
    assert is_equal_everywhere(param)
    assert bool((param != before).any())


@on_ranks(2)
def test_a_local_step_after_an_attach_begins_with_a_header(rank: int) -> None:
    ddp, optimizer = attached(vote_every=9)
    sent = []
    for step in range(5):
        if step == 3:
            optimizer.attach(ddp)
        take_step(optimizer, ddp, batch(step, rank))
        sent.append(optimizer.wire.last_bytes_sent)
    assert [count > 0 for count in sent] == [True, False, False, True, False]
    optimizer.detach()


@on_ranks(2)
def test_a_wrong_order_of_calls_is_refused(rank: int) -> None:
    """Calls `attach`, `detach`, and `step` after local steps."""
    model, optimizer = plain(vote_every=3)
    step = functools.partial(take_step, optimizer, model, batch(0, rank))
    step()
    with (
        pytest.raises(RuntimeError, match=r"^step\(\) in `with optimizer\.common_weights"),
        optimizer.common_weights(),
    ):
        step()
    ddp = DistributedDataParallel(model)  # gives rank 1 the own weights of rank 0
    with pytest.raises(RuntimeError, match=r"got another DDP wrapper between two exchanges"):
        optimizer.attach(ddp)
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        optimizer.attach(model)
    optimizer.detach()
    model[0].weight.data[0, 0] = rank
    with pytest.raises(Disagreement, match=r"parameters, first in '0\.weight'"):
        step()


@on_ranks(4)
def test_all_ranks_raise_if_weights_were_replaced_in_a_node(rank: int) -> None:
    """Steps on NaN gradients first, and later replaces the weights of rank 2."""
    ddp, optimizer = attached(local_group=2, vote_every=3)
    for step in range(6):
        backward(ddp, batch(step, rank) * (torch.nan if step == 0 else 1.0))
        if step == 5 and rank == 2:
            ddp.module[0].weight.data.add_(1.0)
        optimizer.step()
    with pytest.raises(Disagreement, match=r"^the weights of 'module\.0\.weight' on rank 2 are f"):
        take_step(optimizer, ddp, batch(6, rank))
    optimizer.detach()


def errors_in_a_node(rank: int, act: Callable[[DistributedLion], Any]) -> list[str]:
    """Returns each rank's error in `act` or in the step after it, a local one of two nodes."""
    ddp, optimizer = attached(local_group=2, vote_every=9)
    for step in range(2):
        take_step(optimizer, ddp, batch(step, rank))
    backward(ddp, batch(2, rank))
    said = error_of(act, optimizer) or error_of(optimizer.step)
    optimizer.detach()
    return gathered(said)


def reload(optimizer: DistributedLion) -> None:
    """Loads a state, after which a step begins with headers."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("does", ["exchanges", "saves", "steps"])
@on_ranks(4)
def test_a_rank_of_a_node_that_leaves_a_local_step_does_not_hang_the_node(
    rank: int, tmp_path: Path, does: str
) -> None:
    acts = {
        "exchanges": DistributedLion.exchange_now,
        "saves": lambda optimizer: save_momentum(optimizer, tmp_path),
        "steps": reload,
    }
    first, second, *others = errors_in_a_node(rank, acts[does] if rank == 1 else lambda _: None)
    assert f"rank 1 {does} while rank 0 takes a local step" in first
    assert second == first
    assert others == ["", ""]


@on_ranks(4)
def test_a_load_that_fails_in_a_node_fails_on_all_ranks(rank: int, tmp_path: Path) -> None:
    failure = OSError("no file") if rank == 1 else None

    def load(optimizer: DistributedLion) -> None:
        if failure is None:
            reload(optimizer)
        load_momentum(optimizer, tmp_path, failure=failure)

    said = errors_in_a_node(rank, load)
    assert said.pop(1) == "OSError: no file"
    assert all("load failed on 1 of 4 ranks: rank 1: OSError: no file" in other for other in said)


@pytest.mark.parametrize("every", [2, 9])
@on_ranks(2)
def test_a_step_that_fails_in_its_plan_raises_on_all_ranks(rank: int, every: int) -> None:
    """Raises in a new plan on rank 1, in an exchange or in a local step."""

    def select(name: str, param: torch.Tensor) -> bool:
        if rank == 1 and name == "b":
            raise KeyError("in a selection")
        return name == "a"

    optimizer = DistributedLion([("a", filled(1.0))], vote_every=every, full_precision=select)
    optimizer.step()
    optimizer.add_param_group({"params": [("b", nn.Parameter(torch.ones(5)))]})
    check_error(error_of(optimizer.step), "{named}KeyError: 'in a selection'$", rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@on_ranks(2)
def test_a_look_at_common_weights_changes_nothing(rank: int, dtype: torch.dtype) -> None:
    """Looks on rank 0 alone, also while parameters are frozen, and nested; twice with a NaN."""
    ends = []
    for looks in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(3, 64).to(dtype)) for _ in range(3)]
        optimizer = DistributedLion([(str(k), p) for k, p in enumerate(params)], vote_every=4)
        start = copies(params)
        for step in range(7):
            give_gradients(params, rank, step)
            if step == 2 and rank == 1:
                params[2].data[0, 0] = math.nan
            with warned():
                optimizer.step()
            if looks and rank == 0:
                params[0].requires_grad_(False)
                with optimizer.common_weights(), optimizer.common_weights():
                    assert step > 2 or same(params, start)
                    assert step < 3 or not same(params, start)
                params[0].requires_grad_(True)
        ends.append(copies(params))
        optimizer.exchange_now()
        assert all(map(is_equal_everywhere, params))
        before = copies(params)
        with optimizer.common_weights():
            assert same(params, before)
    assert same(*ends)


@on_ranks(2)
def test_a_look_that_fails_halfway_changes_nothing(rank: int) -> None:
    """There is no memory for the second parameter's copy on rank 1, whose loop goes on."""
    params = [filled(1.0), filled(1.0)]
    optimizer = DistributedLion([("a", params[0]), ("b", params[1])], lr=2**-7, vote_every=4)
    show = LocalState.show

    def fail(state: LocalState, part: torch.Tensor) -> None:
        if state is optimizer.local.states[params[1]]:
            raise MemoryError
        show(state, part)

    for step in range(4):
        if step == 2 and rank == 1:
            fails = mock.patch.object(LocalState, "show", fail)
            with fails, pytest.raises(MemoryError), optimizer.common_weights():
                pass
            assert all(bool((p == 1 - 2 * 2**-7).all()) for p in params)
        optimizer.step()
    assert all(bool((p == 1 - 4 * 2**-7).all()) for p in params)


@pytest.mark.parametrize("where", ["the anchor", "the step"])
@on_ranks(2)
def test_a_local_step_that_fails_and_is_taken_again_decays_once(rank: int, where: str) -> None:
    """There is no memory on rank 1, at the first step of the second period."""
    params = [filled(1.0), filled(1.0)]
    optimizer = DistributedLion(params, lr=2**-7, weight_decay=0.5, vote_every=3)
    make = LocalState.of

    def fail(part: torch.Tensor) -> LocalState:
        if part.data_ptr() == params[1].data_ptr():
            raise MemoryError
        return make(part)

    fails = mock.patch.object(LocalState, "of", fail)
    if where == "the step":
        fails = mock.patch.object(form, "local_step", side_effect=MemoryError)
    for step in range(6):
        if (rank, step) == (1, 3):
            with fails, pytest.raises(MemoryError):
                optimizer.step()
        optimizer.step()
    assert all(map(is_equal_everywhere, params))


def test_weights_that_a_look_keeps_follow_the_parameter_to_another_device() -> None:
    part = torch.ones(64)
    state = LocalState.of(part)
    state.show(part)
    state.fit("w", part.to("meta"))
    assert state.own is not None
    assert {state.own.device.type, state.anchor.device.type} == {"meta"}


@pytest.mark.parametrize("what", ["a closure", "a cast", "a freeze"])
@on_ranks(2)
def test_ranks_agree_on_the_next_header_after_a_new_layout(rank: int, what: str) -> None:
    """In a closure, or on rank 0 alone before an exchange, while gradients are NaN."""
    model, optimizer = plain(vote_every=4)
    model[2].requires_grad_(what != "a closure")

    def closure() -> float:
        if what == "a closure" and step == 1:
            model[2].requires_grad_(True)
        backward(model, batch(step, rank))
        if (what == "a closure" and step == 1 and rank == 1) or (what == "a cast" and step > 3):
            next(model.parameters()).grad.fill_(math.nan)
        return 0.0

    for step in range(12):
        if what == "a cast" and step == 7 and rank == 0:
            with optimizer.common_weights():
                model.double()
            model.float()
        if what == "a freeze" and step == 6:
            with optimizer.common_weights() if rank == 0 else contextlib.nullcontext():
                optimizer.exchange_now()
                model[2].requires_grad_(rank == 1)
            model[2].requires_grad_(True)
        optimizer.step(closure)
    optimizer.exchange_now()
    assert optimizer.steps == 12
    assert all(map(is_equal_everywhere, model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_writes_into_common_weights_reach_the_weights_that_train(
    rank: int, dtype: torch.dtype
) -> None:
    """Writes as a callback may, through `.data`, where one parameter is broken."""
    param, broken = filled(1.0, dtype), filled(math.nan, dtype)
    optimizer = DistributedLion([("w", param), ("broken", broken)], lr=2**-7, vote_every=9)
    param.grad *= (-1) ** rank
    optimizer.step()
    moved = (-1) ** rank * 2**-7
    with optimizer.common_weights():
        param.data[:64] = 0.5
    assert bool((param[:64] == 0.5 - moved).all())
    assert bool((param[64:] == 1.0 - moved).all())
    optimizer.step()
    with optimizer.common_weights():
        param.data.clamp_(max=0.25)
    with warned():
        optimizer.exchange_now()
    # The ranks have moved in opposite directions, so their mean stays.
    assert bool((param == 0.25).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@on_ranks(2)
def test_a_write_within_a_period_counts_as_a_move(rank: int, dtype: torch.dtype) -> None:
    """Clamps and rewrites weights, as a loop of a user may after each step."""
    param, optimizer = single(dtype=dtype, vote_every=4, bits=8)
    for step in range(3):
        param.grad = torch.full_like(param, -1.0 if rank else 1.0)
        optimizer.step()
        with torch.no_grad():
            param.clamp_(max=1.0)
            if step == 1:
                param.data.add_(0.0)
    # Rank 1 went up by 0.03, which its clamp undid.
    assert bool((param == 1.0).all()) == (rank == 1)
    optimizer.exchange_now()
    assert is_equal_everywhere(param)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        param.detach().float().mean(), torch.tensor(0.985), atol=tolerance, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_ranks(2)
def test_a_local_step_ends_at_the_largest_number(rank: int, dtype: torch.dtype) -> None:
    """Rounding a weight to the nearest number would make it infinite."""
    largest = torch.finfo(dtype).max
    param, optimizer = single(largest, dtype, lr=largest / 64, vote_every=4)
    param.grad.neg_()
    optimizer.step()
    assert bool((param == largest).all())
    param.grad.neg_()
    optimizer.step()
    assert bool((param < largest).all())


@pytest.mark.parametrize(
    ("value", "lr", "dtype"),
    [
        # Half a unit in the last place in float32, but not in float64: the step is a whole one.
        (1 + 2**-23, math.nextafter(2**-24, 0.0), torch.float32),
        # A compensation becomes the smallest number of its dtype, six times the rate, or zero.
        (2**-14, 1e-8, torch.float16),
    ],
)
@on_ranks(2)
def test_rounding_is_not_taken_for_weights_that_were_replaced(
    rank: int, value: float, lr: float, dtype: torch.dtype
) -> None:
    param, optimizer = single(value, dtype, lr=lr, vote_every=4)
    optimizer.step()
    optimizer.exchange_now()
    assert optimizer.wire.exchanges == 1
    assert is_equal_everywhere(param)


@on_ranks(2)
def test_a_compensation_that_is_not_finite_is_forgotten_with_its_weights(rank: int) -> None:
    param, optimizer = single(dtype=torch.bfloat16, vote_every=4, bits=8)
    optimizer.step()
    if rank == 1:
        param.data.fill_(math.nan)
    optimizer.step()
    with warned() as texts:
        optimizer.exchange_now()
    assert ["were not finite on rank 1" in text for text in texts] == [True] * rank
    assert is_equal_everywhere(param)
    # Rank 0 went down by 0.02, and rank 1 counts as if it had stayed.
    assert float(param.detach().float().mean()) == pytest.approx(0.99, abs=0.002)


@on_ranks(2)
def test_a_period_in_which_nothing_trains_ends_without_an_exchange(rank: int) -> None:
    param, optimizer = single(vote_every=3)
    for step in range(5):
        param.requires_grad_(step < 3)
        optimizer.step()
    assert optimizer.local.period.steps == 2
    optimizer.exchange_now()
    assert (optimizer.local.period.steps, optimizer.local.exchanges) == (0, 1)


@on_ranks(2)
def test_what_is_written_between_periods_counts(rank: int) -> None:
    """Clamps, resets, loads, and prunes after an exchange, as with any optimizer."""
    model, optimizer = plain(vote_every=3, check_replicas_every=1)
    for step in range(9):
        take_step(optimizer, model, batch(step, rank))
        if step % 3 == 2:
            with torch.no_grad():
                model[0].weight.clamp_(-0.05, 0.05)
                model[2].weight.zero_()
            model[3].load_state_dict({name: p + 1 for name, p in model[3].state_dict().items()})
            written = copies(model.parameters())
            with optimizer.common_weights():
                assert same([*model.parameters()], written)
    assert all(map(is_equal_everywhere, model.parameters()))
    assert float(model[0].weight.detach().abs().max()) <= 0.0500001
    assert not model[2].weight.any()


@on_ranks(3)
def test_weights_written_on_one_rank_between_periods_are_named(rank: int) -> None:
    """A period would begin with different weights, and ranks would differ forever."""
    model, optimizer = plain(vote_every=2)
    for step in range(4):
        if step == 2 and rank == 1:
            model[2].weight.data[3, 3] += 1e-3
        give_gradients(model.parameters(), rank, step)
        if step < 3:
            optimizer.step()
    with pytest.raises(
        Disagreement, match=r"began, in 1 of 6 parameters, first in '2\.weight': rank 1"
    ) as raised:
        optimizer.step()
    # `detach` would go on with the weights that differ.
    assert str(raised.value).endswith("resume from an earlier checkpoint")


@on_ranks(2)
def test_weights_loaded_in_a_period_without_gradients_are_refused(rank: int) -> None:
    param, optimizer = single(vote_every=4)
    for step in range(5):  # The second period has begun.
        if step == 4:
            param.grad.fill_(math.nan)
        optimizer.step()
    with torch.no_grad():
        param.fill_(5.0)
    with pytest.raises(Disagreement, match="on ranks 0 and 1 are farther from the last exchange"):
        optimizer.exchange_now()
    assert bool((param == 5.0).all())


@on_ranks(2)
def test_a_reordered_group_keeps_its_period(rank: int) -> None:
    """Reverses a group, and moves a parameter to another one, as some loops do."""
    params = [filled(1.0) for _ in range(3)]
    groups = [{"params": params[:2], "weight_decay": 10.0}, {"params": params[2:]}]
    optimizer = DistributedLion(groups, lr=0.01, vote_every=4, bits=8)
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["params"].reverse()
            optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    # Two steps with decay for the one that moved, four for the one that stayed.
    for p, decay in zip(params, (0.9**2, 0.9**4, 1.0), strict=True):
        torch.testing.assert_close(p.detach(), torch.full_like(p, (1 - 0.04) * decay))


@on_ranks(2)
def test_abstentions_are_counted_if_exchanges_come_early(rank: int) -> None:
    param, optimizer = single(vote_every=32, max_abstained_steps=5)
    said = []
    for _ in range(12):
        param.grad = torch.full_like(param, math.nan if rank else 1.0)
        optimizer.step()
        said.append(error_of(optimizer.exchange_now))
    number = next(number for number, text in enumerate(said) if text)
    assert number in (4, 5)
    assert "5 steps in a row" in said[number]


@on_ranks(2)
def test_an_exchange_counts_the_steps_from_which_any_rank_abstained(rank: int) -> None:
    """A rank abstains if it has a NaN, or no gradient; exchanges end steps 2 and 6."""
    values = [[1.0] * 5 + [math.nan, 1.0, 1.0], [1.0, math.nan, None, 1.0, None, None, None, None]]
    param, optimizer = single(vote_every=4, max_abstained_steps=4)
    counts = []
    for number, value in enumerate(values[rank]):
        param.grad = None if value is None else torch.full_like(param, value)
        optimizer.step()
        if number == 1:
            optimizer.exchange_now()
        counts.append(optimizer.wire.abstentions)
    assert counts == [0, 1, 1, 1, 1, 5, 5, 5]
    said = error_of(optimizer.exchange_now)
    assert "gradients of rank 1 held a NaN or an Inf in 4 steps in a row, or were all m" in said


def test_a_group_destroyed_within_a_period_is_refused() -> None:
    param = filled(1.0)
    optimizer = DistributedLion([param], vote_every=4)
    optimizer.local.states[param] = LocalState.of(param.detach())
    with pytest.raises(RuntimeError, match="destroyed within a period of local steps"):
        optimizer.exchange_now()


@pytest.mark.parametrize("change", ["strides", "dtype", "deepcopy"])
@on_ranks(2)
def test_a_parameter_may_get_another_memory_layout_within_a_period(rank: int, change: str) -> None:
    """A period goes on with another memory format or dtype, as momenta do."""
    model, optimizer = plain(nn.Conv2d(3, 4, 3), vote_every=4)
    for step in range(8):
        give_gradients(model.parameters(), rank, step)
        if step == 2 and change == "strides":
            model.to(memory_format=torch.channels_last)
        elif step == 2 and change == "dtype":
            model.bfloat16()
            for p in model.parameters():
                p.grad = p.grad.bfloat16()
        elif step == 2:
            copy.deepcopy((model, optimizer))
        optimizer.step()
        if step == 2:
            with optimizer.common_weights():
                assert all(map(is_equal_everywhere, model.parameters()))
        if step % 4 == 3:
            assert all(map(is_equal_everywhere, model.parameters()))


@on_ranks(2)
def test_a_parameter_resized_within_a_period_is_named(rank: int) -> None:
    param, optimizer = single(vote_every=4)
    optimizer.step()
    param.data = torch.ones(64)
    param.grad = torch.ones(64)
    with pytest.raises(
        RuntimeError, match=r"^'w' had shape \(128,\) in the last local step, and has"
    ):
        optimizer.step()


@on_ranks(2)
def test_detach_within_a_period_leaves_the_common_weights(rank: int) -> None:
    param, optimizer = single(vote_every=4)
    param.grad *= (-1) ** rank
    optimizer.step()
    assert bool((param != 1.0).all())
    optimizer.detach()
    assert bool((param == 1.0).all())
    optimizer.step()
    assert optimizer.local.period.steps == 1


@on_ranks(2)
def test_a_local_step_after_a_detach_begins_with_a_header() -> None:
    _, optimizer = single(vote_every=3)
    sends = []
    for step in range(8):
        if step == 6:
            optimizer.detach()
        optimizer.step()
        sends.append(optimizer.wire.last_bytes_sent > 0)
    assert sends == [True, False, True, False, False, True, True, False]


@on_ranks(2)
def test_after_weights_were_replaced_detach_goes_on_from_the_last_exchange(rank: int) -> None:
    param, optimizer = single(vote_every=2)
    for _ in range(3):
        optimizer.step()
    with torch.no_grad():
        param.add_(5.0 * rank)
    for _ in range(2):
        assert "call optimizer.detach() on every rank" in error_of(optimizer.step)
    optimizer.detach()
    assert is_equal_everywhere(param)
    for _ in range(2):
        optimizer.step()
    assert optimizer.wire.exchanges == optimizer.local.exchanges == 2


@on_ranks(2)
def test_abstentions_are_counted_once_if_an_exchange_fails(rank: int) -> None:
    param, optimizer = single(vote_every=4)
    param.grad = torch.full_like(param, math.nan if rank else 1.0)
    optimizer.step()
    with torch.no_grad():
        param.add_(0.0 if rank else 5.0)
    assert "something replaced them" in error_of(optimizer.exchange_now)
    assert optimizer.wire.abstentions == 0
    with torch.no_grad():
        param.sub_(0.0 if rank else 5.0)
    optimizer.exchange_now()
    assert optimizer.wire.abstentions == 1


@pytest.mark.parametrize("how", ["load", "detach"])
@on_ranks(2)
def test_a_period_that_is_forgotten_forgets_its_abstentions(rank: int, how: str) -> None:
    param, optimizer = single(vote_every=4)
    weights, state = param.detach().clone(), optimizer.state_dict()
    param.grad = torch.full_like(param, math.nan if rank else 1.0)
    optimizer.step()
    if how == "load":
        param.data.copy_(weights)
        optimizer.load_state_dict(state)
    else:
        optimizer.detach()
    for _ in range(4):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert optimizer.wire.exchanges == 1
    assert optimizer.wire.abstentions == 0


@on_ranks(2)
def test_replicas_are_compared_if_empty_exchanges_come_between(rank: int) -> None:
    """Calls `exchange_now` before an evaluation that follows an exchange."""
    param, optimizer = single(vote_every=2, check_replicas_every=2)
    sent = []
    for _ in range(8):
        optimizer.exchange_now()
        for _ in range(2):
            param.grad = torch.full_like(param, (-1.0) ** rank)
            before = optimizer.wire.bytes_sent
            optimizer.step()
        sent.append(optimizer.wire.bytes_sent - before)
    assert sent[2::2] == [sent[2]] * 3
    assert sent[1::2] == [sent[2] + 16] * 4


@on_ranks(2)
def test_an_evaluation_in_inference_mode_may_exchange(rank: int) -> None:
    param, optimizer = single(vote_every=2)
    param.grad *= (-1) ** rank
    optimizer.step()
    with torch.inference_mode():
        optimizer.synchronize_momentum()
        with optimizer.common_weights():
            optimizer.exchange_now()  # Ends the period; there is nothing to put back.
        assert is_equal_everywhere(param)
    param.grad = torch.ones_like(param)
    for _ in range(2):
        optimizer.step()
    assert optimizer.wire.exchanges == 2
    assert is_equal_everywhere(optimizer.state[param]["exp_avg"])


@pytest.mark.parametrize(("vote_every", "raises"), [(2, 3), (6, 5)])
@on_ranks(2)
def test_local_steps_go_on_after_the_error_about_abstentions(
    rank: int, vote_every: int, raises: int
) -> None:
    param, optimizer = single(vote_every=vote_every, max_abstained_steps=3)
    raised = []
    for number in range(12):
        is_nan = rank and (number < 3 or (vote_every == 6 and number == 4))
        param.grad = torch.full_like(param, math.nan if is_nan else 1.0)
        raised.append("in 3 steps in a row" in error_of(optimizer.step))
    assert raised == [number == raises for number in range(12)]


@on_ranks(2)
def test_no_rank_raises_alone_if_all_abstain_from_a_step_with_a_header(rank: int) -> None:
    param, optimizer = single(vote_every=8, max_abstained_steps=2)
    raised = []
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": [("new", nn.Parameter(torch.ones(64)))]})
        param.grad = torch.full_like(param, math.nan if number == 2 or number == 1 - rank else 1.0)
        raised.append(error_of(optimizer.step) != "")
    assert len(set(map(tuple, gathered(raised)))) == 1


@on_ranks(2)
def test_a_group_keeps_its_decay_if_one_before_it_is_removed(rank: int) -> None:
    params = [filled(1.0) for _ in range(3)]
    groups = [{"params": [p], "weight_decay": 10.0 * (k == 0)} for k, p in enumerate(params)]
    optimizer = DistributedLion(groups, lr=0.01, vote_every=3, bits=8)
    for removed in (0, 2):
        give_gradients(params, rank, removed)
        optimizer.step()
        if removed == 0:
            optimizer.param_groups.pop(0)
            optimizer.add_param_group({"params": params[0], "weight_decay": 10.0})
    means = [torch.stack(everyones(p)).mean(dim=0) for p in params]
    optimizer.exchange_now()
    # The first one decayed in both steps, since it was added again at once.
    for p, mean, decay in zip(params, means, (0.81, 1.0, 1.0), strict=True):
        torch.testing.assert_close(p.detach(), mean * decay, atol=1e-3, rtol=0.0)


@on_ranks(2)
def test_a_parameter_that_is_removed_within_a_period_gets_the_common_weights(rank: int) -> None:
    params = [filled(1.0) for _ in range(2)]
    optimizer = DistributedLion([{"params": [p]} for p in params], lr=0.01, vote_every=4)
    for step in range(3):
        if step == 1:
            optimizer.param_groups.pop()
        optimizer.step()
        assert [bool((p == 1.0).all()) for p in params] == [False, step > 0]


@on_ranks(2)
def test_a_group_can_be_removed_between_exchanges(rank: int, tmp_path: Path) -> None:
    params = [nn.Parameter(torch.ones(64)) for _ in range(3)]
    optimizer = DistributedLion([{"params": [p]} for p in params], lr=0.01, vote_every=3)
    give_gradients(params[:2], rank, 0)
    optimizer.step()
    for _ in range(2):
        optimizer.param_groups.pop()  # First one without gradients.
        save_momentum(optimizer, tmp_path)
    give_gradients(params[:1], rank, 1)
    for _ in range(4):
        optimizer.step()
    assert optimizer.wire.exchanges == 2  # The first one was that of a save.


@on_ranks(2)
def test_a_save_within_a_period_warns(rank: int, tmp_path: Path) -> None:
    def warnings_of(model: nn.Module) -> int:
        with warned() as texts:
            model.state_dict()
        return sum("exchange_now() on every rank before you save" in text for text in texts)

    ddp, optimizer = attached(vote_every=4)
    optimizer.attach(ddp)  # Again, as Trainer does when it resumes.
    assert warnings_of(ddp) == 0
    take_step(optimizer, ddp, batch(0, rank))
    assert [warnings_of(ddp), warnings_of(ddp.module)] == [1, 1]
    assert warnings_of(copy.deepcopy(ddp.module)) == 0
    torch.save(ddp.module, tmp_path / f"{rank}.pt")
    assert b"hf_dlion" not in (tmp_path / f"{rank}.pt").read_bytes()  # Which another machine lacks.
    assert warnings_of(torch.load(tmp_path / f"{rank}.pt", weights_only=False)) == 0
    with optimizer.common_weights():
        assert warnings_of(ddp) == 0
    optimizer.exchange_now()
    assert warnings_of(ddp) == 0
    optimizer.detach()
    assert not ddp.module._state_dict_pre_hooks
    model = nn.Linear(64, 2)
    ddp, optimizer = plain(
        DistributedDataParallel(torch.compile(model, backend="eager")), vote_every=4
    )
    optimizer.attach(ddp)
    give_gradients(model.parameters(), rank)
    optimizer.step()
    assert warnings_of(model) == 1


@on_ranks(2)
def test_an_exchange_in_a_look_keeps_the_periods_steps(rank: int) -> None:
    param, optimizer = single(vote_every=4, bits=8)
    optimizer.step()
    optimizer.step()
    with optimizer.common_weights():
        optimizer.exchange_now()
    assert optimizer.local.exchanges == 1
    torch.testing.assert_close(param.detach(), torch.full_like(param, 0.98))


@on_ranks(2)
def test_an_anchor_that_is_not_finite_takes_no_part(rank: int) -> None:
    param, optimizer = single(vote_every=2, weight_decay=1.0)
    with torch.no_grad():
        param[3] = math.nan
    before = param.detach().clone()
    for _ in range(2):
        optimizer.step()
    assert torch.equal(param.detach().nan_to_num(7.0), before.nan_to_num(7.0))


@on_ranks(2)
def test_a_warning_of_a_step_that_fails_is_a_note_of_its_error(rank: int) -> None:
    """Otherwise, the next step would give it, perhaps that of another optimizer."""
    params = [nn.Parameter(torch.zeros(64)) for _ in range(2)]
    optimizer = DistributedLion(list(zip("pq", params, strict=True)), lr=0.01, vote_every=2)
    for param in params:
        param.grad = torch.ones(64)
    optimizer.step()
    with torch.no_grad():
        if rank == 0:
            params[0].fill_(torch.nan)
            params[1].fill_(5.0)
    with pytest.raises(Disagreement, match="'q'") as failure:
        optimizer.exchange_now()
    notes = getattr(failure.value, "__notes__", [])
    assert len(notes) == (rank == 0)
    assert all("'p' were not finite on rank 0" in note for note in notes)
    alone = DistributedLion([nn.Parameter(torch.zeros(64))])
    alone.param_groups[0]["params"][0].grad = torch.ones(64)
    alone.step()  # A warning would be an error.
