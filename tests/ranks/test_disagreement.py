"""What would make replicas drift apart is raised on every rank, and no rank waits for ever."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import DistributedLion
from hf_dlion.options import Options
from hf_dlion.options.treatment import Treatment
from hf_dlion.ranks import agreement, header
from tests.support.option_cases import EXAMPLES, needed
from tests.support.spawn import RankPools, run_ranks

WORLD_SIZE = 3


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(4, 5), (7,)]]


def _backward(params: list[nn.Parameter], seed: int) -> None:
    for k, p in enumerate(params):
        p.grad = None
        weight = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + k))
        (p * weight).sum().backward()


def _attempt(step: Callable[[], Any], params: list[nn.Parameter]) -> tuple[str, bool]:
    """Returns the error of a step, and whether it left the parameters alone."""
    before = [p.detach().clone() for p in params]
    try:
        step()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = ""
    return message, all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


def _options_with(options: Options, name: str) -> Options:
    """Returns options of which the one named has another value."""
    other = EXAMPLES[name][1]
    if other == getattr(options, name):
        other = getattr(Options(), name)
    return dataclasses.replace(options, **{name: other})


def _with_options(
    rank: int, world_size: int, name: str, overlap: bool, late: bool
) -> tuple[str, bool]:
    params = _parameters()
    chosen = dataclasses.replace(Options(**needed(name)), overlap=overlap)
    if rank == 1 and not late:
        chosen = _options_with(chosen, name)
    # Patterns of names must mean one of them.
    named = zip(("norm.weight", "norm.bias"), params, strict=True)
    optimizer = DistributedLion(named, **vars(chosen))
    if late:
        for seed in range(3):
            _backward(params, seed)
            optimizer.step()
    if rank == 1 and late:
        optimizer._engine.options = _options_with(chosen, name)
        optimizer._engine.ranks._local_group = optimizer.options.local_group
    _backward(params, rank)
    return _attempt(optimizer.step, params)


def _with_group_value(
    rank: int, world_size: int, key: str, value: Any, late: bool
) -> tuple[str, bool]:
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.125)
    if late:
        _backward(params, rank)
        optimizer.step()
    if rank == world_size - 1:
        optimizer.param_groups[0][key] = value
    _backward(params, rank)
    return _attempt(optimizer.step, params)


def _raised_everywhere(results: list[tuple[str, bool]], *words: str) -> None:
    for rank, (message, untouched) in enumerate(results):
        assert message, f"rank {rank} raised nothing"
        assert untouched, f"rank {rank} moved its parameters"
        for word in words:
            assert word in message, f"rank {rank}: {message}"


# Every field, so that an option added later is compared or fails here.
@pytest.mark.parametrize(
    ("world_size", "overlap", "late", "name"),
    [
        pytest.param(*case, field.name, id=f"{told}-{field.name}")
        for told, case in {
            "first step": (3, False, False),
            "later": (2, False, True),
            "overlap, first step": (2, True, False),
            "overlap, later": (3, True, True),
        }.items()
        for field in dataclasses.fields(Options)
        if not (case[1] and field.name == "local_group")  # refused together, on the rank itself
    ],
)
def test_an_option_that_differs_on_one_rank(
    ranks: RankPools, name: str, world_size: int, overlap: bool, late: bool
) -> None:
    results = ranks(world_size).run(_with_options, name, overlap, late, timeout=20)
    _raised_everywhere(results, f"options, first in '{name}'", "rank 1")


def _with_loaded_seed(rank: int, world_size: int) -> tuple[str, bool]:
    params = _parameters()
    optimizer = DistributedLion(params, seed=5)
    if rank == 1:
        optimizer.load_state_dict(DistributedLion(params, seed=6).state_dict())
    _backward(params, rank)
    return _attempt(optimizer.step, params)


def test_a_seed_that_one_rank_loaded(ranks: RankPools) -> None:
    results = ranks(2).run(_with_loaded_seed, timeout=20)
    _raised_everywhere(results, "'seed': rank 0: 5, rank 1: 6")


@pytest.mark.parametrize("late", [False, True], ids=["first step", "later"])
@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("lr", 0.2),
        ("lr", torch.tensor(0.1)),
        ("lr", float("nan")),
        ("betas", (0.8, 0.99)),
        ("betas", (0.9, 0.999)),
        ("weight_decay", 0.5),
    ],
    ids=str,
)
def test_a_group_value_that_differs_on_one_rank(
    ranks: RankPools, name: str, odd: Any, late: bool
) -> None:
    results = ranks(WORLD_SIZE).run(_with_group_value, name, odd, late, timeout=20)
    _raised_everywhere(results[:-1], name, "rank 2")
    _raised_everywhere(results[-1:], name)


@pytest.mark.parametrize("late", [False, True], ids=["first step", "later"])
@pytest.mark.parametrize(
    ("name", "equal"),
    [
        ("lr", torch.tensor(0.125)),
        ("lr", np.float32(0.125)),
        ("betas", [0.9, 0.99]),
        ("weight_decay", torch.tensor(0.0)),
    ],
    ids=["tensor", "NumPy number", "list", "tensor of zero"],
)
def test_an_equal_value_of_another_type_is_no_difference(
    ranks: RankPools, name: str, equal: Any, late: bool
) -> None:
    results = ranks(2).run(_with_group_value, name, equal, late, timeout=20)
    assert results == [("", False)] * 2


def _with_local_plateau(rank: int, world_size: int) -> tuple[str, bool, int]:
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.125)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    for t in range(10):
        _backward(params, t)
        message, untouched = _attempt(optimizer.step, params)
        if message:
            return message, untouched, t
        # The loss of the last rank's own data does not fall.
        scheduler.step(1.0 if rank == world_size - 1 else 1.0 / (t + 1))
    return "", False, 10


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_schedule_on_each_ranks_own_metric(ranks: RankPools, world_size: int) -> None:
    results = ranks(world_size).run(_with_local_plateau, timeout=20)
    odd = f"rank {world_size - 1}: 0.0625"
    told = "'group 0 lr': rank 0: 0.125"
    _raised_everywhere([found[:2] for found in results], told, odd, "metric that is reduced")
    # It lasts two steps without progress after the first, and the next one does not begin.
    assert [t for _, _, t in results] == [3] * world_size


def _with_layout(rank: int, world_size: int, kind: str, late: bool) -> tuple[str, bool]:
    params = _parameters()
    thawed = nn.Parameter(torch.ones(3), requires_grad=False)
    extra = nn.Parameter(torch.ones(200, 3))
    params.append(thawed)
    optimizer = DistributedLion(params, lr=0.1)
    if late:
        _backward(params[:2], rank)
        optimizer.step()
    if rank == 1:
        if kind == "added":
            params.append(extra)
            optimizer.add_param_group({"params": [extra]})
        elif kind == "fewer":
            optimizer.param_groups[0]["params"].pop(1)
            params.pop(1)
        elif kind == "frozen":
            params[0].requires_grad_(False)
            params[0].grad = None
        elif kind == "thawed":
            thawed.requires_grad_(True)
        elif kind == "order":
            optimizer.param_groups[0]["params"].reverse()
        elif kind == "shape":
            params[1].data = torch.ones(9)
            params[1].grad = None
            optimizer.state.pop(params[1], None)  # Or its momentum would be refused.
        else:
            params[1].data = params[1].data.double()
            params[1].grad = None
    _backward([p for p in params if p.requires_grad], rank)
    return _attempt(optimizer.step, params)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("late", [False, True], ids=["first step", "later"])
@pytest.mark.parametrize("kind", ["added", "fewer", "frozen", "thawed", "order", "shape", "dtype"])
def test_parameters_that_differ_on_one_rank(
    ranks: RankPools, kind: str, late: bool, world_size: int
) -> None:
    results = ranks(world_size).run(_with_layout, kind, late, timeout=20)
    _raised_everywhere(results, "trainable parameters, first in", "rank 1")


def _never_meet(rank: int, world_size: int, what: str) -> tuple[str, float]:
    """Returns the error and the seconds until it; rank 1 never enters what rank 0 waits in."""
    limit = datetime.timedelta(seconds=2)
    everyone = dist.new_group(list(range(world_size)), timeout=limit)
    some = dist.new_group([0, 1], timeout=limit)
    holder: list[nn.Module] = [nn.Linear(40, 3)]
    begin = time.monotonic()
    optimizer: torch.optim.Optimizer
    if what == "another group":
        group = some if rank == 0 else everyone
        optimizer = DistributedLion(holder[0].parameters(), process_group=group)
    else:
        holder = [DistributedDataParallel(holder[0], process_group=everyone)]
        optimizer = DistributedLion(holder[0].parameters(), process_group=everyone)
        if rank == 1:
            optimizer = torch.optim.AdamW(holder[0].parameters())
    said = "accepted"
    try:
        for _ in range(2):
            holder[0](torch.ones(2, 40)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        said = type(error).__name__
    holder.clear()
    gc.collect()
    return said, time.monotonic() - begin


@pytest.mark.multiproc
@pytest.mark.parametrize(("what", "world_size"), [("another group", 3), ("another optimizer", 2)])
def test_ranks_that_never_meet_end_at_the_timeout(what: str, world_size: int) -> None:
    # Nothing can be compared then. In processes of its own: the groups are broken.
    results = run_ranks(world_size, _never_meet, what)
    # AdamW's rank is told by torch's own wrapper.
    others = {1: "RuntimeError"} if what == "another optimizer" else {}
    for rank, (said, seconds) in enumerate(results):
        assert said == others.get(rank, "LostRank")
        assert seconds < 20


def _with_equal_tensors(rank: int, world_size: int, names: list[list[str]]) -> tuple[str, bool]:
    """Two parameters of one shape and value, which only their names tell apart."""
    params = {name: nn.Parameter(torch.zeros(5)) for name in names[rank]}
    optimizer = DistributedLion(params.items(), lr=0.1)
    for name in sorted(params):
        (params[name] * (1.0 if name == "a" else -1.0)).sum().backward()
    return _attempt(optimizer.step, list(params.values()))


def test_equal_parameters_in_another_order_are_told_apart_by_their_names(ranks: RankPools) -> None:
    results = ranks(3).run(_with_equal_tensors, [["a", "b"], ["b", "a"], ["a", "b"]], timeout=20)
    told = "names of trainable parameters, first in 0: rank 0: 'a', rank 1: 'b', rank 2: 'a'"
    _raised_everywhere(results, told)


def _with_groups(
    rank: int, world_size: int, sizes: list[int], odd: list[int], late: bool
) -> tuple[str, bool]:
    """Groups of so many of six equal parameters; the first has a learning rate of its own."""
    params = [nn.Parameter(torch.zeros(5)) for _ in range(6)]

    def groups_of(sizes: list[int]) -> list[dict[str, Any]]:
        left = iter(params)
        groups = [{"params": list(itertools.islice(left, size)), "lr": 0.1} for size in sizes]
        groups[0]["lr"] = 0.2
        return groups

    optimizer = DistributedLion(groups_of(sizes if late or rank else odd))
    if late:
        _backward(params, 0)
        optimizer.step()
        for group, own in zip(optimizer.param_groups, groups_of(odd), strict=True):
            group["params"] = group["params"] if rank else own["params"]
    _backward(params, rank)
    return _attempt(optimizer.step, params)


@pytest.mark.parametrize(
    ("odd", "late", "told"),
    [
        ([4, 2], False, "'group 0 parameters': rank 0: 4, rank 1: 3"),
        ([4, 2], True, "'group 0 parameters': rank 0: 4, rank 1: 3"),
        ([3, 1, 2], False, "'group 1 parameters': rank 0: 1, rank 1: 3"),
        ([3, 3, 0], False, "'group 2 lr': rank 0: 0.1, rank 1: 'missing'"),
    ],
    ids=["divided otherwise", "divided otherwise later", "one more", "an empty one more"],
)
def test_groups_that_differ_on_one_rank(
    ranks: RankPools, odd: list[int], late: bool, told: str
) -> None:
    results = ranks(2).run(_with_groups, [3, 3], odd, late, timeout=20)
    _raised_everywhere(results, "ranks differ in parameter groups, first in", told)


def test_devices_are_compared_by_their_kind() -> None:
    with FakeTensorMode():
        devices = ["cuda:0", "cuda:1", "cpu"]
        alike, same, other = (
            agreement.layout_lines(
                [{"params": [nn.Parameter(torch.empty(3, device=device))]}], Treatment()
            )
            for device in devices
        )
    assert alike == same != other


def _with_wire_version(rank: int, world_size: int, late: bool) -> tuple[str, bool]:
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.1)
    if late:
        _backward(params, rank)
        optimizer.step()
    _backward(params, rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(header, "WIRE_VERSION", header.WIRE_VERSION + 1)
        return _attempt(optimizer.step, params)


@pytest.mark.parametrize("late", [False, True], ids=["first step", "later"])
def test_a_rank_that_speaks_another_version_of_the_wire_format(
    ranks: RankPools, late: bool
) -> None:
    results = ranks(3).run(_with_wire_version, late, timeout=20)
    v = header.WIRE_VERSION
    told = f"[{v}, {v + 1}, {v}] in rank order: install the same hf_dlion"
    _raised_everywhere(results, "different versions of the wire format", told)


def _with_values(rank: int, world_size: int, change: float) -> tuple[str, bool]:
    params = _parameters()
    named = [("first", params[0]), ("second", params[1])]
    if rank == 0:
        params[1].data[6] += change
    optimizer = DistributedLion(named, lr=0.1)
    _backward(params, rank)
    return _attempt(optimizer.step, params)


@pytest.mark.parametrize("change", [1.0, 1e-6])
def test_replicas_that_do_not_start_equal(ranks: RankPools, change: float) -> None:
    results = ranks(WORLD_SIZE).run(_with_values, change, timeout=20)
    _raised_everywhere(results, "second", "rank 0")


def _with_sparse_gradient(rank: int, world_size: int, late: bool) -> tuple[str, bool]:
    embedding = nn.Embedding(10, 3, sparse=rank == 1)
    torch.nn.init.zeros_(embedding.weight)
    params = [embedding.weight]
    optimizer = DistributedLion(params, lr=0.1)
    if late:
        _backward(params, rank)
        optimizer.step()
    optimizer.zero_grad()
    embedding(torch.tensor([1, 2])).sum().backward()
    return _attempt(optimizer.step, params)


@pytest.mark.parametrize("late", [False, True], ids=["first step", "later"])
def test_a_sparse_gradient_on_one_rank(ranks: RankPools, late: bool) -> None:
    results = ranks(WORLD_SIZE).run(_with_sparse_gradient, late, timeout=20)
    _raised_everywhere(results, "sparse")


def _with_closure_error(rank: int, world_size: int) -> tuple[str, bool]:
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.1)

    def closure() -> float:
        if rank == 2:
            raise ArithmeticError("the closure of rank two")
        _backward(params, rank)
        return 0.0

    return _attempt(lambda: optimizer.step(closure), params)


def test_a_closure_that_raises_on_one_rank(ranks: RankPools) -> None:
    results = ranks(WORLD_SIZE).run(_with_closure_error, timeout=20)
    _raised_everywhere(results, "the closure of rank two")


def _with_other_step_count(rank: int, world_size: int) -> tuple[str, bool]:
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.1)
    state = optimizer.state_dict()
    if rank == 0:
        state["dlion"]["steps"] = 7
    optimizer.load_state_dict(state)
    _backward(params, rank)
    return _attempt(optimizer.step, params)


def test_ranks_that_loaded_different_steps(ranks: RankPools) -> None:
    results = ranks(WORLD_SIZE).run(_with_other_step_count, timeout=20)
    _raised_everywhere(results, "step", "7")


def _with_stubborn_nan(rank: int, world_size: int) -> list[tuple[str, bool]]:
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.1, max_abstained_steps=3)
    attempts = []
    # Rank 1 fails in steps 0 and 1, recovers, and then fails for good.
    for t in range(6):
        _backward(params, rank)
        if rank == 1 and t != 2:
            assert params[0].grad is not None
            params[0].grad[0, 0] = float("nan")
        attempts.append(_attempt(optimizer.step, params))
    return attempts


def test_a_rank_that_abstains_too_often_in_a_row(ranks: RankPools) -> None:
    results = ranks(WORLD_SIZE).run(_with_stubborn_nan, timeout=20)
    for attempts in results:
        assert [bool(message) for message, _ in attempts] == [False] * 5 + [True]
        assert not any(untouched for _, untouched in attempts[:5])
        assert "max_abstained_steps" in attempts[5][0]
        assert "rank 1" in attempts[5][0]


def _go_on(
    rank: int, world_size: int, what: str, overlap: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns parameters and momenta after four steps, one of which raised and was repeated."""
    params = _parameters()
    optimizer = DistributedLion(params, lr=0.1, overlap=overlap)
    for t in range(4):
        _backward(params, 10 * t + rank)
        if t == 2 and what != "nothing":
            group, options = optimizer.param_groups[0], optimizer.options
            if what == "lr":
                group["lr"] = 0.1 + rank
            elif what == "option":
                optimizer._engine.options = Options(overlap=overlap, seed=rank)
            elif rank == 1:
                params[0].requires_grad_(False)
            momenta = [optimizer.state[p]["exp_avg"].clone() for p in params]
            message, untouched = _attempt(optimizer.step, params)
            assert message.startswith("Disagreement"), message
            assert untouched, "parameters moved"
            assert optimizer.steps == 2
            assert all(torch.equal(optimizer.state[p]["exp_avg"], m)
                       for p, m in zip(params, momenta, strict=True))  # fmt: skip
            group["lr"], optimizer._engine.options = 0.1, options
            params[0].requires_grad_(True)
        optimizer.step()
    return [p.detach() for p in params], [optimizer.state[p]["exp_avg"] for p in params]


@pytest.mark.parametrize("overlap", [False, True], ids=["step", "overlap"])
@pytest.mark.parametrize("what", ["lr", "option", "layout"])
def test_a_difference_that_is_mended_leaves_no_trace(
    ranks: RankPools, what: str, overlap: bool
) -> None:
    mended = ranks(WORLD_SIZE).run(_go_on, what, overlap, timeout=20)
    clean = ranks(WORLD_SIZE).run(_go_on, "nothing", overlap, timeout=20)
    for own, expected in zip(mended, clean, strict=True):
        assert all(map(torch.equal, itertools.chain(*own), itertools.chain(*expected)))


def _with_two_optimizers(
    rank: int, world_size: int, swapped: Sequence[int], overlap: bool, by_turns: bool
) -> list[tuple[str, bool]]:
    if rank == 1:
        DistributedLion(_parameters(), lr=0.1)  # no rank's count of optimizers is another's
    models = [_parameters(), _parameters()]
    optimizers = [DistributedLion(own, lr=0.1, overlap=overlap) for own in models]
    attempts = []
    for t in range(4):
        here = [1, 0] if rank == 1 and t in swapped else [0, 1]
        if not by_turns:
            for own in models:
                _backward(own, 10 * t + rank)
        for k in here:
            if by_turns:
                _backward(models[k], 10 * t + rank)
            attempts.append(_attempt(optimizers[k].step, [*models[0], *models[1]]))
        if any(message for message, _ in attempts):
            break
    return attempts


@pytest.mark.parametrize("by_turns", [False, True], ids=["", "by_turns"])
@pytest.mark.parametrize("overlap", [False, True], ids=["step", "overlap"])
def test_optimizers_of_one_layout_in_another_order_on_one_rank(
    ranks: RankPools, overlap: bool, by_turns: bool
) -> None:
    """Nothing else tells them apart: neither size nor step, and equal replicas had equal hashes."""
    # From a step on; in every one, as where the order is that of a set; never.
    for swapped, wrong in [([2], [4, 5]), (range(9), [1]), ([], [])]:
        for attempts in ranks(WORLD_SIZE).run(
            _with_two_optimizers, swapped, overlap, by_turns, timeout=20
        ):
            assert [k for k, (message, _) in enumerate(attempts) if message] == wrong
            for message, untouched in (attempts[k] for k in wrong):
                assert "step() of different optimizers" in message
                assert untouched
