"""FSDP2 shards, whose replicas vote, on real ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from hf_dlion.checkpoint import save_momentum
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Disagreement
from tests.support.local_definition import lions_of
from tests.support.spawn import on_ranks
from tests.support.steps import backward, copies, parts, plain, sharded, take_step
from tests.support.training import (
    batch,
    filled,
    gathered,
    gradients_of,
    is_equal_everywhere,
    model_of,
    replicas_of_shards,
    same,
)


@pytest.mark.parametrize("every", [1, 3])
@on_ranks(4)
def test_two_replicas_of_two_shards_equal_the_definition(rank: int, every: int) -> None:
    """Compares steps and local steps of 2 x 2 FSDP2 with the definition of each shard."""
    model, optimizer = sharded(2, 2, weight_decay=0.1, vote_every=every, check_replicas_every=1)
    bare, params = model_of(), list(model.parameters())
    lions = lions_of(parts(model), 2, every)
    for step in range(7):
        with torch.no_grad():
            for p, whole in zip(params, bare.parameters(), strict=True):
                whole.copy_(p.full_tensor())
        backward(model, batch(step, rank))
        members = [gradients_of(bare, batch(step, rank - rank % 2 + k)) for k in range(2)]
        for p, *grads in zip(params, *members, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), sum(grads) / 2)
        by_rank = gathered([p.grad.to_local() for p in params])
        with torch.no_grad():
            model(batch(step, rank))  # leaves the root gathered
        lions.step(by_rank[rank % 2 :: 2])
        optimizer.step()
        assert same(parts(model), lions.params if every == 1 else lions.own[rank // 2]), step
    with torch.no_grad():
        trained = model(batch(0, 0))
        with optimizer.common_weights():
            common = model(batch(0, 0))
        assert torch.equal(trained, model(batch(0, 0)))
        assert is_equal_everywhere(common)
        assert torch.equal(trained, common) == (every == 1)
        if every > 1:
            with optimizer.common_weights():
                for k, part in enumerate(parts(model)):
                    lions.write(k, part.clamp_(-0.1, 0.1))
            assert same(parts(model), lions.own[rank // 2])
    state = optimizer.state_dict()["state"]
    assert all(own["exp_avg"].device_mesh is not None for own in state.values())
    with torch.no_grad():
        model(batch(0, 0))
    optimizer.attach(model)  # Though the root is gathered.


@on_ranks(4)
def test_detach_within_a_period_leaves_the_common_weights_of_a_gathered_model(rank: int) -> None:
    model, optimizer = sharded(2, 2, vote_every=8)
    common = model(batch(0, 0)).detach()
    for step in range(3):
        backward(model, batch(step, rank))
        optimizer.step()
    with torch.no_grad():
        assert not torch.equal(model(batch(0, 0)), common)  # leaves the root gathered
        optimizer.detach()
        assert torch.equal(model(batch(0, 0)), common)
    backward(model, batch(3, rank))
    with pytest.raises(RuntimeError, match=r"'0\.weight' belongs to no attached model"):
        optimizer.step()
    optimizer.attach(model)
    optimizer.step()


@on_ranks(4)
def test_momenta_of_which_a_shard_has_nothing_are_averaged(rank: int) -> None:
    """The only row of a parameter is in the first shard."""
    mesh, model = replicas_of_shards(2, 2), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    fully_shard(model, mesh=mesh["shard"])
    _, optimizer = plain(
        model, replicate=mesh["replicate"], vote_every=2, momentum_sync_every=1,
        momentum_sync="1.bias",
    )  # fmt: skip
    optimizer.attach(model)
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(4, 64)).sum() * (-1) ** (rank // 2)).backward()
        optimizer.step()
    momentum = optimizer.state[model[1].bias]["exp_avg"].to_local()
    assert momentum.numel() == (rank % 2 == 0)
    # Those of the replicas, 0.16 and -0.16, cancel out but for what 4 bits leave out.
    assert float(momentum.abs().sum()) < 0.02


@on_ranks(2, timeout=20)
def test_a_closure_that_fails_on_one_rank_leaves_no_model_gathered_there(rank: int) -> None:
    """Its next forward would gather nothing, and the other rank would wait."""
    model, optimizer = sharded(1, 2)

    def closure() -> float:
        backward(model, batch(0, rank))
        with torch.no_grad():
            model(batch(0, rank))  # leaves the root gathered
        return 0.0 if rank == 0 else 1 / 0

    with pytest.raises((ZeroDivisionError, Disagreement)):
        optimizer.step(closure)
    take_step(optimizer, model, batch(0, rank))
    assert optimizer.steps == 1


@on_ranks(2)
def test_complete_momenta_of_sharded_parameters_are_refused() -> None:
    """Each shard would continue with the first rows; and sharded momenta of complete parameters."""
    (_, split), (_, whole) = pairs = [sharded(1, 2), plain()]
    for model, optimizer in pairs:
        take_step(optimizer, model, batch(0, 0))
    states = split.state_dict(), whole.state_dict()
    with pytest.raises(ValueError, match="a complete momentum for a parameter that is sharded: "):
        split.load_state_dict(states[1])
    with pytest.raises(ValueError, match="a sharded momentum for a parameter that is not sharded"):
        whole.load_state_dict(states[0])


UNSUPPORTED = {
    "not attached": (RuntimeError, r"call optimizer\.attach"),
    "no replicate": (ValueError, r"pass replicate=mesh\['replicate'\]"),
    "not sharded": (ValueError, "replicate= needs a model sharded with FSDP2"),
    "HSDP": (NotImplementedError, "on a mesh of 2 dimensions: DistributedLion needs fully_shard"),
    "tensor parallelism": (NotImplementedError, "'weight' is placed as .Replicate().* no tensor"),
    "no mesh": (ValueError, r"'weight' is sharded over ranks \[0, 1\], which replicate= gives"),
    "a plain tensor": (NotImplementedError, "'plain' is a plain tensor, but other parameters are"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
@on_ranks(2)
def test_an_unsupported_placement_is_refused(rank: int, what: str) -> None:
    mesh, model = replicas_of_shards(2, 1), nn.Linear(64, 4)
    if what == "tensor parallelism":
        for name, param in list(model.named_parameters()):
            tensor = distribute_tensor(param.detach(), mesh["shard"], [Replicate()])
            model.register_parameter(name, nn.Parameter(tensor))
    elif what != "not sharded":
        meshes = {"HSDP": mesh, "no mesh": None}
        fully_shard(model, mesh=meshes.get(what, mesh["shard"]))
    named = list(model.named_parameters())
    if what == "a plain tensor":
        named.append(("plain", filled(1.0)))
    replicate = None if what == "no replicate" else mesh["replicate"]
    optimizer = DistributedLion(named, lr=0.01, replicate=replicate)
    if what not in ("not attached", "not sharded", "tensor parallelism"):
        optimizer.attach(model)
    for _, param in named:
        param.grad = torch.ones_like(param)
    error, text = UNSUPPORTED[what]
    with pytest.raises(error, match=text):
        optimizer.step()


@on_ranks(2)
def test_a_mesh_of_two_dimensions_replicates_nothing() -> None:
    with pytest.raises(ValueError, match=r"must be one dimension of the mesh.*got 2 dimensions"):
        DistributedLion([filled(1.0)], replicate=replicas_of_shards(2, 1))


@on_ranks(4)
def test_a_nan_in_one_shard_makes_its_replica_abstain(rank: int) -> None:
    model, optimizer = sharded(2, 2)
    replica = rank // 2
    for param in model.parameters():
        param.grad = torch.full_like(param, (-1.0) ** replica)
    if rank == 0:
        model[0].weight.grad.to_local()[0] = torch.nan
    before = copies(parts(model))
    optimizer.step()
    for param, part, old in zip(model.parameters(), parts(model), before, strict=True):
        # Replica 1 alone decides; its gradients are -1.
        torch.testing.assert_close(part, old + 0.01)
        momentum = optimizer.state[param].get("exp_avg")
        has_moved = momentum is not None and bool(momentum.to_local().any())
        assert has_moved == (replica == 1)
    assert optimizer.wire.abstentions == 2


@on_ranks(4)
def test_an_evaluation_of_two_sharded_models_changes_nothing(rank: int) -> None:
    """Trains two models with one optimizer; an evaluation leaves both gathered."""
    ends = []
    for evaluates in (False, True):
        mesh, models = replicas_of_shards(2, 2), nn.ModuleList([model_of(), model_of()])
        for model in models:
            fully_shard(model, mesh=mesh["shard"])
        optimizer = DistributedLion(
            models.named_parameters(), lr=0.01, replicate=mesh["replicate"], vote_every=3
        )
        optimizer.attach(models[0])
        for model in models:
            backward(model, batch(0, rank))
        with pytest.raises(RuntimeError, match=r"'1\.0\.weight' belongs to no attached model"):
            optimizer.step()
        optimizer.attach(models[1])
        for step in range(4):
            for model in models:
                backward(model, batch(step, rank))
            optimizer.step()
            if evaluates:
                with optimizer.common_weights(), torch.no_grad():
                    for model in models:
                        model(batch(step, rank))
        ends.append(copies(parts(models)))
    assert same(*ends)


@on_ranks(2)
def test_a_sharded_model_with_parameters_of_another_optimizer_is_refused() -> None:
    mesh, model = replicas_of_shards(2, 1), model_of()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = DistributedLion(model[0].named_parameters(), replicate=mesh["replicate"])
    with pytest.raises(RuntimeError, match="4 trainable parameters of the FSDP2 model belong to n"):
        optimizer.attach(model)
    other = DistributedLion(model[1:].named_parameters(), replicate=mesh["replicate"])
    for own in (optimizer, other):
        own.attach(model)


@on_ranks(2)
def test_a_compiled_sharded_model_is_attached_and_a_frozen_one_needs_no_attach() -> None:
    """Attaches a model that was compiled before or after it was sharded; another one is frozen."""
    mesh = replicas_of_shards(2, 1)
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


@on_ranks(4, timeout=30)
def test_replicas_on_some_ranks_only_do_not_hang(rank: int) -> None:
    _, optimizer = sharded(2, 2, **({"replicate": None} if rank == 1 else {}))
    error, text = Disagreement, "rank 1 steps while ranks 0, 2, and 3 have replicate="
    if rank == 1:
        error, text = ValueError, "the parameters are sharded: pass replicate="
    with pytest.raises(error, match=text):
        optimizer.step()


@pytest.mark.parametrize("replicas", [2, 1])
@on_ranks(4)
def test_weights_replaced_in_a_shard_are_refused_on_all_ranks(rank: int, replicas: int) -> None:
    """Replaces the shard of one rank; the ranks that hold other shards raise, too."""
    mesh, model = replicas_of_shards(2, 2), nn.Linear(64, 4).to(torch.bfloat16)
    fully_shard(model, mesh=mesh["shard"])
    options: dict[str, Any] = {"replicate": mesh["replicate"], "vote_every": 8}
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, **options)
    optimizer.attach(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, (-1.0) ** rank)
    optimizer.step()
    with torch.no_grad():
        if rank == 1 or (replicas == 2 and rank == 3):
            model.weight.to_local().add_(2)
    for _ in range(2):
        with pytest.raises(Disagreement, match=r"^the weights of 'weight' on rank.* are farther"):
            optimizer.exchange_now()


@pytest.mark.parametrize("fails_in", ["a save", "a step"])
@on_ranks(2, timeout=30)
def test_ranks_train_on_after_a_failure_on_one_of_them(
    rank: int, tmp_path: Path, fails_in: str
) -> None:
    """An evaluation leaves the root gathered, which all ranks must free, or none."""
    model, optimizer = sharded(1, 2)
    for step in range(3):
        take_step(optimizer, model, batch(step, rank))
        if step == 1:
            with torch.no_grad():
                model(batch(step, rank))
            failure = OSError("disk full") if rank == 0 else None
            call = functools.partial(save_momentum, optimizer, tmp_path, failure=failure)
            if fails_in == "a step":
                call = functools.partial(optimizer.step, failure and mock.Mock(side_effect=failure))
            with pytest.raises(OSError if rank == 0 else Disagreement):
                call()
    assert optimizer.steps == 3
