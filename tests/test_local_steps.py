"""What local steps of real ranks keep, average, and send."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_dlion.optimizer import DistributedLion
from tests.support.local_definition import LocalLions
from tests.support.spawn import on_ranks
from tests.support.steps import copies, drawn, give_gradients
from tests.support.training import error_of, everyones, is_equal_everywhere, same


@pytest.mark.parametrize("bits", [1, 4])
@on_ranks(2)
def test_an_exchange_changes_the_mean_by_the_decay_only(rank: int, bits: int) -> None:
    """Checks in 1,000 exchanges that the mean of the own weights changes by the decay only."""
    param = nn.Parameter(torch.randn(3, 64))
    optimizer = DistributedLion([param], lr=1e-3, weight_decay=0.1, vote_every=10**6, bits=bits)
    for number in range(1000):  # exchanges
        give_gradients([param], rank, number)
        optimizer.step()
        before = torch.stack(everyones(param)).double().mean(dim=0)
        optimizer.exchange_now()
        after = torch.stack(everyones(param)).double().mean(dim=0)
        ulp = float(torch.finfo(torch.float32).eps * param.detach().abs().max())
        assert float((after - before * (1 - 1e-3 * 0.1)).abs().max()) <= 2 * ulp


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@on_ranks(3)
def test_the_wire_shows_how_own_weights_agree_with_the_mean_and_what_stays_in_them(
    rank: int, bits: int
) -> None:
    """Compares both numbers with those of complete weights, of which one row never moves."""
    params = [nn.Parameter(0.01 * torch.randn(shape)) for shape in ((9, 64), (300,))]
    optimizer = DistributedLion(params, lr=0.01, vote_every=10**6, bits=bits)

    def displacement() -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.cat([p.detach().view(-1) for p in params])
        with optimizer.common_weights():
            common = torch.cat([p.detach().view(-1) for p in params])
        return common - own, common

    for number in range(3):  # exchanges
        for step in range(4):
            give_gradients(params, rank, step, number)
            params[0].grad[3] = 0.0
            optimizer.step()
        w, before = displacement()
        optimizer.exchange_now()
        left, after = displacement()
        signs = (w.sign() * (before - after).sign())[w != 0]
        assert optimizer.wire.agreement == pytest.approx(0.5 + 0.5 * float(signs.mean()))
        wanted = float(left[w != 0].abs().sum() / w.abs().sum())
        assert optimizer.wire.remainder == pytest.approx(wanted, rel=1e-4)


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
    optimizer.eval()
    assert same([rows[2:], idle], [start[1][2:], start[2]])
    assert float(turns.square().sum() / start[0].square().sum()) < 0.6


@on_ranks(2)
def test_parameters_that_share_memory_are_refused(rank: int) -> None:
    for first, every, says in ((4, 2, ""), (3, 1, ""), (3, 2, "'a' and 'b' share memory")):
        memory = torch.ones(8, 64)
        params = [nn.Parameter(memory[:4]), nn.Parameter(memory[first:].t())]
        optimizer = DistributedLion(zip("ab", params, strict=True), lr=0.01, vote_every=every)
        give_gradients(params, rank)
        assert says in error_of(optimizer.step)
        assert optimizer.steps == (not says)


@pytest.mark.parametrize(("every", "most"), [(16, 0.070), (32, 0.036)])
@on_ranks(2)
def test_local_steps_send_nothing_and_an_exchange_one_bit(
    rank: int, every: int, most: float
) -> None:
    """Counts bits per parameter and step, bytes of the local steps, and bytes of state."""
    params = [nn.Parameter(torch.randn(768, 768)) for _ in range(4)]
    params += [nn.Parameter(torch.randn(128, 3700)), nn.Parameter(torch.randn(1001))]
    optimizer = DistributedLion(params, lr=1e-4, vote_every=every)
    give_gradients(params, rank)
    numel, sent = sum(p.numel() for p in params), []
    for _ in range(every + 1):
        optimizer.step()
        sent.append(optimizer.wire.last_bytes_sent)
    optimizer.eval()
    optimizer.train()
    held = optimizer.schedule.kept.values()
    kept = [t for own in held for t in (own.anchor, own.displacement) if t is not None]
    kept += [optimizer.state[p]["exp_avg"] for p in params]
    memory = sum(own.numel() * own.element_size() for own in kept) / numel
    exchanged = sent.pop(every - 1)
    assert optimizer.wire.bytes_sent == sum(sent) + exchanged
    assert 1 / every <= (8 * exchanged / numel / every) <= most
    assert set(sent[1:]) == {0}
    assert 8 <= memory <= 8.1


@on_ranks(2)
def test_local_steps_with_full_precision_and_synchronized_momenta(rank: int) -> None:
    """Checks that selected tensors are averaged exactly, and momenta at exchanges."""
    start = [torch.randn(shape) for shape in ((10,), (4, 64), (7,), (2, 64))]
    start[0], start[3] = start[0].bfloat16(), start[3].bfloat16()
    params = [nn.Parameter(p.clone()) for p in start]
    named = list(zip(("low.bias", "weight", "bias", "low.weight"), params, strict=True))
    optimizer = DistributedLion(
        named, lr=0.01, weight_decay=0.1, vote_every=2, full_precision="*bias",
        momentum_sync="weight", momentum_sync_every=2,
    )  # fmt: skip
    lions = LocalLions(copies(start), 2, [0.01] * 4, [0.1] * 4, every=2, full=(0, 2))
    for step in range(8):
        grads = [[drawn(p.shape, step, r).to(p) for p in start] for r in range(2)]
        for p, grad in zip(params, grads[rank], strict=True):
            p.grad = grad.clone()
        lions.step(grads)
        optimizer.step()
        for (name, p), wanted in zip(named, lions.own[rank], strict=True):
            if name != "weight" or step < 2:  # Its momentum was synchronized by then.
                assert torch.equal(p, wanted), (step, name)
    # The fourth exchange averaged the first half.
    momenta = [own.view(-1) for own in everyones(optimizer.state[params[1]]["exp_avg"])]
    assert float((momenta[0] - momenta[1])[:128].abs().max()) < 1e-3
    assert float((momenta[0] - momenta[1])[128:].abs().max()) > 1e-3
    optimizer.eval()
    assert all(map(is_equal_everywhere, params))
