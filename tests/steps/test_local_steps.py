"""Local steps of real ranks: what they keep, send, and leave out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_dlion.core.slot import Slot
from hf_dlion.optimizer import DistributedLion
from hf_dlion.steps.displacement import SCALES
from tests.support.local_definition import LocalLions
from tests.support.spawn import on_ranks
from tests.support.steps import copies, drawn, give_gradients, single
from tests.support.training import filled, is_equal_everywhere, same


@on_ranks(3)
def test_the_wire_shows_how_a_rank_agrees_with_the_mean(rank: int) -> None:
    """Compares the share with that of complete weights, of which one row never moves."""
    params = [nn.Parameter(0.01 * torch.randn(shape)) for shape in ((9, 64), (300,))]
    optimizer = DistributedLion(params, lr=0.01, vote_every=10**6)
    for number in range(3):  # exchanges
        before = copies(params)
        for step in range(4):
            give_gradients(params, rank, step, number)
            params[0].grad[3] = 0.0
            optimizer.step()
        ws = [x - p.detach() for x, p in zip(before, params, strict=True)]
        optimizer.exchange_now()
        agreeing, moved = 0.0, 0
        for x, w, p in zip(before, ws, params, strict=True):
            agreeing += float((w.sign() * (x - p.detach()).sign()).sum())
            moved += int((w != 0).sum())
        assert optimizer.wire.agreement == pytest.approx(0.5 + 0.5 * agreeing / moved)


@on_ranks(2)
def test_a_parameter_that_ranks_use_in_turns_trains(rank: int) -> None:
    """Trains one parameter on the ranks in turns, half of a second, and none of a third."""
    turns, rows, idle = (nn.Parameter(torch.randn(4, 64)) for _ in range(3))
    start = copies((turns, rows, idle))
    optimizer = DistributedLion([turns, rows, idle], lr=0.01, vote_every=2)
    for step in range(100):
        optimizer.zero_grad()
        loss = rows[:2].square().sum()
        if step // 2 % 2 == rank:
            loss = loss + turns.square().sum()
        loss.backward()
        optimizer.step()
    assert same([rows[2:], idle], [start[1][2:], start[2]])
    assert all(map(is_equal_everywhere, (turns, rows)))
    assert float(turns.square().sum() / start[0].square().sum()) < 0.6


@on_ranks(3)
def test_some_of_the_ranks_may_take_local_steps(rank: int) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    param, optimizer = single(vote_every=2, process_group=group)
    param.grad *= (-1) ** rank
    for _ in range(2):
        assert bool((param == 1.0).all()) == (optimizer.steps == 0)
        optimizer.step()
    assert optimizer.wire.exchanges == 1
    assert bool((param == 1.0).all())  # They moved in opposite directions.


def test_a_mean_over_voters_is_rounded_once_and_leaves_out_those_that_abstain() -> None:
    slot = Slot.of(torch.empty(64), 0)
    SCALES[1].set_magnitudes([slot], [[1e16], [1.0], [0.0], [1.0]])
    assert slot.magnitude == (1e16 + 2) / 3


@pytest.mark.parametrize("when", [0, 1, 2])
@on_ranks(2)
def test_a_gradient_of_zeros_in_any_step_of_a_period_counts(rank: int, when: int) -> None:
    """The parameter doesn't move, and decays, also if only rank 0 has the gradient, at the end."""
    _, optimizer = single(vote_every=3, weight_decay=10.0)
    other, without = filled(1.0), filled(1.0)
    optimizer.add_param_group({"params": [("other", other), ("without", without)]})
    without.grad = None
    for step in range(3):
        other.grad = torch.zeros_like(other) if step == when and rank == 0 else None
        optimizer.step()
    torch.testing.assert_close(other.detach(), torch.full_like(other, 0.9**3))
    assert bool((without == 1.0).all())


@pytest.mark.parametrize(
    ("every", "bits", "least", "most"), [(16, 1, 1 / 16, 0.070), (32, None, 1 / 8, 0.133)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_local_steps_send_nothing_and_keep_an_anchor_in_a_period(
    rank: int, every: int, bits: int | None, least: float, most: float, dtype: torch.dtype
) -> None:
    """Counts bits per parameter and step, bytes of the local steps, and bytes of state."""
    params = [nn.Parameter(torch.randn(768, 768, dtype=dtype)) for _ in range(4)]
    params += [nn.Parameter(torch.randn(size, dtype=dtype)) for size in ((128, 3700), (1001,))]
    optimizer = DistributedLion(params, lr=1e-4, vote_every=every, bits=bits)
    give_gradients(params, rank)
    numel, sent, kept = sum(p.numel() for p in params), [], []
    for _ in range(every + 1):
        optimizer.step()
        sent.append(optimizer.wire.last_bytes_sent)
        states = optimizer.local.states.values()
        tensors = [t for own in states for t in (own.anchor, own.compensation) if t is not None]
        tensors += [optimizer.state[p]["exp_avg"] for p in params]
        kept.append(sum(tensor.nbytes for tensor in tensors) / numel)
    assert kept == [{4: 8.0, 2: 6.0}[dtype.itemsize]] * (every - 1) + [dtype.itemsize, kept[0]]
    exchanged = sent.pop(every - 1)
    assert optimizer.wire.bytes_sent == sum(sent) + exchanged
    assert least <= 8 * exchanged / numel / every <= most
    assert set(sent[1:]) == {0}


@on_ranks(2)
def test_local_steps_with_full_precision_and_synchronized_momenta(rank: int) -> None:
    """Checks that selected tensors are averaged exactly, and momenta at every second exchange."""
    start = [torch.randn(shape) for shape in ((10,), (4, 64), (7,), (2, 64))]
    start[0], start[3] = start[0].bfloat16(), start[3].bfloat16()
    params = [nn.Parameter(p.clone()) for p in start]
    named = list(zip(("low.bias", "weight", "bias", "low.weight"), params, strict=True))
    optimizer = DistributedLion(
        named, lr=0.01, weight_decay=0.1, vote_every=2, full_precision="*bias",
        momentum_sync="*weight;bias", momentum_sync_every=2,
    )  # fmt: skip
    lions = LocalLions(
        copies(start), 2, [0.01] * 4, [0.1] * 4, every=2, bits=4, full=(0, 2), synced=(1, 2, 3),
        sync_every=2,
    )  # fmt: skip
    for step in range(8):
        grads = [[drawn(p.shape, step, r).to(p) for p in start] for r in range(2)]
        for p, grad in zip(params, grads[rank], strict=True):
            p.grad = grad.clone()
        lions.step(grads)
        optimizer.step()
        momenta = [optimizer.state[p]["exp_avg"] for p in params]
        for k, (name, p) in enumerate(named):
            assert torch.equal(p, lions.own[rank][k]), (step, name)
            assert torch.equal(momenta[k], lions.momenta[rank][k]), (step, name)
    assert all(map(is_equal_everywhere, params))


@on_ranks(2)
def test_a_rank_that_never_moved_counts_in_the_mean(rank: int) -> None:
    param, optimizer = single(vote_every=2, full_precision="*")
    if rank == 1:
        param.grad = None
    for _ in range(2):
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full_like(param, 0.99))
