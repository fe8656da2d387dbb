"""DDP leaves gradients to the optimizers that are attached to it, and averages them otherwise."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from hf_dlion import DistributedLion
from hf_dlion.ddp import _check_step, attach, detach, hook_states, introduce
from tests.support.spawn import on_ranks
from tests.support.training import error_of, everyones, is_equal_everywhere


class Owner(torch.optim.SGD):
    """An optimizer with the attributes of DistributedLion that `attach` reads."""

    def __init__(self, params: Any, process_group: Any = None, node_group: Any = None) -> None:
        super().__init__(params, lr=0.1)
        self.process_group, self.node_group = process_group, node_group


class RunningMean(nn.Module):
    """A layer whose state follows the data, as a codebook's does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean.lerp_(x.detach().mean(0), 0.5)
        return x - self.running_mean


class Model(nn.Module):
    """A model with an optional second half, and a buffer that isn't part of its state."""

    def __init__(self, recompute: str = "", norm: bool = False, layer: Any = None) -> None:
        super().__init__()
        layer = layer or (nn.BatchNorm1d(8) if norm else nn.Tanh())
        self.first = nn.Sequential(nn.Linear(4, 8), layer)
        self.second = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.recompute, self.interrupted = recompute, False

    def forward(self, x: Tensor, use_second: bool = True) -> Tensor:
        if self.interrupted:
            raise KeyboardInterrupt
        if self.recompute:
            x = checkpoint(self.first, x, use_reentrant=self.recompute == "reentrant")
        else:
            x = self.first(x)
        return ((self.second(x) if use_second else x) * self.scale).square().mean()


def inputs(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 4, generator=generator).requires_grad_()  # for reentrant checkpoints


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    pairs = list(zip(left, right, strict=True))
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def owned(model: nn.Module | None = None, **options: Any) -> tuple[DistributedDataParallel, Owner]:
    """Returns a new wrapper, and an optimizer of its parameters that is attached to it."""
    ddp = DistributedDataParallel(model or Model(), **options)
    owner = Owner(ddp.parameters())
    attach(ddp, owner)
    return ddp, owner


def backward(ddp: nn.Module, rank: int, step: int = 0) -> list[Tensor | None]:
    ddp.zero_grad()
    ddp(inputs(rank, step)).backward()
    return gradients(ddp)


def averages(ddp: nn.Module, rank: int, step: int = 0) -> bool:
    """Whether the gradients are the mean of those that ranks compute without DDP."""
    found = backward(ddp, rank, step)
    for grad, mean in zip(found, backward(copy.deepcopy(ddp.module), rank, step), strict=True):
        dist.all_reduce(mean.div_(dist.get_world_size()))
        torch.testing.assert_close(grad, mean)
    return True


def is_local(ddp: nn.Module, rank: int, step: int = 0) -> bool:
    return same(backward(ddp, rank, step), backward(copy.deepcopy(ddp.module), rank, step))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"micro_steps": 3},
    "no_sync": {"micro_steps": 3, "no_sync": True},
    "reentrant checkpoints": {"recompute": "reentrant"},
    "other checkpoints": {"recompute": "not reentrant"},
    "static graph": {"static_graph": True},
    "static graph with checkpoints": {"static_graph": True, "recompute": "reentrant"},
    "unused parameters": {"skip": True},
    "find unused": {"find_unused_parameters": True, "skip": True},
    "bucket views": {"gradient_as_bucket_view": True, "micro_steps": 2},
    "batch norm": {"norm": True, "micro_steps": 2},
    "batch norm and no_sync": {"norm": True, "micro_steps": 2, "no_sync": True},
    "several buckets": {"norm": True, "bucket_cap_mb": 0.0001},
    "averaged before": {"trained": True},
    "compiled inside": {"compile": "inside"},
    "compiled outside": {"compile": "outside"},
}


@pytest.mark.parametrize("case", [pytest.param("plain", marks=pytest.mark.smoke), *list(CASES)[1:]])
@on_ranks(2)
def test_gradients_equal_those_without_ddp_bit_for_bit(rank: int, case: str) -> None:
    """Compares the gradients of each step with those of the model without DDP."""
    options = dict(CASES[case])
    model = Model(options.pop("recompute", ""), options.pop("norm", False))
    bare = copy.deepcopy(model)
    micro_steps, no_sync = options.pop("micro_steps", 1), options.pop("no_sync", False)
    skip, trained = options.pop("skip", False), options.pop("trained", False)
    compiled = options.pop("compile", "")
    inner = torch.compile(model, backend="eager") if compiled == "inside" else model
    ddp = DistributedDataParallel(inner, **options)
    if trained:
        backward(ddp, rank)
    called = torch.compile(ddp, backend="eager") if compiled == "outside" else ddp
    owner = Owner(model.parameters())
    attach(called, owner)
    for step in range(3):
        model.zero_grad()
        bare.zero_grad()
        for number in range(micro_steps):
            x = inputs(rank, 10 * step + number)
            use_second = not (skip and rank == 0 and step != 1)
            quiet = no_sync and number < micro_steps - 1
            with ddp.no_sync() if quiet else contextlib.nullcontext():
                called(x, use_second).backward()
            bare(x, use_second).backward()
        assert same(gradients(model), gradients(bare))
        owner.step()
        bare.load_state_dict(model.state_dict())
    torch._dynamo.reset()


@pytest.mark.parametrize("trained", [False, True])
@on_ranks(2, timeout=20)
def test_an_attached_rank_trains_without_the_others(rank: int, trained: bool) -> None:
    """Rank 1 never trains, and rank 0's forwards and backwards start no collective."""
    ddp = DistributedDataParallel(Model(), find_unused_parameters=not trained)
    if trained:
        backward(ddp, rank)
    owner = Owner(ddp.parameters())
    attach(ddp, owner)
    with torch.profiler.profile() as profile:
        for step in range(3 * (rank == 0)):
            backward(ddp, rank, step)
    keys = [event.key for event in profile.key_averages()]
    assert [key for key in keys if "gloo" in key or "c10d" in key] == []


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, RunningMean])
@on_ranks(2)
def test_each_forward_starts_from_the_buffers_of_rank_0(rank: int, layer: type[nn.Module]) -> None:
    means: list[Tensor] = []
    ddp, _ = owned(Model(layer=layer(8)))
    ddp.module.first[1].register_forward_pre_hook(
        lambda norm, _: means.append(norm.running_mean.clone())
    )
    for step in range(3):
        backward(ddp, rank, step)
    assert all(map(is_equal_everywhere, means))
    assert not torch.equal(means[0], means[2])


WAYS = ["interrupted", "batch norm", "static graph", "attached again"]


@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.smoke), *WAYS])
@on_ranks(2)
def test_a_wrapper_without_owners_averages(rank: int, how: str) -> None:
    ddp, owner = owned(Model(norm=how == "batch norm"), static_graph=how == "static graph")
    for step in range(2):
        assert is_local(ddp, rank, step)
    if how == "interrupted":
        ddp.module.interrupted = True
        with contextlib.suppress(KeyboardInterrupt), ddp.no_sync():
            ddp(inputs(rank, 0))
        ddp.module.interrupted = False
    detach(owner)
    assert hook_states(owner) == {}
    for step in range(3):
        assert averages(ddp, rank, step)
    if how == "attached again":
        attach(ddp, owner)
        assert is_local(ddp, rank)
        detach(owner)
        assert averages(ddp, rank)


@on_ranks(2)
def test_a_wrapper_whose_owner_is_detached_inside_no_sync_averages_after_it(rank: int) -> None:
    ddp, owner = owned()
    with ddp.no_sync():
        detach(owner)
        del owner
    assert averages(ddp, rank)


@on_ranks(2, timeout=30)
def test_an_owner_that_is_dropped_without_detach_still_owns_the_wrapper(rank: int) -> None:
    """Though garbage is collected on one rank alone, all ranks do the same."""
    ddp, owner = owned()
    del owner
    if rank == 0:
        gc.collect()
    assert is_local(ddp, rank)
    other = torch.optim.SGD(ddp.parameters(), lr=0.1)
    assert "would step gradients that DDP did not average" in error_of(other.step)
    attach(ddp, Owner(ddp.parameters()))  # Takes over.
    assert is_local(ddp, rank)


@on_ranks(2)
def test_a_wrapper_that_its_owner_refers_to_is_collected_with_it() -> None:
    ddp, owner = owned()
    owner.ddp = ddp  # As a user's hooks may refer to it.
    watched = [weakref.ref(ddp), weakref.ref(owner)]
    del ddp, owner
    gc.collect()
    assert [watch() for watch in watched] == [None, None]


@on_ranks(3)
def test_a_node_group_averages_inside_the_node_only(rank: int) -> None:
    nodes = [dist.new_group([0, 1]), dist.new_group([2])]
    ddp = DistributedDataParallel(Model())
    owner = Owner(ddp.parameters(), node_group=nodes[rank // 2])
    attach(ddp, owner)
    bare = everyones(backward(copy.deepcopy(ddp.module), rank)[0])
    expected = bare[2] if rank == 2 else (bare[0] + bare[1]) / 2
    for _ in range(2):
        assert torch.equal(backward(ddp, rank)[0], expected)
    other = Owner(ddp.module.first.parameters())
    assert "use one local_group" in error_of(attach, ddp, other)
    detach(owner)
    assert averages(ddp, rank)


class Around(torch.optim.SGD):
    """An optimizer that calls another one's step, as Lookahead and SAM do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, lr=0.1)
        self.base_optimizer = inner

    def step(self, closure: Any = None) -> None:
        self.base_optimizer.step()


@on_ranks(2)
def test_another_optimizer_may_not_step_attached_gradients(rank: int) -> None:
    ddp = DistributedDataParallel(Model())
    owner = Owner(ddp.parameters())
    adamw = torch.optim.AdamW(ddp.module.second.parameters())
    elsewhere = torch.optim.AdamW(nn.Linear(2, 2).parameters())

    def errors() -> list[str]:
        backward(ddp, rank)
        return [error_of(optimizer.step) for optimizer in (adamw, owner, elsewhere)]

    assert errors() == ["", "", ""]
    attach(ddp, owner)
    refused, *others = errors()
    assert refused.startswith("RuntimeError: AdamW would step")
    assert others == ["", ""]
    assert error_of(Around(owner).step) == ""
    assert error_of(Around(adamw).step).startswith("RuntimeError: Around would step")
    detach(owner)
    assert errors() == ["", "", ""]
    assert list(_global_optimizer_pre_hooks.values()).count(_check_step) == 1


BUCKETS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "bucket views": ({"gradient_as_bucket_view": True}, False),
    "find unused": ({"find_unused_parameters": True}, False),
    "static graph": ({"static_graph": True}, True),
    "batch norm": ({}, True),
}


@pytest.mark.parametrize(
    "case", [pytest.param("plain", marks=pytest.mark.smoke), *list(BUCKETS)[1:]]
)
@on_ranks(2)
def test_an_attached_wrapper_keeps_no_copy_of_the_gradients(rank: int, case: str) -> None:
    """Buckets are freed by `attach`, and come back with `detach`, if no gradient is averaged."""
    options, keeps = BUCKETS[case]
    ddp = DistributedDataParallel(Model(norm=case == "batch norm"), **options)
    count = sum(param.numel() for param in ddp.parameters())

    def in_buckets() -> int:
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        return sum(bucket.buffer().numel() for bucket in buckets)

    assert in_buckets() == count
    owner = Owner(ddp.parameters())
    for _ in range(2):
        attach(ddp, owner)
        assert is_local(ddp, rank)
        assert in_buckets() == (count if keeps else 1)
        detach(owner)
        assert in_buckets() == count
        assert averages(ddp, rank)


@pytest.mark.parametrize("frozen", ["some", "all"])
@on_ranks(2)
def test_what_was_frozen_at_detach_is_averaged_again(rank: int, frozen: str) -> None:
    """As in training by stages, or of a GAN."""
    ddp, owner = owned(find_unused_parameters=True)
    part = ddp.module.first if frozen == "some" else ddp
    part.requires_grad_(False)
    with torch.inference_mode():
        detach(owner)
    assert not any(param.requires_grad for param in part.parameters())
    part.requires_grad_(True)
    assert averages(ddp, rank)
    part.requires_grad_(frozen == "all")  # Also what is frozen at the attach.
    attach(ddp, owner)
    assert is_local(ddp, rank)
    full = torch.OutOfMemoryError("no memory")
    with mock.patch("hf_dlion.ddp_buckets._make_reducer", side_effect=full):
        assert "no memory" in error_of(detach, owner)
    assert is_local(ddp, rank)
    detach(owner)
    part.requires_grad_(True)
    assert averages(ddp, rank)


@on_ranks(2)
def test_gradients_stay_local_in_a_loop_that_sets_the_synchronization(rank: int) -> None:
    ddp, owner = owned()
    ddp.require_backward_grad_sync = True  # As loops that accumulate by themselves do.
    assert is_local(ddp, rank)
    assert error_of(owner.step) == ""


@on_ranks(2)
def test_an_attached_wrapper_refuses_another_hook(rank: int) -> None:
    ddp, _owner = owned()
    assert "can only be called once" in error_of(ddp.register_comm_hook, None, allreduce_hook)


def copied(ddp: nn.Module, how: str) -> nn.Module:
    if how == "pickle":
        return pickle.loads(pickle.dumps(ddp))
    return AveragedModel(ddp).module if how == "average" else copy.deepcopy(ddp)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "average"])
@on_ranks(2)
def test_a_copy_of_a_wrapper_averages(rank: int, how: str, norm: bool) -> None:
    original, _owner = owned(Model(norm=norm))
    backward(original, rank)
    first = copied(original, how)
    assert averages(first, rank, 1)
    assert is_local(original, rank, 2)
    assert averages(copied(first, how), rank, 3)
    owner = Owner(first.parameters())
    attach(first, owner)
    assert is_local(first, rank, 4)
    detach(owner)
    assert averages(first, rank, 5)


@pytest.mark.parametrize("norm", [False, True])
@on_ranks(2)
def test_optimizers_share_a_wrapper_or_take_over(rank: int, norm: bool) -> None:
    """Two optimizers own a half each; then a third takes over the first one's half."""
    unowned = "trainable parameters of the DDP wrapper belong to no attached optimizer"
    ddp = DistributedDataParallel(Model(norm=norm))
    first, second = ddp.module.first, ddp.module.second
    owners = [Owner(half.parameters()) for half in (first, second, first)]
    assert unowned in error_of(attach, ddp, owners[0])
    introduce(owners[1])
    attach(ddp, owners[0])
    assert "Owner would step" in error_of(owners[1].step)
    attach(ddp, owners[1])
    assert is_local(ddp, rank)
    assert is_local(ddp, rank, 1)
    assert [error_of(owner.step) for owner in owners[:2]] == ["", ""]
    attach(ddp, owners[2])
    assert [list(hook_states(owner)) == [ddp] for owner in owners] == [False, True, True]
    assert is_local(ddp, rank, 2)
    refused, *others = [error_of(owner.step) for owner in owners]
    assert "Owner would step" in refused
    assert others == ["", ""]
    detach(owners[2])
    assert unowned in error_of(backward, ddp, rank)


@on_ranks(2)
def test_what_ddp_ignores_needs_no_owner_and_no_synchronization(rank: int) -> None:
    model = Model(norm=True)
    ignored = [f"second.{name}" for name, _ in model.second.named_parameters()]
    ignored += [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model)
    owner, other = Owner(model.first.parameters()), Owner(model.second.parameters())
    attach(ddp, owner)
    assert not ddp.require_backward_grad_sync
    assert is_local(ddp, rank)
    assert [error_of(optimizer.step) for optimizer in (owner, other)] == ["", ""]
    detach(owner)


@on_ranks(2)
def test_a_wrapper_of_compiled_regions_is_attached_itself(rank: int) -> None:
    """Attaches a copy of a wrapper, as Accelerate's regional compilation makes it."""
    original = DistributedDataParallel(Model())
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    vars(ddp).update(vars(original), _orig_mod=original)
    owner = Owner(ddp.parameters())
    attach(ddp, owner)
    assert list(hook_states(owner)) == [ddp]
    assert original.reducer is ddp.reducer  # So the buckets of the first one are freed.
    assert is_local(ddp, rank)
    detach(owner)
    assert original.reducer is ddp.reducer
    assert not is_local(ddp, rank)


class Outer(nn.Module):
    """A module around another, such as what Fabric.setup() returns."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)


@on_ranks(2)
def test_the_only_wrapper_in_other_modules_is_attached_and_several_are_refused(rank: int) -> None:
    ddp, other = DistributedDataParallel(Model()), DistributedDataParallel(Model())
    for around in (
        torch.compile,
        Outer,
        lambda it: Outer(Outer(torch.compile(it)), nn.Linear(2, 2)),
    ):
        owner = Owner(ddp.parameters())
        attach(around(ddp), owner)
        assert list(hook_states(owner)) == [ddp]
        assert is_local(ddp, rank)
        detach(owner)
    said = error_of(attach, Outer(ddp, other), owner)
    assert said.startswith("ValueError: Outer has 2 modules of class DistributedDataParallel")
    assert hook_states(owner) == {}


REFUSED = {
    "no wrapper": "TypeError: attach() needs a DistributedDataParallel, or a module with one",
    "other model": "ValueError: the optimizer holds none of the 4 trainable parameters",
    "unowned": "RuntimeError: 2 trainable parameters of the DDP wrapper belong to no attached opt",
    "hook": "RuntimeError: the DDP wrapper already has the communication hook 'allreduce_hook'",
    "builtin hook": "RuntimeError: the DDP wrapper already has a communication hook: ",
    "group": "ValueError: the DDP wrapper averages over ranks [0, 1], but the optimizer votes amon",
    "delayed": "RuntimeError: the DDP wrapper averages 2 parameters without a communication hook",
    "python reducer": 'RuntimeError: torch._dynamo.config.optimize_ddp = "python_reducer"',
}


@pytest.mark.parametrize("what", REFUSED)
@on_ranks(2)
def test_attach_refuses_an_unsupported_wrapper(rank: int, what: str) -> None:
    model = Model()
    options: dict[str, Any] = {}
    if what == "delayed":
        options["delay_all_reduce_named_params"] = list(model.second.named_parameters("second"))
        options["param_to_hook_all_reduce"] = model.second.weight
    mode = "python_reducer" if what == "python reducer" else True
    with torch._dynamo.config.patch(optimize_ddp=mode):
        ddp = DistributedDataParallel(model, **options)
        if what == "hook":
            ddp.register_comm_hook(None, allreduce_hook)
        if what == "builtin hook":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        held = {"other model": Model(), "unowned": model.first}.get(what, model)
        alone = [dist.new_group([r]) for r in range(2)][rank] if what == "group" else None
        owner = Owner(held.parameters(), process_group=alone)
        found = error_of(attach, model if what == "no wrapper" else ddp, owner)
    assert found.startswith(REFUSED[what])
    assert hook_states(owner) == {}
    if what not in ("delayed", "python reducer"):
        assert ddp.require_backward_grad_sync is True


@pytest.mark.parametrize("norm", [False, True])
@on_ranks(2)
def test_join_is_refused(rank: int, norm: bool) -> None:
    ddp, owner = owned(Model(norm=norm))

    def train_once() -> None:
        with ddp.join():
            backward(ddp, rank)
            assert not norm, "the hook lets a bucket pass"
            owner.step()

    for message in (error_of(train_once), error_of(attach, ddp, owner)):
        assert message.startswith("RuntimeError: DistributedLion does not work in ddp.join()")


@on_ranks(2)
def test_wrapper_and_optimizer_can_be_garbage_collected(rank: int) -> None:
    ddp, owner = owned()
    introduce(owner)
    backward(ddp, rank)
    gone = [weakref.ref(ddp), weakref.ref(owner)]
    del ddp, owner
    gc.collect()
    assert [ref() is None for ref in gone] == [True, True]


@on_ranks(1)
def test_a_process_that_trains_alone_is_told(rank: int) -> None:
    """As on each machine if `--nnodes` was forgotten."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="trains alone, .*with --nnodes"):
        DistributedLion(model.parameters()).attach(model)
