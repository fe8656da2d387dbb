"""What may happen between two exchanges of local steps, and what is refused on all ranks."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.checkpoint import load_momentum, save_momentum
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.meeting import Disagreement
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
    error_of,
    everyones,
    filled,
    gathered,
    is_equal_everywhere,
    same,
    warned,
)

Change = Callable[[nn.Linear, DistributedLion], Any]


def on_last(change: Change) -> Change:
    return lambda model, optimizer: change(model, optimizer) if dist.get_rank() == 1 else None


def replace(model: nn.Linear, _: DistributedLion) -> None:
    model.load_state_dict({name: p + 1 for name, p in model.state_dict().items()})


def thaw_and_replace(model: nn.Linear, optimizer: DistributedLion) -> None:
    model.bias.requires_grad_(True)
    on_last(replace)(model, optimizer)


def reorder(model: nn.Linear, _: DistributedLion) -> None:
    model.weight.data = model.weight.data.t().contiguous().t()


@torch.no_grad()
def shrink(model: nn.Linear, _: DistributedLion) -> None:
    model.weight.clamp_(max=0.0)


def give_nan(model: nn.Linear, optimizer: DistributedLion) -> None:
    def spoil(*_: Any) -> None:
        model.weight.grad.fill_(torch.nan)

    optimizer.register_step_pre_hook(spoil)


F32, BF16 = torch.float32, torch.bfloat16
BF16_WRITE = "RuntimeError: a torch.bfloat16 parameter of shape (3, 64) has"
# The dtype, what changes before which step, and with their steps the error of rank 1 and, if it is
# another, that of rank 0.
CHANGES: dict[str, tuple[torch.dtype, int, Change, str, str]] = {
    "lr": (
        F32, 1, on_last(lambda _, optimizer: optimizer.param_groups[0].update(lr=0.02)),
        "3 Disagreement: ranks differ, first in 'lr of each group, summed since the "
        "last exchange': rank 0: [0.04], rank 1: [0.05]. Give groups the same values",
        "",
    ),
    "NaN": (
        F32, 0, on_last(give_nan),
        "3 RuntimeError: gradients of rank 1 held a NaN or an Inf",
        "3 Disagreement: exchange failed",
    ),
    "replaced": (
        F32, 5, on_last(replace),
        "7 Disagreement: the weights of 'weight' on rank 1 are farther from", "",
    ),
    "replaced on all ranks": (BF16, 5, replace, f"5 {BF16_WRITE} local", ""),
    "changed": (
        BF16, 7, on_last(shrink),
        f"7 {BF16_WRITE}",
        "7 Disagreement: exchange failed on 1 of 2 ranks: rank 1: RuntimeError: a torch",
    ),
    "replaced when a layout is new": (
        BF16, 5, thaw_and_replace,
        f"5 {BF16_WRITE}",
        "5 Disagreement: step failed on 1 of 2 ranks: rank 1: RuntimeError: a torch",
    ),
    "memory layout": (
        F32, 5, reorder,
        "5 RuntimeError: a torch.float32 parameter of shape (3, 64) has local", "",
    ),
    "eval": (
        F32, 3, on_last(lambda _, optimizer: optimizer.eval()),
        "3 RuntimeError: step() after optimizer.eval()",
        "3 Disagreement: exchange failed",
    ),
    "closure": (
        F32, 3, on_last(lambda _, optimizer: optimizer.step(lambda: 1 / 0)),
        "3 ZeroDivisionError: division by zero",
        "3 Disagreement: exchange failed on 1",
    ),
    "exchange_now": (
        F32, 2, on_last(lambda _, optimizer: optimizer.exchange_now()),
        "2 Disagreement: ranks are at different steps",
        "3 Disagreement: ranks are at",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
@on_ranks(2)
def test_all_ranks_raise_if_something_is_wrong_on_one(rank: int, what: str) -> None:
    """Steps with vote_every=4 until something raises."""
    dtype, when, change, own, others = CHANGES[what]
    model, optimizer = plain(nn.Linear(64, 3, dtype=dtype), vote_every=4, max_abstained_steps=2)
    model.bias.requires_grad_(False)

    def step(number: int) -> None:
        give_gradients(model.parameters(), rank, number)
        optimizer.param_groups[0]["lr"] = 0.01
        if number == when:
            change(model, optimizer)
        optimizer.step()

    said = (f"{number} {error}" for number in range(12) if (error := error_of(step, number)))
    assert next(said).startswith(own if rank == 1 else others or own)


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
            # Frozen after the exchange of step 2: it takes part in that of step 5.
            assert (params[0] in optimizer.schedule.kept) == (step < 5)
            if step >= 5:
                assert is_equal_everywhere(params[0])
    with optimizer.common_weights():
        optimizer.exchange_now()
        assert all(map(is_equal_everywhere, params))
    optimizer.eval()
    for p in params:
        assert bool(p.isfinite().all())
        assert is_equal_everywhere(p)
    # Seven steps with the decay of its group, in three exchanges.
    torch.testing.assert_close(params[3].detach(), torch.full((5,), 0.95**7))
    optimizer.detach()
    assert not optimizer.schedule.kept
    assert len(texts) == rank
    assert all("the weights of '1' were not finite on rank 1" in text for text in texts)


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
            if rank == 0:  # Both calls are local to the rank.
                optimizer.eval()
                optimizer.train()
            if step < 6:
                model.requires_grad_(True)
        optimizer.exchange_now()
        optimizer.eval()
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
    optimizer.eval()
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
    optimizer.eval()
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
    optimizer.eval()
    assert is_equal_everywhere(param)
    assert bool((param != before).any())


@on_ranks(2)
def test_a_wrong_order_of_calls_is_refused(rank: int) -> None:
    """Calls `attach`, `detach`, and `step` after local steps."""
    model, optimizer = plain(vote_every=3)
    step = functools.partial(take_step, optimizer, model, batch(0, rank))
    step()
    with (
        pytest.raises(RuntimeError, match=r"in common_weights\(\)"),
        optimizer.common_weights(),
    ):
        step()
    ddp = DistributedDataParallel(model)  # gives rank 1 the own weights of rank 0
    with pytest.raises(RuntimeError, match=r"got another DDP wrapper between two exchanges"):
        optimizer.attach(ddp)
    optimizer.detach()
    model[0].weight.data[0, 0] = rank
    with pytest.raises(Disagreement, match=r"parameters, first in '0\.weight'"):
        step()


@on_ranks(2)
def test_what_is_saved_after_a_refused_exchange_can_be_loaded(rank: int, tmp_path: Path) -> None:
    params = [nn.Parameter(torch.ones(64)) for _ in range(2)]
    optimizer = DistributedLion(params, lr=0.01, vote_every=2)
    for step in range(2):
        params[rank].grad = torch.ones(64)  # Another parameter than on the other rank.
        if step == 1:
            params[rank].data.add_(float(rank))
            said = error_of(optimizer.step)
            assert said.startswith("Disagreement: the weights of 'group 0 parameter 1' on")
        else:
            optimizer.step()
    optimizer.eval()
    save_momentum(optimizer, tmp_path)
    loaded = DistributedLion(params, lr=0.01, vote_every=2)
    load_momentum(loaded, tmp_path)
    assert loaded.schedule.steps_since_exchange == 2


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
        return False

    optimizer = DistributedLion([("a", filled(1.0))], vote_every=every, full_precision=select)
    optimizer.step()
    optimizer.add_param_group({"params": [("b", nn.Parameter(torch.ones(5)))]})
    said = error_of(optimizer.step)
    assert said.startswith("KeyError" if rank == 1 else "Disagreement: ")
    assert said.endswith("KeyError: 'in a selection'")


@pytest.mark.parametrize("thaws", [False, True], ids=["freezes", "thaws"])
@on_ranks(2)
def test_own_weights_survive_a_change_of_the_layout(rank: int, tmp_path: Path, thaws: bool) -> None:
    """Own weights of 16 bits keep their bits in `eval` and a save if the layout has changed."""
    params = [nn.Parameter(torch.randn(3, 64).bfloat16()) for _ in range(3)]
    params[0].requires_grad_(not thaws)
    named = [(str(k), p) for k, p in enumerate(params)]
    optimizer = DistributedLion(named, lr=0.003, vote_every=4)
    for step in range(3):
        give_gradients(params, rank, step)
        optimizer.step()
    params[0].requires_grad_(thaws)
    if not thaws:
        give_gradients(params, rank, 3)
        optimizer.step()  # The exchange drops the frozen parameter from the layout.
    with torch.no_grad():
        params[2].clamp_(-1e9, 1e9)  # A write that changes no value is none.
    own = copies(params)
    optimizer.eval()
    common = copies(params)
    optimizer.train()
    assert same(own, params)
    save_momentum(optimizer, tmp_path)
    resumed = [
        (name, nn.Parameter(x.clone(), p.requires_grad))
        for (name, p), x in zip(named, common, strict=True)
    ]
    load_momentum(DistributedLion(resumed, vote_every=4), tmp_path)
    assert same(own, [p for _, p in resumed])
    if thaws:
        optimizer.exchange_now()  # In the new layout.
        own = copies(params)
        with torch.no_grad():
            params[2].clamp_(-1e9, 1e9)
        optimizer.eval()
        optimizer.train()
        assert same(own, params)
    give_gradients(params, rank, 4)
    optimizer.step()
    optimizer.eval()
    assert all(map(is_equal_everywhere, params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_writes_into_common_weights_reach_the_weights_that_train(
    rank: int, dtype: torch.dtype
) -> None:
    """Writes as a callback may, through `.data`, where one parameter is broken."""
    param, broken = filled(1.0, dtype), filled(math.nan, dtype)
    optimizer = DistributedLion(
        [("w", param), ("broken", broken)], lr=2**-7, vote_every=9, check_replicas_every=1
    )
    param.grad *= (-1) ** rank
    optimizer.step()
    moved = (-1) ** rank * 2**-7
    with optimizer.common_weights():
        param.data[:64] = 0.5
    assert bool((param[:64] == 0.5 - moved).all())
    assert bool((param[64:] == 1.0 - moved).all())
    with torch.no_grad():
        broken.mul_(1)  # A NaN that stays is no write.
    optimizer.step()
    optimizer.eval()
    param.data.clamp_(max=0.25)
    with warned():
        optimizer.exchange_now()
    # The ranks have moved in opposite directions, so their mean stays.
    assert bool((param == 0.25).all())
    param.data.add_(rank)
    optimizer.train()
    optimizer.step()
    with warned(), pytest.raises(Disagreement, match="replicas differ after step 3"):
        optimizer.exchange_now()


@on_ranks(2)
def test_replaced_weights_are_refused_until_the_optimizer_is_detached() -> None:
    param, optimizer = single(1.0, torch.bfloat16, vote_every=4)
    for _ in range(2):
        optimizer.step()
    with torch.no_grad():
        param.fill_(7.0)
    calls = optimizer.step, optimizer.eval, optimizer.exchange_now, optimizer.step, optimizer.detach
    for refused in calls:
        with pytest.raises(RuntimeError, match="values were changed between two steps"):
            refused()
        assert bool((param == 7.0).all())
    optimizer.step()  # Local steps begin again at the new weights.
    assert bool((param < 7.0).any())


@on_ranks(2)
def test_a_parameter_frozen_on_one_rank_between_exchanges_is_named(rank: int) -> None:
    params = [filled(1.0), filled(2.0)]
    sync = {"momentum_sync_every": 1}
    optimizer = DistributedLion([("a", params[0]), ("b", params[1])], vote_every=2, **sync)
    optimizer.step()
    params[1].requires_grad_(rank == 0)
    text = r"first in 'frozen parameters': rank 0: \[\], rank 1: \['b'\]"
    with pytest.raises(Disagreement, match=text):
        optimizer.step()


@on_ranks(2)
def test_an_exchange_that_fails_after_eval_leaves_the_common_weights(rank: int) -> None:
    param, optimizer = single(vote_every=4)
    optimizer.step()
    with torch.no_grad():
        param.add_(100.0 * rank)
    optimizer.eval()
    with pytest.raises(Disagreement, match=r"^the weights of 'w' on rank 1 are farther"):
        optimizer.exchange_now()
    assert bool((param == 1.0).all())  # Still the common weights.


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
    assert sent[1::2] == [sent[2] + 24] * 4


@on_ranks(2)
def test_a_layout_changed_between_eval_and_train_is_refused(rank: int) -> None:
    model, optimizer = plain(nn.Conv2d(3, 4, 3), vote_every=4)
    for param in model.parameters():
        param.grad = torch.full_like(param, (-1.0) ** rank)
    optimizer.step()
    optimizer.eval()
    model.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="device, dtype, or memory layout was changed"):
        optimizer.train()


@on_ranks(2)
def test_an_evaluation_in_inference_mode_may_exchange(rank: int) -> None:
    param, optimizer = single(vote_every=2)
    param.grad *= (-1) ** rank
    optimizer.step()
    with torch.inference_mode():
        optimizer.synchronize_momentum()
        optimizer.exchange_now()
        optimizer.eval()
        optimizer.train()
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
    optimizer = DistributedLion(groups, lr=0.01, vote_every=3)
    for removed in (0, 2):
        give_gradients(params, rank, removed)
        optimizer.step()
        if removed == 0:
            optimizer.param_groups.pop(0)
            optimizer.add_param_group({"params": params[0], "weight_decay": 10.0})
    before = torch.stack(everyones(params[1])).mean(dim=0)
    optimizer.exchange_now()
    torch.testing.assert_close(torch.stack(everyones(params[1])).mean(dim=0), before)
    with optimizer.common_weights():  # Decayed in both steps, since it was added again at once.
        assert float(params[0].detach().mean()) == pytest.approx(0.81, abs=0.03)


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
    assert optimizer.wire.exchanges == 1
