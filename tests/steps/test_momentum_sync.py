"""Selection and averaging of momenta, on real ranks."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hf_dlion.steps.momentum_sync as momentum_sync
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Disagreement
from hf_dlion.ranks.topology import Topology
from hf_dlion.steps.means import average_whole, sum_over_voters
from hf_dlion.steps.momentum_sync import average_momenta, slice_of
from tests.support.spawn import on_ranks
from tests.support.steps import backward, drawn, plain, single, take_step
from tests.support.training import (
    batch,
    everyones,
    filled,
    is_equal_everywhere,
    same,
)


def chosen(name: str, param: torch.Tensor) -> bool:
    return name.startswith("0.") or name.endswith("bias")


@pytest.mark.parametrize("selection", ["0.*;*bias", chosen], ids=["patterns", "function"])
@on_ranks(3)
def test_selected_momenta_are_averaged(rank: int, selection: Any) -> None:
    model, optimizer = plain(momentum_sync_every=1, momentum_sync=selection)
    for step in range(4):
        take_step(optimizer, model, batch(step, rank))
    for name, p in model.named_parameters():
        momentum = optimizer.state[p]["exp_avg"]
        spread = torch.stack(everyones(momentum)).std(dim=0).mean() / momentum.abs().mean()
        # Each rank keeps its own error of rounding to bfloat16.
        assert 0 < spread < 2**-8 if chosen(name, p) else spread > 0.1, name


def test_slices_cover_all_momenta_once() -> None:
    for total, every in [(0, 1), (1, 3), (10, 3), (64, 1), (7, 7)]:
        slices = [slice_of(total, every, step) for step in range(1, every + 1)]
        covered = sorted(k for start, stop in slices for k in range(start, stop))
        assert covered == list(range(total))


@on_ranks(3)
def test_momenta_are_averaged_in_parts_with_the_same_bits_and_bytes(rank: int) -> None:
    ranks, results = Topology(), []
    for part in (1 << 22, 2):
        momenta = [drawn([size], rank) for size in (5, 0, 64, 4)]
        before = ranks.voters.stats.bytes_sent
        with mock.patch.object(momentum_sync, "PART", part):
            average_momenta(momenta, ranks, 3, 71)
        results.append((ranks.voters.stats.bytes_sent - before, momenta))
    (bytes_at_once, at_once), (bytes_in_parts, in_parts) = results
    assert bytes_in_parts == bytes_at_once == 4 * 2 * 23  # of 68 elements
    assert same(in_parts, at_once)


@on_ranks(4)
def test_the_ranks_of_a_node_share_the_averaging(rank: int) -> None:
    """The bits are those of as many voters without nodes, and each rank sends half as much."""
    nodes = Topology(local_group=2)
    nodes.form()
    ends, sent = [], []
    for ranks in (nodes, Topology(nodes.voters.group)):
        momenta, stats = [drawn([size], rank // 2) for size in (5, 0, 64, 4)], ranks.voters.stats
        before = stats.bytes_sent, stats.node_bytes_sent
        with mock.patch.object(momentum_sync, "PART", 16):  # 68 elements are 32, 32, and 4.
            average_momenta(momenta, ranks, 3, 71)
        ends.append(momenta)
        sent.append((stats.bytes_sent - before[0], stats.node_bytes_sent - before[1]))
    assert same(*ends)
    assert sent == [(4 * (8 + 8 + 1), 2 * 2 * (8 + 8 + 1)), (4 * (16 + 16 + 2), 0)]


@on_ranks(4)
def test_the_ranks_of_a_node_share_a_sum_in_full_precision(rank: int) -> None:
    nodes = Topology(local_group=2)
    nodes.form()
    stats = nodes.voters.stats
    before, flat = (stats.bytes_sent, stats.node_bytes_sent), drawn([5], rank // 2)
    total = sum_over_voters(flat, "a test", nodes)
    assert torch.equal(total, drawn([5], 0) + drawn([5], 1))
    assert torch.equal(flat, drawn([5], rank // 2))
    assert (stats.bytes_sent - before[0], stats.node_bytes_sent - before[1]) == (2 * 2 * 4, 3 * 4)
    assert sum_over_voters(torch.empty(0), "a parameter without elements", nodes).shape == (0,)


@on_ranks(2)
def test_means_of_momenta_are_finite_and_as_precise_as_the_momenta(rank: int) -> None:
    """Averages momenta next to the largest number of their dtype, and float64 ones."""
    ranks = Topology()
    half = torch.full((2,), 65376.0 if rank else 65504.0, dtype=torch.float16)
    average_momenta([half], ranks, 0, 2)
    brain = torch.full((2,), 3e38, dtype=torch.bfloat16)
    double = torch.full((2,), 1 / 3, dtype=torch.float64)
    average_whole([brain, double], ranks)
    average_momenta([double], ranks, 0, 2)
    assert all(map(math.isfinite, half.tolist() + brain.tolist()))
    assert double.tolist() == [1 / 3, 1 / 3]


@on_ranks(2)
def test_functions_that_select_different_momenta_are_refused(rank: int) -> None:
    own = "0.weight" if rank == 0 else "0.bias"
    model, optimizer = plain(momentum_sync_every=1, momentum_sync=lambda name, param: name == own)
    backward(model, batch(0, rank))
    with pytest.raises(Disagreement, match="choices of momentum_sync"):
        optimizer.step()


@on_ranks(2)
def test_torchs_default_dtype_changes_nothing(rank: int) -> None:
    options = {"momentum_sync_every": 1, "check_replicas_every": 1}
    pairs = [plain(**options) for _ in range(2)]
    for step in range(2):
        for (model, optimizer), dtype in zip(pairs, (torch.float32, torch.bfloat16), strict=True):
            backward(model, batch(step, rank))
            torch.set_default_dtype(dtype)
            try:
                optimizer.step()
            finally:
                torch.set_default_dtype(torch.float32)
    assert same(*(list(model.parameters()) for model, _ in pairs))


@on_ranks(3)
def test_synchronize_momentum_makes_all_momenta_equal(rank: int) -> None:
    """Also those of a parameter that is frozen now, and one that only rank 0 has used."""
    model, optimizer = plain()
    first, *_, last = model.parameters()
    last.requires_grad_(rank == 0)
    backward(model, batch(0, rank))
    last.requires_grad_(True)
    optimizer.step()
    first.requires_grad_(False)
    optimizer.synchronize_momentum()
    assert all(is_equal_everywhere(optimizer.state[p]["exp_avg"]) for p in model.parameters())
    assert bool(optimizer.state[first]["exp_avg"].any())


@on_ranks(2, timeout=20)
def test_a_rank_that_synchronizes_momenta_alone_is_named(rank: int) -> None:
    model, optimizer = plain()
    take_step(optimizer, model, batch(0, rank))
    call = optimizer.synchronize_momentum if rank == 0 else optimizer.step
    with pytest.raises(Disagreement, match="rank 1 steps while rank 0 synchronizes momenta: "):
        call()


@on_ranks(2)
def test_local_steps_average_momenta_of_full_precision_too(rank: int) -> None:
    options = {"momentum_sync_every": 1, "betas": (0.9, 0.99)}
    param, optimizer = single(vote_every=2, full_precision="w", **options)
    param.grad *= (-1) ** rank
    for _ in range(2):
        optimizer.step()
    # What 4 bits leave out stays.
    assert 1e-3 <= float(optimizer.state[param]["exp_avg"].abs().max()) <= 2e-3


@on_ranks(2)
def test_a_parameter_that_is_frozen_for_an_exchange_keeps_its_momentum(rank: int) -> None:
    param, optimizer = single(vote_every=2, momentum_sync_every=1)
    other = filled(1.0)
    optimizer.add_param_group({"params": [("other", other)]})
    for step in range(2):
        param.requires_grad_(step == 0)
        for p in (param, other):
            p.grad = torch.full_like(p, (-1.0) ** rank) if p.requires_grad else None
        optimizer.step()
    momenta = [float(optimizer.state[p]["exp_avg"].mean()) for p in (param, other)]
    # What 4 bits leave out of a momentum is at most a third of this one.
    assert momenta == pytest.approx([0.02 * (-1) ** rank, 0.0], abs=6e-3)


def test_an_attach_that_is_repeated_refuses_a_selection_again() -> None:
    model = nn.Linear(2, 2)
    options: dict[str, Any] = {"momentum_sync_every": 2, "momentum_sync": "weight"}
    optimizer = DistributedLion(model.parameters(), full_precision="weight", **options)
    for _ in range(2):
        with pytest.raises(ValueError, match="momentum_sync would have no effect"):
            optimizer.params.name_as(model)


def test_a_selection_of_momenta_that_are_equal_anyway_is_refused() -> None:
    named = [("norm", filled(1.0)), ("weight", filled(1.0))]
    options: dict[str, Any] = {"momentum_sync_every": 2, "full_precision": "norm"}
    for sync, own in (("all", {}), ("*", {}), ("norm", {"vote_every": 2})):
        DistributedLion(named, momentum_sync=sync, **options, **own)
    with pytest.raises(ValueError, match="momentum_sync would have no effect: full_precision"):
        DistributedLion(named, momentum_sync="norm", **options)
