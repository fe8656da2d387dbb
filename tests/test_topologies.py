"""Nodes that vote as one, FSDP2 shards, averaged gradients and momenta, on real ranks."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_dlion.fsdp as fsdp
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.failures import Disagreement
from hf_dlion.vote import message
from tests.support.definition import Lions
from tests.support.spawn import LASTING, RankPools, on_ranks
from tests.support.training import batch, everyones, is_equal_everywhere, model_of, same

pytestmark = pytest.mark.multiproc


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def attached(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Compares training under DDP with the definition on the gradients of every node."""
    bare = model_of()
    ddp = DistributedDataParallel(model_of())
    optimizer = DistributedLion(ddp.named_parameters(), lr=0.01, weight_decay=0.1, **options)
    optimizer.attach(ddp)
    node = options.get("local_group", 1)
    params = [p.detach().clone() for p in bare.parameters()]
    lions = Lions(params, world_size // node, [0.01] * len(params), [0.1] * len(params))
    first = rank - rank % node
    for step in range(4):
        with torch.no_grad():
            for p, own in zip(bare.parameters(), lions.params, strict=True):
                p.copy_(own)
        optimizer.zero_grad()
        ddp(batch(step, rank)).square().sum().backward()
        grads = [p.grad for p in ddp.parameters()]
        members = [gradients(bare, batch(step, first + k)) for k in range(node)]
        for grad, *own in zip(grads, *members, strict=True):
            # DDP may round the mean in a node differently.
            tolerance = {"rtol": 0.0, "atol": 0.0} if node == 1 else {}
            torch.testing.assert_close(grad, sum(own) / node, **tolerance)
        by_rank = list(zip(*map(everyones, grads), strict=True))
        assert all(same(by_rank[r], by_rank[r - r % node]) for r in range(world_size))
        lions.step(by_rank[::node])
        optimizer.step()
        assert same(list(ddp.parameters()), lions.params)
    optimizer.detach()


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, {}, marks=pytest.mark.smoke),
        (2, {"local_group": 2}),  # Lion on the mean gradient
        (4, {"local_group": 2, "exchange": "gather"}),
        (4, {"local_group": 2, "exchange": "two_phase"}),
    ],
)
def test_attached_wrappers_equal_the_definition(
    pools: RankPools, ranks: int, options: dict[str, Any]
) -> None:
    pools(ranks).run(attached, options)


def unattached_node(rank: int, world_size: int, case: str) -> str:
    model = model_of()
    options: dict[str, Any] = {} if case == "on rank 1" and rank == 0 else {"local_group": 2}
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, **options)
    if case == "resumed":
        state = optimizer.state_dict()
        state["param_groups"][0]["step"] = 7
        optimizer.load_state_dict(state)
    model(batch(0, rank)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("case", ["new", "resumed", "on rank 1"])
def test_nodes_need_attach(pools: RankPools, case: str) -> None:
    first, second = pools(2).run(unattached_node, case)
    assert "needs optimizer.attach(ddp_model)" in second
    alone = f"step failed on 1 of 2 ranks: rank 1: RuntimeError: {second}"
    assert first == (alone if case == "on rank 1" else second)


def refused_on_one_rank(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(model_of())
    optimizer = DistributedLion(ddp.named_parameters(), lr=0.01, local_group=2)
    try:
        optimizer.attach(ddp.module if rank == 1 else ddp)
    except TypeError as error:
        return str(error)
    finally:
        optimizer.detach()
    return ""


def test_an_attach_that_is_refused_on_one_rank_does_not_hang(pools: RankPools) -> None:
    said = pools(4).run(refused_on_one_rank, timeout=30)
    assert said[0] == said[2] == said[3] == ""
    assert said[1].startswith("attach() needs a DistributedDataParallel")


@pytest.mark.parametrize(("how", "name"), [("unfrozen", "0.weight"), ("outside", "outside")])
@on_ranks(4)
def test_nodes_refuse_parameters_that_no_hook_averages(rank: int, how: str, name: str) -> None:
    """Trains a parameter in nodes whose gradient no hook averages."""
    model, outside = model_of(), nn.Parameter(torch.ones(3))
    first = next(iter(model.named_parameters()))
    if how == "unfrozen":
        first[1].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    named = [*model.named_parameters(), *([("outside", outside)] if how == "outside" else [])]
    optimizer = DistributedLion(named, lr=0.01, local_group=2)
    optimizer.attach(ddp)
    first[1].requires_grad_(True)
    said = ""
    ddp(batch(0, rank)).square().sum().backward()
    outside.grad = torch.full((3,), float(rank))
    try:
        optimizer.step()
    except RuntimeError as error:
        said = str(error)
    optimizer.detach()
    assert f"DDP doesn't average the gradient of '{name}' inside a node" in said


def test_scaled_gradients_of_float16_are_refused() -> None:
    param = nn.Parameter(torch.ones(4, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = DistributedLion([param], lr=0.01)
    scaler.scale(param.sum()).backward()
    with pytest.raises(ValueError, match="GradScaler scaled float16 gradients"):
        scaler.step(optimizer)


def uneven_nodes(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(model_of())
    optimizer = DistributedLion(ddp.named_parameters(), lr=0.01, local_group=1 + rank)
    with pytest.raises(Disagreement) as caught:
        optimizer.attach(ddp)
    return str(caught.value)


def test_nodes_of_different_sizes_are_refused_together(pools: RankPools) -> None:
    texts = pools(3).run(uneven_nodes)
    assert texts[0] == texts[1] == texts[2]
    assert "(local_group or LOCAL_WORLD_SIZE), got [1, 2, 3] in rank order" in texts[0]


def sharded(rank: int, world_size: int, attach: bool) -> str:
    """Compares 2 x 2 FSDP2 with plain ranks whose gradients are the replicas' means."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    bare, model = model_of(), model_of()
    # The others are the root's, which stays gathered after a forward.
    fully_shard(model[0], mesh=mesh["shard"])  # type: ignore[index]
    fully_shard(model, mesh=mesh["shard"])
    optimizer = DistributedLion(
        model.named_parameters(),
        lr=0.01,
        weight_decay=0.1,
        replicate=mesh["replicate"],
        check_replicas_every=1,
    )
    if not attach:
        model(batch(0, rank)).square().sum().backward()
        with pytest.raises(RuntimeError, match=r"call optimizer\.attach"):
            optimizer.step()
        return "refused"
    optimizer.attach(model)
    replica, place = divmod(rank, 2)
    params = [p.to_local().detach().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    lions = Lions(params, 2, [0.01] * len(params), [0.1] * len(params))
    for step in range(3):
        grads = []
        for other in range(2):
            members = [gradients(bare, batch(step, other * 2 + k)) for k in range(2)]
            means = [sum(own) / 2 for own in zip(*members, strict=True)]
            grads.append([_shard(mean, place) for mean in means])
        optimizer.zero_grad()
        model(batch(step, rank)).square().sum().backward()
        for p, mean in zip(model.parameters(), grads[replica], strict=True):
            torch.testing.assert_close(p.grad.to_local(), mean)  # type: ignore[union-attr]
            p.grad.to_local().copy_(mean)  # type: ignore[union-attr]
        with torch.no_grad():
            model(batch(step, rank))  # leaves the root gathered
        lions.step(grads)
        optimizer.step()
        with torch.no_grad():
            shards = optimizer.param_groups[0]["params"]
            for p, own, whole in zip(shards, lions.params, bare.parameters(), strict=True):
                assert torch.equal(p.to_local(), own)
                whole.copy_(p.full_tensor())
    state = optimizer.state_dict()["state"]
    assert all(own["exp_avg"].device_mesh is not None for own in state.values())
    return "equal"


def _shard(tensor: torch.Tensor, place: int) -> torch.Tensor:
    chunks = list(torch.chunk(tensor, 2))
    return chunks[place] if place < len(chunks) else tensor[:0]


def test_two_replicas_of_two_shards_equal_the_definition(pools: RankPools) -> None:
    assert pools(4).run(sharded, True) == ["equal"] * 4


def test_shards_need_attach(pools: RankPools) -> None:
    assert pools(4).run(sharded, False) == ["refused"] * 4


def two_sharded(rank: int, world_size: int, evaluates: bool) -> list[torch.Tensor]:
    """Trains two models with one optimizer; an evaluation leaves both gathered."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    LASTING.update(mesh.get_all_groups())
    models = [model_of(), model_of()]
    for model in models:
        fully_shard(model, mesh=mesh["shard"])
    named = [
        (f"{k}.{name}", p) for k, own in enumerate(models) for name, p in own.named_parameters()
    ]
    optimizer = DistributedLion(named, lr=0.01, replicate=mesh["replicate"], vote_every=3)
    optimizer.attach(models[0])
    for model in models:
        model(batch(0, rank)).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"'1\.0\.weight' belongs to no attached model"):
        optimizer.step()
    optimizer.attach(models[1])
    for step in range(4):
        optimizer.zero_grad()
        for model in models:
            model(batch(step, rank)).square().sum().backward()
        optimizer.step()
        if evaluates:
            optimizer.eval()
            with torch.no_grad():
                for model in models:
                    model(batch(step, rank))
            optimizer.train()
    return [p.to_local().detach().clone() for _, p in named]  # type: ignore[attr-defined]


def test_an_evaluation_of_two_sharded_models_changes_nothing(pools: RankPools) -> None:
    pairs = zip(*(pools(4).run(two_sharded, evaluates) for evaluates in (False, True)), strict=True)
    for without, with_evaluation in pairs:
        assert same(without, with_evaluation)


def unevenly_sharded(rank: int, world_size: int) -> list[tuple[int, int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    LASTING.update(mesh.get_all_groups())
    model = nn.Sequential(nn.Linear(64, 3), nn.Linear(3, 1))
    fully_shard(model, mesh=mesh["shard"])
    params = model.parameters()
    return [(fsdp.largest_part(p), fsdp.local_part(p.detach()).numel()) for p in params]


def test_all_ranks_know_the_size_of_the_largest_shard(pools: RankPools) -> None:
    """By which they choose the momenta that fit into a budget."""
    for by_rank in zip(*pools(4).run(unevenly_sharded), strict=True):
        assert {size for size, _ in by_rank} == {max(part for _, part in by_rank)}


@on_ranks(2)
def test_a_compiled_sharded_model_is_attached_and_a_frozen_one_needs_no_attach() -> None:
    """Attaches a model that was compiled before or after it was sharded; another one is frozen."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    LASTING.update(mesh.get_all_groups())
    for compiled_first in (False, True):
        model, frozen = model_of(), model_of().requires_grad_(False)
        fully_shard(frozen, mesh=mesh["shard"])
        compiled = torch.compile(model)
        fully_shard(compiled if compiled_first else model, mesh=mesh["shard"])
        named = [
            *compiled.named_parameters(),
            *(("f." + n, p) for n, p in frozen.named_parameters()),
        ]
        optimizer = DistributedLion(named, lr=0.01, replicate=mesh["replicate"])
        optimizer.attach(compiled)
        for p in compiled.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert optimizer.steps == 1


def replicas_on_one_rank(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    LASTING.update(mesh.get_all_groups())
    model = model_of()
    fully_shard(model, mesh=mesh["shard"])
    replicate = None if rank == 1 else mesh["replicate"]
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, replicate=replicate)
    optimizer.attach(model)
    with pytest.raises((Disagreement, ValueError)) as caught:
        optimizer.step()
    return str(caught.value)


def test_replicas_on_some_ranks_only_do_not_hang(pools: RankPools) -> None:
    found = pools(4).run(replicas_on_one_rank, timeout=30)
    assert found[1].startswith("the parameters are sharded: pass replicate=")
    for text in (found[0], found[2], found[3]):
        assert "rank 1 steps while ranks 0, 2, and 3 have replicate=" in text


def _generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(1000**k * n for k, n in enumerate(numbers)))


@pytest.mark.parametrize("selection", ["*bias", "", "*"], ids=["pattern", "function", "all"])
@on_ranks(2)
def test_full_precision_is_lion_on_the_mean_gradient(rank: int, selection: str) -> None:
    """Compares with plain Lion on the mean over the ranks that have a gradient."""
    message.PIECE["cpu"], message.MESSAGE["cpu"], message.MESSAGES = 1 << 7, 1 << 8, 1 << 20
    model = model_of()
    optimizer = DistributedLion(
        model.named_parameters(),
        lr=0.01,
        weight_decay=0.1,
        full_precision=selection or (lambda name, param: name.endswith("bias")),
    )
    names = [name for name, _ in model.named_parameters()]
    start = [p.detach().clone() for p in model.parameters()]
    alone = Lions([p.clone() for p in start], 1, [0.01] * len(start), [0.1] * len(start))
    for step in range(5):
        every = [
            [torch.randn(p.shape, generator=_generator(step, r, k)) for k, p in enumerate(start)]
            for r in range(2)
        ]
        for k, p in enumerate(model.parameters()):
            # One bias has no gradient on rank 1 in a step, and on no rank in the next.
            missing = k == 1 and (step == 3 or (step == 2 and rank == 1))
            p.grad = None if missing else every[rank][k].clone()
        means = [sum(own) / 2 for own in zip(*every, strict=True)]
        if step == 3:
            means[1] = None
        if step == 2:
            others = [own[1] for r, own in enumerate(every) if r != 1]
            means[1] = sum(others) / len(others)
        alone.step([means])
        optimizer.step()
        for name, p, own in zip(names, model.parameters(), alone.params, strict=True):
            if selection == "*" or name.endswith("bias"):
                assert torch.equal(p, own), (step, name)
    if selection == "*":  # Each element is sent once, also those of tensors in several messages.
        elements = sum(p.numel() for p in model.parameters())
        assert len(optimizer._plan.full) > len(start)
        assert (
            0 <= optimizer.wire.last_bytes_sent - 64 - 4 * elements < 8 * len(optimizer._plan.full)
        )


@on_ranks(2)
def test_functions_that_select_different_momenta_are_refused(rank: int) -> None:
    model = model_of()
    chosen = "0.weight" if rank == 0 else "0.bias"
    optimizer = DistributedLion(
        model.named_parameters(),
        lr=0.01,
        momentum_sync_every=1,
        momentum_sync=lambda name, param: name == chosen,
    )
    model(batch(0, rank)).square().sum().backward()
    with pytest.raises(Disagreement, match="choices of momentum_sync"):
        optimizer.step()


@on_ranks(2)
def test_steps_work_with_another_default_dtype(rank: int) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = model_of()
        optimizer = DistributedLion(
            model.named_parameters(),
            lr=0.01,
            momentum_sync_every=1,
            momentum_sync="auto",
            check_replicas_every=1,
        )
        for step in range(2):
            model(batch(step, rank).bfloat16()).square().sum().backward()
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)


@on_ranks(3)
def test_synchronize_momentum_makes_all_momenta_equal(rank: int) -> None:
    model = model_of()
    optimizer = DistributedLion(model.named_parameters(), lr=0.01)
    model(batch(0, rank)).square().sum().backward()
    optimizer.step()
    optimizer.synchronize_momentum()
    assert all(is_equal_everywhere(optimizer.state[p]["exp_avg"]) for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_momentum_keeps_its_dtype_and_bits(dtype: torch.dtype) -> None:
    """Other than torch, which converts a loaded state to the dtype of the parameters."""
    model = model_of().to(torch.bfloat16)
    optimizer = DistributedLion(model.named_parameters(), momentum_dtype=dtype)
    for step in range(3):
        model(batch(step, 0).bfloat16()).square().sum().backward()
        optimizer.step()
    loaded = DistributedLion(model.named_parameters(), momentum_dtype=dtype)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert loaded.steps == 3
    momenta, others = (
        [own.state[p]["exp_avg"] for p in model.parameters()] for own in (optimizer, loaded)
    )
    assert same(momenta, others)
    assert {own.dtype for own in others} == {dtype}


def attached_again(rank: int, world_size: int, alone: bool) -> str:
    ddp = DistributedDataParallel(model_of())
    optimizer = DistributedLion(ddp.named_parameters(), lr=0.01)
    optimizer.attach(ddp)
    ddp(batch(0, rank)).sum().backward()
    optimizer.step()
    optimizer.detach()
    if not alone:
        with torch.no_grad():
            next(ddp.parameters()).add_(float(rank))
    if not alone or rank == 1:
        optimizer.attach(ddp)
    with pytest.raises(Disagreement) as caught:
        optimizer.step()
    optimizer.detach()
    return str(caught.value)


def test_a_second_training_begins_with_equal_weights(pools: RankPools) -> None:
    for text in pools(2).run(attached_again, False):
        assert "first in 'module.0.weight'" in text
    for text in pools(2).run(attached_again, True):
        assert "first in 'calls of attach and detach': rank 0: 2, rank 1: 3" in text


def copied(rank: int, world_size: int, whole: bool) -> list[str]:
    model = model_of()
    optimizer = DistributedLion(model.named_parameters(), lr=0.01)

    def train() -> None:
        for p, grad in zip(model.parameters(), gradients(model, batch(0, rank)), strict=True):
            p.grad = grad
        optimizer.step()

    train()
    states = [optimizer.state_dict()] * world_size
    if whole:  # As if every rank loaded the state of rank 0.
        dist.all_gather_object(states, optimizer.state_dict())
    optimizer.load_state_dict(states[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
        train()
    return [str(own.message) for own in caught]


def test_one_momentum_loaded_on_all_ranks_warns_once(pools: RankPools) -> None:
    (said,), *others = pools(2).run(copied, True)
    assert said.startswith("all ranks loaded the same momentum")
    assert "hf_dlion.load_momentum()" in said
    assert others == [[]]
    assert pools(2).run(copied, False) == [[], []]


def test_a_pickled_optimizer_keeps_options_and_state() -> None:
    model = model_of()
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, ties="zero")
    model(batch(0, 0)).sum().backward()
    optimizer.step()
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert loaded.options == optimizer.options
    assert loaded.steps == 1
    loaded.step()


def frozen(rank: int, world_size: int) -> None:
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
        before = [p.detach().clone() for p in model.parameters()]
        model.zero_grad()
        model(batch(step, rank)).square().sum().backward()
        optimizer.step()
        moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
        assert moved == [True, step not in (2, 3), step >= 3, step >= 3, False, False]
    assert [group["step"] for group in optimizer.param_groups] == [6, 6]


def test_parameters_can_be_frozen_unfrozen_and_added(pools: RankPools) -> None:
    pools(2).run(frozen)


@on_ranks(2)
def test_a_scaled_step_accepts_a_rank_without_gradients(rank: int) -> None:
    """Rank 0 has no gradient in a step in which rank 1 has some."""
    model = model_of()
    optimizer = DistributedLion(model.named_parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if rank == 1:
        scaler.scale(model(batch(0, rank)).square().sum()).backward()
    else:
        scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert optimizer.steps == 1


@on_ranks(2)
def test_a_rank_without_gradients_does_not_hang_at_the_start_of_a_warm_up(rank: int) -> None:
    """Takes a first step with a learning rate of 0, without gradients on rank 1."""
    model = model_of()
    optimizer = DistributedLion(model.named_parameters(), lr=0.0)
    if rank == 0:
        model(batch(0, rank)).square().sum().backward()
    optimizer.step()
    first = optimizer.steps
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.zero_grad()
    model(batch(1, rank)).square().sum().backward()
    optimizer.step()
    assert (first, optimizer.steps) == (1, 2)


@pytest.mark.parametrize("every", [1, 2])
@on_ranks(2)
def test_a_step_that_only_creates_state_is_not_counted(every: int) -> None:
    """Creates the state as torch.distributed.checkpoint does."""
    model = model_of()
    optimizer = DistributedLion(model.named_parameters(), lr=0.0, vote_every=every)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all("exp_avg" in optimizer.state[p] for p in model.parameters())
    assert optimizer.steps == 0


def loads_alone(rank: int, world_size: int) -> str:
    model = model_of()
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, full_precision="*bias")
    for step in range(2):
        if step == 1 and rank == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        model(batch(step, rank)).square().sum().backward()
        try:
            optimizer.step()
        except Disagreement as error:
            return str(error)
    return ""


def test_a_load_on_one_rank_only_does_not_hang(pools: RankPools) -> None:
    texts = pools(2).run(loads_alone)
    assert texts[0] == texts[1]
    assert "first in 'calls of load_state_dict': rank 0: 0, rank 1: 1" in texts[0]
