"""Parameters whose gradients are averaged (`full_precision`), on real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_dlion.core import layout
from hf_dlion.optimizer import DistributedLion
from tests.support.local_definition import lions_of
from tests.support.spawn import on_ranks
from tests.support.steps import copies, drawn, give_gradients, plain
from tests.support.training import error_of, is_equal_everywhere, warned


@pytest.mark.parametrize("selection", ["*bias", "", "*"], ids=["pattern", "function", "all"])
@on_ranks(2)
def test_full_precision_is_lion_on_the_mean_gradient(rank: int, selection: str) -> None:
    """Compares with plain Lion on the mean over the ranks that have a gradient.

    Momenta are those of operations that round one by one, so all processors get the same ones.
    """
    layout.PIECE["cpu"], layout.MESSAGE["cpu"], layout.MESSAGES = 1 << 7, 1 << 8, 1 << 20
    model, optimizer = plain(
        weight_decay=0.1,
        full_precision=selection or (lambda name, param: name.endswith("bias")),
    )
    start = copies(model.parameters())
    alone, momenta = lions_of(start, 1, 1), [torch.zeros_like(p) for p in start]
    for step in range(5):
        every = [[drawn(p.shape, step, r, k) for k, p in enumerate(start)] for r in range(2)]
        for k, p in enumerate(model.parameters()):
            # One bias has no gradient on rank 1 in a step, and on no rank in the next.
            missing = k == 1 and (step == 3 or (step == 2 and rank == 1))
            p.grad = None if missing else every[rank][k].clone()
        means = [sum(own) / 2 for own in zip(*every, strict=True)]
        if step == 3:
            means[1] = None
        if step == 2:
            means[1] = every[0][1]
        alone.step([means])
        for m, mean in zip(momenta, means, strict=True):
            if mean is not None:
                m += (mean - m) * (1 - 0.98)
        optimizer.step()
        for (name, p), own, m in zip(model.named_parameters(), alone.params, momenta, strict=True):
            if selection == "*" or name.endswith("bias"):
                assert torch.equal(p, own), (step, name)
                assert torch.equal(optimizer.state[p]["exp_avg"], m), (step, name)
    if selection == "*":  # Each element is sent once, also those of tensors in several messages.
        elements = sum(p.numel() for p in start)
        sizes = [
            sum(stop - start for piece in message.pieces for _, start, stop, _ in piece.stretches)
            for message in optimizer.params.fresh_layout().averaged_messages
        ]
        assert len(sizes) > len(start)
        assert sum(sizes) == elements
        assert optimizer.wire.last_bytes_sent == 64 + sum(8 * -(-size // 2) for size in sizes)


@on_ranks(2)
def test_momenta_stay_equal_after_a_rank_froze_another_parameter(rank: int) -> None:
    model, optimizer = plain(full_precision="*bias")
    for step in range(4):
        if step in (1, 2):
            model[0].weight.requires_grad_(rank == 0 or step == 2)
        give_gradients(model.parameters(), rank, step)
        assert error_of(optimizer.step).partition(":")[0] == "Disagreement" * (step == 1)
    assert is_equal_everywhere(optimizer.state[model[0].bias]["exp_avg"])


@on_ranks(2)
def test_momenta_are_averaged_if_a_parameter_is_selected_later(rank: int) -> None:
    chosen = ["0.bias"]
    model, optimizer = plain(full_precision=lambda name, _: name in chosen)
    for step in range(4):
        if step == 2:
            chosen.append("0.weight")
            model[2].weight.requires_grad_(False)  # A new layout, which asks the function again.
        give_gradients(model.parameters(), rank, step)
        optimizer.step()
        is_equal = is_equal_everywhere(optimizer.state[model[0].weight]["exp_avg"])
        assert is_equal == (step >= 2)


@on_ranks(2)
def test_momenta_of_16_bits_are_rounded_alike_on_all_ranks(rank: int) -> None:
    param = nn.Parameter(torch.zeros(64))
    optimizer = DistributedLion(
        [("p", param)], lr=1.0, full_precision="*", momentum_dtype=torch.bfloat16
    )
    for step in range(3):
        param.grad = torch.randn(64, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.step()
        assert is_equal_everywhere(optimizer.state[param]["exp_avg"])


@on_ranks(2)
def test_rows_of_the_mean_decide_which_are_old(rank: int) -> None:
    """Rank 0 alone never uses a row."""
    param = nn.Parameter(torch.zeros(3, 64))
    optimizer = DistributedLion([("p", param)], lr=1.0, betas=(0.9, 0.5), full_precision="*")
    for step in range(6):
        param.grad = torch.ones(3, 64)
        if rank == 0:
            param.grad[1] = 0.0
        optimizer.step()
        assert bool((param == -float(step + 1)).all())
    assert is_equal_everywhere(param)


@on_ranks(2, timeout=20)
def test_unequal_momenta_are_averaged_if_a_rank_has_no_gradient(rank: int) -> None:
    param, other = (nn.Parameter(torch.zeros(64)) for _ in range(2))
    named = [("p", param), ("o", other)]
    optimizer = DistributedLion(named, lr=1.0, full_precision="*")
    voted = DistributedLion(named, lr=1.0)
    for p in (param, other):
        p.grad = torch.full((64,), 1.0 + rank)
    voted.step()
    optimizer.load_state_dict(voted.state_dict())
    if rank == 1:
        other.grad = None
    optimizer.step()
    assert is_equal_everywhere(optimizer.state[param]["exp_avg"])
    assert is_equal_everywhere(optimizer.state[other]["exp_avg"])
    assert is_equal_everywhere(other)


@on_ranks(2)
def test_finite_gradients_whose_sum_is_not_change_nothing(rank: int) -> None:
    optimizer = DistributedLion(
        [(name, nn.Parameter(torch.ones(70))) for name in ("mean", "voted")],
        lr=0.1, weight_decay=0.1, full_precision="mean",
    )  # fmt: skip
    mean, voted = optimizer.param_groups[0]["params"]
    for value in (1.0, 2e38, 1.0):
        before = mean.clone(), voted.clone()
        mean.grad, voted.grad = torch.full((70,), value), torch.ones(70)
        with warned() as texts:
            optimizer.step()
        said = [text for text in texts if "'mean' are finite, but not their sum" in text]
        assert len(said) == (value > 1 and rank == 0)
        assert torch.equal(mean, before[0]) == (value > 1)
        assert not torch.equal(voted, before[1])
    assert optimizer.state[mean]["exp_avg"][0].item() == pytest.approx(1 - 0.98**2)


@on_ranks(2)
def test_a_sum_that_is_not_finite_leaves_the_ages_of_other_tensors(rank: int) -> None:
    rows, large = nn.Parameter(torch.zeros(3, 64)), nn.Parameter(torch.zeros(64))
    named = [("rows", rows), ("large", large)]
    # Rows are voted on for two updates without a gradient.
    optimizer = DistributedLion(named, lr=1.0, betas=(0.9, 0.5), full_precision="*")
    for step in range(8):
        rows.grad, large.grad = torch.ones(3, 64), torch.full((64,), 2e38 if step == 5 else 1.0)
        if step:
            rows.grad[1] = 0.0
        with warned():
            optimizer.step()
    assert rows[:, 0].tolist() == [-8.0, -2.0, -8.0]
