"""Local steps of real ranks equal the definition in NumPy, and fail together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.optimizer import DistributedLion
from tests.support.forms import form
from tests.support.gradients import KINDS, gradients, pair, shuffled
from tests.support.local_definition import LocalLions
from tests.support.spawn import RankPools, on_ranks
from tests.support.training import (
    batch,
    everyones,
    is_equal_everywhere,
    model_of,
    replicas_of_shards,
)

pytestmark = pytest.mark.multiproc


def equals_the_definition(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    kinds: list[torch.dtype],
    seed: int,
    faults: bool = True,
    name: str = "cpu",
) -> None:
    """Compares a form with the definition; see `_equals_the_definition`."""
    with form(name) as device:
        _equals_the_definition(rank, world_size, options, kinds, seed, faults, device)


def _equals_the_definition(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    kinds: list[torch.dtype],
    seed: int,
    faults: bool,
    device: str,
) -> None:
    """Compares eleven steps with the definition; the last exchange comes before its period ends."""
    shapes = shuffled(seed)
    dtypes = [kinds[k % len(kinds)] for k in range(len(shapes))]
    lions, optimizer, params = pair(LocalLions, world_size, shapes, dtypes, options, device)

    def check(step: int) -> None:
        for k, (param, wanted) in enumerate(zip(params, lions.own[rank], strict=True)):
            assert torch.equal(param.cpu(), wanted), (step, shapes[k], param.dtype)
            if param in optimizer.state:
                momentum = optimizer.state[param]["exp_avg"]
                assert torch.equal(momentum.cpu(), lions.momenta[rank][k]), (step, shapes[k])
        optimizer.eval()
        for k, (param, wanted) in enumerate(zip(params, lions.params, strict=True)):
            assert torch.equal(param.cpu(), wanted), (step, shapes[k], param.dtype, "anchor")
            if step % 4 == 1:  # Before and after an exchange.
                lions.write(k, param.data.clamp_(-0.5, 0.5).cpu())
        optimizer.train()
        for k, (param, wanted) in enumerate(zip(params, lions.own[rank], strict=True)):
            assert torch.equal(param.cpu(), wanted), (step, shapes[k], param.dtype, "own")

    for step in range(11):
        scale = min(1.0, (step + 1) / 4)  # warm-up
        for group, lr in zip(optimizer.param_groups, (0.1, 0.01), strict=True):
            group["lr"] = lr * scale
        lions.lrs = [scale * (0.1 if k < 4 else 0.01) for k in range(len(shapes))]
        grads = gradients(seed + step, world_size, shapes, dtypes, faults=faults)
        for param, grad in zip(params, grads[rank], strict=True):
            param.grad = None if grad is None else grad.clone().to(device)
        lions.step(grads)
        optimizer.step()
        check(step)
    lions.exchange()
    optimizer.exchange_now()
    check(11)
    assert optimizer.steps == lions.t
    assert optimizer.schedule.exchanges == lions.exchanges


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
def test_ranks_equal_the_definition(pools: RankPools, case: dict[str, Any], ranks: int) -> None:
    pools(ranks).run(equals_the_definition, case, [torch.float32], 7 * ranks)


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS[:3]], ids=str)
def test_ranks_equal_the_definition_in_other_dtypes(
    pools: RankPools, kinds: list[torch.dtype]
) -> None:
    pools(3).run(equals_the_definition, {"vote_every": 3, "seed": 2**40 + 1}, kinds, 5)
    pools(2).run(equals_the_definition, {"vote_every": 2, "bits": 2}, kinds, 6)


@pytest.mark.parametrize("kinds", [[torch.float32], [torch.bfloat16], KINDS[:2]], ids=str)
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_kernels_equal_the_definition(
    pools: RankPools, case: dict[str, Any], kinds: list[torch.dtype]
) -> None:
    pools(2).run(equals_the_definition, case, kinds, 14, True, "kernels", timeout=300)


@on_ranks(4)
def test_two_nodes_of_two_ranks_equal_the_definition(rank: int) -> None:
    """Compares two nodes of two ranks with the definition, on gradients that DDP averaged."""
    ddp = DistributedDataParallel(model_of())
    params = list(ddp.parameters())
    optimizer = DistributedLion(
        ddp.named_parameters(), lr=0.01, weight_decay=0.1, local_group=2, vote_every=3
    )
    optimizer.attach(ddp)
    start = [p.detach().clone() for p in params]
    lions = LocalLions(start, 2, [0.01] * len(params), [0.1] * len(params), every=3)
    for step in range(7):
        optimizer.zero_grad()
        ddp(batch(step, rank)).square().sum().backward()
        if step == 4 and rank == 2:
            params[0].grad = None  # So it doesn't count on any rank of the node.
        every = [everyones(torch.zeros_like(p) if p.grad is None else p.grad) for p in params]
        grads: list[list[torch.Tensor | None]] = [[own[first] for own in every] for first in (0, 3)]
        if step == 4:
            grads[1][0] = None
        lions.step(grads)
        optimizer.step()
        for p, wanted in zip(params, lions.own[rank // 2], strict=True):
            assert torch.equal(p, wanted), step
    optimizer.exchange_now()
    optimizer.eval()
    assert all(map(is_equal_everywhere, params))
    optimizer.detach()


@on_ranks(4)
def test_two_replicas_of_two_shards_equal_the_definition(rank: int) -> None:
    """Compares two replicas of two shards with the definition of each shard."""
    mesh = replicas_of_shards(2, 2)
    model = model_of()
    fully_shard(model[0], mesh=mesh["shard"])  # type: ignore[index]
    fully_shard(model, mesh=mesh["shard"])
    params = list(model.parameters())
    optimizer = DistributedLion(
        model.named_parameters(),
        lr=0.01,
        weight_decay=0.1,
        replicate=mesh["replicate"],
        vote_every=3,
        check_replicas_every=1,
    )
    optimizer.attach(model)
    start = [p.to_local().detach().clone() for p in params]  # type: ignore[attr-defined]
    lions = LocalLions(start, 2, [0.01] * len(params), [0.1] * len(params), every=3)
    for step in range(7):
        optimizer.zero_grad()
        model(batch(step, rank)).square().sum().backward()
        grads = [p.grad.to_local().clone() for p in params]  # type: ignore[union-attr]
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, grads)
        lions.step([everyone[rank % 2], everyone[2 + rank % 2]])
        with torch.no_grad():
            model(batch(step, rank))  # leaves the root gathered
        optimizer.step()
        for p, wanted in zip(params, lions.own[rank // 2], strict=True):
            assert torch.equal(p.to_local(), wanted), step  # type: ignore[attr-defined]
    with torch.no_grad():
        own = model(batch(0, 0))
        optimizer.eval()
        common = model(batch(0, 0))
        optimizer.train()
        assert torch.equal(own, model(batch(0, 0)))
        optimizer.eval()
        for k, p in enumerate(params):
            lions.write(k, p.to_local().clamp_(-0.1, 0.1))  # type: ignore[attr-defined]
        optimizer.train()
        for p, wanted in zip(params, lions.own[rank // 2], strict=True):
            assert torch.equal(p.to_local(), wanted)  # type: ignore[attr-defined]
    assert not torch.equal(own, common)
    assert is_equal_everywhere(common)


@pytest.mark.parametrize("bits", [1, 4])
@on_ranks(2)
def test_an_exchange_changes_the_mean_by_the_decay_only(rank: int, bits: int) -> None:
    """Checks in 1,000 exchanges that the mean of the own weights changes by the decay only."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(3, 64))
    optimizer = DistributedLion([param], lr=1e-3, weight_decay=0.1, vote_every=10**6, bits=bits)
    random = torch.Generator().manual_seed(rank)
    for _ in range(1000):  # exchanges
        param.grad = torch.randn(3, 64, generator=random)
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
    torch.manual_seed(0)
    params = [nn.Parameter(0.01 * torch.randn(shape)) for shape in ((9, 64), (300,))]
    optimizer = DistributedLion(params, lr=0.01, vote_every=10**6, bits=bits)
    random = torch.Generator().manual_seed(rank)

    def displacement() -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.cat([p.detach().view(-1) for p in params])
        with optimizer.common_weights():
            common = torch.cat([p.detach().view(-1) for p in params])
        return common - own, common

    for _ in range(3):  # exchanges
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, generator=random)
            params[0].grad[3] = 0.0  # type: ignore[index]
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
    torch.manual_seed(0)
    turns, rows, idle = (nn.Parameter(torch.randn(4, 64)) for _ in range(3))
    start = [p.detach().clone() for p in (turns, rows, idle)]
    optimizer = DistributedLion([turns, rows, idle], lr=0.01, vote_every=2)
    for step in range(100):
        optimizer.zero_grad()
        loss = rows[:2].square().sum()
        if step // 2 % 2 == rank:
            loss = loss + turns.square().sum()
        loss.backward()
        optimizer.step()
    unused = torch.equal(rows[2:], start[1][2:]) and torch.equal(idle, start[2])
    optimizer.eval()
    unused = unused and torch.equal(rows[2:], start[1][2:]) and torch.equal(idle, start[2])
    assert float(turns.square().sum() / start[0].square().sum()) < 0.6
    assert unused


@pytest.mark.parametrize(("every", "most"), [(16, 0.070), (32, 0.036)])
@on_ranks(2)
def test_local_steps_send_nothing_and_an_exchange_one_bit(
    rank: int, every: int, most: float
) -> None:
    """Counts bits per parameter and step, bytes of the local steps, and bytes of state."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(768, 768)) for _ in range(4)]
    params += [nn.Parameter(torch.randn(128, 3700)), nn.Parameter(torch.randn(1001))]
    optimizer = DistributedLion(params, lr=1e-4, vote_every=every)
    random = torch.Generator().manual_seed(rank)
    for p in params:
        p.grad = torch.randn(p.shape, generator=random)
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
    torch.manual_seed(0)
    start = [torch.randn(10), torch.randn(4, 64), torch.randn(7), torch.randn(2, 64)]
    start[0], start[3] = start[0].bfloat16(), start[3].bfloat16()
    params = [nn.Parameter(p.clone()) for p in start]
    named = list(zip(("low.bias", "weight", "bias", "low.weight"), params, strict=True))
    optimizer = DistributedLion(
        named, lr=0.01, weight_decay=0.1, vote_every=2, full_precision="*bias",
        momentum_sync="weight", momentum_sync_every=2,
    )  # fmt: skip
    lions = LocalLions([p.clone() for p in start], 2, [0.01] * 4, [0.1] * 4, every=2, full=(0, 2))
    for step in range(8):
        grads: list[Any] = [
            [
                torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + r)).to(p)
                for p in start
            ]
            for r in range(2)
        ]
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
