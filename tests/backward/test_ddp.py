"""DDP hands over local gradients however it is wrapped: training equals that without a wrapper."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import DistributedLion
from hf_dlion.backward import search as comm_hook
from hf_dlion.ranks.agreement import Disagreement
from tests.support.ddp_training import (
    CASES,
    STEPS,
    alike,
    batches,
    bits_of,
    new_model,
    optimizer_of,
    released,
    train,
)
from tests.support.messages import message_numel
from tests.support.spawn import RankPools

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("case", [pytest.param("plain", marks=pytest.mark.smoke), *list(CASES)[1:]])
def test_training_in_ddp_equals_training_without_it(ranks: RankPools, case: str) -> None:
    wrap, ddp_options, loop = CASES[case]
    wrapped = ranks(2).run(train, wrap, ddp_options, loop)
    bare = ranks(2).run(train, "bare", {}, {**loop, "set_to_none": True})
    for (bits, sent), (bare_bits, bare_sent) in zip(wrapped, bare, strict=True):
        assert all(map(torch.equal, bits, wrapped[0][0]))
        assert all(map(torch.equal, bits, bare_bits))
        assert sent == bare_sent


def leave_gradients_local(rank: int, world_size: int) -> tuple[Tensor, bool]:
    model = new_model()
    optimizer = optimizer_of(model)
    holder = [DistributedDataParallel(model)]
    with released(holder):
        holder[0](batches(rank, 1)[0][0]).backward()
        local = model.first.weight.grad.clone()
        alone = new_model()
        alone(batches(rank, 1)[0][0]).backward()
        optimizer.step()
        return local, torch.equal(local, alone.first.weight.grad)


def test_gradients_stay_each_ranks_own(ranks: RankPools) -> None:
    (first, first_own), (second, second_own) = ranks(2).run(leave_gradients_local)
    assert first_own
    assert second_own
    assert not torch.equal(first, second)


class Loop:
    """Holds a wrapper in a cycle, as torch.compile's wrapper of one does."""

    def __init__(self, model: nn.Module) -> None:
        self.ddp, self.forward = DistributedDataParallel(model), self.run

    def run(self, tokens: Tensor) -> Tensor:
        return self.ddp(tokens)


def wrap_again(rank: int, world_size: int, old: str) -> dict[str, Any]:
    """Trains, wraps the same model in a new DDP and trains on."""
    model = new_model()
    optimizer = optimizer_of(model)
    holder: list[Any] = [Loop(model)]
    kept: list[Any] = []
    local: list[bool] = []
    gc.disable()
    try:
        with released(holder, kept):
            for step, (tokens,) in enumerate(batches(rank, 1)[:4]):
                if step == 1:
                    if old == "kept":
                        kept.extend(holder)
                    holder[0] = Loop(model)
                    if old == "gone" or (old == "gone on one rank" and rank == 0):
                        gc.collect()
                holder[0].forward(tokens).backward()
                local.append(not alike(model.first.weight.grad))
                optimizer.step()
                optimizer.zero_grad()
    finally:
        gc.enable()
    return {"local": local, "bits": bits_of(model)}


@pytest.mark.parametrize("old", ["kept", "gone", "gone on one rank"])
def test_a_new_wrapper_is_found_at_once_whatever_became_of_the_old_one(
    ranks: RankPools, old: str
) -> None:
    results = ranks(2).run(wrap_again, old)
    for result in results:
        assert result["local"] == [True] * 4
        assert all(map(torch.equal, result["bits"], results[0]["bits"]))


def wrap_in_each_epoch(rank: int, world_size: int) -> list[Tensor]:
    """A wrapper for each epoch, all kept; rank 1 runs out of data first."""
    model = new_model()
    optimizer = optimizer_of(model)
    holder: list[Any] = []
    with released(holder):
        for _ in range(3):
            holder.append(DistributedDataParallel(model, broadcast_buffers=False))
            with Join([optimizer]):
                for (tokens,) in batches(rank, 1)[: 2 + (rank == 0)]:
                    holder[-1](tokens).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return bits_of(model)


def test_wrappers_are_found_alike_by_ranks_without_data(ranks: RankPools) -> None:
    first, second = ranks(2).run(wrap_in_each_epoch, timeout=30)
    assert all(map(torch.equal, first, second))


def search_only_while_needed(rank: int, world_size: int) -> list[bool]:
    gc.collect()
    model = new_model()
    optimizer = optimizer_of(model)
    holder = [DistributedDataParallel(model)]
    with released(holder):
        searching = [comm_hook._search.active]
        holder[0](batches(rank, 1)[0][0]).backward()
        searching.append(comm_hook._search.active)
        optimizer.step()
        searching.append(comm_hook._search.active)
    searching.append(comm_hook._search.active)
    return searching


def test_the_hook_of_all_modules_goes_once_the_wrapper_is_found(ranks: RankPools) -> None:
    assert ranks(2).run(search_only_while_needed) == [[True, False, False, False]] * 2


def train_two_models(rank: int, world_size: int, one_wrapper: bool) -> list[bool]:
    """Two optimizers, over the two halves of one wrapper or over two wrappers."""
    models = nn.ModuleDict({"a": new_model(), "b": new_model()})
    optimizers = [optimizer_of(models["a"]), optimizer_of(models["b"])]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.models = models

        def forward(self, tokens: Tensor) -> Tensor:
            return self.models["a"](tokens) + 2 * self.models["b"](tokens)

    holder: list[Any] = (
        [DistributedDataParallel(Both())]
        if one_wrapper
        else [DistributedDataParallel(models["a"]), DistributedDataParallel(models["b"])]
    )
    with released(holder):
        for step in batches(rank, 1):
            sum(wrapper(step[0]) for wrapper in holder).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    mine = bits_of(models)
    moved = [
        not torch.equal(bits, first)
        for bits, first in zip(mine, bits_of(new_model()) * 2, strict=True)
    ]
    return [alike(*mine), all(moved), all(o.wire.exchanges == STEPS for o in optimizers)]


@pytest.mark.parametrize("one_wrapper", [True, False])
def test_several_optimizers_work_side_by_side(ranks: RankPools, one_wrapper: bool) -> None:
    assert ranks(2).run(train_two_models, one_wrapper) == [[True, True, True]] * 2


def train_against_a_frozen_critic(rank: int, world_size: int, loaded: bool) -> list[bool]:
    """Returns for each step of the critic whether its gradients are those of this rank alone."""
    gc.collect()
    maker, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    optimizers = DistributedLion(maker.parameters()), DistributedLion(critic.parameters())
    holder = [DistributedDataParallel(maker), DistributedDataParallel(critic)]
    local = []
    with released(holder):
        if loaded:
            optimizers[1].attach(holder[1])
            # Its wrapper may be another one from here on, so it is looked for once more.
            optimizers[1].load_state_dict(optimizers[1].state_dict())
        for _ in range(3):
            critic.requires_grad_(False)
            holder[1](holder[0](torch.full((4, 2), rank + 1.0))).sum().backward()
            optimizers[0].step()
            critic.requires_grad_(True)
            critic.zero_grad()
            holder[1](torch.full((4, 3), rank + 1.0)).sum().backward()
            local.append(torch.equal(critic.weight.grad, torch.full((1, 3), 4.0 * (rank + 1))))
            optimizers[1].step()
    return local


@pytest.mark.parametrize("loaded", [False, True])
def test_gradients_stay_local_in_a_wrapper_that_was_found_frozen(
    ranks: RankPools, loaded: bool
) -> None:
    assert ranks(2).run(train_against_a_frozen_critic, loaded) == [[True] * 3] * 2


def train_in_a_compiled_step(rank: int, world_size: int) -> tuple[int, Tensor]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = DistributedLion(model.parameters())
    holder = [DistributedDataParallel(model)]

    @torch.compile(backend="eager")
    def train_once(inputs: Tensor) -> None:
        optimizer.zero_grad()
        holder[0](inputs).sum().backward()
        optimizer.step()

    with released(holder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of torch, about DDP and about itself.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for step in range(12):
                train_once(torch.full((4, 2), rank + step + 1.0))
    return optimizer.steps, model[0].weight.detach().clone()


def test_a_whole_step_may_be_compiled(ranks: RankPools) -> None:
    (steps, weights), (_, others) = ranks(2).run(train_in_a_compiled_step)
    assert steps == 12
    assert torch.equal(weights, others)


def refuse(rank: int, world_size: int, what: str) -> str:
    model = new_model()
    holder: list[Any] = [DistributedDataParallel(model)]
    with released(holder):
        options: dict[str, Any] = {}
        params: Any = model.named_parameters()
        if what == "foreign_hook":
            holder[0].register_comm_hook(None, allreduce_hook)
        if what == "foreign_group":
            options["process_group"] = dist.new_group(list(range(world_size)))
        if what == "strangers":
            params = model.first.named_parameters()
        optimizer = DistributedLion(params, **options)
        try:
            if what == "no_wrapper":
                optimizer.attach(model)
            elif what == "other_model":
                optimizer.attach(DistributedDataParallel(new_model()))
            else:
                holder[0](batches(rank, 1)[0][0])
        except (RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("foreign_hook", "RuntimeError: DDP already has the comm hook 'allreduce_hook'"),
        ("foreign_group", "RuntimeError: DistributedDataParallel and DistributedLion use differ"),
        ("strangers", "RuntimeError: DDP would leave the gradients of 5 trainable"),
        ("no_wrapper", "TypeError: attach() takes a DistributedDataParallel, got Model"),
        ("other_model", "ValueError: the DDP wrapper holds none of this optimizer's parameters"),
    ],
)
def test_a_wrapper_that_cannot_be_attached_is_refused_by_name(
    ranks: RankPools, what: str, message: str
) -> None:
    for found in ranks(2).run(refuse, what):
        assert found.startswith(message)


def overflow(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1's loss overflows in step 1; GradScaler on the CPU, through clipping's unscale_."""
    model = new_model()
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    holder = [DistributedDataParallel(model)]
    momenta = []
    with released(holder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, (tokens,) in enumerate(batches(rank, 1)):
            loss = holder[0](tokens)
            if rank == 1 and step == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            momenta.append(optimizer.state[model.first.weight]["exp_avg"].clone())
    return {
        "bits": bits_of(model),
        "scale": scaler.get_scale(),
        "kept": torch.equal(momenta[0], momenta[1]),
        "steps": optimizer.steps,
        "abstentions": optimizer.wire.abstentions,
    }


def test_a_rank_that_overflows_abstains_while_the_others_go_on(ranks: RankPools) -> None:
    first, second = ranks(2).run(overflow)
    assert all(map(torch.equal, first["bits"], second["bits"]))
    assert (first["scale"], second["scale"]) == (1024.0, 512.0)
    assert (first["kept"], second["kept"]) == (False, True)
    assert first["steps"] == second["steps"] == STEPS
    assert first["abstentions"] == second["abstentions"] == 1


def unscale_in_step(rank: int, world_size: int) -> bool:
    """Without unscale_() before it, step() divides by the scale itself."""
    models = [new_model(), new_model()]
    for model, scaler in zip(
        models, [None, torch.amp.GradScaler("cpu", init_scale=64.0)], strict=True
    ):
        optimizer = optimizer_of(model)
        for (tokens,) in batches(rank, 1):
            loss = model(tokens)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return all(map(torch.equal, bits_of(models[0]), bits_of(models[1])))


def test_the_scale_of_the_loss_is_divided_out(ranks: RankPools) -> None:
    assert ranks(2).run(unscale_in_step) == [True, True]


def refuse_shards(rank: int, world_size: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = new_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    try:
        optimizer_of(model)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_shards_of_one_replica_are_refused_as_voters_with_what_works(ranks: RankPools) -> None:
    for message in ranks(2).run(refuse_shards):
        assert 'replicate=mesh["replicate"]' in message
        assert "DistributedDataParallel" in message


def test_hooks_do_not_keep_an_optimizer_alive_nor_hinder_copies() -> None:
    model = new_model()
    optimizer = optimizer_of(model)
    assert model.first.weight._post_accumulate_grad_hooks
    twin = copy.deepcopy(model)
    assert torch.equal(pickle.loads(pickle.dumps(model)).first.weight, model.first.weight)
    twin(torch.zeros(1, 1, dtype=torch.int64)).backward()
    del optimizer
    gc.collect()
    assert not model.first.weight._post_accumulate_grad_hooks


def saved(ddp: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "save": saved,
    "average": lambda ddp: torch.optim.swa_utils.AveragedModel(ddp).module,
    "copy of a copy": lambda ddp: saved(copy.deepcopy(ddp)),
}


def gradients_of(ddp: nn.Module, rank: int) -> Tensor:
    ddp.zero_grad()
    ddp(torch.full((2, 4), 1.0 + rank)).square().sum().backward()
    return torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None])


def train_beside_a_copy(
    rank: int, world_size: int, how: str, ddp_options: dict[str, Any]
) -> dict[str, Any]:
    torch.manual_seed(0)
    holder: list[nn.Module] = [DistributedDataParallel(nn.Linear(4, 3), **ddp_options)]
    optimizer = DistributedLion(holder[0].parameters(), lr=0.1)
    gradients_of(holder[0], rank)
    optimizer.step()
    holder.append(COPIES[how](holder[0]))
    found: dict[str, Any] = {"copy": gradients_of(holder[1], rank)}
    found["own"] = gradients_of(holder[0], rank)
    optimizer.step()
    # An optimizer of its own takes the copy over as it would any wrapper.
    second = DistributedLion(holder[1].parameters(), lr=0.1)
    found["second"] = gradients_of(holder[1], rank)
    second.step()
    found["weights"] = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in holder]
    return found


@pytest.mark.parametrize("ddp_options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_wrapper_is_nobodys(
    ranks: RankPools, how: str, ddp_options: dict[str, Any]
) -> None:
    left, right = ranks(2).run(train_beside_a_copy, how, ddp_options)
    assert torch.equal(left["copy"], right["copy"])
    torch.testing.assert_close(left["copy"], (left["own"] + right["own"]) / 2)
    for name in ("own", "second"):
        assert not torch.equal(left[name], right[name])
    # Each has moved by itself, and alike on all ranks.
    assert all(map(torch.equal, left["weights"], right["weights"]))


def train_parts(rank: int, world_size: int, rewrap: bool) -> dict[str, Any]:
    """One optimizer over two wrappers; with `rewrap` the second gets a new one in step 2."""
    models = nn.ModuleDict({"a": new_model(), "b": new_model()})
    optimizer = optimizer_of(models)
    holder = [DistributedDataParallel(models["a"]), DistributedDataParallel(models["b"])]
    old: list[Any] = []
    local: list[bool] = []
    with released(holder, old), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, (tokens,) in enumerate(batches(rank, 1)):
            if rewrap and step == 1:
                old.append(holder[1])
                holder[1] = DistributedDataParallel(models["b"])
            (holder[0](tokens) + holder[1](tokens)).backward()
            local.append(not alike(models["b"].first.weight.grad))
            optimizer.step()
            optimizer.zero_grad()
    return {"local": local, "searching": comm_hook._search.active, "bits": bits_of(models)}


@pytest.mark.parametrize("rewrap", [False, True])
def test_every_wrapper_of_an_optimizer_is_found(ranks: RankPools, rewrap: bool) -> None:
    results = ranks(2).run(train_parts, rewrap)
    for result in results:
        assert result["local"] == [True] * STEPS
        assert all(map(torch.equal, result["bits"], results[0]["bits"]))


def train_wrappers_in_turns(rank: int, world_size: int, tasks: str) -> tuple[list[bool], bool]:
    """One optimizer, two wrappers that take turns; returns in which steps gradients are local."""
    torch.manual_seed(0)
    trunk, heads = nn.Linear(4, 6), [nn.Linear(6, 2), nn.Linear(6, 3)]
    trunks = [trunk, nn.Linear(4, 6) if tasks == "apart" else trunk]
    chosen = [heads[0], heads[0] if tasks == "same" else heads[1]]
    models = [nn.Sequential(*parts) for parts in zip(trunks, chosen, strict=True)]
    optimizer = optimizer_of(nn.ModuleList([*trunks, *chosen]))
    holder = [DistributedDataParallel(model) for model in models]
    local = []
    with released(holder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(8):
            holder[step % 2](torch.full((4, 4), rank + 1.0)).square().sum().backward()
            local.append(not alike(models[step % 2][0].weight.grad))
            optimizer.step()
            optimizer.zero_grad()
        return local, alike(*bits_of(nn.ModuleList(models)))


@pytest.mark.parametrize("tasks", ["apart", "trunk", "same"])
def test_wrappers_that_take_turns_are_all_found(ranks: RankPools, tasks: str) -> None:
    assert ranks(2).run(train_wrappers_in_turns, tasks) == [([True] * 8, True)] * 2


def wrap_late(rank: int, world_size: int, what: str) -> dict[str, Any]:
    """Two steps without a wrapper, then two with one; or a second, wrapped model joins then."""
    models = nn.ModuleList([new_model(), new_model()])
    optimizer = optimizer_of(models[0])
    holder: list[Any] = [DistributedDataParallel(models[0])] if what == "group" else [models[0]]
    local = []
    with released(holder):
        for step, (tokens,) in enumerate(batches(rank, 1)[:4]):
            if step == 2:
                late = models[1] if what == "group" else models[0]
                holder.append(DistributedDataParallel(late))
                if what == "group":
                    named = [(f"late.{name}", p) for name, p in late.named_parameters()]
                    optimizer.add_param_group({"params": named})
                else:
                    del holder[0]
            sum(wrapper(tokens) for wrapper in holder).backward()
            local += [not alike(model.first.weight.grad) for model in models[: len(holder)]]
            optimizer.step()
            optimizer.zero_grad()
        return {"local": all(local), "searching": comm_hook._search.active}


@pytest.mark.parametrize("what", ["wrapper", "group"])
def test_a_wrapper_that_comes_late_is_found_at_its_first_forward(
    ranks: RankPools, what: str
) -> None:
    expected = {"local": True, "searching": False}
    assert ranks(2).run(wrap_late, what) == [expected] * 2


def train_with_a_second_lion(rank: int, world_size: int) -> tuple[bool, list[Tensor]]:
    """A new optimizer around the same wrapper takes over from the first."""
    model = new_model()
    optimizer = optimizer_of(model)
    holder = [DistributedDataParallel(model)]
    with released(holder):
        for step, (tokens,) in enumerate(batches(rank, 1)):
            holder[0](tokens).backward()
            local = not alike(model.first.weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                del optimizer
                gc.collect()
                optimizer = optimizer_of(model)
    return local, bits_of(model)


def test_a_second_optimizer_takes_the_wrapper_over(ranks: RankPools) -> None:
    (local, bits), (_, others) = ranks(2).run(train_with_a_second_lion)
    assert local
    assert all(map(torch.equal, bits, others))


def join_uneven(rank: int, world_size: int) -> str:
    model = new_model()
    optimizer = optimizer_of(model)
    holder = [DistributedDataParallel(model)]
    with released(holder):
        try:
            with holder[0].join():
                holder[0](torch.zeros(1, 1, dtype=torch.int64)).backward()
                optimizer.step()
        except RuntimeError as error:
            return str(error)
    return "accepted"


def test_uneven_inputs_are_refused_instead_of_waited_for(ranks: RankPools) -> None:
    for message in ranks(2).run(join_uneven):
        assert "give every rank as many batches" in message


def copy_with_a_group(rank: int, world_size: int) -> str:
    group = dist.new_group(list(range(world_size)))
    model = new_model()
    twin = copy.deepcopy(DistributedLion(model.parameters(), process_group=group))
    try:
        twin.step()
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_a_copy_does_not_vote_in_another_group(ranks: RankPools) -> None:
    for message in ranks(2).run(copy_with_a_group):
        assert "make a new one with process_group" in message


def shard_after_construction(rank: int, world_size: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = new_model()
    optimizer = optimizer_of(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    # What Accelerate does for FSDP2: the groups get the sharded parameters.
    optimizer.param_groups[0]["params"] = list(model.parameters())
    try:
        optimizer.step()
    except Disagreement as error:
        return str(error)
    return "accepted"


def test_parameters_that_are_sharded_later_are_refused_too(ranks: RankPools) -> None:
    for message in ranks(2).run(shard_after_construction):
        assert "DistributedDataParallel" in message


def set_one_gradient_by_hand(rank: int, world_size: int) -> list[bool]:
    a, b, c = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = DistributedLion([a, b, c], lr=0.1)
    a.sum().backward()
    b.grad, c.grad = torch.ones(3), torch.zeros(3)
    optimizer.step()
    return [bool((param != 1).any()) for param in (a, b, c)]


def test_a_gradient_set_by_hand_counts_beside_those_of_autograd(ranks: RankPools) -> None:
    assert ranks(2).run(set_one_gradient_by_hand) == [[True, True, False]] * 2


def split_unlike(rank: int, world_size: int) -> str:
    params = [nn.Parameter(torch.ones(70)) for _ in range(4)]
    for param in params:
        param.grad = torch.ones(70)
    try:
        with message_numel(100 if rank else None):
            DistributedLion(params).step()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_ranks_that_would_send_other_messages_are_refused(ranks: RankPools) -> None:
    for message in ranks(2).run(split_unlike):
        assert message.startswith("Disagreement: ranks differ in trainable parameters")


class Normed(nn.Module):
    """A model with a buffer that DDP broadcasts before a forward: BatchNorm's running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("this forward fails")
        return self.last(self.norm(x)).square().mean()


def train_with_buffers(rank: int, world_size: int, lion: bool) -> tuple[Tensor, list[bool], int]:
    """Returns the running mean as the last forward found it, and what the wrapper says of sync."""
    torch.manual_seed(0)
    model = Normed()
    calls: list[int] = []
    if lion:
        optimizer: torch.optim.Optimizer = optimizer_of(model)
    else:
        # The same without a reduction, by DDP's own means.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    holder = [DistributedDataParallel(model)]
    found: list[Tensor] = []
    sync: list[bool] = []
    generator = torch.Generator().manual_seed(rank)
    with released(holder):
        if lion:
            optimizer.attach(holder[0])
            reduced = comm_hook._attachments[holder[0]].reduced
            comm_hook._attachments[holder[0]].reduced = lambda b: calls.append(1) or reduced(b)
        model.norm.register_forward_pre_hook(
            lambda module, args: found.append(module.running_mean.clone())
        )
        for micro_step in range(6):
            quiet = holder[0].no_sync() if micro_step % 3 == 0 else contextlib.nullcontext()
            with quiet:
                loss = holder[0](torch.randn(5, 4, generator=generator))
            sync.append(holder[0].require_backward_grad_sync)
            loss.backward()
            if micro_step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        model.fails = True
        with contextlib.suppress(ValueError):
            holder[0](torch.randn(5, 4, generator=generator))
        sync.append(holder[0].require_backward_grad_sync)
    return torch.stack(found), sync, len(calls)


def test_buffers_are_broadcast_when_ddp_would_and_its_buckets_are_left_alone(
    ranks: RankPools,
) -> None:
    ours, theirs = ranks(2).run(train_with_buffers, True), ranks(2).run(train_with_buffers, False)
    for (means, sync, calls), (expected, expected_sync, _) in zip(ours, theirs, strict=True):
        assert torch.equal(means, expected)
        assert sync == expected_sync == [True] * 7
        assert calls == 0


def bucket_calls(rank: int, world_size: int, ddp_options: dict[str, Any]) -> int:
    model = new_model()
    optimizer = optimizer_of(model)
    calls: list[int] = []
    holder = [DistributedDataParallel(model, **ddp_options)]
    with released(holder):
        optimizer.attach(holder[0])
        attachment = comm_hook._attachments[holder[0]]
        reduced = attachment.reduced
        attachment.reduced = lambda bucket: calls.append(1) or reduced(bucket)
        holder[0](batches(rank, 1)[0][0]).backward()
        optimizer.step()
    return len(calls)


@pytest.mark.parametrize(
    ("ddp_options", "used"),
    [({}, 0), ({"gradient_as_bucket_view": True}, 1), ({"static_graph": True}, 1)],
)
def test_gradients_go_through_buckets_only_where_they_must(
    ranks: RankPools, ddp_options: dict[str, Any], used: int
) -> None:
    assert ranks(2).run(bucket_calls, ddp_options) == [used] * 2
