"""Parameters that FSDP2 shards inside each replica: the rule on whole parameters, step by step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.oracle import same_bits
from tests.support.sharded_training import (
    ShardedOracle,
    full_params,
    grid,
    new_model,
    optimizer_of,
    sharded,
    tokens_of,
    whole_gradients,
)
from tests.support.spawn import RankPools

SHARDS = 2
STEPS = 5
# In this step the gradients of one rank hold a NaN, so that of its replica's mean does.
NAN_STEP = 2


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


Trained = tuple[list[list[Tensor]], list[list[Tensor | None]], dict[str, Any]]


def train(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    fsdp: dict[str, Any] | None = None,
    plain: bool = False,
) -> Trained:
    """Returns whole parameters before and after each step, and this rank's whole gradients."""
    mesh, model = grid(world_size, SHARDS), new_model(dtype)
    if plain:
        fsdp = {"ignored_params": {model.scale.weight}}
    sharded(model, mesh, **(fsdp or {}))
    optimizer = optimizer_of(model, mesh, **options)
    params, grads = [full_params(model)], []
    for step in range(STEPS):
        tokens = tokens_of(rank, step)
        own = whole_gradients(params[-1], [tokens])
        model(tokens).backward()
        if step == NAN_STEP and rank == 1:
            # In the part that this rank holds; the other rank of the replica sees none.
            model.body.weight.grad._local_tensor[0, 0] = math.nan
            own[1] = torch.full_like(own[1], math.nan)
        optimizer.step()
        optimizer.zero_grad()
        params.append(full_params(model))
        grads.append(own)
    told = {
        "kinds": sorted({type(s["exp_avg"]).__name__ for s in optimizer.state.values()}),
        "abstentions": optimizer.abstentions.steps,
        "world_size": optimizer.world_size,
        "bytes": optimizer.wire.last_bytes_sent,
    }
    return params, grads, told


def check_against_whole(
    trained: list[Trained], plain: tuple[int, ...] = (), **options: Any
) -> None:
    oracle = ShardedOracle(trained[0][0][0], len(trained) // SHARDS, SHARDS, plain, **options)
    for step in range(STEPS):
        oracle.step([grads[step] for _, grads, _ in trained])
        wanted = oracle.params()
        for params, _, _ in trained:
            pairs = zip(params[step + 1], wanted, strict=True)
            assert [same_bits(*pair) for pair in pairs] == [True] * len(wanted), step


@pytest.mark.full
@pytest.mark.parametrize("replicas", [2, 3])
def test_every_step_is_the_rule_on_the_rows_that_replicas_share(
    pools: RankPools, replicas: int
) -> None:
    trained = pools(replicas * SHARDS).run(train, {})
    check_against_whole(trained)
    told = trained[0][2]
    assert told["kinds"] == ["DTensor"]
    assert told["abstentions"] == [1, *[0] * (replicas - 1)]
    assert told["world_size"] == replicas * SHARDS


@pytest.fixture
def fake_ranks() -> Iterator[int]:
    """Four ranks of which this process is one; nothing that they send arrives."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield 4
    dist.destroy_process_group()


def shard_by_columns(model: nn.Module, mesh: DeviceMesh) -> None:
    columns = {"shard_placement_fn": lambda param: Shard(param.ndim - 1)}
    fully_shard(model.unused, mesh=mesh["shard"], **columns)


def shard_natively(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    linear = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0), Shard(1)]))
    model.body.register_parameter("weight", linear)


@pytest.mark.parametrize(
    ("shard", "why"),
    [
        (shard_by_columns, "parts are rows"),
        (shard_natively, "averages gradients over the first dimension"),
        (parallelize, "no tensor parallelism beside FSDP"),
    ],
)
def test_other_placements_are_refused_with_the_two_lines_that_work(
    fake_ranks: int, shard: Callable[[nn.Module, DeviceMesh], None], why: str
) -> None:
    mesh, model = grid(fake_ranks), new_model()
    shard(model, mesh)
    with pytest.raises(NotImplementedError, match=why) as refused:
        optimizer_of(model, mesh)
    assert 'mesh=mesh["shard"]' in str(refused.value)
    assert 'replicate=mesh["replicate"]' in str(refused.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"local_group": 2}, "one vote already"),
        ({"bits": 4, "level_scale": "tensor"}, "use level_scale='word'"),
        ({"momentum_sync_every": 4, "momentum_sync": "auto"}, "use 'all' or patterns"),
    ],
)
def test_options_that_take_whole_tensors_are_refused(
    fake_ranks: int, options: dict[str, Any], problem: str
) -> None:
    mesh = grid(fake_ranks)
    model = sharded(new_model(), mesh)
    with pytest.raises(NotImplementedError, match=problem):
        optimizer_of(model, mesh, **options)


def test_a_voting_group_of_several_parts_of_a_replica_is_refused(fake_ranks: int) -> None:
    mesh = grid(fake_ranks)
    model = sharded(new_model(), mesh)
    for group in (None, mesh["shard"].get_group()):
        with pytest.raises(ValueError, match="several parts of one replica, those of ranks"):
            optimizer_of(model, mesh, replicate=None, process_group=group)


def test_replicate_takes_a_mesh_of_one_dimension_and_no_group_beside_it(fake_ranks: int) -> None:
    mesh = grid(fake_ranks)
    model = sharded(new_model(), mesh)
    with pytest.raises(ValueError, match="must have one dimension"):
        optimizer_of(model, mesh, replicate=mesh)
    with pytest.raises(TypeError, match="pass one of them"):
        optimizer_of(model, mesh, process_group=mesh["replicate"].get_group())
    with pytest.raises(TypeError, match="must be a DeviceMesh"):
        optimizer_of(model, mesh, replicate=2)


def test_replicas_whose_parameters_were_never_sharded_do_not_step(fake_ranks: int) -> None:
    mesh = grid(fake_ranks)
    optimizer = optimizer_of(new_model(), mesh)
    engine = optimizer._engine
    with pytest.raises(RuntimeError, match="no parameter is sharded"):
        engine.ranks.check_step()


def test_join_is_refused_where_parameters_are_sharded(fake_ranks: int) -> None:
    mesh = grid(fake_ranks)
    optimizer = optimizer_of(sharded(new_model(), mesh), mesh)
    with pytest.raises(NotImplementedError, match="FSDP needs every rank"):
        optimizer.join_hook()


def train_with_plain(rank: int, world_size: int, options: dict[str, Any]) -> Trained:
    return train(rank, world_size, options, plain=True)


@pytest.mark.full
def test_gradients_of_plain_parameters_are_averaged_inside_the_replica(pools: RankPools) -> None:
    trained = pools(4).run(train_with_plain, {})
    names = [name for name, _ in new_model().named_parameters()]
    check_against_whole(trained, plain=(names.index("scale.weight"),))
    assert trained[0][2]["kinds"] == ["DTensor", "Tensor"]


def disagree(rank: int, world_size: int, what: str) -> str:
    mesh = grid(world_size, SHARDS)
    model = sharded(new_model(), mesh)
    optimizer = optimizer_of(model, mesh, lr=0.02 if what == "lr" and rank == 3 else 0.01)
    model(tokens_of(rank, 0)).backward()
    before = full_params(model)
    if rank == 3 and what == "values":
        model.body.weight._local_tensor.data[0, 0] += 1
    if rank == 3 and what == "trainable":
        model.body.bias.requires_grad_(False)
    if rank == 3 and what == "gradient":
        whole = torch.zeros(model.body.weight.shape)
        model.body.weight.grad = DTensor.from_local(
            whole, mesh["shard"], [Replicate()], run_check=False
        )
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    if what != "values":
        assert all(map(same_bits, full_params(model), before))
    return str(raised.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("lr", "parameter groups.*rank 3: 0.02"),
        ("values", "parameter values.*'body.weight': rank 1: .*, rank 3: "),
        ("trainable", "ranks differ in trainable parameters"),
        ("gradient", r"gradient of placement \(Replicate"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all_ranks_of_all_replicas(
    pools: RankPools, what: str, told: str
) -> None:
    for message in pools(4).run(disagree, what):
        assert re.search(told, message), message
