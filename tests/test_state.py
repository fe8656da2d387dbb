"""What an optimizer holds: loads, copies, and parameters that change."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.checkpoint import load_momentum, momenta_apart, save_momentum
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Disagreement
from tests.support.spawn import on_ranks
from tests.support.steps import attached, backward, copies, plain, single, take_step
from tests.support.training import (
    batch,
    error_of,
    filled,
    gathered,
    is_equal_everywhere,
    model_of,
    replicas_of_shards,
    same,
    warned,
)


def momenta_of(optimizer: DistributedLion) -> list[torch.Tensor]:
    return [state["exp_avg"] for state in optimizer.state.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_momentum_keeps_its_dtype_and_bits(dtype: torch.dtype) -> None:
    """Other than torch, which converts a loaded state to the dtype of the parameters."""
    model = model_of().to(torch.bfloat16)
    optimizer = DistributedLion(model.named_parameters(), momentum_dtype=dtype)
    for step in range(3):
        take_step(optimizer, model, batch(step, 0).bfloat16())
    loaded = DistributedLion(model.named_parameters(), momentum_dtype=dtype)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert loaded.steps == 3
    assert same(momenta_of(optimizer), momenta_of(loaded))
    assert {momentum.dtype for momentum in momenta_of(loaded)} == {dtype}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"eps": 1e-8}, "DistributedLion has no such option"),
        ({"weight_decay": None}, "weight_decay must be a number"),
        ({}, "its groups have no 'betas'"),
    ],
)
def test_another_optimizers_state_is_refused(change: dict[str, Any], text: str) -> None:
    """One that counts steps in its groups, as fused ones do."""
    _, optimizer = single()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0] |= change
    if not change:
        del state["param_groups"][0]["betas"]
    with pytest.raises(ValueError, match=f"the state dict is another optimizer's.*{text}"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.98)


def test_a_loaded_momentum_is_finite() -> None:
    _, optimizer = single()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"][:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    optimizer.load_state_dict(state)
    most = torch.finfo(torch.float32).max
    assert momenta_of(optimizer)[0][:3].tolist() == [0.0, most, -most]


@on_ranks(2)
def test_a_model_that_was_loaded_on_one_rank_only_is_found(rank: int) -> None:
    ddp, optimizer = attached()
    take_step(optimizer, ddp, batch(0, rank))
    saved = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
    take_step(optimizer, ddp, batch(1, rank))
    if rank == 0:
        ddp.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    backward(ddp, batch(1, rank))
    with pytest.raises(Disagreement, match=r"replicas differ in \d of 6 parameters"):
        optimizer.step()


@pytest.mark.parametrize("alone", [False, True])
@on_ranks(2)
def test_a_second_training_begins_with_equal_weights_and_on_all_ranks(
    rank: int, alone: bool
) -> None:
    ddp, optimizer = attached()
    take_step(optimizer, ddp, batch(0, rank))
    optimizer.detach()
    if not alone:
        with torch.no_grad():
            next(ddp.parameters()).add_(float(rank))
    if not alone or rank == 1:
        optimizer.attach(ddp)
    calls = "first in 'calls of attach and detach': rank 0: 2, rank 1: 3"
    with pytest.raises(Disagreement, match=calls if alone else r"first in 'module\.0\.weight'"):
        optimizer.step()
    optimizer.detach()


@on_ranks(2)
def test_after_the_end_of_its_process_group_an_optimizer_says_so(rank: int, tmp_path: Path) -> None:
    group = dist.new_group([0, 1])
    model, optimizer = plain(process_group=group)
    take_step(optimizer, model, batch(0, rank))
    dist.destroy_process_group(group)
    save = partial(save_momentum, optimizer, tmp_path)
    for call in (optimizer.step, save, optimizer.synchronize_momentum):
        said = error_of(call)
        assert said.startswith("RuntimeError: the process group of this optimizer was destroyed")


@pytest.mark.parametrize("same_state", [True, False])
@on_ranks(2)
def test_one_momentum_loaded_on_all_ranks_warns_once(rank: int, same_state: bool) -> None:
    model, optimizer = plain()
    take_step(optimizer, model, batch(0, rank))
    states = gathered(optimizer.state_dict())
    optimizer.load_state_dict(states[0 if same_state else rank])
    with warned() as texts:
        for _ in range(2):
            take_step(optimizer, model, batch(0, rank))
    assert len(texts) == (same_state and rank == 0)
    for text in texts:
        assert text.startswith("all ranks loaded the same momentum")
        assert "hf_dlion.load_momentum()" in text


@pytest.mark.parametrize("options", [{}, {"vote_every": 3}], ids=str)
@on_ranks(2)
def test_all_ranks_may_load_what_rank_0_has_sent(rank: int, options: dict[str, Any]) -> None:
    """Rank 0 loads its own tensors, the other rank copies of them, at the end of a period."""
    model, optimizer = plain(**options)
    every = optimizer.options.vote_every
    for step in range(2 * every):
        take_step(optimizer, model, batch(step, rank))
    sent = gathered(optimizer.state_dict())[0]
    optimizer.load_state_dict(optimizer.state_dict() if rank == 0 else sent)
    with warned() as texts:
        for step in range(2 * every):
            take_step(optimizer, model, batch(step, rank))
    assert optimizer.steps == 4 * every
    assert is_equal_everywhere(next(model.parameters()))
    assert ["same momentum" in text for text in texts] == [True] * (rank == 0)


@on_ranks(2)
def test_a_load_of_its_own_state_within_a_period_is_refused(rank: int) -> None:
    """As in Accelerate's `prepare`: the ranks' own weights would be the next period's anchors."""
    model, optimizer = plain(vote_every=4)
    for step in range(2):
        take_step(optimizer, model, batch(step, rank))
    optimizer.load_state_dict(optimizer.state_dict())
    assert "Replicas must start equal" in error_of(take_step, optimizer, model, batch(2, rank))


@on_ranks(2)
def test_a_load_of_its_own_state_counts_on_a_rank_that_never_had_a_gradient(rank: int) -> None:
    param, optimizer = single()
    for _ in range(2):
        param.grad = torch.ones_like(param) if rank == 0 else None
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert optimizer.steps == 3


def test_a_load_forgets_abstentions() -> None:
    param, optimizer = single(max_abstained_steps=2)
    said = []
    for step in range(3):
        param.grad.fill_(torch.nan)
        said.append(error_of(optimizer.step))
        if step == 0:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [text != "" for text in said] == [False, False, True]


@on_ranks(2)
def test_a_memory_format_that_changes_on_one_rank_is_named(rank: int) -> None:
    param = nn.Parameter(torch.ones(2, 64, 3, 5))
    optimizer = DistributedLion([("w", param)], lr=0.01)
    for step in range(2):
        if (rank, step) == (1, 1):
            param.data = param.data.to(memory_format=torch.channels_last)
        param.grad = torch.ones_like(param)
        said = error_of(optimizer.step)
        assert ("ranks differ in trainable parameters" in said) == (step == 1)


def test_a_pickled_optimizer_keeps_options_and_state() -> None:
    model, optimizer = plain(ties="zero")
    take_step(optimizer, model, batch(0, 0))
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert loaded.options == optimizer.options
    assert loaded.steps == 1
    assert same(momenta_of(optimizer), momenta_of(loaded))
    loaded.step()  # On parameters without gradients.


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copied_optimizer_keeps_ages_of_its_own_parameters(copied: Any) -> None:
    param = nn.Parameter(torch.zeros(3, 64))
    optimizer = DistributedLion([("p", param)], lr=1.0, betas=(0.9, 0.5))
    for step in range(8):
        param.grad = torch.ones(3, 64)
        if step:
            param.grad[1] = 0.0
        if step == 4:
            param, optimizer = copied((param, optimizer))
            param.grad = torch.ones(3, 64)
            param.grad[1] = 0.0
        optimizer.step()
    assert param[:, 0].tolist() == [-8.0, -2.0, -8.0]


@on_ranks(2)
def test_a_state_without_momenta_needs_those_of_the_ranks_files(rank: int, tmp_path: Path) -> None:
    """As the common state of Trainer's and Accelerate's checkpoints."""
    param, optimizer = single()
    optimizer.step()
    save_momentum(optimizer, tmp_path)
    with momenta_apart(optimizer):
        state = optimizer.state_dict()
    assert optimizer.state_dict()["state"]
    optimizer.load_state_dict(state)
    before = copies([param])
    for _ in range(2):
        assert "saved without momenta" in error_of(optimizer.step)
    assert same(before, [param])
    load_momentum(optimizer, tmp_path)
    assert error_of(optimizer.step) == ""
    optimizer.load_state_dict(state if rank == 0 else optimizer.state_dict())
    said = error_of(optimizer.step)
    assert ("RuntimeError" if rank == 0 else "step failed on 1 of 2 ranks") in said


@on_ranks(2)
def test_parameters_can_be_frozen_unfrozen_and_added(rank: int) -> None:
    """Freezes, unfreezes, and adds groups between steps, on all ranks together."""
    model = model_of()
    layers = list(model)
    optimizer = DistributedLion(layers[0].named_parameters(), lr=0.01)
    for step in range(6):
        if step == 2:
            layers[0].bias.requires_grad_(False)
        if step == 3:
            optimizer.add_param_group({"params": list(layers[2].named_parameters()), "lr": 0.1})
        if step == 4:
            layers[0].bias.requires_grad_(True)
        before = copies(model.parameters())
        take_step(optimizer, model, batch(step, rank))
        moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
        assert moved == [True, step not in (2, 3), step >= 3, step >= 3, False, False]
    assert [group["step"] for group in optimizer.param_groups] == [6, 6]


def test_a_group_that_takes_the_place_of_the_first_one_keeps_the_count_of_steps() -> None:
    _, optimizer = single()
    optimizer.step()
    optimizer.add_param_group({"params": [("new", filled(1.0))]})
    optimizer.param_groups.pop(0)
    assert optimizer.steps == 1


@pytest.mark.parametrize("how", ["DDP", "compiled", "FSDP2", "added"])
@on_ranks(2)
def test_another_order_of_equal_parameters_is_found_by_the_names_of_the_model(
    rank: int, how: str
) -> None:
    """Passes parameters in another order on rank 1, without names, as a set would have them."""
    model = nn.Sequential(*(nn.LayerNorm(64) for _ in range(4)))
    model[2:].requires_grad_(False)
    outside = nn.Parameter(torch.ones(64), requires_grad=how == "DDP")
    options: dict[str, Any] = {"lr": 0.1, "full_precision": "*.bias"}
    if how == "FSDP2":
        mesh = replicas_of_shards(2, 1)
        fully_shard(model, mesh=mesh["shard"])
        options["replicate"] = mesh["replicate"]
    wrapped = model if how == "FSDP2" else DistributedDataParallel(model)
    if how == "compiled":
        wrapped = torch.compile(wrapped, backend="eager")
    weights, late = ([model[k].weight, model[k + 1].weight] for k in (0, 2))
    if rank:
        (late if how == "added" else weights).reverse()
    biases = [model[0].bias, model[1].bias]
    wrong = DistributedLion(weights + biases, **options | {"full_precision": "*.bais"})
    with pytest.raises(ValueError, match=r"no parameter's name matches '\*.bais'"):
        wrong.attach(wrapped)
    optimizer = DistributedLion([{"params": weights}, {"params": [outside, *biases]}], **options)
    optimizer.attach(wrapped)
    wrapped(torch.ones(1, 64)).sum().backward()
    first = 0
    if how == "added":  # As Lightning's BackboneFinetuning does.
        optimizer.step()
        model[2:].requires_grad_(True)
        optimizer.add_param_group({"params": late, "lr": 0.01})
        first = 4
    text = f"in different orders, first in 'parameter {first}': rank 0: '{first // 2}.weight (64"
    with pytest.raises(Disagreement, match=re.escape(text)):
        optimizer.step()
    assert not any("param_names" in group for group in optimizer.param_groups)
    optimizer.detach()


def test_names_of_a_second_model_are_not_those_of_the_first() -> None:
    models = [nn.Linear(2, 2), nn.LayerNorm(2), nn.Conv1d(2, 2, 1)]
    optimizer = DistributedLion([param for model in models for param in model.parameters()])
    for model in (*models, models[0]):
        optimizer.params.name_as(model)
    names = [name for name, _ in optimizer.params.named()]
    assert names == [
        f"{model}{name}" for model in ("", "model 2: ", "model 3: ") for name in ("weight", "bias")
    ]


def test_names_that_were_passed_stay_in_a_load_and_others_stay_out() -> None:
    """Loads states with and without names, as earlier versions saved them with Trainer."""
    model = nn.LayerNorm(64)
    named, nameless = (DistributedLion(p) for p in (model.named_parameters(), model.parameters()))
    named.load_state_dict(nameless.state_dict())
    nameless.load_state_dict(named.state_dict())
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]
    nameless.add_param_group({"params": [filled(1.0)]})
    with pytest.raises(ValueError, match="with/without names"):
        named.add_param_group({"params": [filled(1.0)]})  # torch's own rule


@on_ranks(2)
def test_torchs_distributed_checkpoint_never_loads_its_own_state(rank: int) -> None:
    """It fills momenta in place, so a new period begins with weights that it may have filled."""
    model, optimizer = plain(vote_every=4)
    for step in range(2):
        take_step(optimizer, model, batch(step, rank))
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    assert optimizer.local.period.steps == 0


@on_ranks(2)
def test_hooks_of_users_work_as_in_other_optimizers(rank: int) -> None:
    """Maps momenta by name, as in torch's tutorial, and changes what was loaded."""
    layers = [nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    model = nn.Sequential(*layers)
    saved = DistributedLion(model.named_parameters(), momentum_dtype=torch.float32)
    saved.register_state_dict_post_hook(lambda _, found: {"nested": found})
    take_step(saved, model, torch.randn(2, 64).bfloat16())
    other = DistributedLion([*model.named_parameters()][::-1], momentum_dtype=torch.float32)
    calls: list[str] = []

    def by_name(_: object, outer: dict[str, Any]) -> dict[str, Any]:
        found = copy.deepcopy(outer["nested"])
        [group] = found["param_groups"]
        number = dict(zip(group["param_names"], group["params"], strict=True))
        group["params"] = [number[name] for name in other.param_groups[0]["param_names"]]
        return found

    def double(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] * 2

    other.register_load_state_dict_pre_hook(by_name)
    other.register_load_state_dict_post_hook(double)
    other.register_state_dict_post_hook(lambda *_: calls.append("state_dict"))
    other.load_state_dict(saved.state_dict())
    for param in model.parameters():
        assert torch.equal(other.state[param]["exp_avg"], 2 * saved.state[param]["exp_avg"])
    assert not calls


@on_ranks(2)
def test_a_rank_without_gradients_does_not_hang_at_the_start_of_a_warm_up(rank: int) -> None:
    """Takes a first step with a learning rate of 0, without gradients on rank 1."""
    model, optimizer = plain(lr=0.0)
    if rank == 0:
        backward(model, batch(0, rank))
    optimizer.step()
    assert optimizer.steps == 1
    optimizer.param_groups[0]["lr"] = 0.01
    take_step(optimizer, model, batch(1, rank))
    assert optimizer.steps == 2


def test_a_zero_gradient_counts_as_one_at_the_start_of_a_warm_up() -> None:
    """As that of LoRA's A, whose row grows older, though its learning rate is 0."""
    params = [filled(1.0), filled(1.0)]
    optimizer = DistributedLion([("A", params[0]), ("B", params[1])], lr=0.0)
    params[0].grad.zero_()
    optimizer.step()
    assert optimizer.steps == 1
    assert optimizer.params.ages[params[0]].tolist() == [1]


@pytest.mark.parametrize("every", [1, 2])
@on_ranks(2)
def test_a_step_that_only_creates_state_is_not_counted(every: int) -> None:
    """Creates the state as torch.distributed.checkpoint does, also where weights are saved."""
    model, optimizer = plain(vote_every=every)
    with optimizer.common_weights():
        get_optimizer_state_dict(model, optimizer)
    assert all("exp_avg" in optimizer.state[p] for p in model.parameters())
    assert optimizer.steps == 0


@pytest.mark.parametrize("option", ["process_group", "replicate"])
@on_ranks(2)
def test_a_copy_would_lose_its_process_group(option: str) -> None:
    optimizer = DistributedLion([filled(1.0)], **{option: dist.group.WORLD})
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        copy.deepcopy(optimizer)


@on_ranks(2)
def test_copies_of_two_optimizers_share_a_wrapper(rank: int) -> None:
    ddp = DistributedDataParallel(model_of())
    halves = [DistributedLion(half.parameters()) for half in (ddp.module[0], ddp.module[2:])]
    copied = copy.deepcopy([ddp, *halves])
    for optimizer in copied[1:]:
        optimizer.attach(copied[0])
    backward(copied[0], batch(0, rank))
    for optimizer in copied[1:]:
        optimizer.step()
        optimizer.detach()


@pytest.mark.parametrize("again", ["both", "one"])
@on_ranks(2)
def test_a_load_that_failed_on_one_rank_can_be_repeated(rank: int, again: str) -> None:
    """As after a checkpoint that rank 1 couldn't read: all load another, or it reads again."""
    model, optimizer = plain()
    take_step(optimizer, model, batch(0, rank))
    saved = copy.deepcopy(optimizer.state_dict())
    if rank == 0:
        optimizer.load_state_dict(saved)
    assert "first in 'calls of load_state_dict': rank 0: 1, rank 1: 0" in error_of(
        optimizer.synchronize_momentum
    )
    if again == "both" or rank == 1:
        optimizer.load_state_dict(saved)
    optimizer.synchronize_momentum()
    assert is_equal_everywhere(optimizer.state[model[0].weight]["exp_avg"])
    if rank == 1:  # And a later load on one rank is found.
        optimizer.load_state_dict(saved)
    assert "rank 0: 0, rank 1: 1" in error_of(optimizer.synchronize_momentum)
