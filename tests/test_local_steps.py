"""Local steps of real ranks equal the definition in NumPy, and fail together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_dlion.optimizer import DistributedLion
from tests.support.forms import form
from tests.support.gradients import KINDS, Pair
from tests.support.local_definition import LocalLions
from tests.support.spawn import on_ranks
from tests.support.steps import copies, drawn, give_gradients
from tests.support.training import everyones, is_equal_everywhere, same


def equal_the_definition(
    rank: int, ranks: int, options: dict[str, Any], kinds: list[torch.dtype], seed: int,
    name: str = "cpu",
) -> None:  # fmt: skip
    """Compares eleven steps with the definition; the last exchange comes before its period ends."""
    with form(name) as device:
        pair = Pair(LocalLions, rank, ranks, options, kinds, seed, device)
        lions, optimizer = pair.lions, pair.optimizer
        lrs = lions.lrs
        for step in range(11):
            scale = min(1.0, (step + 1) / 4)  # warm-up
            for group, lr in zip(optimizer.param_groups, (0.1, 0.01), strict=True):
                group["lr"] = lr * scale
            lions.lrs = [lr * scale for lr in lrs]
            pair.step(step, faults=True)
            check(pair, step)
        lions.exchange()
        optimizer.exchange_now()
        check(pair, 11)
    assert optimizer.schedule.exchanges == lions.exchanges


def check(pair: Pair[LocalLions], step: int) -> None:
    """Compares own weights, and common ones, into which some steps write."""
    lions = pair.lions
    pair.check(lions.own[pair.rank], step)
    pair.optimizer.eval()
    pair.check(lions.params, step, "anchor")
    if step % 4 == 1:  # Before and after an exchange.
        for k, param in enumerate(pair.params):
            lions.write(k, param.data.clamp_(-0.5, 0.5).cpu())
    pair.optimizer.train()
    pair.check(lions.own[pair.rank], step, "own")


CASES: list[dict[str, Any]] = [
    {"vote_every": 3},
    {"vote_every": 4, "exchange": "two_phase"},
    {"vote_every": 2, "bits": 2},
    {"vote_every": 3, "bits": 4},
    {"vote_every": 4, "bits": 4, "exchange": "two_phase"},
    {"vote_every": 3, "bits": 8},
]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.smoke), 3, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks("ranks")
def test_ranks_equal_the_definition(rank: int, ranks: int, case: dict[str, Any]) -> None:
    equal_the_definition(rank, ranks, case, [torch.float32], 7 * ranks)


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS[:3]], ids=str)
@pytest.mark.parametrize(
    ("ranks", "case", "seed"),
    [(3, {"vote_every": 3, "seed": 2**40 + 1}, 5), (2, {"vote_every": 2, "bits": 2}, 6)],
)
@on_ranks("ranks")
def test_ranks_equal_the_definition_in_other_dtypes(
    rank: int, ranks: int, case: dict[str, Any], kinds: list[torch.dtype], seed: int
) -> None:
    equal_the_definition(rank, ranks, case, kinds, seed)


@pytest.mark.parametrize("kinds", [[torch.float32], [torch.bfloat16], KINDS[:2]], ids=str)
@pytest.mark.parametrize("case", CASES[:2], ids=str)
@on_ranks(2, timeout=300)
def test_kernels_equal_the_definition(
    rank: int, case: dict[str, Any], kinds: list[torch.dtype]
) -> None:
    equal_the_definition(rank, 2, case, kinds, 14, "kernels")


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
