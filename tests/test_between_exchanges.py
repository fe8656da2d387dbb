"""What may happen between two exchanges of local steps, and what is refused on all ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.checkpoint import load_momentum, save_momentum
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.meeting import Disagreement
from tests.support.spawn import RankPools, on_ranks
from tests.support.training import batch, filled, is_equal_everywhere, model_of, same, warned

pytestmark = pytest.mark.multiproc


def fails(rank: int, world_size: int, what: str) -> list[str]:
    """Steps with vote_every=4 until something is wrong on the last rank; returns each error."""
    last = rank == world_size - 1
    torch.manual_seed(0)
    dtype = torch.bfloat16 if what in ("changed", "one", "thawed") else torch.float32
    model = nn.Linear(64, 3, dtype=dtype)
    model.bias.requires_grad_(what != "thawed")
    every = 8 if what == "every" and last else 4
    optimizer = DistributedLion(
        model.named_parameters(), lr=0.01, vote_every=every, max_abstained_steps=2
    )
    said = []
    for step in range(12):
        model.zero_grad()
        closure = None
        for k, p in enumerate(model.parameters()):
            random = torch.Generator().manual_seed(100 * step + 10 * rank + k)
            p.grad = torch.randn(p.shape, generator=random).to(dtype)
            if what == "nan" and last:
                p.grad.fill_(torch.nan)
        if what == "lr":
            optimizer.param_groups[0]["lr"] = 0.02 if last and step == 1 else 0.01
        if step == 5 and what in ("replaced", "changed", "thawed") and (last or what == "changed"):
            model.load_state_dict({name: p + 1 for name, p in model.state_dict().items()})
        if what == "thawed" and step == 5:
            model.bias.requires_grad_(True)
        if what == "one" and last and step == 7:
            with torch.no_grad():
                model.weight.clamp_(max=0.0)
        if what == "layout" and step == 5:
            model.weight.data = model.weight.data.t().contiguous().t()
        if what == "eval" and last and step == 3:
            optimizer.eval()
        if what == "closure" and last and step == 3:
            closure = lambda: 1 / 0  # noqa: E731
        try:
            if what == "now" and last and step == 2:
                optimizer.exchange_now()
            optimizer.step(closure)  # type: ignore[arg-type]
        except (RuntimeError, ZeroDivisionError) as error:
            return [*said, f"{step} {type(error).__name__}: {error}"]
    return said


@pytest.mark.parametrize(
    ("what", "own", "others"),
    [
        ("every", "0 Disagreement: ranks differ in options, first in 'vote_every'", ""),
        (
            "lr",
            "3 Disagreement: ranks differ in options, first in 'lr of each group, summed "
            "since the last exchange': rank 0: [0.04], rank 1: [0.05]. Give groups the same values",
            "",
        ),
        (
            "nan",
            "3 RuntimeError: gradients of rank 1 held a NaN or an Inf",
            "3 Disagreement: exchange failed",
        ),
        ("replaced", "7 Disagreement: the weights of 'weight' on rank 1 are farther from", ""),
        ("changed", "5 RuntimeError: a torch.bfloat16 parameter of shape (3, 64) has local", ""),
        (
            "one",
            "7 RuntimeError: a torch.bfloat16 parameter of shape (3, 64) has",
            "7 Disagreement: exchange failed on 1 of 2 ranks: rank 1: RuntimeError: a torch",
        ),
        (
            "thawed",
            "5 RuntimeError: a torch.bfloat16 parameter of shape (3, 64) has",
            "5 Disagreement: step failed on 1 of 2 ranks: rank 1: RuntimeError: a torch",
        ),
        ("layout", "5 RuntimeError: a torch.float32 parameter of shape (3, 64) has local", ""),
        (
            "eval",
            "3 RuntimeError: step() after optimizer.eval()",
            "3 Disagreement: exchange failed",
        ),
        (
            "closure",
            "3 ZeroDivisionError: division by zero",
            "3 Disagreement: exchange failed on 1",
        ),
        ("now", "2 Disagreement: ranks are at different steps", "3 Disagreement: ranks are at"),
    ],
)
def test_all_ranks_raise_if_something_is_wrong_on_one(
    pools: RankPools, what: str, own: str, others: str
) -> None:
    first, last = pools(2).run(fails, what, timeout=60)
    assert last[-1].startswith(own)
    assert first[-1].startswith(others or own)


def changes(rank: int, world_size: int) -> list[str]:
    """Freezes, adds, and breaks parameters between exchanges; anchors stay equal."""
    torch.manual_seed(0)
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
            for k, p in enumerate(params):
                random = torch.Generator().manual_seed(100 * step + 10 * rank + k)
                p.grad = torch.randn(p.shape, generator=random) if p.requires_grad else None
                if k == 3:
                    p.grad = torch.zeros(5)
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
    return texts


def test_parameters_can_be_frozen_added_and_broken_between_exchanges(pools: RankPools) -> None:
    first, second = pools(2).run(changes)
    assert first == []
    assert len(second) == 1
    assert "the weights of '1' were not finite on rank 1" in second[0]


@on_ranks(2)
def test_an_evaluation_or_a_save_of_a_frozen_model_loses_no_step(rank: int, tmp_path: Path) -> None:
    """Freezes a model around an evaluation and a save, as with a GAN's discriminator."""
    results = []
    for freezes in (False, True):
        model = model_of()
        optimizer = DistributedLion(model.named_parameters(), lr=0.01, vote_every=4)
        for step in range(7):
            optimizer.zero_grad()
            model(batch(step, rank)).square().sum().backward()
            optimizer.step()
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
        results.append([p.detach().clone() for p in model.parameters()])
    assert same(*results)


@on_ranks(2)
def test_tensors_of_one_shape_can_be_trained_in_turns() -> None:
    """Trains two tensors of one shape in turns, as some low-memory recipes do."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(2, 64)) for _ in range(2)]
    optimizer = DistributedLion(params, lr=0.01, vote_every=3, check_replicas_every=1)
    starts = [p.detach().clone() for p in params]
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


@on_ranks(2)
def test_a_wrong_order_of_calls_is_refused(rank: int) -> None:
    """Calls `attach`, `detach`, and `step` after local steps."""
    said = []
    model = model_of()
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, vote_every=3)

    def step() -> None:
        optimizer.zero_grad()
        model(batch(0, rank)).square().sum().backward()
        optimizer.step()

    step()
    with pytest.raises(RuntimeError) as caught, optimizer.common_weights():
        step()
    said.append(str(caught.value))
    ddp = DistributedDataParallel(model)  # gives rank 1 the own weights of rank 0
    with pytest.raises(RuntimeError) as caught:
        optimizer.attach(ddp)
    said.append(str(caught.value))
    optimizer.detach()
    with torch.no_grad():
        model[0].weight[0, 0] = rank  # type: ignore[index]
    with pytest.raises(Disagreement) as disagreed:
        step()
    said.append(str(disagreed.value))
    swapped, wrapped, differs = said
    assert "in common_weights()" in swapped
    assert "attach() got a DDP wrapper that was made during local steps" in wrapped
    assert "parameters, first in '0.weight'" in differs


@on_ranks(4)
def test_all_ranks_raise_if_weights_were_replaced_in_a_node(rank: int) -> None:
    """Steps on NaN gradients first, and later replaces the weights of rank 2."""
    ddp = DistributedDataParallel(model_of())
    optimizer = DistributedLion(ddp.named_parameters(), lr=0.01, local_group=2, vote_every=3)
    optimizer.attach(ddp)
    said = ""
    for step in range(8):
        optimizer.zero_grad()
        ddp(batch(step, rank) * (torch.nan if step == 0 else 1.0)).square().sum().backward()
        if step == 5 and rank == 2:
            with torch.no_grad():
                next(ddp.parameters()).add_(1.0)
        try:
            optimizer.step()
        except Disagreement as error:
            said = f"{step}: {error}"
            break
    optimizer.detach()
    assert said.startswith("6: the weights of 'module.0.weight' on rank 2 are farther"), said


def leaves_a_local_step(rank: int, world_size: int, does: str, folder: str) -> str:
    """Does something else on rank 1 while the other rank of its node steps, or loads."""
    ddp = DistributedDataParallel(model_of())
    optimizer = DistributedLion(ddp.named_parameters(), lr=0.01, local_group=2, vote_every=9)
    optimizer.attach(ddp)
    said = ""
    for step in range(3):
        optimizer.zero_grad()
        ddp(batch(step, rank)).square().sum().backward()
        try:
            if step == 2 and does == "fails to load":
                failure = OSError("no file") if rank == 1 else None
                if failure is None:
                    optimizer.load_state_dict(optimizer.state_dict())
                load_momentum(optimizer, folder, failure=failure)
            if step == 2 and rank == 1:
                if does == "exchanges":
                    optimizer.exchange_now()
                elif does == "saves":
                    save_momentum(optimizer, folder)
                else:
                    optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        except (Disagreement, OSError) as error:
            said = f"{type(error).__name__}: {error}"
            break
    optimizer.detach()
    return said


@pytest.mark.parametrize("does", ["exchanges", "saves", "steps"])
def test_a_rank_of_a_node_that_leaves_a_local_step_does_not_hang_the_node(
    pools: RankPools, tmp_path: Path, does: str
) -> None:
    """The last one has loaded a state, after which a step begins with headers."""
    said = pools(4).run(leaves_a_local_step, does, str(tmp_path), timeout=60)
    assert said[0] == said[1]
    assert f"rank 1 {does} while rank 0 takes a local step" in said[0]
    assert said[2] == said[3] == ""


def test_a_load_that_fails_in_a_node_fails_on_all_ranks(pools: RankPools, tmp_path: Path) -> None:
    said = pools(4).run(leaves_a_local_step, "fails to load", str(tmp_path), timeout=60)
    assert said.pop(1) == "OSError: no file"
    for other in said:
        assert "load failed on 1 of 4 ranks: rank 1: OSError: no file" in other


def fails_to_plan(rank: int, world_size: int, every: int) -> str:
    """Raises in a new plan on rank 1, in an exchange or in a local step."""

    def select(name: str, param: torch.Tensor) -> bool:
        if rank == 1 and len(params) == 2:
            raise KeyError("in a selection")
        return False

    params = [nn.Parameter(torch.ones(64))]
    optimizer = DistributedLion([("a", params[0])], lr=0.1, vote_every=every, full_precision=select)
    params[0].grad = torch.ones(64)
    optimizer.step()
    params.append(nn.Parameter(torch.ones(5)))
    optimizer.add_param_group({"params": [("b", params[1])]})
    try:
        optimizer.step()
    except (Disagreement, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("every", [2, 9])
def test_a_step_that_fails_in_its_plan_raises_on_all_ranks(pools: RankPools, every: int) -> None:
    first, second = pools(2).run(fails_to_plan, every, timeout=60)
    assert "rank 1: KeyError: 'in a selection'" in first
    assert second == "KeyError: 'in a selection'"


@pytest.mark.parametrize("thaws", [False, True], ids=["freezes", "thaws"])
@on_ranks(2)
def test_own_weights_survive_a_change_of_the_layout(rank: int, tmp_path: Path, thaws: bool) -> None:
    """Own weights of 16 bits keep their bits in `eval` and a save if the layout has changed."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(3, 64).bfloat16()) for _ in range(3)]
    params[0].requires_grad_(not thaws)
    named = [(str(k), p) for k, p in enumerate(params)]
    optimizer = DistributedLion(named, lr=0.003, vote_every=4)
    generator = torch.Generator().manual_seed(rank)

    def steps(count: int) -> None:
        for _ in range(count):
            for p in params:
                drawn = torch.randn(p.shape, generator=generator).bfloat16()
                p.grad = drawn if p.requires_grad else None
            optimizer.step()

    steps(3)
    params[0].requires_grad_(thaws)
    if not thaws:
        steps(1)  # The exchange drops the frozen parameter from the layout.
    with torch.no_grad():
        params[2].clamp_(-1e9, 1e9)  # A write that changes no value is none.
    own = [p.detach().clone() for p in params]
    optimizer.eval()
    common = [p.detach().clone() for p in params]
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
        own = [p.detach().clone() for p in params]
        with torch.no_grad():
            params[2].clamp_(-1e9, 1e9)
        optimizer.eval()
        optimizer.train()
        assert same(own, params)
    steps(1)
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
    param = filled(1.0, torch.bfloat16)
    optimizer = DistributedLion([param], lr=0.01, vote_every=4)
    for _ in range(2):
        optimizer.step()
    with torch.no_grad():
        param.fill_(7.0)
    for refused in (optimizer.step, optimizer.eval, optimizer.step, optimizer.detach):
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
    with pytest.raises(Disagreement) as caught:
        optimizer.step()
    assert "first in 'frozen parameters': rank 0: [], rank 1: ['b']" in str(caught.value)


@on_ranks(2)
def test_an_exchange_that_fails_after_eval_leaves_the_common_weights(rank: int) -> None:
    param = filled(1.0)
    optimizer = DistributedLion([("w", param)], lr=0.01, vote_every=4)
    optimizer.step()
    with torch.no_grad():
        param.add_(100.0 * rank)
    optimizer.eval()
    with pytest.raises(Disagreement) as caught:
        optimizer.exchange_now()
    assert bool((param == 1.0).all())  # Still the common weights.
    assert str(caught.value).startswith("the weights of 'w' on rank 1 are farther")


@on_ranks(2)
def test_replicas_are_compared_if_empty_exchanges_come_between(rank: int) -> None:
    """Calls `exchange_now` before an evaluation that follows an exchange."""
    param = filled(1.0)
    optimizer = DistributedLion([("w", param)], lr=0.01, vote_every=2, check_replicas_every=2)
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
    model = nn.Conv2d(3, 4, 3)
    for param in model.parameters():
        param.grad = torch.full_like(param, (-1.0) ** rank)
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, vote_every=4)
    optimizer.step()
    optimizer.eval()
    model.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="dtype or memory layout was changed"):
        optimizer.train()


@on_ranks(2)
def test_an_evaluation_in_inference_mode_may_exchange(rank: int) -> None:
    param = filled(1.0)
    optimizer = DistributedLion([("w", param)], lr=0.01, vote_every=2)
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


@on_ranks(2)
def test_local_steps_go_on_after_the_error_about_abstentions(rank: int) -> None:
    param = filled(1.0)
    optimizer = DistributedLion([param], lr=0.01, vote_every=2, max_abstained_steps=3)
    raised = []
    for number in range(10):
        param.grad = torch.full_like(param, math.nan if rank and number < 3 else 1.0)
        try:
            optimizer.step()
        except RuntimeError:
            raised.append(number)
    assert raised == [3]
