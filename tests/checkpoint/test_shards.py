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
    tokens_of,
)
from tests.support.spawn import RankPools


class Run:
    """A model under FSDP2 with `shards` ranks per replica, or under DDP, and its optimizer."""

    def __init__(self, rank: int, world_size: int, shards: int | None) -> None:
        self.rank, self.model = rank, new_model()
        # torch looks for the state of every parameter that requires a gradient.
        self.model.unused.requires_grad_(False)
        self.forward: Any = self.model
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
    rank: int, world_size: int, folder: str, before: int | None, after: int | None
) -> tuple[list[Tensor], list[Tensor], list[str], list[list[Tensor]]]:
    """Saves a momentum per rank with `before` ranks per replica, and goes on with `after`."""
    first = Run(rank, world_size, before)
    weights = first.train(range(3))
    with hf_dlion.saving(first.lion, folder):
        hf_dlion.save_momentum(first.lion, folder)
    momenta = first.momenta()
    straight = first.train(range(3, 6))
    second = Run(rank, world_size, after)
    second.load_weights(weights)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf_dlion.load_momentum(second.lion, folder)
    told = [str(warning.message) for warning in caught]
    loaded = second.momenta()
    assert second.lion.steps == 3
    return straight, second.train(range(3, 6)), told, [momenta, loaded]


@pytest.mark.multiproc
def test_the_same_mesh_goes_on_bit_for_bit(ranks: RankPools, tmp_path: Path) -> None:
    for straight, resumed, told, (saved, loaded) in ranks(4).run(resume, str(tmp_path), 2, 2):
        assert all(map(same_bits, straight, resumed))
        assert all(map(same_bits, saved, loaded))
        assert told == []


@pytest.mark.multiproc
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (2, None), (None, 2), (1, 2)])
def test_another_mesh_goes_on_from_the_mean_with_a_warning(
    ranks: RankPools, tmp_path: Path, before: int | None, after: int | None
) -> None:
    results = ranks(4).run(resume, str(tmp_path), before, after)
    firsts = range(0, 4, before or 1)  # One rank of each replica: `saved` is whole.
    for _, resumed, told, (_, loaded) in results:
        assert all(map(same_bits, resumed, results[0][1]))
        assert (len(told) == 1) == (told == results[0][2])
        for index, mean in enumerate(loaded):
            saved = [results[rank][3][0][index] for rank in firsts]
            torch.testing.assert_close(mean, torch.stack(saved).mean(dim=0))
    assert "every rank continues with the mean" in results[0][2][0]


def through_torch(
    rank: int, world_size: int, folder: str, after: int, averaged: bool
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    warn_once._given.discard("momentum collected")
    first = Run(rank, world_size, 2)
    first.train(range(3))
    if averaged:
        first.lion.synchronize_momentum()
    model_state, state = get_state_dict(first.model, first.lion)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
    straight = first.train(range(3, 6))
    second = Run(rank, world_size, after)
    with torch.no_grad():
        for param in second.model.parameters():
            param.zero_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model_state, state = get_state_dict(second.model, second.lion)
        dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(
            second.model, second.lion, model_state_dict=model_state, optim_state_dict=state
        )
    told = [str(w.message) for w in caught if "synchronize_momentum" in str(w.message)]
    assert second.lion.steps == 3
    return straight, second.train(range(3, 6)), told


@pytest.mark.multiproc
def test_torch_s_distributed_checkpoint_goes_on_with_the_same_bits(
    ranks: RankPools, tmp_path: Path
) -> None:
    results = ranks(4).run(through_torch, str(tmp_path), 2, True)
    for straight, resumed, told in results:
        assert all(map(same_bits, straight, resumed))
        assert told == []


@pytest.mark.multiproc
@pytest.mark.parametrize("averaged", [True, False])
def test_torch_s_distributed_checkpoint_goes_to_another_mesh(
    ranks: RankPools, tmp_path: Path, averaged: bool
) -> None:
    results = ranks(4).run(through_torch, str(tmp_path), 1, averaged)
    for _, resumed, told in results:
        assert all(map(same_bits, resumed, results[0][1]))
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
