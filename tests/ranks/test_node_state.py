"""Shards of the momentum: they move when messages change, and are saved and loaded."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dlion import DistributedLion
from hf_dlion.checkpoint import momentum_file
from hf_dlion.checkpoint.rank_files import (
    CheckpointError,
    load_momentum,
    resume_momentum,
    save_momentum,
)
from tests.support.oracle import OracleGroup, OracleLion, bits_of, same_bits
from tests.support.spawn import RankPools

SHAPES = [(5, 40), (130,), (3, 70), (64,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.float32]


def new_params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full(s, 0.5, dtype=d)) for s, d in zip(SHAPES, DTYPES, strict=True)]


def grads_of(node: int, t: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * node + t)
    return [
        12 * torch.randint(-9, 10, shape, generator=generator).to(dtype)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def give(params: list[nn.Parameter], rank: int, size: int, t: int, absent: set[int]) -> None:
    """Gives gradients whose mean over a node is exact, and those of the node."""
    for k, (p, grad) in enumerate(zip(params, grads_of(rank // size, t), strict=True)):
        shift = {0: 12, 1: -12}.get(rank % size, 0) if size > 1 else 0
        p.grad = None if k in absent else grad + shift


def whole(optimizer: DistributedLion, params: list[nn.Parameter]) -> list[Tensor | None]:
    """The node's momenta, put together from its ranks; every rank calls it."""
    mine = optimizer.state_dict()
    ranges = mine["dlion"].get("shard", {}).get("ranges", {})
    held = {k: state["exp_avg"].float() for k, state in mine["state"].items()}
    node = optimizer._engine.voters()
    everyone = optimizer._engine.gather_objects((ranges, held))
    members = [everyone[rank] for rank in (node.near or [optimizer.rank])]
    found: list[Tensor | None] = []
    for k, p in enumerate(params):
        total = torch.full((p.numel(),), torch.nan)
        for ranges, held in members:
            if k in held:
                start, stop = ranges.get(k, (0, p.numel()))
                total[start:stop] = held[k].view(-1)
        found.append(total if any(k in held for _, held in members) else None)
    return found


def change_parameters(rank: int, world_size: int, size: int) -> list[tuple[list[bytes], list[Any]]]:
    """Freezes, thaws and adds parameters between steps."""
    params = new_params()
    params[2].requires_grad_(False)
    optimizer = DistributedLion(params[:3], lr=0.01, betas=(0.5, 0.75), local_group=size)
    found = []
    for t in range(10):
        if t == 2:
            params[2].requires_grad_(True)
        if t == 4:
            optimizer.add_param_group({"params": [params[3]]})
        if t == 6:
            params[0].requires_grad_(False)
        if t == 8:
            params[0].requires_grad_(True)
        give(params, rank, size, t, absent_at(t))
        optimizer.step()
        found.append(([bits_of(p) for p in params], whole(optimizer, params)))
        if t == 5:
            optimizer = copied(optimizer, params)
    return found


def copied(optimizer: DistributedLion, params: list[nn.Parameter]) -> DistributedLion:
    """The same optimizer after its state went through a file."""
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    options = {"betas": (0.5, 0.75), "local_group": optimizer.options.local_group}
    fresh = DistributedLion(groups, lr=0.01, **options)
    fresh.load_state_dict(state)
    return fresh


def absent_at(t: int) -> set[int]:
    return {k for k, gone in enumerate([t in (6, 7), False, t < 2, t < 4]) if gone}


@pytest.mark.parametrize(("nodes", "size"), [(2, 2), (2, 3), (1, 2)])
def test_momenta_move_when_parameters_are_frozen_thawed_and_added(
    ranks: RankPools, nodes: int, size: int
) -> None:
    results = ranks(nodes * size).run(change_parameters, size)
    group = OracleGroup([p.detach() for p in new_params()], lr=0.01, betas=(0.5, 0.75))
    oracle = OracleLion([group], nodes)
    for t in range(10):
        grads = [
            [None if k in absent_at(t) else g for k, g in enumerate(grads_of(node, t))]
            for node in range(nodes)
        ]
        oracle.step(grads)
        for rank, result in enumerate(results):
            params, momenta = result[t]
            assert params == [bits_of(p) for p in oracle.params], f"step {t}"
            for k, momentum in enumerate(momenta):
                expected = oracle.exp_avg[rank // size][k].float().view(-1)
                assert expected.any() == (momentum is not None)
                assert momentum is None or torch.equal(momentum, expected), f"{k} in step {t}"


def train(optimizer: DistributedLion, params: list[nn.Parameter], rank: int, size: int, steps: int):
    for _ in range(steps):
        give(params, rank, size, optimizer.steps, set())
        optimizer.step()


def make(local_group: int | None, **options: Any) -> tuple[list[nn.Parameter], DistributedLion]:
    params = new_params()
    return params, DistributedLion(
        params, lr=0.01, betas=(0.5, 0.75), local_group=local_group, **options
    )


def save_run(rank: int, world_size: int, folder: str, local_group: int | None) -> list[Any]:
    params, optimizer = make(local_group)
    train(optimizer, params, rank, local_group or 1, 3)
    if rank == 0:
        state = {"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}
        torch.save(state, Path(folder, "state.pt"))
    save_momentum(optimizer, folder)
    momenta = whole(optimizer, params)
    train(optimizer, params, rank, local_group or 1, 2)
    return [momenta, [bits_of(p) for p in params]]


def load_run(rank: int, world_size: int, folder: str, local_group: int | None) -> list[Any]:
    params, optimizer = make(local_group)
    state = torch.load(Path(folder, "state.pt"), weights_only=True)
    with torch.no_grad():
        for p, saved in zip(params, state["params"], strict=True):
            p.copy_(saved)
    optimizer.load_state_dict(state["optimizer"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_momentum(optimizer, folder)
    momenta = whole(optimizer, params)
    train(optimizer, params, rank, local_group or 1, 2)
    said = [str(warning.message) for warning in caught]
    return [momenta, [bits_of(p) for p in params], said]


def mean_momenta(results: list[Any], size: int) -> list[Tensor]:
    """The mean over the nodes, one of whose ranks each result in `size` is."""
    nodes = [results[first][0] for first in range(0, len(results), size)]
    dtypes = zip(DTYPES, zip(*nodes, strict=True), strict=True)
    return [(torch.stack(same).sum(dim=0) / len(nodes)).to(d).float() for d, same in dtypes]


@pytest.mark.parametrize(("nodes", "size"), [(2, 2), (2, 3)])
def test_the_same_nodes_resume_bit_for_bit(
    ranks: RankPools, tmp_path: Path, nodes: int, size: int
) -> None:
    saved = ranks(nodes * size).run(save_run, str(tmp_path), size)
    loaded = ranks(nodes * size).run(load_run, str(tmp_path), size)
    for before, after in zip(saved, loaded, strict=True):
        assert all(map(torch.equal, before[0], after[0]))
        assert before[1] == after[1]
        assert after[2] == []


@pytest.mark.parametrize(
    ("saved_by", "size", "loaded_by", "new_size"),
    [(4, 2, 6, 3), (4, 2, 6, 2), (4, 2, 4, None), (4, None, 4, 2), (4, 2, 1, 2), (2, None, 4, 2)],
)
def test_other_nodes_load_the_mean_over_the_nodes_and_say_so(
    ranks: RankPools,
    tmp_path: Path,
    saved_by: int,
    size: int | None,
    loaded_by: int,
    new_size: int | None,
) -> None:
    saved = ranks(saved_by).run(save_run, str(tmp_path), size)
    mean = mean_momenta(saved, size or 1)
    loaded = ranks(loaded_by).run(load_run, str(tmp_path), new_size)
    for rank, (momenta, params, said) in enumerate(loaded):
        assert all(map(torch.equal, momenta, mean))
        assert params == loaded[0][1]
        assert len(said) == (rank == 0)
    assert f"saved by {saved_by} ranks" in loaded[0][2][0]


def load_one_state(rank: int, world_size: int, folder: str, local_group: int | None) -> list[Any]:
    """Loads rank 0's state alone, as somebody who forgot the momenta does."""
    params, optimizer = make(local_group)
    state = torch.load(Path(folder, "state.pt"), weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for p, saved in zip(params, state["params"], strict=True):
            p.copy_(saved)
    error = ""
    try:
        resume_momentum(optimizer, folder, ["state.pt"], name="other")
    except CheckpointError as caught:
        error = str(caught)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(optimizer, params, rank, local_group or 1, 1)
    return [error, [bits_of(p) for p in params]]


@pytest.mark.parametrize(("world_size", "size"), [(4, 2), (6, 3), (2, None), (1, None)])
def test_one_ranks_share_alone_is_refused_on_resume_and_breaks_nothing_by_hand(
    ranks: RankPools, tmp_path: Path, world_size: int, size: int | None
) -> None:
    ranks(4).run(save_run, str(tmp_path), 2)
    results = ranks(world_size).run(load_one_state, str(tmp_path), size)
    for error, params in results:
        assert "no momentum of any rank" in error
        assert params == results[0][1]


def warn_of_lost_shares(rank: int, world_size: int, folder: str) -> list[str]:
    from hf_dlion.options import warn_once

    warn_once._given.clear()
    params, optimizer = make(world_size if world_size > 1 else None)
    state = torch.load(Path(folder, "state.pt"), weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for p, saved in zip(params, state["params"], strict=True):
            p.copy_(saved)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(optimizer, params, rank, world_size, 1)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("world_size", [1, 2])
def test_lost_shares_are_said_at_the_next_step(
    ranks: RankPools, tmp_path: Path, world_size: int
) -> None:
    ranks(4).run(save_run, str(tmp_path), 2)
    for said in ranks(world_size).run(warn_of_lost_shares, str(tmp_path)):
        assert any("one rank's share of its node's momentum only" in text for text in said)


def test_a_missing_share_of_a_node_is_refused(ranks: RankPools, tmp_path: Path) -> None:
    ranks(4).run(save_run, str(tmp_path), 2)
    path = tmp_path / "dlion_momentum_3_of_4.pt"
    content = momentum_file.read(path)
    content.exp_avg.pop(3, None)
    content.ranges.pop(3, None)
    momentum_file.write(path, content)
    for error in ranks(2).run(refused, str(tmp_path)):
        assert "lack a part of the momentum of parameter 3" in error


def refused(rank: int, world_size: int, folder: str) -> str:
    _, optimizer = make(None)
    with pytest.raises(CheckpointError) as caught:
        load_momentum(optimizer, folder)
    return str(caught.value)


def synchronize(rank: int, world_size: int, size: int) -> list[Any]:
    params, optimizer = make(size)
    train(optimizer, params, rank, size, 3)
    before = whole(optimizer, params)
    optimizer.synchronize_momentum()
    state = optimizer.state_dict()
    pairs = zip(state["state"].values(), params, strict=True)
    shapes = [s["exp_avg"].shape == p.shape for s, p in pairs]
    mean = [s["exp_avg"].float().view(-1) for s in state["state"].values()]
    train(optimizer, params, rank, size, 1)
    sizes = sum(s["exp_avg"].numel() for s in optimizer.state_dict()["state"].values())
    return [before, mean, shapes, state["dlion"]["rank"], sizes, [bits_of(p) for p in params]]


@pytest.mark.parametrize(("nodes", "size"), [(2, 2), (2, 3), (1, 2)])
def test_synchronized_momenta_are_whole_on_every_rank_until_the_next_step(
    ranks: RankPools, nodes: int, size: int
) -> None:
    results = ranks(nodes * size).run(synchronize, size)
    mean = mean_momenta(results, size)
    total = sum(p.numel() for p in new_params())
    for _, found, shapes, origin, _, params in results:
        assert all(map(torch.equal, found, mean))
        assert all(shapes)
        assert origin is None
        assert params == results[0][5]
    for first in range(0, nodes * size, size):
        assert sum(result[4] for result in results[first : first + size]) == total


def copies(rank: int, world_size: int) -> bool:
    params, optimizer = make(2)
    train(optimizer, params, rank, 2, 2)
    twin = copy.deepcopy(optimizer)
    theirs = [p for group in twin.param_groups for p in group["params"]]
    train(optimizer, params, rank, 2, 2)
    train(twin, theirs, rank, 2, 2)
    return all(same_bits(p.detach(), q.detach()) for p, q in zip(params, theirs, strict=True))


def test_a_copy_goes_on_with_its_shares(ranks: RankPools) -> None:
    assert all(ranks(4).run(copies))


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ({"ranges": {0: [0, 64]}}, "damaged"),
        ({"members": [[0, 1]], "ranges": {9: [0, 64]}}, "other parameters"),
        ({"members": [[0, 1]], "ranges": {0: [0, 64]}}, "said to be elements 0 to 64 of 200"),
        ({"members": [[0, 1]], "ranges": {0: [64, 0]}}, "said to be elements 64 to 0 of 200"),
    ],
)
def test_a_state_with_a_wrong_description_is_refused(shard: dict[str, Any], message: str) -> None:
    params, optimizer = make(None)
    train(optimizer, params, 0, 1, 1)
    state = optimizer.state_dict()
    state["dlion"]["shard"] = shard
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
