"""DistributedLion beside the rest of torch: what torch's own optimizers are checked for."""

from __future__ import annotations

import copy
import inspect
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hf_dlion import DistributedLion
from tests.support.oracle import same_bits
from tests.support.random_training import (
    DTYPES,
    all_same_bits,
    backward,
    mixed_params,
    random_param,
    take_steps,
)

SCHEDULERS: dict[str, Callable[[DistributedLion], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.5**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.5),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    known = {
        name
        for name, found in inspect.getmembers(lr_scheduler, inspect.isclass)
        if issubclass(found, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert known - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_decides_how_far_every_step_moves(name: str, tensor_lr: bool) -> None:
    p = random_param(40)
    optimizer = DistributedLion([p], lr=torch.tensor(0.25) if tensor_lr else 0.25)
    scheduler = SCHEDULERS[name](optimizer)
    lrs, betas = [], []
    for seed in range(5):
        before = p.detach().clone()
        lrs.append(float(optimizer.param_groups[0]["lr"]))
        betas.append(float(optimizer.param_groups[0]["betas"][0]))
        backward([p], seed)
        optimizer.step()
        torch.testing.assert_close((p - before).abs(), torch.full((40,), lrs[-1]))
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(set(lrs)) > 1
    # These two cycle the momentum too: of an optimizer with betas, the first of them.
    assert (len(set(betas)) > 1) == (name in ("CyclicLR", "OneCycleLR"))


def test_an_averaged_model_is_the_mean_of_the_steps() -> None:
    model = nn.Linear(3, 2)
    averaged = swa_utils.AveragedModel(model)
    optimizer = DistributedLion(model.parameters(), lr=0.1)
    seen = []
    for seed in range(3):
        take_steps(optimizer, list(model.parameters()), range(seed, seed + 1))
        averaged.update_parameters(model)
        seen.append(model.weight.detach().clone())
    torch.testing.assert_close(averaged.module.weight, torch.stack(seen).mean(0))


def test_the_parts_of_a_parametrized_weight_are_trained() -> None:
    model = parametrizations.weight_norm(nn.Linear(3, 2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = DistributedLion(model.named_parameters(), lr=0.125)
    model(torch.tensor([[1.0, 2.0, 4.0]])).square().sum().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close((p - before[name]).abs(), torch.full_like(p, 0.125))
    assert "parametrizations.weight.original0" in optimizer.param_groups[0]["param_names"]


def test_a_tied_weight_votes_once_with_the_sum_of_its_gradients() -> None:
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    before = embedding.weight.detach().clone()
    optimizer = DistributedLion(model.named_parameters(), lr=0.125)
    model(torch.arange(5)).square().sum().backward()
    assert embedding.weight.grad is not None
    expected = before - 0.125 * embedding.weight.grad.sign()
    optimizer.step()
    assert torch.equal(head.weight, expected)


@pytest.mark.parametrize("how", ["functional_call", "grad"])
def test_gradients_of_functional_calls_are_taken(how: str) -> None:
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    x = torch.tensor([[1.0, -2.0, 4.0]])

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x,)).square().sum()

    optimizer = DistributedLion(model.named_parameters(), lr=0.125)
    reference = DistributedLion(twin.named_parameters(), lr=0.125)
    for _ in range(3):
        reference.zero_grad()
        twin(x).square().sum().backward()
        reference.step()
        optimizer.zero_grad()
        if how == "functional_call":
            loss(dict(model.named_parameters())).backward()
        else:
            grads = torch.func.grad(loss)({k: p.detach() for k, p in model.named_parameters()})
            for name, p in model.named_parameters():
                p.grad = grads[name]
        optimizer.step()
    assert all_same_bits(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("cls", [DistributedLion, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_backward_through_a_graph_from_before_the_step_is_refused(
    cls: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    optimizer = cls(model.parameters(), lr=0.01)
    loss = model(torch.ones(3, 4, dtype=dtype)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


def training_step(model: nn.Module, optimizer: DistributedLion, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "backend"),
    [
        ("model", "aot_eager"),
        ("training step", "eager"),
        pytest.param("step", "eager", marks=pytest.mark.long),
        pytest.param("step", "aot_eager", marks=pytest.mark.long),
        pytest.param("training step", "aot_eager", marks=pytest.mark.long),
        pytest.param("model", "inductor", marks=[COMPILER, pytest.mark.long]),
        pytest.param("step", "inductor", marks=[COMPILER, pytest.mark.long]),
        pytest.param("training step", "inductor", marks=[COMPILER, pytest.mark.long]),
    ],
)
def test_compiled_training_gives_the_same_bits(what: str, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    optimizer, reference = (
        DistributedLion(m.named_parameters(), lr=0.1, weight_decay=0.1) for m in (model, twin)
    )
    called: nn.Module = model
    train = training_step
    with warnings.catch_warnings():
        # Dynamo tells where the graph breaks, and that it ignores the profiler and hooks.
        warnings.simplefilter("ignore")
        if what == "model":
            called = torch.compile(model, backend=backend)  # type: ignore[assignment]
        elif what == "step":
            optimizer.step = torch.compile(optimizer.step, backend=backend)  # type: ignore[method-assign]
        else:
            train = torch.compile(training_step, backend=backend)
        for seed in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            train(called, optimizer, x)
            training_step(twin, reference, x)
    assert optimizer.steps == 3
    assert all_same_bits(list(model.parameters()), list(twin.parameters()))


def test_hooks_on_all_optimizers_see_its_steps() -> None:
    p, seen = random_param(3), []
    optimizer = DistributedLion([p])
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: seen.append(("pre", o))),
        register_optimizer_step_post_hook(lambda o, *_: seen.append(("post", o))),
    ]
    try:
        take_steps(optimizer, [p], range(1))
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [("pre", optimizer), ("post", optimizer)]


def test_a_step_hook_may_replace_the_arguments() -> None:
    optimizer = DistributedLion([random_param(3)])
    optimizer.register_step_pre_hook(lambda o, *_: ((o, lambda: 7.0), {}))  # type: ignore[arg-type]
    assert optimizer.step() == 7.0  # type: ignore[func-returns-value]


def test_a_copy_has_all_public_attributes() -> None:
    p = random_param(3)
    optimizer = DistributedLion([p])
    take_steps(optimizer, [p], range(1))
    assert {name for name in dir(optimizer) if name[0] != "_"} == {
        name for name in dir(copy.deepcopy(optimizer)) if name[0] != "_"
    }


def test_a_copy_takes_new_groups_with_its_defaults() -> None:
    copied = copy.deepcopy(DistributedLion([random_param(3)], lr=0.25))
    copied.add_param_group({"params": [random_param(2)]})
    assert copied.param_groups[1]["lr"] == 0.25


def test_betas_may_be_tensors() -> None:
    a, b = [random_param(40)], [random_param(40)]
    numbers = DistributedLion(a, lr=0.1, betas=(0.75, 0.5))
    tensors = DistributedLion(b, lr=0.1, betas=(torch.tensor(0.75), torch.tensor(0.5)))  # type: ignore[arg-type]
    take_steps(numbers, a, range(3))
    take_steps(tensors, b, range(3))
    assert all_same_bits(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "twist",
    [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.new_empty(8, 6, 10)[::2, 1:5, ::2].copy_(t),
        lambda t: t.unsqueeze(0).contiguous(memory_format=torch.channels_last)[0],
    ],
    ids=["transposed", "strided", "channels last"],
)
def test_strides_do_not_matter(
    twist: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    plain = random_param(4, 4, 5, dtype=dtype)
    twisted = nn.Parameter(twist(plain.detach()))
    assert not twisted.is_contiguous()
    strides = twisted.stride()
    a, b = (DistributedLion([p], lr=0.1, weight_decay=0.1) for p in (plain, twisted))
    for seed in range(3):
        (grad,) = backward([plain], seed)
        assert grad is not None
        twisted.grad = twist(grad)
        a.step()
        b.step()
    assert same_bits(plain, twisted.detach().contiguous())
    assert twisted.stride() == strides


def test_an_empty_parameter_is_no_obstacle() -> None:
    empty, p = nn.Parameter(torch.zeros(0, 3)), random_param(2)
    optimizer = DistributedLion([empty, p], lr=0.125)
    before = p.detach().clone()
    (empty.sum() + p.sum()).backward()
    optimizer.step()
    assert torch.equal(p, before - 0.125)
    copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())


def test_steps_without_gradients_do_nothing() -> None:
    p = random_param(3)
    before = p.detach().clone()
    optimizer = DistributedLion([p], lr=0.1, weight_decay=0.1)
    optimizer.step()
    backward([p], 0)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert torch.equal(p, before)
    assert optimizer.steps == 0


def test_two_state_dicts_are_equal_and_in_the_parameters_order() -> None:
    params = mixed_params()
    optimizer = DistributedLion(params, lr=0.1)
    # The last one first, so that the state is filled in another order.
    take_steps(optimizer, params[-1:], range(1))
    take_steps(optimizer, params, range(1))
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert list(first["state"]) == list(second["state"])
    assert set(first["state"]) == set(range(len(params)))
    assert first["param_groups"] == second["param_groups"]
    copied = copy.deepcopy(optimizer)
    copied.load_state_dict(first)
    assert copied.state_dict()["param_groups"] == first["param_groups"]


@pytest.mark.parametrize("named", [(True, False), (False, True)], ids=["to unnamed", "to named"])
def test_named_and_unnamed_states_load_into_one_another(named: tuple[bool, bool]) -> None:
    saved, loaded = (
        DistributedLion([("w", p)] if names else [p])
        for names, p in zip(named, (random_param(3), random_param(3)), strict=True)
    )
    p, q = (o.param_groups[0]["params"][0] for o in (saved, loaded))
    take_steps(saved, [p], range(2))
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded.state[q]["exp_avg"], saved.state[p]["exp_avg"])
    assert loaded.steps == 2


def test_a_state_of_the_first_release_loads() -> None:
    # It had neither a copy of the entry in the groups nor whose momentum it is.
    p, q = random_param(3), random_param(3)
    optimizer, other = DistributedLion([p], seed=3), DistributedLion([q])
    take_steps(optimizer, [p], range(2))
    state = optimizer.state_dict()
    state["dlion"] = {name: state["dlion"][name] for name in ("version", "steps", "seed")}
    for group in state["param_groups"]:
        del group["dlion"]
    other.load_state_dict(state)
    assert (other.steps, other.options.seed) == (2, 3)
    assert torch.equal(other.state[q]["exp_avg"], optimizer.state[p]["exp_avg"])
