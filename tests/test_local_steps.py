"""Local steps of real ranks equal the definition in NumPy, and fail together."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.checkpoint import load_momentum, save_momentum
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.failures import Disagreement
from tests.support.gradients import KINDS, SHAPES, gradients, pair
from tests.support.local_definition import LocalLions
from tests.support.spawn import LASTING, RankPools, on_ranks
from tests.support.training import batch, everyones, is_equal_everywhere, model_of, same

pytestmark = pytest.mark.multiproc


def equals_the_definition(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    kinds: list[torch.dtype],
    seed: int,
    faults: bool = True,
) -> None:
    """Compares eleven steps with the definition; the last exchange comes before its period ends."""
    dtypes = [kinds[k % len(kinds)] for k in range(len(SHAPES))]
    lions, optimizer, params = pair(LocalLions, world_size, dtypes, options)

    def check(step: int) -> None:
        for k, (param, wanted) in enumerate(zip(params, lions.own[rank], strict=True)):
            assert torch.equal(param, wanted), (step, SHAPES[k], param.dtype)
            if param in optimizer.state:
                momentum = optimizer.state[param]["exp_avg"]
                assert torch.equal(momentum, lions.momenta[rank][k]), (step, SHAPES[k])
        own = [p.clone() for p in params]
        optimizer.eval()
        for k, (param, wanted) in enumerate(zip(params, lions.params, strict=True)):
            assert torch.equal(param, wanted), (step, SHAPES[k], param.dtype, "anchor")
        optimizer.train()
        for param, wanted in zip(params, own, strict=True):
            assert torch.equal(param, wanted)

    for step in range(11):
        scale = min(1.0, (step + 1) / 4)  # warm-up
        for group, lr in zip(optimizer.param_groups, (0.1, 0.01), strict=True):
            group["lr"] = lr * scale
        lions.lrs = [scale * (0.1 if k < 4 else 0.01) for k in range(len(SHAPES))]
        grads = gradients(seed + step, world_size, dtypes, faults=faults)
        for param, grad in zip(params, grads[rank], strict=True):
            param.grad = None if grad is None else grad.clone()
        lions.step(grads)
        optimizer.step()
        check(step)
    lions.exchange()
    optimizer.exchange_now()
    check(11)
    assert optimizer.steps == lions.t
    assert optimizer._local.exchanges == lions.exchanges


CASES: list[dict[str, Any]] = [
    {"vote_every": 3},
    {"vote_every": 4, "exchange": "two_phase"},
    {"vote_every": 2, "bits": 2},
    {"vote_every": 4, "bits": 4, "exchange": "two_phase"},
    {"vote_every": 3, "bits": 8},
]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_equal_the_definition(pools: RankPools, case: dict[str, Any], ranks: int) -> None:
    pools(ranks).run(equals_the_definition, case, [torch.float32], 7 * ranks)


@pytest.mark.smoke
@pytest.mark.parametrize("bits", [1, 4])
def test_two_ranks_equal_the_definition(pools: RankPools, bits: int) -> None:
    pools(2).run(equals_the_definition, {"vote_every": 3, "bits": bits}, [torch.float32], 3)


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS[:3]], ids=str)
def test_ranks_equal_the_definition_in_other_dtypes(
    pools: RankPools, kinds: list[torch.dtype]
) -> None:
    pools(3).run(equals_the_definition, {"vote_every": 3, "seed": 2**40 + 1}, kinds, 5)
    pools(2).run(equals_the_definition, {"vote_every": 2, "bits": 2}, kinds, 6)


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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    LASTING.update(mesh.get_all_groups())
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
    kept = [*optimizer._local.anchors.values(), *optimizer._local.displacements.values()]
    kept += [optimizer.state[p]["exp_avg"] for p in params]
    memory = sum(own.numel() * own.element_size() for own in kept) / numel
    exchanged = sent.pop(every - 1)
    assert optimizer.wire.bytes_sent == sum(sent) + exchanged
    assert 1 / every <= (8 * exchanged / numel / every) <= most
    assert set(sent[1:]) == {0}
    assert 8 <= memory <= 8.1


def fails(rank: int, world_size: int, what: str) -> list[str]:
    """Steps with vote_every=4 until something is wrong on the last rank; returns each error."""
    last = rank == world_size - 1
    torch.manual_seed(0)
    dtype = torch.bfloat16 if what in ("changed", "one") else torch.float32
    model = nn.Linear(64, 3, dtype=dtype)
    every = 8 if what == "every" and last else 4
    optimizer = DistributedLion(
        model.named_parameters(), lr=0.01, vote_every=every, max_abstained_steps=2
    )
    said = []
    for step in range(12):
        model.zero_grad()
        closure = None
        for k, p in enumerate(model.parameters()):
            random = torch.Generator().manual_seed(100 * step + 10 * rank + k)
            p.grad = torch.randn(p.shape, generator=random).to(dtype)
            if what == "nan" and last:
                p.grad.fill_(torch.nan)
        if what == "lr":
            optimizer.param_groups[0]["lr"] = 0.02 if last and step == 1 else 0.01
        if step == 5 and what in ("replaced", "changed") and (last or what == "changed"):
            model.load_state_dict({name: p + 1 for name, p in model.state_dict().items()})
        if what == "one" and last and step == 7:
            with torch.no_grad():
                model.weight.clamp_(max=0.0)
        if what == "layout" and step == 5:
            model.weight.data = model.weight.data.t().contiguous().t()
        if what == "eval" and last and step == 3:
            optimizer.eval()
        if what == "closure" and last and step == 3:
            closure = lambda: 1 / 0  # noqa: E731
        try:
            if what == "now" and last and step == 2:
                optimizer.exchange_now()
            optimizer.step(closure)  # type: ignore[arg-type]
        except (RuntimeError, ZeroDivisionError) as error:
            return [*said, f"{step} {type(error).__name__}: {error}"]
    return said


@pytest.mark.parametrize(
    ("what", "own", "others"),
    [
        ("every", "0 Disagreement: ranks differ in options, first in 'vote_every'", ""),
        (
            "lr",
            "3 Disagreement: ranks differ in options, first in 'lr, betas and weight decay since",
            "",
        ),
        (
            "nan",
            "3 RuntimeError: gradients of rank 1 held a NaN or an Inf",
            "3 Disagreement: exchange failed",
        ),
        ("replaced", "7 Disagreement: the weights of 'weight' on rank 1 are farther from", ""),
        ("changed", "5 RuntimeError: a torch.bfloat16 parameter of shape (3, 64) has local", ""),
        (
            "one",
            "7 RuntimeError: a torch.bfloat16 parameter of shape (3, 64) has",
            "7 Disagreement: exchange failed on 1 of 2 ranks: rank 1: RuntimeError: a torch",
        ),
        ("layout", "5 RuntimeError: a torch.float32 parameter of shape (3, 64) has local", ""),
        (
            "eval",
            "3 RuntimeError: step() after optimizer.eval()",
            "3 Disagreement: exchange failed",
        ),
        (
            "closure",
            "3 ZeroDivisionError: division by zero",
            "3 Disagreement: exchange failed on 1",
        ),
        ("now", "2 Disagreement: ranks are at different steps", "3 Disagreement: ranks are at"),
    ],
)
def test_all_ranks_raise_if_something_is_wrong_on_one(
    pools: RankPools, what: str, own: str, others: str
) -> None:
    first, last = pools(2).run(fails, what, timeout=60)
    assert last[-1].startswith(own)
    assert first[-1].startswith(others or own)


def changes(rank: int, world_size: int) -> list[str]:
    """Freezes, adds, and breaks parameters between exchanges; anchors stay equal."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(2, 64)) for _ in range(3)]
    optimizer = DistributedLion(
        [(str(k), p) for k, p in enumerate(params)], lr=0.01, vote_every=3, check_replicas_every=1
    )
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(11):
            if step == 4:
                params[0].requires_grad_(False)
                params.append(nn.Parameter(torch.ones(5)))
                optimizer.add_param_group(
                    {"params": [("new", params[3])], "lr": 0.1, "weight_decay": 0.5}
                )
            for k, p in enumerate(params):
                random = torch.Generator().manual_seed(100 * step + 10 * rank + k)
                p.grad = torch.randn(p.shape, generator=random) if p.requires_grad else None
                if k == 3:
                    p.grad = torch.zeros(5)
            if step == 7 and rank == 1:
                with torch.no_grad():
                    params[1].fill_(torch.inf)
            optimizer.step()
            # Frozen after the exchange of step 2: it takes part in that of step 5.
            assert (params[0] in optimizer._local.anchors) == (step < 5)
            if step >= 5:
                assert is_equal_everywhere(params[0])
        said = [str(own.message) for own in caught]
    with optimizer.common_weights():
        optimizer.exchange_now()
        assert all(map(is_equal_everywhere, params))
    optimizer.eval()
    for p in params:
        assert bool(p.isfinite().all())
        assert is_equal_everywhere(p)
    # Seven steps with the decay of its group, in three exchanges.
    torch.testing.assert_close(params[3].detach(), torch.full((5,), 0.95**7))
    optimizer.detach()
    assert not optimizer._local.anchors
    return said


def test_parameters_can_be_frozen_added_and_broken_between_exchanges(pools: RankPools) -> None:
    first, second = pools(2).run(changes)
    assert first == []
    assert len(second) == 1
    assert "the weights of '1' were not finite on rank 1" in second[0]


@on_ranks(2)
def test_an_evaluation_or_a_save_of_a_frozen_model_loses_no_step(rank: int, tmp_path: Path) -> None:
    """Freezes a model around an evaluation and a save, as with a GAN's discriminator."""
    results = []
    for freezes in (False, True):
        model = model_of()
        optimizer = DistributedLion(model.named_parameters(), lr=0.01, vote_every=4)
        for step in range(7):
            optimizer.zero_grad()
            model(batch(step, rank)).square().sum().backward()
            optimizer.step()
            model.requires_grad_(not freezes)
            if step == 1:
                save_momentum(optimizer, tmp_path)
            if rank == 0:  # Both calls are local to the rank.
                optimizer.eval()
                optimizer.train()
            if step < 6:
                model.requires_grad_(True)
        optimizer.exchange_now()
        optimizer.eval()
        results.append([p.detach().clone() for p in model.parameters()])
    assert same(*results)


@on_ranks(2)
def test_tensors_of_one_shape_can_be_trained_in_turns() -> None:
    """Trains two tensors of one shape in turns, as some low-memory recipes do."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(2, 64)) for _ in range(2)]
    optimizer = DistributedLion(params, lr=0.01, vote_every=3, check_replicas_every=1)
    starts = [p.detach().clone() for p in params]
    for step in range(12):
        trained, frozen = params if step % 4 < 2 else params[::-1]
        trained.requires_grad_(True)
        frozen.requires_grad_(False)
        # A gradient that was left from earlier steps doesn't move a frozen tensor.
        trained.grad, before = torch.ones(2, 64), frozen.detach().clone()
        optimizer.step()
        if step % 3 < 2:
            assert torch.equal(frozen, before)
    optimizer.eval()
    for p, start in zip(params, starts, strict=True):
        assert is_equal_everywhere(p)
        # Six steps each, all down on all ranks.
        torch.testing.assert_close(p.detach(), start - 0.06)


@on_ranks(2)
def test_a_wrong_order_of_calls_is_refused(rank: int) -> None:
    """Calls `attach`, `detach`, and `step` after local steps."""
    said = []
    model = model_of()
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, vote_every=3)

    def step() -> None:
        optimizer.zero_grad()
        model(batch(0, rank)).square().sum().backward()
        optimizer.step()

    step()
    with pytest.raises(RuntimeError) as caught, optimizer.common_weights():
        step()
    said.append(str(caught.value))
    ddp = DistributedDataParallel(model)  # gives rank 1 the own weights of rank 0
    with pytest.raises(RuntimeError) as caught:
        optimizer.attach(ddp)
    said.append(str(caught.value))
    optimizer.detach()
    with torch.no_grad():
        model[0].weight[0, 0] = rank  # type: ignore[index]
    with pytest.raises(Disagreement) as disagreed:
        step()
    said.append(str(disagreed.value))
    swapped, wrapped, differs = said
    assert "in common_weights()" in swapped
    assert "attach() got a DDP wrapper that was made during local steps" in wrapped
    assert "parameters, first in '0.weight'" in differs


@on_ranks(4)
def test_all_ranks_raise_if_weights_were_replaced_in_a_node(rank: int) -> None:
    """Steps on NaN gradients first, and later replaces the weights of rank 2."""
    ddp = DistributedDataParallel(model_of())
    optimizer = DistributedLion(ddp.named_parameters(), lr=0.01, local_group=2, vote_every=3)
    optimizer.attach(ddp)
    said = ""
    for step in range(8):
        optimizer.zero_grad()
        ddp(batch(step, rank) * (torch.nan if step == 0 else 1.0)).square().sum().backward()
        if step == 5 and rank == 2:
            with torch.no_grad():
                next(ddp.parameters()).add_(1.0)
        try:
            optimizer.step()
        except Disagreement as error:
            said = f"{step}: {error}"
            break
    optimizer.detach()
    assert said.startswith("6: the weights of some parameters on rank 2 are farther"), said


def leaves_a_local_step(rank: int, world_size: int, does: str, folder: str) -> str:
    """Does something else on rank 1 while the other rank of its node steps, or loads."""
    ddp = DistributedDataParallel(model_of())
    optimizer = DistributedLion(ddp.named_parameters(), lr=0.01, local_group=2, vote_every=9)
    optimizer.attach(ddp)
    said = ""
    for step in range(3):
        optimizer.zero_grad()
        ddp(batch(step, rank)).square().sum().backward()
        try:
            if step == 2 and does == "fails to load":
                failure = OSError("no file") if rank == 1 else None
                if failure is None:
                    optimizer.load_state_dict(optimizer.state_dict())
                load_momentum(optimizer, folder, failure=failure)
            if step == 2 and rank == 1:
                if does == "exchanges":
                    optimizer.exchange_now()
                elif does == "saves":
                    save_momentum(optimizer, folder)
                else:
                    optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        except (Disagreement, OSError) as error:
            said = f"{type(error).__name__}: {error}"
            break
    optimizer.detach()
    return said


@pytest.mark.parametrize("does", ["exchanges", "saves", "steps"])
def test_a_rank_of_a_node_that_leaves_a_local_step_does_not_hang_the_node(
    pools: RankPools, tmp_path: Path, does: str
) -> None:
    """The last one has loaded a state, after which a step begins with headers."""
    said = pools(4).run(leaves_a_local_step, does, str(tmp_path), timeout=60)
    assert said[0] == said[1]
    assert f"rank 1 {does} while rank 0 takes a local step" in said[0]
    assert said[2] == said[3] == ""


def test_a_load_that_fails_in_a_node_fails_on_all_ranks(pools: RankPools, tmp_path: Path) -> None:
    said = pools(4).run(leaves_a_local_step, "fails to load", str(tmp_path), timeout=60)
    assert said.pop(1) == "OSError: no file"
    for other in said:
        assert "load failed on 1 of 4 ranks: rank 1: OSError: no file" in other


def fails_to_plan(rank: int, world_size: int, every: int) -> str:
    """Raises in a new plan on rank 1, in an exchange or in a local step."""

    def select(name: str, param: torch.Tensor) -> bool:
        if rank == 1 and len(params) == 2:
            raise KeyError("in a selection")
        return False

    params = [nn.Parameter(torch.ones(64))]
    optimizer = DistributedLion([("a", params[0])], lr=0.1, vote_every=every, full_precision=select)
    params[0].grad = torch.ones(64)
    optimizer.step()
    params.append(nn.Parameter(torch.ones(5)))
    optimizer.add_param_group({"params": [("b", params[1])]})
    try:
        optimizer.step()
    except (Disagreement, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("every", [2, 9])
def test_a_step_that_fails_in_its_plan_raises_on_all_ranks(pools: RankPools, every: int) -> None:
    first, second = pools(2).run(fails_to_plan, every, timeout=60)
    assert "rank 1: KeyError: 'in a selection'" in first
    assert second == "KeyError: 'in a selection'"


@pytest.mark.parametrize("thaws", [False, True], ids=["freezes", "thaws"])
@on_ranks(2)
def test_own_weights_survive_a_change_of_the_layout(rank: int, thaws: bool) -> None:
    """Own weights of 16 bits keep their bits in `eval` and `train` if the layout has changed."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(3, 64).bfloat16()) for _ in range(3)]
    params[0].requires_grad_(not thaws)
    named = [(str(k), p) for k, p in enumerate(params)]
    optimizer = DistributedLion(named, lr=0.003, vote_every=4)
    generator = torch.Generator().manual_seed(rank)

    def steps(count: int) -> None:
        for _ in range(count):
            for p in params:
                drawn = torch.randn(p.shape, generator=generator).bfloat16()
                p.grad = drawn if p.requires_grad else None
            optimizer.step()

    steps(3)
    params[0].requires_grad_(thaws)
    if not thaws:
        steps(1)  # The exchange drops the frozen parameter from the layout.
    with torch.no_grad():
        params[2].clamp_(-1e9, 1e9)  # A write that changes no value is none.
    optimizer.eval()
    optimizer.train()
    own = [p.detach().clone() for p in params]
    optimizer.eval()
    optimizer.train()
    assert same(own, params)
    with torch.no_grad():
        params[2].clamp_(-1e9, 1e9)
    steps(1)
    optimizer.eval()
    assert all(map(is_equal_everywhere, params))


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
