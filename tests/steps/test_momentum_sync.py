"""Selection, averaging, and divergence of momenta, on real ranks."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hf_dlion.steps.momentum_sync as momentum_sync
from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Scratch
from hf_dlion.core.slot import Slot
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options import Options
from hf_dlion.ranks.header import Disagreement
from hf_dlion.ranks.topology import Topology
from hf_dlion.steps.means import average_whole
from hf_dlion.steps.momentum_sync import (
    average_momenta,
    measure,
    slice_of,
    synchronize,
)
from tests.support.spawn import on_ranks
from tests.support.steps import attached, backward, drawn, plain, single, take_step
from tests.support.training import (
    batch,
    everyones,
    filled,
    gathered,
    is_equal_everywhere,
    replicas_of_shards,
    same,
)

SHAPES = {"alike": (8, 8), "apart": (3, 64), "large": (64, 256)}


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
            average_momenta(momenta, ranks.voters, 3, 71)
        results.append((ranks.voters.stats.bytes_sent - before, momenta))
    (bytes_at_once, at_once), (bytes_in_parts, in_parts) = results
    assert bytes_in_parts == bytes_at_once == 4 * 2 * 23  # of 68 elements
    assert same(in_parts, at_once)


@pytest.mark.parametrize("size", [64, 128])
@on_ranks(2)
def test_the_budget_counts_the_largest_shard(rank: int, size: int) -> None:
    """Averages a momentum whose largest shard has `size` elements, if the budget allows it."""
    flat = torch.full((64,), float(rank))
    options = Options(momentum_sync="auto", momentum_sync_every=1, momentum_sync_budget=200)
    slot = Slot.of(flat, 0)
    slot.momentum, slot.largest_part, slot.state = flat, size, {"divergence": 1.0}
    context = StepContext(
        number=2, voter=rank, voters=2, options=options, groups=[], scratch=Scratch()
    )
    synchronize([slot], context, Topology())
    assert bool((flat == 0.5).all()) == (size == 64)


@on_ranks(2)
def test_means_of_momenta_are_finite_and_as_precise_as_the_momenta(rank: int) -> None:
    """Averages momenta next to the largest number of their dtype, and float64 ones."""
    ranks = Topology()
    half = torch.full((2,), 65376.0 if rank else 65504.0, dtype=torch.float16)
    average_momenta([half], ranks.voters, 0, 2)
    brain = torch.full((2,), 3e38, dtype=torch.bfloat16)
    double = torch.full((2,), 1 / 3, dtype=torch.float64)
    average_whole([brain, double], ranks.voters)
    average_momenta([double], ranks.voters, 0, 2)
    assert all(map(math.isfinite, half.tolist() + brain.tolist()))
    assert double.tolist() == [1 / 3, 1 / 3]


def divergence_of(momenta: list[torch.Tensor]) -> float:
    """Returns the variance over the voters relative to the mean square."""
    stacked = torch.stack(momenta).double()
    return float((stacked - stacked.mean(0)).square().sum() / stacked.square().sum())


class Automatic:
    """Steps on gradients that are equal for one parameter and independent for two."""

    def __init__(self, rank: int, budget: int | None, steps: int) -> None:
        torch.manual_seed(0)
        params = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
        self.optimizer = DistributedLion(
            params.items(),
            momentum_sync="auto",
            momentum_sync_every=4,
            momentum_sync_budget=budget,
        )
        self.sent = []
        for step in range(steps):
            for k, (name, p) in enumerate(params.items()):
                p.grad = drawn(p.shape, step, k, 0 if name == "alike" else 1 + rank)
            if step == 0:  # The momentum after this step, before any is averaged.
                self.before = {name: everyones(0.01 * p.grad) for name, p in params.items()}
            self.optimizer.step()
            self.sent.append(self.optimizer.wire.last_bytes_sent)
        state, self.divergence = self.optimizer.state, self.optimizer.momentum_divergence()
        self.momenta = {name: everyones(state[p]["exp_avg"]) for name, p in params.items()}


@on_ranks(2)
def test_auto_averages_the_momenta_that_differ_within_the_budget(rank: int) -> None:
    # A slice of "apart" is 48 elements in a step: 4 * 24 bytes between two ranks. "large" is 4,096.
    run = Automatic(rank, 4 * 24, 4)
    divergence = run.divergence
    assert gathered(divergence) == [divergence] * 2
    assert divergence["alike"] == 0.0
    for name in ("alike", "apart"):  # With fewer than 256 elements the sample is all of them.
        assert divergence[name] == pytest.approx(divergence_of(run.before[name]), abs=1e-6)
    assert 0.4 < divergence["large"] < 0.6
    votes = run.sent[3] - 4 * 24
    # Three momenta are measured in the first step, which also compares layouts, and gradients of
    # attached models and of others.
    assert run.sent[1:] == [votes + 4 * 24] * 3
    assert run.sent[0] == votes + 4 * 24 + 3 * 1024 + 3 * 16
    # The ranks only differ by what they added since the slice was averaged.
    a, b = run.momenta["apart"]
    assert float((a - b).square().mean() / a.square().mean()) < 1.5
    a, b = run.momenta["large"]
    assert float((a - b).square().mean() / a.square().mean()) > 1.5


@on_ranks(2)
def test_no_momenta_are_sent_if_none_fits_the_budget(rank: int) -> None:
    none, usual = Automatic(rank, 95, 2), Automatic(rank, None, 2)
    assert none.divergence == usual.divergence
    # One bit per parameter, and here "large" needs 16 bits in every fourth step.
    assert usual.sent[1] - none.sent[1] == 4 * 24


@on_ranks(2)
def test_an_averaged_momentum_keeps_most_of_its_divergence(rank: int) -> None:
    """Measures at steps 1, 53 and 105; the momenta are equal from step 60."""
    param = nn.Parameter(torch.zeros(4, 64))
    optimizer = DistributedLion(
        [("w", param)], momentum_sync="auto", momentum_sync_every=4, momentum_sync_budget=10**6
    )
    own, common = (torch.Generator().manual_seed(seed) for seed in (rank, 9))
    found = []
    for step in range(1, 106):
        param.grad = torch.randn(param.shape, generator=own if step < 60 else common)
        optimizer.step()
        found.append(optimizer.momentum_divergence()["w"])
    assert found[0] == found[51] != found[52] == found[103] != found[104]
    assert found[52] < 0.5 * found[0]  # That of one gradient, which isn't kept.
    # Synchronized momenta differ little, but would differ again without synchronization.
    assert found[104] == pytest.approx(0.9 * found[52])
    assert gathered(found) == [found, found]


@on_ranks(2)
def test_local_steps_measure_again_after_at_least_50_steps(rank: int) -> None:
    """Momenta are averaged in each fourth step, so it is the first of these after 50 steps."""
    param = nn.Parameter(torch.zeros(4, 64))
    optimizer = DistributedLion(
        [("w", param)], vote_every=2, momentum_sync="auto", momentum_sync_every=2
    )
    found = [None]
    for step in range(60):
        param.grad = drawn(param.shape, step, rank)
        optimizer.step()
        found.append(optimizer.momentum_divergence().get("w"))
    assert [step for step in range(1, 61) if found[step] != found[step - 1]] == [4, 56]


@on_ranks(2)
def test_momenta_of_zeros_do_not_differ(rank: int) -> None:
    assert measure([torch.zeros(64), torch.full((64,), (-1.0) ** rank)], Topology()) == [0.0, 1.0]


@on_ranks(2)
def test_momenta_are_measured_in_each_exchange_if_periods_are_long(rank: int) -> None:
    param, optimizer = single(vote_every=64, momentum_sync_every=1, momentum_sync="auto")
    found = []
    for number in range(3):
        param.grad = drawn(param.shape, number, rank)
        optimizer.step()
        optimizer.exchange_now()
        found.append(optimizer.momentum_divergence()["w"])
    assert len(set(found)) == 3


def test_the_default_budget_is_one_bit_per_parameter() -> None:
    """In an eighth of the steps, 16 bits for half of the parameters."""
    slots = [Slot.of(torch.empty(1024), 0) for _ in range(2)]
    for slot, value in zip(slots, (0.5, 1.0), strict=True):
        slot.largest_part, slot.state = slot.size, {"divergence": value}
    options = Options(momentum_sync="auto", momentum_sync_every=8)
    assert momentum_sync._most_divergent(slots, options, mock.Mock(world_size=2)) == slots[1:]


@on_ranks(4)
def test_nodes_measure_one_divergence(rank: int) -> None:
    ddp, optimizer = attached(local_group=2, momentum_sync="auto", momentum_sync_every=2)
    take_step(optimizer, ddp, batch(0, rank))
    optimizer.detach()
    # The momentum before any is averaged is 0.01 times the mean gradient of a node.
    expected = divergence_of(everyones(ddp.module[3].weight.grad)[::2])
    divergence = optimizer.momentum_divergence()
    assert divergence["module.3.weight"] == pytest.approx(expected)
    assert gathered(divergence) == [divergence] * 4


@on_ranks(4)
def test_replicas_measure_over_all_shards(rank: int) -> None:
    mesh = replicas_of_shards(2, 2)
    ranks = Topology(replicate=mesh["replicate"].get_group())
    ranks.form()
    # Ranks with the same shard share a column of the mesh. Sizes of shards differ a lot.
    parts = [drawn((64,), r) * (1 if r % 2 else 10) for r in range(4)]
    found = measure([parts[rank]], ranks)
    assert found == pytest.approx([divergence_of(list(torch.stack(parts).view(2, 2, 64)))])


@on_ranks(2)
def test_functions_that_select_different_momenta_are_refused(rank: int) -> None:
    own = "0.weight" if rank == 0 else "0.bias"
    model, optimizer = plain(momentum_sync_every=1, momentum_sync=lambda name, param: name == own)
    backward(model, batch(0, rank))
    with pytest.raises(Disagreement, match="choices of momentum_sync"):
        optimizer.step()


@on_ranks(2)
def test_ranks_with_different_divergences_are_refused(rank: int) -> None:
    """They would average different momenta."""
    model, optimizer = plain(momentum_sync_every=1, momentum_sync="auto")
    take_step(optimizer, model, batch(0, rank))
    optimizer.state[model[0].weight]["divergence"] += rank
    with pytest.raises(Disagreement, match="first in 'divergences of momenta'"):
        optimizer.step()


@on_ranks(2)
def test_torchs_default_dtype_changes_nothing(rank: int) -> None:
    options = {"momentum_sync_every": 1, "momentum_sync": "auto", "check_replicas_every": 1}
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
    first, second = (optimizer.momentum_divergence() for _, optimizer in pairs)
    assert first == second


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
    for bits, least, most in ((16, 0.0, 1e-4), (4, 1e-3, 2e-3)):  # What bits leave out stays.
        options = {"momentum_sync_every": 1, "momentum_sync_bits": bits, "betas": (0.9, 0.99)}
        param, optimizer = single(vote_every=2, full_precision="w", **options)
        param.grad *= (-1) ** rank
        for _ in range(2):
            optimizer.step()
        assert least <= float(optimizer.state[param]["exp_avg"].abs().max()) <= most


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


@on_ranks(3)
def test_auto_averages_what_fits_into_a_budget_per_exchange(rank: int) -> None:
    """With local steps, momenta are measured at an exchange, and averaged whole in 4 bits."""
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    optimizer = DistributedLion(
        params.items(), vote_every=4, momentum_sync_every=2, momentum_sync="auto",
        momentum_sync_budget=600,  # Enough for the smaller ones.
    )  # fmt: skip
    spreads = []
    for step in range(17):
        for k, (name, p) in enumerate(params.items()):
            p.grad = drawn(p.shape, step, k, 0 if name == "alike" else 1 + rank)
        optimizer.step()
        found = [torch.stack(everyones(optimizer.state[p]["exp_avg"])) for p in params.values()]
        spreads.append([float(own.std(dim=0).mean() / own.abs().mean()) for own in found])
    # After exchanges 2 and 4, at steps 8 and 16, those of "apart" are close.
    alike, apart, large = zip(*spreads, strict=True)
    assert max(alike) < 1e-6
    assert [step + 1 for step, own in enumerate(apart) if own < 0.3] == [8, 16]
    assert min(large) > 0.3
    assert gathered(optimizer.momentum_divergence()) == 3 * [optimizer.momentum_divergence()]


def test_a_selection_of_momenta_that_are_equal_anyway_is_refused() -> None:
    named = [("norm", filled(1.0)), ("weight", filled(1.0))]
    options: dict[str, Any] = {"momentum_sync_every": 2, "full_precision": "norm"}
    for sync, own in (("all", {}), ("*", {}), ("norm", {"vote_every": 2})):
        DistributedLion(named, momentum_sync=sync, **options, **own)
    with pytest.raises(ValueError, match="momentum_sync would have no effect: full_precision"):
        DistributedLion(named, momentum_sync="norm", **options)
