"""Synchronised momenta and full precision on real ranks equal the simulation, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_dlion import Disagreement
from hf_dlion.codec.rule import StepRule, TensorRule
from hf_dlion.exchange import WireStats
from hf_dlion.exchange.mean import mean_of
from hf_dlion.exchange.wire import connect, default_group
from hf_dlion.momentum.slices import Held, synchronize_slice
from tests.support import zoo
from tests.support.oracle import bits_of
from tests.support.random_training import (
    DTYPES,
    backward,
    ignored_warnings,
    mixed_params,
    normal,
    random_param,
    take_steps,
)
from tests.support.spawn import RankPools

CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "sync": ({"momentum_sync_every": 3}, ()),
    "sync-float32": ({"momentum_sync_every": 1, "momentum_sync_dtype": torch.float32}, ()),
    "sync-narrow": (
        {
            "momentum_sync_every": 2,
            "momentum_sync_dtype": torch.float32,
            "momentum_dtype": torch.bfloat16,
            "aggregation": "average",
        },
        (),
    ),
    "sync-float16": (
        {"momentum_sync_every": 2, "momentum_dtype": torch.float16, "ties": "zero"},
        (),
    ),
    "sync-some": ({"momentum_sync_every": 2, "momentum_sync": "*o*"}, ()),
    "full-vectors": ({}, (1,)),
    "full-named": ({"full_precision": "[lw]o*", "momentum_sync_every": 5}, (2,)),
    "full-small": ({"momentum_dtype": torch.bfloat16, "exchange": "two_phase"}, (2, 3)),
    "full-all": ({"stochastic_rounding": False}, (0, 1, 2, 3)),
    "warmup": ({"warmup_full_steps": 7, "momentum_dtype": torch.float32}, ()),
    "warmup-and-all": ({"warmup_full_steps": 4, "momentum_sync_every": 4}, (1,)),
}


# Each way of averaging once.
SHORT = ("sync", "sync-narrow", "sync-some", "full-named", "full-all", "warmup-and-all")


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        pytest.param(n, case, marks=[] if n == 2 and case in SHORT else pytest.mark.full)
        for n in (2, 3)
        for case in CASES
    ],
)
def test_every_step_equals_the_simulation(ranks: RankPools, world_size: int, case: str) -> None:
    options, full_groups = CASES[case]
    records = ranks(world_size).run(zoo.train_full, 16, options, full_groups)
    oracle = zoo.replay(records, options, full_groups)
    assert oracle.steps == 15


@pytest.mark.multiproc
@pytest.mark.parametrize("case", ["sync", "full-named", "warmup", "warmup-and-all"])
@pytest.mark.parametrize("overlap", [False, True])
def test_training_in_ddp_equals_the_simulation(ranks: RankPools, overlap: bool, case: str) -> None:
    options = {**CASES[case][0], "overlap": overlap}
    ddp = {"find_unused_parameters": True}
    records = ranks(2).run(zoo.train_ddp, 15, options, ddp)
    zoo.replay(records, options)
    overlapped = [any(record.foreseen for record in own) for own in records]
    assert overlapped == [overlap] * 2
    for t in range(options.get("warmup_full_steps", 0)):
        assert not records[0][t].foreseen


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)]
)
def test_nodes_synchronise_their_shares(ranks: RankPools, dtype: torch.dtype) -> None:
    options = {
        "local_group": 2,
        "momentum_sync_every": 1,
        "momentum_sync_dtype": dtype,
        "momentum_dtype": torch.bfloat16,
    }
    records = ranks(4).run(zoo.train, 10, options)
    zoo.replay(zoo.as_nodes(records, [[0, 1], [2, 3]]), options)


def synchronize_shares(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Returns what becomes of a momentum as a whole, and of its two parts, put together."""
    momentum = normal(300, seed=rank, dtype=torch.bfloat16)
    part = momentum[100:].clone()
    rest = momentum[:100].clone()
    group = default_group()
    assert group is not None
    wire = connect(group, WireStats(), torch.device("cpu"))
    step = StepRule(
        step=5,
        rank=rank,
        world_size=world_size,
        aggregation="majority",
        ties="zero",
        stochastic_rounding=True,
        seed=3,
    )
    rules = {4: TensorRule(step_rule=step, index=4, lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)}
    for held in (Held(4, momentum), Held(4, part, 100), Held(4, rest)):
        synchronize_slice([held], 0, 1, rules, torch.float32, wire)
    return momentum, torch.cat([rest, part])


def test_a_share_is_rounded_as_in_the_whole(ranks: RankPools) -> None:
    for whole, parts in ranks(2).run(synchronize_shares):
        assert bits_of(whole) == bits_of(parts)


def _bytes(numel: int, world_size: int, itemsize: int) -> int:
    return 2 * (world_size - 1) * -(-numel // world_size) * itemsize


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_are_the_documented_formula(ranks: RankPools, world_size: int) -> None:
    params = [p for group in zoo.Zoo().groups() for p in group]
    header = 8 * (world_size - 1) * (6 + -(-len(params) // 64))
    votes = [own[1].bytes_sent - header for own in ranks(world_size).run(zoo.train, 2, {})]
    options = {"momentum_sync_every": 3, "warmup_full_steps": 3}
    for own in ranks(world_size).run(zoo.train, 6, options):
        # Steps 2 and 3: one batch for each dtype, of the parameters that any rank used.
        for t in (1, 2):
            used = [zoo.uses(rank, world_size, t) for rank in range(world_size)]
            absent = {"never"} | (set() if any(u for _, u in used) else {"sometimes"})
            by_dtype: dict[torch.dtype, int] = {}
            for name, p in zoo.Zoo().named_parameters():
                if p.requires_grad and name not in absent:
                    by_dtype[p.dtype] = by_dtype.get(p.dtype, 0) + p.numel()
            expected = sum(_bytes(n, world_size, dtype.itemsize) for dtype, n in by_dtype.items())
            assert own[t].bytes_sent == header + expected, f"step {t + 1}"
        n = sum(p.numel() for p in params)
        for step in (5, 6):
            part = step % 3
            due = (part + 1) * n // 3 - part * n // 3
            expected = header + votes[0] + _bytes(due, world_size, 2)
            assert own[step - 1].bytes_sent == expected, f"step {step}"


def train_in_auto(rank: int, world_size: int, budget: int, steps: int) -> dict[str, Any]:
    from hf_dlion import DistributedLion

    generator = torch.Generator().manual_seed(0)
    names = {"alike": 400, "apart": 300, "large": 3000, "mixed": 300}
    params = {
        name: torch.nn.Parameter(torch.randn(n, generator=generator)) for name, n in names.items()
    }
    optimizer = DistributedLion(
        params.items(),
        lr=1e-3,
        momentum_sync_every=2,
        momentum_sync="auto",
        momentum_sync_budget=budget,
    )
    sent, divergences = [], []
    for t in range(steps):
        common = torch.Generator().manual_seed(t)
        own = torch.Generator().manual_seed(1000 * rank + t)
        for name, p in params.items():
            same = torch.randn(p.shape, generator=common)
            other = torch.randn(p.shape, generator=own)
            share = {"alike": 0.0, "apart": 1.0, "large": 0.9, "mixed": 0.3}[name]
            p.grad = (1 - share) * same + share * other
        optimizer.step()
        sent.append(optimizer.wire.last_bytes_sent)
        divergences.append(optimizer.momentum_divergence)
    return {
        "sent": sent,
        "divergence": divergences,
        "chosen": dict(optimizer._engine.sync.needed),
        "report": optimizer.momentum_report(),
        "apart": optimizer.state[params["apart"]]["exp_avg"],
        "large": optimizer.state[params["large"]]["exp_avg"],
    }


def test_auto_synchronises_what_differs_most_within_the_budget(ranks: RankPools) -> None:
    budget = 2 * -(-300 // 2) * 2  # half of `apart` and `mixed` in each step
    results = ranks(2).run(train_in_auto, budget, 2)
    first = results[0]
    divergence = first["divergence"][0]
    assert divergence["apart"] > divergence["large"] > divergence["mixed"] > divergence["alike"]
    assert divergence["alike"] == 0.0
    assert 0.3 < divergence["apart"] < 0.7
    for result in results:
        assert result["divergence"] == first["divergence"]
        assert result["chosen"] == {1: 1, 3: 1}  # `large` does not fit
        assert "0.000     0/1  alike" in result["report"]
    names = [line.split()[-1] for line in first["report"].splitlines()[1:]]
    assert names == ["apart", "large", "mixed", "alike"]
    apart, large = ([result[name] for result in results] for name in ("apart", "large"))
    # `apart` is the first half of both, and due in step 2; what bfloat16 left off remains.
    assert float((apart[0] - apart[1]).abs().max()) < 2**-8 * float(apart[0].abs().max())
    assert float((large[0] - large[1]).abs().mean()) > 0.005
    without = ranks(2).run(train_in_auto, 0, 2)[0]["sent"]
    measured = 4 * 256 * 4
    assert first["sent"][1] - without[1] == budget
    assert without[0] == without[1] + 80 + measured


def train_with_wide_gradients(rank: int, world_size: int) -> list[float]:
    """One parameter whose gradient is float32, on the first rank alone."""
    from hf_dlion import DistributedLion

    param = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    other = nn.Parameter(torch.ones(2))
    optimizer = DistributedLion([param, other], lr=0.1, warmup_full_steps=1)
    loss = (other * (rank + 1.0)).sum()
    if rank == 0:
        loss = loss + (param * torch.arange(-2.0, 3.0).bfloat16()).float().sum()
    loss.backward()
    optimizer.step()
    return [float(value) for value in param]


def test_gradients_of_another_dtype_are_averaged_in_the_parameter_s(ranks: RankPools) -> None:
    first, second = ranks(2).run(train_with_wide_gradients)
    assert first == second
    assert first == pytest.approx([1.1, 1.1, 1.0, 0.9, 0.9], abs=0.01)


def train_at_last(rank: int, world_size: int, change: str) -> tuple[list[Any], list[Any], float]:
    """Votes for some steps, and then exchanges gradients in full precision."""
    from hf_dlion import DistributedLion

    params = mixed_params()
    group = {"params": params, "lr": 1e-2, "exchange": "full" if change == "load" else "vote"}
    optimizer = DistributedLion([group], warmup_full_steps=0)
    if change == "load":
        voting = DistributedLion([{**group, "exchange": "vote"}])
        take_steps(voting, params, range(100 * rank, 100 * rank + 3))
        saved = voting.state_dict()
        saved["param_groups"][0]["exchange"] = "full"
        optimizer.load_state_dict(saved)
    else:
        take_steps(optimizer, params, range(100 * rank, 100 * rank + 3))
        optimizer.param_groups[0]["exchange"] = "full"
    with ignored_warnings():
        take_steps(optimizer, params, range(100 * rank + 3, 100 * rank + 7))
    momenta = [optimizer.state[p]["exp_avg"] for p in params]
    return (
        [bits_of(p) for p in params],
        [bits_of(m) for m in momenta],
        float(momenta[0].abs().sum()),
    )


@pytest.mark.parametrize("change", ["group", "load"])
def test_momenta_that_differ_are_made_equal_before_gradients_are_averaged(
    ranks: RankPools, change: str
) -> None:
    results = ranks(3).run(train_at_last, change)
    for params, momenta, size in results:
        assert params == results[0][0]
        assert momenta == results[0][1]
        assert size > 0


def train_on_means(rank: int, world_size: int, dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    """Returns what `full` made of the ranks' gradients, and Lion of their mean, on one rank."""
    from hf_dlion import DistributedLion

    ours = [random_param(20, 3, seed=1, dtype=dtype), random_param(7, seed=2, dtype=dtype)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    alone = dist.new_group([rank], use_local_synchronization=True)
    groups = [{"params": p, "lr": 1e-2, "weight_decay": 0.1, "exchange": "full"} for p in ours]
    full = DistributedLion(groups)
    plain = DistributedLion(theirs, 1e-2, weight_decay=0.1, process_group=alone)
    for t in range(8):
        for k, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            grads = [normal(*p.shape, seed=100 * t + 10 * r + k, dtype=dtype) for r in range(3)]
            p.grad, q.grad = grads[rank], mean_of(grads)
        full.step()
        plain.step()
    states = [[o.state[p]["exp_avg"] for p in ps] for o, ps in ((full, ours), (plain, theirs))]
    return [bits_of(x) for x in [*ours, *states[0]]], [bits_of(x) for x in [*theirs, *states[1]]]


@pytest.mark.multiproc
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_in_full_is_lion_on_the_mean_gradient(ranks: RankPools, dtype: torch.dtype) -> None:
    for full, plain in ranks(3).run(train_on_means, dtype):
        assert full == plain


AUTO = {
    "momentum_sync_every": 3,
    "momentum_sync": "auto",
    "momentum_sync_budget": 60,
    "warmup_full_steps": 2,
    "full_precision": "p4",
}


def train_and_resume(rank: int, world_size: int, folder: str, resume: bool) -> list[Any]:
    """Trains 9 steps, in one go or with a new optimizer after the fifth."""
    from hf_dlion import DistributedLion, load_momentum, save_momentum

    params = mixed_params()

    def make() -> DistributedLion:
        return DistributedLion([(f"p{k}", p) for k, p in enumerate(params)], lr=1e-2, **AUTO)

    optimizer = make()
    take_steps(optimizer, params, range(100 * rank, 100 * rank + 5))
    if resume:
        save_momentum(optimizer, folder)
        state = [copy.deepcopy(optimizer.state_dict())]
        dist.broadcast_object_list(state, 0)
        optimizer = make()
        optimizer.load_state_dict(state[0])
        load_momentum(optimizer, folder)
    take_steps(optimizer, params, range(100 * rank + 5, 100 * rank + 9))
    momenta = [optimizer.state[p]["exp_avg"] for p in params]
    return [optimizer.momentum_divergence, *(bits_of(x) for x in [*params, *momenta])]


@pytest.mark.multiproc
def test_a_resumed_run_equals_the_uninterrupted_one(ranks: RankPools, tmp_path: Path) -> None:
    whole, resumed = (ranks(2).run(train_and_resume, str(tmp_path), r) for r in (False, True))
    assert whole == resumed
    assert len(whole[0][0]) == 4
    assert any(value > 0 for value in whole[0][0].values())


def differ(rank: int, world_size: int, how: str) -> str:
    from hf_dlion import DistributedLion

    params = mixed_params()
    options: dict[str, Any] = {"momentum_sync_every": 2, "full_precision": "p1"}
    if how == "function":
        options["momentum_sync"] = lambda name, p: name == f"p{rank}"
    elif how == "group":
        del options["full_precision"]
    elif rank == 1:
        others = {"every": {"momentum_sync_every": 3}, "warm": {"warmup_full_steps": 1}}
        options |= others.get(how, {})
    optimizer = DistributedLion([(f"p{k}", p) for k, p in enumerate(params)], **options)
    if how == "group" and rank == 1:
        optimizer.param_groups[0]["exchange"] = "full"
    if how == "divergence":
        optimizer._engine.sync.divergence = {0: 0.5 + rank}
    backward(params, rank)
    try:
        optimizer.step()
    except Disagreement as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("every", ["momentum_sync_every", "rank 1: 3"]),
        ("warm", ["warmup_full_steps", "rank 1: 1"]),
        ("function", ["p0", "momentum synchronised"]),
        ("group", ["p0", "in full precision"]),
        ("divergence", ["momentum divergence", "0.5", "1.5"]),
    ],
)
def test_a_difference_between_ranks_is_named(ranks: RankPools, how: str, words: list[str]) -> None:
    for message in ranks(2).run(differ, how):
        for word in words:
            assert word in message
