"""Checkpoints of parameters that FSDP2 shards inside each replica."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import hf_dlion
from hf_dlion import DistributedLion
from hf_dlion.options import warn_once
from tests.support.oracle import same_bits
from tests.support.sharded_training import (
    full,
    full_params,
    grid,
    new_model,
    optimizer_of,
    sharded,
    sharded_late,
    tokens_of,
)
from tests.support.spawn import RankPools


class Run:
    """A model under FSDP2 with `shards` ranks per replica, or under DDP, and its optimizer."""

    def __init__(
        self, rank: int, world_size: int, shards: int | None, *, late: bool = False
    ) -> None:
        self.rank, self.model = rank, new_model()
        if late:
            self.model, self.lion = sharded_late(grid(world_size, shards or 1))
        # torch looks for the state of every parameter that requires a gradient.
        self.model.unused.requires_grad_(False)
        self.forward: Any = self.model
        if late:
            return
        if shards is None:
            self.forward = DistributedDataParallel(self.model, find_unused_parameters=True)
            self.lion = DistributedLion(self.model.named_parameters(), lr=0.01)
        else:
            mesh = grid(world_size, shards)
            self.lion = optimizer_of(sharded(self.model, mesh), mesh)

    def train(self, steps: range) -> list[Tensor]:
        for step in steps:
            self.forward(tokens_of(self.rank, step)).backward()
            self.lion.step()
            self.lion.zero_grad()
        return full_params(self.model)

    def momenta(self) -> list[Tensor]:
        return [full(state["exp_avg"]) for state in self.lion.state.values()]

    def load_weights(self, weights: list[Tensor]) -> None:
        """Continues with another run's whole parameters."""
        with torch.no_grad():
            for param, whole in zip(self.model.parameters(), weights, strict=True):
                fill(param, whole)


def fill(param: Tensor, whole: Tensor) -> None:
    """Writes whole values into a parameter, of which this rank may hold a part."""
    if not hasattr(param, "_local_tensor"):
        param.copy_(whole)
        return
    most = -(-len(whole) // param.device_mesh.size())
    first = param.device_mesh.get_local_rank() * most
    param._local_tensor.copy_(whole[first : first + most])


def resume(
    rank: int, world_size: int, folder: str, before: int | None, after: int | None, late: bool
) -> tuple[list[Tensor], list[Tensor], list[str], list[list[Tensor]]]:
    """Saves a momentum per rank with `before` ranks per replica, and goes on with `after`.

    Args:
        late: Whether the model that goes on is sharded after its optimizer was made.
    """
    first = Run(rank, world_size, before)
    weights = first.train(range(3))
    with hf_dlion.saving(first.lion, folder):
        hf_dlion.save_momentum(first.lion, folder)
    momenta = first.momenta()
    straight = first.train(range(3, 6))
    second = Run(rank, world_size, after, late=late)
    second.load_weights(weights)
    told = load_momentum(second, folder)
    loaded = second.momenta()
    return straight, second.train(range(3, 6)), told, [momenta, loaded]


def load_momentum(run: Run, folder: str) -> list[str]:
    """Loads what three steps left, and returns what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf_dlion.load_momentum(run.lion, folder)
    assert run.lion.steps == 3
    return [str(warning.message) for warning in caught]


@pytest.mark.multiproc
@pytest.mark.parametrize("late", [False, True])
def test_the_same_mesh_goes_on_bit_for_bit(ranks: RankPools, tmp_path: Path, late: bool) -> None:
    for straight, resumed, told, (saved, loaded) in ranks(4).run(resume, str(tmp_path), 2, 2, late):
        assert all(map(same_bits, straight, resumed))
        assert all(map(same_bits, saved, loaded))
        assert told == []


@pytest.mark.multiproc
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (2, None), (None, 2), (1, 2)])
def test_another_mesh_goes_on_from_the_mean_with_a_warning(
    ranks: RankPools, tmp_path: Path, before: int | None, after: int | None
) -> None:
    results = ranks(4).run(resume, str(tmp_path), before, after, False)
    firsts = range(0, 4, before or 1)  # One rank of each replica: `saved` is whole.
    for _, resumed, told, (_, loaded) in results:
        assert all(map(same_bits, resumed, results[0][1]))
        assert (len(told) == 1) == (told == results[0][2])
        for index, mean in enumerate(loaded):
            saved = [results[rank][3][0][index] for rank in firsts]
            torch.testing.assert_close(mean, torch.stack(saved).mean(dim=0))
    assert "every rank continues with the mean" in results[0][2][0]


def resume_with_others(
    rank: int, world_size: int, folder: str, weights: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Goes on with what another number of replicas of two ranks saved."""
    run = Run(rank, world_size, 2)
    run.load_weights(weights)
    told = load_momentum(run, folder)
    return run.momenta(), run.train(range(3, 4)), told


def save(rank: int, world_size: int, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """Saves with two ranks per replica; returns whole parameters and momenta."""
    run = Run(rank, world_size, 2)
    weights = run.train(range(3))
    hf_dlion.save_momentum(run.lion, folder)
    return weights, run.momenta()


@pytest.mark.multiproc
def test_another_number_of_replicas_goes_on_from_the_mean(ranks: RankPools, tmp_path: Path) -> None:
    saved = ranks(4).run(save, str(tmp_path))
    results = ranks(2).run(resume_with_others, str(tmp_path), saved[0][0])
    for momenta, resumed, _ in results:
        for index, mean in enumerate(momenta):
            wanted = torch.stack([saved[rank][1][index] for rank in (0, 2)]).mean(dim=0)
            torch.testing.assert_close(mean, wanted)
        assert all(map(same_bits, resumed, results[0][1]))
    assert "was saved by 4 ranks" in results[0][2][0]


def save_by_torch(
    rank: int, world_size: int, folder: str, averaged: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Saves with two ranks per replica; returns whole momenta, and whole parameters later on."""
    run = Run(rank, world_size, 2)
    run.train(range(3))
    if averaged:
        run.lion.synchronize_momentum()
    model_state, state = get_state_dict(run.model, run.lion)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
    return run.momenta(), run.train(range(3, 6))


def load_by_torch(
    rank: int, world_size: int, folder: str, shards: int
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Returns whole momenta, whole parameters after some more steps, and what was warned of."""
    warn_once._given.discard("momentum collected")
    run = Run(rank, world_size, shards)
    with torch.no_grad():
        for param in run.model.parameters():
            param.zero_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model_state, state = get_state_dict(run.model, run.lion)
        dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(run.model, run.lion, model_state_dict=model_state, optim_state_dict=state)
    told = [str(w.message) for w in caught if "synchronize_momentum" in str(w.message)]
    assert run.lion.steps == 3
    return run.momenta(), run.train(range(3, 6)), told


@pytest.mark.multiproc
def test_torch_s_distributed_checkpoint_goes_on_with_the_same_bits(
    ranks: RankPools, tmp_path: Path
) -> None:
    saved = ranks(4).run(save_by_torch, str(tmp_path), True)
    loaded = ranks(4).run(load_by_torch, str(tmp_path), 2)
    for (_, straight), (_, resumed, told) in zip(saved, loaded, strict=True):
        assert all(map(same_bits, straight, resumed))
        assert told == []


@pytest.mark.multiproc
@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize(("count", "shards"), [(4, 1), (2, 2)])
def test_torch_s_distributed_checkpoint_goes_to_another_mesh(
    ranks: RankPools, tmp_path: Path, count: int, shards: int, averaged: bool
) -> None:
    saved = ranks(4).run(save_by_torch, str(tmp_path), averaged)
    loaded = ranks(count).run(load_by_torch, str(tmp_path), shards)
    for momenta, resumed, told in loaded:
        for found, one, other in zip(momenta, saved[0][0], saved[2][0], strict=True):
            # Without the mean torch keeps each part's momentum of one of the replicas.
            assert bool(((found == one) | (found == other)).all())
            assert bool(found.any())
            assert same_bits(one, other) == averaged
        assert all(map(same_bits, resumed, loaded[0][1]))
        assert bool(told) == (not averaged)


def whole_state(rank: int, world_size: int) -> bool:
    """Loads a state dict of whole momenta, as one that was never sharded."""
    alone = new_model()
    lion = DistributedLion(alone.named_parameters(), process_group=dist.new_group([rank]))
    alone(tokens_of(0, 0)).backward()
    lion.step()
    run = Run(rank, world_size, 2)
    run.lion.load_state_dict(lion.state_dict())
    wanted = [state["exp_avg"] for state in lion.state.values()]
    kinds = {type(state["exp_avg"]).__name__ for state in run.lion.state.values()}
    return all(map(same_bits, run.momenta(), wanted)) and kinds == {"DTensor"}


@pytest.mark.multiproc
def test_a_state_of_whole_momenta_is_cut_into_parts(ranks: RankPools) -> None:
    assert all(ranks(4).run(whole_state))


def stated(mesh: DeviceMesh) -> DistributedLion:
    """Returns an optimizer that holds momenta."""
    model = sharded(new_model(), mesh)
    lion = optimizer_of(model, mesh)
    for param in model.parameters():
        lion.state[param]["exp_avg"] = torch.zeros_like(param)
    return lion


def test_a_state_of_another_part_is_refused(fake_ranks: int) -> None:
    lion = stated(grid(fake_ranks))
    state = lion.state_dict()
    assert state["dlion"]["part"] == [0, 2]
    lion.load_state_dict(state)
    state["dlion"]["part"] = [1, 2]
    with pytest.raises(ValueError, match=r"part 1 of 2, .* part 0 of 2"):
        lion.load_state_dict(state)


def test_a_state_of_parts_is_refused_by_whole_parameters(fake_ranks: int) -> None:
    state = stated(grid(fake_ranks)).state_dict()
    del state["dlion"]["part"]
    whole = DistributedLion(new_model().named_parameters())
    with pytest.raises(ValueError, match="is sharded, the parameter is not"):
        whole.load_state_dict(state)


def test_a_state_that_is_sharded_otherwise_is_refused(fake_ranks: int) -> None:
    state = stated(grid(fake_ranks, 4)).state_dict()
    del state["dlion"]["part"]
    lion = stated(grid(fake_ranks, 2))
    with pytest.raises(ValueError, match=r"part of shape \(2, 6\) .* of shape \(4, 6\)"):
        lion.load_state_dict(state)


def test_a_stretch_of_a_node_s_momentum_is_refused_by_a_sharded_parameter(fake_ranks: int) -> None:
    lion = stated(grid(fake_ranks))
    state = lion.state_dict()
    state["dlion"]["shard"] = {"members": [[0, 1], [2, 3]], "ranges": {0: [0, 40]}}
    state["state"][0] = {"exp_avg": torch.ones(40)}
    state["dlion"]["steps"] = 7
    with pytest.raises(ValueError, match="as ranks with local_group save it"):
        lion.load_state_dict(state)
    assert lion.steps == 0
    assert not any(entry["exp_avg"].to_local().any() for entry in lion.state.values())


def test_momenta_of_ranks_that_have_not_met_are_not_saved(fake_ranks: int, tmp_path: Path) -> None:
    lion = stated(grid(fake_ranks))
    with pytest.raises(RuntimeError, match="take a step first"):
        hf_dlion.save_momentum(lion, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_of_parameters_that_are_sharded_late_are_those_of_all_ranks(
    fake_ranks: int, tmp_path: Path
) -> None:
    _, lion = sharded_late(grid(fake_ranks))
    assert hf_dlion.save_momentum(lion, tmp_path).name.endswith(f"_0_of_{fake_ranks}.pt")
