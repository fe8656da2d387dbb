"""Parameters that FSDP2 shards inside each replica: the rule on whole parameters, step by step."""

from __future__ import annotations

import gc
import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hf_dlion import DistributedLion
from hf_dlion.checkpoint.access import gather_objects
from hf_dlion.options.groups import flat_params
from hf_dlion.options.parts import Part
from tests.support.oracle import same_bits
from tests.support.sharded_training import (
    DECAY,
    LR,
    ShardedOracle,
    full,
    full_params,
    grid,
    keep_groups,
    new_model,
    optimizer_of,
    rows_of,
    sharded,
    sharded_late,
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


@dataclass(frozen=True)
class Case:
    """How a model is trained: options of the optimizer, of FSDP, and what the loop does.

    Attributes:
        options: Of the optimizer.
        oracle: Those of them that the oracle takes.
        dtype: Of the parameters.
        policy: Arguments of `fully_shard` by name, made on the rank.
        plain: Whether a parameter is left unsharded.
        clip: Norm to which gradients are clipped.
        batches: Per step.
        sync: Whether FSDP reduces gradients after each of them, and not only after the last.
        seen: Whether the rule takes the gradients as FSDP left them: those of a model that nobody
            shards are rounded otherwise.
    """

    options: dict[str, Any] = field(default_factory=dict)
    oracle: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    policy: str = ""
    plain: bool = False
    clip: float | None = None
    batches: int = 1
    sync: bool = False
    seen: bool = False


POLICIES: dict[str, dict[str, Any]] = {
    "": {},
    "keep": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def train(rank: int, world_size: int, case: Case) -> Trained:
    """Returns whole parameters before and after each step, and this rank's whole gradients."""
    mesh, model = grid(world_size, SHARDS), new_model(case.dtype)
    policy = POLICIES[case.policy]
    sharded(
        model, mesh, **policy, **({"ignored_params": {model.scale.weight}} if case.plain else {})
    )
    optimizer = optimizer_of(model, mesh, **case.options)
    params, grads, early = [full_params(model)], [], []
    for step in range(STEPS):
        batches = [tokens_of(rank, 10 * step + k) for k in range(case.batches)]
        own = whole_gradients(params[-1], batches)
        for k, tokens in enumerate(batches):
            model.set_requires_gradient_sync(case.sync or k + 1 == len(batches))
            model(tokens).backward()
        if step == NAN_STEP and rank == 1:
            # In the part that this rank holds; the other rank of the replica sees none.
            model.body.weight.grad._local_tensor[0, 0] = math.nan
            own[1] = torch.full_like(own[1], math.nan)
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        if case.seen:
            own = [None if p.grad is None else full(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        params.append(full_params(model))
        grads.append(own)
        early.append(optimizer.wire.sent_in_backward)
    keep_groups(optimizer)
    told = {
        "kinds": sorted({type(s["exp_avg"]).__name__ for s in optimizer.state.values()}),
        "abstentions": optimizer.abstentions.steps,
        "world_size": optimizer.world_size,
        "overlapped": optimizer.wire.overlapped,
        "early": early,
    }
    return params, grads, told


PLAIN = [name for name, _ in new_model().named_parameters()].index("scale.weight")


def check_against_whole(trained: list[Trained], case: Case) -> None:
    plain = (PLAIN,) if case.plain else ()
    replicas = len(trained) // SHARDS
    oracle = ShardedOracle(trained[0][0][0], replicas, SHARDS, plain, **case.oracle)
    for step in range(STEPS):
        oracle.step([grads[step] for _, grads, _ in trained])
        wanted = oracle.params()
        for params, _, _ in trained:
            pairs = zip(params[step + 1], wanted, strict=True)
            assert [same_bits(*pair) for pair in pairs] == [True] * len(wanted), step


@pytest.mark.full
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_step_is_the_rule_on_the_rows_that_replicas_share(
    pools: RankPools, replicas: int
) -> None:
    trained = pools(replicas * SHARDS).run(train, Case())
    check_against_whole(trained, Case())
    told = trained[0][2]
    assert told["kinds"] == ["DTensor"]
    assert told["abstentions"] == [1, *[0] * (replicas - 1)]
    assert told["world_size"] == replicas * SHARDS


def same(**options: Any) -> Case:
    """A case whose options the oracle has, too."""
    return Case(options, options)


NARROW = {"dtype": torch.bfloat16, "seen": True}
CASES = {
    "bits": same(bits=4),
    "average": same(aggregation="average"),
    "zero": same(ties="zero"),
    "gather": Case({"exchange": "gather"}),
    "bfloat16": Case(**NARROW),
    "nearest": Case({"stochastic_rounding": False}, {"stochastic_rounding": False}, **NARROW),
    "momentum_dtype": same(momentum_dtype=torch.bfloat16),
    "momentum_sync": same(momentum_sync_every=2),
    "full_precision": Case({"full_precision": "*.bias"}, {"full": [2, 5, 7]}),
    "warmup": same(warmup_full_steps=2),
    "check_replicas": Case({"check_replicas_every": 1}),
    "plain": Case(plain=True),
    "clip": Case(clip=0.1, seen=True),
    "accumulate": Case(batches=2),
    "accumulate reduced": Case(batches=2, sync=True, seen=True),
    "keep": Case(policy="keep"),
    "mixed": Case(policy="bf16", seen=True),
    "offload": Case(policy="offload"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_what_the_plain_optimizer_does_goes_for_parts(pools: RankPools, name: str) -> None:
    trained = pools(2 * SHARDS).run(train, CASES[name])
    check_against_whole(trained, CASES[name])
    if name == "plain":
        assert trained[0][2]["kinds"] == ["DTensor", "Tensor"]


@pytest.mark.full
@pytest.mark.parametrize("case", [Case({"overlap": True}), Case({"overlap": True}, batches=2)])
def test_votes_on_parts_leave_during_backward(pools: RankPools, case: Case) -> None:
    trained = pools(2 * SHARDS).run(train, case)
    check_against_whole(trained, case)
    for _, _, told in trained:
        # Not in the first step, in which the order is found, nor where a NaN drops them.
        assert told["overlapped"] == STEPS - 2
        # What nobody uses holds its message up, until it comes last.
        assert told["early"][-1] > 0


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


LATE: dict[str, Callable[[DistributedLion], object]] = {
    "world_size": lambda lion: lion.world_size,
    "state_dict": lambda lion: lion.state_dict()["dlion"]["world_size"],
    "join_process_group": lambda lion: dist.get_world_size(lion.join_process_group),
    "gathering": lambda lion: len(gather_objects(lion, 0)),
}


@pytest.mark.parametrize("what", LATE)
def test_who_all_ranks_are_is_known_before_the_first_step_of_parameters_sharded_late(
    fake_ranks: int, what: str
) -> None:
    _, optimizer = sharded_late(grid(fake_ranks))
    assert LATE[what](optimizer) == fake_ranks


def test_join_is_refused_where_parameters_are_sharded_late(fake_ranks: int) -> None:
    _, optimizer = sharded_late(grid(fake_ranks))
    with pytest.raises(NotImplementedError, match="FSDP needs every rank"):
        optimizer.join_hook()


def test_parts_of_parameters_that_were_replaced_are_let_go(fake_ranks: int) -> None:
    mesh = grid(fake_ranks)
    optimizer, later = optimizer_of(sharded(new_model(), mesh), mesh), sharded(new_model(), mesh)
    engine = optimizer._engine
    parts = [weakref.ref(part) for part in flat_params(engine.local_groups)]
    optimizer.param_groups[0]["params"] = list(later.parameters())
    assert len(flat_params(engine.local_groups)) == len(parts)
    gc.collect()
    assert [part() for part in parts] == [None] * len(parts)


def test_a_model_that_is_converted_after_its_optimizer_was_made_stays_as_it_is(
    fake_ranks: int,
) -> None:
    mesh = grid(fake_ranks)
    model = sharded(new_model(), mesh)
    optimizer = optimizer_of(model, mesh)
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        model.double()
    assert {param.dtype for param in flat_params(optimizer.param_groups)} == {torch.float32}


def test_join_is_refused_where_parameters_are_sharded(fake_ranks: int) -> None:
    mesh = grid(fake_ranks)
    optimizer = optimizer_of(sharded(new_model(), mesh), mesh)
    with pytest.raises(NotImplementedError, match="FSDP needs every rank"):
        optimizer.join_hook()


def disagree(rank: int, world_size: int, what: str) -> str:
    mesh = grid(world_size, SHARDS)
    model = sharded(new_model(), mesh)
    overlap = what in ("pinned", "gradient of votes that left")
    lr = 0.02 if what == "lr" and rank == 3 else 0.01
    optimizer = optimizer_of(model, mesh, lr=lr, overlap=overlap)
    # Until what nobody uses is put last, so the votes leave that do not wait for it.
    for step in range(4 if what == "gradient of votes that left" else 0):
        model(tokens_of(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(tokens_of(rank, 4)).backward()
    if what == "gradient of votes that left":
        assert optimizer._engine.early._flight._sent > 0
    before = full_params(model)
    if rank == 3 and what == "values":
        model.body.weight._local_tensor.data[0, 0] += 1
    if rank == 3 and what == "trainable":
        model.body.bias.requires_grad_(False)
    if rank == 3 and what.startswith("gradient"):
        whole = torch.zeros(model.body.weight.shape)
        model.body.weight.grad = DTensor.from_local(
            whole, mesh["shard"], [Replicate()], run_check=False
        )
    with pytest.MonkeyPatch.context() as patch:
        if what == "pinned":
            patch.setattr(Part, "is_pinned", lambda self: True)
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
    if what != "values":
        assert all(map(same_bits, full_params(model), before))
    keep_groups(optimizer)
    return str(raised.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("lr", "parameter groups.*rank 3: 0.02"),
        ("values", "parameter values.*'body.weight': rank 1: .*, rank 3: "),
        ("trainable", "ranks differ in trainable parameters"),
        ("gradient", r"gradient of placement \(Replicate"),
        ("gradient of votes that left", r"gradient of placement \(Replicate"),
        ("pinned", "pin_memory=False"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all_ranks_of_all_replicas(
    pools: RankPools, what: str, told: str
) -> None:
    for message in pools(4).run(disagree, what):
        assert re.search(told, message), message


def hold_nothing(rank: int, world_size: int, overlap: bool) -> Trained:
    mesh = grid(world_size, SHARDS)
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = optimizer_of(model, mesh, overlap=overlap)
    params, grads = [full_params(model)], []
    for step in range(STEPS):
        torch.manual_seed(10 * rank + step)
        inputs, whole = torch.randn(3, 4), params[-1][0].requires_grad_()
        nn.functional.linear(inputs, whole).square().sum().backward()
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        params.append(full_params(model))
        grads.append([whole.grad])
    keep_groups(optimizer)
    assert model.weight.to_local().numel() == (4 if rank % SHARDS == 0 else 0)
    return [[param.detach() for param in own] for own in params], grads, {}


@pytest.mark.full
@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_that_holds_no_rows_goes_along(pools: RankPools, overlap: bool) -> None:
    trained = pools(4).run(hold_nothing, overlap)
    check_against_whole(trained, Case())
    assert bool((trained[0][0][-1][0] != 1).all())


def scale(rank: int, world_size: int) -> tuple[list[Tensor], list[float], list[int]]:
    mesh = grid(world_size, SHARDS)
    model = sharded(new_model(), mesh)
    optimizer = optimizer_of(model, mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for step in range(3):
        scaler.scale(model(tokens_of(rank, step))).backward()
        if step == 1 and rank == 1:
            model.body.weight.grad._local_tensor[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return full_params(model), scales, optimizer.abstentions.steps


@pytest.mark.full
def test_an_overflow_in_one_part_halves_the_scale_of_its_replica(pools: RankPools) -> None:
    trained = pools(4).run(scale)
    for params, _, abstentions in trained:
        assert all(map(same_bits, params, trained[0][0]))
        assert abstentions == [1, 0]
    assert [scales for _, scales, _ in trained] == [[4.0, 2.0, 2.0]] * 2 + [[4.0] * 3] * 2


def drop_on_one_rank(rank: int, world_size: int) -> Trained:
    mesh = grid(world_size, SHARDS)
    model = sharded(new_model(), mesh)
    optimizer = optimizer_of(model, mesh)
    params, grads = [full_params(model)], []
    for step in range(STEPS):
        own = whole_gradients(params[-1], [tokens_of(rank, step)])
        model(tokens_of(rank, step)).backward()
        if rank == 3:
            model.body.weight.grad = None
        if rank in (2, 3):
            rows_of(own[1], SHARDS)[1].zero_()
        optimizer.step()
        optimizer.zero_grad()
        params.append(full_params(model))
        grads.append(own)
    return params, grads, {}


@pytest.mark.full
def test_a_gradient_that_one_rank_dropped_counts_as_zeros_of_its_part(pools: RankPools) -> None:
    check_against_whole(pools(4).run(drop_on_one_rank), Case())


def diverge(rank: int, world_size: int, on_divergence: str) -> tuple[str, list[Tensor]]:
    mesh = grid(world_size, SHARDS)
    model = sharded(new_model(), mesh)
    options = {"check_replicas_every": 1, "on_divergence": on_divergence}
    optimizer = optimizer_of(model, mesh, **options)
    told = ""
    for step in range(2):
        model(tokens_of(rank, step)).backward()
        if step == 1 and rank == 3:
            with torch.no_grad():
                model.body.weight._local_tensor[0, 0] += 1
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            try:
                optimizer.step()
            except RuntimeError as error:
                told = str(error)
        optimizer.zero_grad()
        told += "".join(str(warning.message) for warning in found)
    return told, full_params(model)


@pytest.mark.full
@pytest.mark.parametrize("on_divergence", ["raise", "repair"])
def test_a_part_that_differs_is_named_on_all_ranks(pools: RankPools, on_divergence: str) -> None:
    found = pools(4).run(diverge, on_divergence)
    equal = [all(map(same_bits, params, found[0][1])) for _, params in found]
    assert equal == [True, True, *[on_divergence == "repair"] * 2]
    for told, _ in found:
        assert "first in 'body.weight': rank 3 from rank 1" in told


def step_by_process_group(rank: int, world_size: int) -> list[Tensor]:
    mesh = grid(world_size, SHARDS)
    model = new_model()
    group = mesh["replicate"].get_group()
    optimizer = DistributedLion(model.parameters(), lr=LR, weight_decay=DECAY, process_group=group)
    sharded(model, mesh)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    model(tokens_of(rank, 0)).backward()
    optimizer.step()
    return full_params(model)


@pytest.mark.full
def test_a_group_of_replicas_takes_parameters_that_are_sharded_later(pools: RankPools) -> None:
    late, early = pools(4).run(step_by_process_group), pools(4).run(train, Case())
    for params in late:
        assert all(map(same_bits, params, early[0][0][1]))


def step_by_hand(rank: int, world_size: int) -> list[Tensor]:
    """Moves a sharded and a replicated DTensor, with gradients that no FSDP made."""
    mesh = grid(world_size, SHARDS)
    params = [
        nn.Parameter(distribute_tensor(torch.ones(3, 4), mesh["shard"], [placement]))
        for placement in (Shard(0), Replicate())
    ]
    optimizer = DistributedLion(params, lr=0.5, replicate=mesh["replicate"])
    # All replicas vote alike: +1 in the first row, -1 below, and nothing in the last.
    grad = torch.tensor([[-1.0], [1.0], [0.0]]).expand(3, 4).contiguous()
    params[0].grad = distribute_tensor(grad, mesh["shard"], [Shard(0)])
    # One rank alone would vote otherwise; and the sum may still be under way.
    own = funcol.all_reduce(grad * (3 if rank % SHARDS else -1) / 2, "sum", mesh["shard"])
    own = own if rank < SHARDS else grad * (3 if rank % SHARDS else -1)
    params[1].grad = DTensor.from_local(own, mesh["shard"], [Replicate()], run_check=False)
    optimizer.step()
    return [full(param) for param in params]


@pytest.mark.full
def test_a_replicated_parameter_moves_by_the_mean_of_its_replica(pools: RankPools) -> None:
    wanted = torch.tensor([[1.5], [0.5], [1.0]]).expand(3, 4).contiguous()
    for params in pools(4).run(step_by_hand):
        assert all(same_bits(param, wanted) for param in params)


def start_with_other_copies(rank: int, world_size: int) -> str:
    mesh = grid(world_size, SHARDS)
    shared = distribute_tensor(torch.ones(3, 4), mesh["shard"], [Shard(0)])
    # Ranks that hold the same parts agree, those of one replica do not.
    own = torch.full((2,), float(rank % SHARDS))
    copy = DTensor.from_local(own, mesh["shard"], [Replicate()], run_check=False)
    optimizer = DistributedLion(
        [nn.Parameter(shared), nn.Parameter(copy)], replicate=mesh["replicate"]
    )
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    return str(raised.value)


@pytest.mark.full
def test_copies_that_differ_inside_a_replica_at_the_start_are_refused(pools: RankPools) -> None:
    for message in pools(4).run(start_with_other_copies):
        assert "replicas must start equal" in message
        assert "'parameter 1': rank 0" in message
