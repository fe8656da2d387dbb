"""Votes that leave during backward: the same rule, whatever happens between backward and step."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import Disagreement
from hf_dlion.backward.gradient_scale import GradientScale
from hf_dlion.options import Options
from tests.support import zoo
from tests.support.ddp_training import (
    CASES,
    STEPS,
    batches,
    bits_of,
    new_model,
    optimizer_of,
    released,
    train,
)
from tests.support.spawn import RankPools, run_ranks
from tests.support.zoo import short_messages, train_zoo

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "gather"},
        {"exchange": "two_phase", "momentum_dtype": torch.float32},
        {"exchange": "two_phase", "aggregation": "average"},
        {"exchange": "gather", "ties": "zero"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("ddp", [None, {"find_unused_parameters": True}], ids=["bare", "ddp"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_step_equals_the_simulation(
    ranks: RankPools, world_size: int, options: dict[str, Any], ddp: dict[str, Any] | None
) -> None:
    options = {**options, "overlap": True}
    records = ranks(world_size).run(train_zoo, 15, options, ddp)
    zoo.replay(records, options)
    if world_size > 1:
        seen = [[len(record.foreseen) for record in mine] for mine in records]
        # The zoo clips, so that what is foreseen differs from what the loop leaves; votes that
        # left before a NaN or an Inf was found are discarded on all ranks.
        assert all(mine[0] == 0 for mine in seen)
        assert max(map(max, seen)) > 5, seen
        for step in (zoo.ONE_NAN_STEP, zoo.ALL_INF_STEP):
            assert [mine[step] for mine in seen] == [0] * world_size


def train_and_count(rank: int, world_size: int, case: str) -> tuple[list[Tensor], int, int]:
    wrap, ddp_options, loop = CASES[case]
    made: list[Any] = []

    def kept(model: nn.Module, **options: Any) -> Any:
        made.append(optimizer_of(model, **options))
        return made[0]

    with short_messages():
        bits, _ = train(rank, world_size, wrap, ddp_options, {**loop, "overlap": True}, kept)
    stats = made[0].wire
    return bits, stats.overlapped, stats.exchanges


@pytest.mark.parametrize("case", [case for case in CASES if case != "clipping"])
def test_training_equals_that_in_step_mode(ranks: RankPools, case: str) -> None:
    wrap, ddp_options, loop = CASES[case]
    expected = ranks(2).run(train, wrap, ddp_options, loop)
    found = ranks(2).run(train_and_count, case)
    for (bits, overlapped, exchanges), (expected_bits, _) in zip(found, expected, strict=True):
        assert all(map(torch.equal, bits, expected_bits))
        assert exchanges == STEPS
        assert overlapped == STEPS - 1  # the first step agrees on the messages


def misbehave(rank: int, world_size: int, overlap: bool, what: str) -> dict[str, Any]:
    """Trains while something happens between backward and step, from the third step on."""
    model = new_model()
    state, aside = None, {}

    def in_backward(param: Tensor) -> None:
        if t == 3 and what == "put_back":
            aside[param], param.grad = param.grad, None

    def poisoned(grad: Tensor) -> Tensor:
        lost = t == 3 and what == "mended" and rank == 0
        return torch.full_like(grad, float("nan")) if lost else grad

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(in_backward)
    model.second.weight.register_hook(poisoned)
    optimizer = optimizer_of(model, overlap=overlap, exchange="two_phase")
    tokens = [torch.randint(0, 11, (3, 5), generator=_generator(rank, t)) for t in range(8)]
    with short_messages(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(8):
            odd = t >= 2
            first = odd and what == "other_order" and rank == 1
            idle = t in (3, 5) and what == "no_backward" and rank == 1
            if not idle:
                losses = [model(tokens[t]), 0.5 * model(tokens[t - 1])]
                (sum(reversed(losses)) if first else sum(losses)).backward()
            if odd and what == "twice":
                model(tokens[t - 2]).backward()
            if t == 3 and what == "dropped":
                optimizer.zero_grad()
                model(tokens[0]).backward()
            if t == 3 and what == "one_dropped" and rank == 0:
                model.second.weight.grad = None
            if t == 3 and what == "nan" and rank == 0:
                model.second.weight.grad[-1, -1] = float("nan")
            if t == 3 and what == "nan_in_data" and rank == 0:
                model.second.weight.grad.data.fill_(float("nan"))
            for param, grad in aside.items():
                param.grad = grad
            aside.clear()
            if t == 3 and what == "mended" and rank == 0:
                torch.nan_to_num_(model.second.weight.grad)
            if t == 3 and what == "negated":
                model.second.weight.grad.neg_()
            if t == 3 and what == "all_negated":
                for param in model.parameters():
                    param.grad.neg_()
            if t == 3 and what == "masked":
                model.embedding.weight.grad[:4] = 0.0
            if t == 3 and what == "replaced":
                model.second.weight.grad = torch.ones_like(model.second.weight)
            if t in (3, 4, 5) and what == "overflows" and rank == 0:
                model.second.weight.grad.fill_(float("inf"))
            if t == 3 and what == "nobody":
                optimizer.zero_grad()
            if t == 3 and what == "betas":
                optimizer.param_groups[0]["betas"] = (0.5, 0.9)
            if t == 3 and what == "lr":
                optimizer.param_groups[0]["lr"] *= 0.5
            if t == 3 and what == "averaged":
                optimizer.synchronize_momentum()
            if t == 2:
                state = optimizer.state_dict()
                state = {**state, "state": {k: {"exp_avg": v["exp_avg"].clone()} for k, v in
                                            state["state"].items()}}  # fmt: skip
            if t == 3 and what == "loaded":
                optimizer.load_state_dict(state)
            if t == 4 and what == "thawed":
                model.first.bias.requires_grad_(False)
            if t == 6 and what == "thawed":
                model.first.bias.requires_grad_(True)
            if t == 4 and what == "added":
                extra = nn.Parameter(torch.ones(5, 70))
                model.register_parameter("extra", extra)
                optimizer.add_param_group({"params": [("extra", extra)], "lr": 1e-3})
            if t >= 4 and what == "added":
                (model.extra * torch.randn(5, 70, generator=_generator(rank, t))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [str(w.message) for w in caught if "overlap=True does not pay" in str(w.message)]
    return {
        "bits": bits_of(model),
        "momenta": [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()],
        "overlapped": optimizer.wire.overlapped,
        "exchanges": optimizer.wire.exchanges,
        "told": len(told),
    }


def _generator(rank: int, t: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * t + rank)


@pytest.mark.parametrize(
    ("what", "overlapped"),
    [
        ("nothing", 7),
        ("other_order", 7),
        ("no_backward", 7),
        ("twice", 1),
        ("dropped", 6),
        ("one_dropped", 6),
        ("nan", 6),
        ("nan_in_data", 6),
        ("put_back", 6),
        ("mended", 6),
        ("negated", 6),
        ("all_negated", 6),
        ("masked", 6),
        ("replaced", 6),
        ("overflows", 4),
        ("nobody", 6),
        ("betas", 6),
        ("lr", 7),
        ("averaged", 6),
        ("loaded", 6),
        ("thawed", 5),
        ("added", 6),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_whatever_happens_before_the_step_the_outcome_is_that_of_step_mode(
    ranks: RankPools, world_size: int, what: str, overlapped: int
) -> None:
    expected = ranks(world_size).run(misbehave, False, what)
    found = ranks(world_size).run(misbehave, True, what)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine["bits"], theirs["bits"]))
        assert all(map(torch.equal, mine["bits"], found[0]["bits"]))
        assert all(map(torch.equal, mine["momenta"], theirs["momenta"]))
        assert mine["exchanges"] == theirs["exchanges"]
        assert mine["overlapped"] == overlapped
        assert mine["told"] == (what == "twice")


def fail_once(rank: int, world_size: int, how: str) -> tuple[list[str], list[Tensor], int]:
    """Rank 1 fails in its fourth step, in backward or before the header; all go on afterwards."""
    model = new_model()
    optimizer = optimizer_of(model, overlap=True, exchange="two_phase")
    raised: list[str] = []
    with short_messages():
        for t in range(8):
            bad = t == 3 and rank == 1
            loss = model(torch.randint(0, 11, (3, 5), generator=_generator(rank, t)))
            try:
                if bad and how == "sparse":
                    handle = model.branch.weight.register_post_accumulate_grad_hook(_make_sparse)
                    optimizer._engine.hooks._handles.pop(id(model.branch.weight)).remove()
                    optimizer._engine.hooks.watch_gradients([model.branch.weight])
                    loss.backward()
                    handle.remove()
                elif bad and how == "closure":
                    optimizer.step(_raise)
                else:
                    loss.backward()
                if bad and how == "betas":
                    optimizer.param_groups[0]["betas"] = ("high", 0.99)
                if not (bad and how == "closure"):
                    optimizer.step()
            except (Disagreement, TypeError, ValueError) as error:
                raised.append(f"{t} {type(error).__name__}: {error}")
                optimizer.param_groups[0]["betas"] = (0.9, 0.99)
            optimizer.zero_grad()
    return raised, bits_of(model), optimizer.wire.overlapped


def _make_sparse(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad.to_sparse()


def _raise() -> float:
    raise ValueError("the data loader is empty")


@pytest.mark.parametrize(
    ("how", "own", "others"),
    [
        ("sparse", "3 TypeError: DistributedLion takes no sparse gradients", "sparse gradients"),
        ("closure", "3 ValueError: the data loader is empty", "the data loader is empty"),
        ("betas", "3 TypeError: betas", "betas"),
    ],
)
def test_what_fails_on_one_rank_is_raised_on_all_and_the_next_step_is_whole(
    ranks: RankPools, how: str, own: str, others: str
) -> None:
    results = ranks(3).run(fail_once, how)
    for rank, (raised, bits, overlapped) in enumerate(results):
        (message,) = raised
        assert message.startswith(own if rank == 1 else "3 Disagreement: the step failed on 1 of 3")
        assert others in message
        assert all(map(torch.equal, bits, results[0][1]))
        assert overlapped == 6


def fail_to_prepare(rank: int, world_size: int, bad: bool) -> tuple[list[str], list[Tensor], int]:
    """Rank 1 cannot make the messages of the second step; all go on."""
    model = new_model()
    optimizer = optimizer_of(model, overlap=True)
    raised: list[str] = []
    with short_messages():
        for t in range(8):
            model(torch.randint(0, 11, (3, 5), generator=_generator(rank, t))).backward()
            try:
                with pytest.MonkeyPatch.context() as patch:
                    if bad and t == 0 and rank == 1:
                        patch.setattr("hf_dlion.backward.overlap.Plan", _raise_memory_error)
                    optimizer.step()
            except (Disagreement, MemoryError) as error:
                raised.append(f"{t} {type(error).__name__}: {error}")
            optimizer.zero_grad()
            assert optimizer.steps == t + 1
    return raised, bits_of(model), optimizer.wire.overlapped


def _raise_memory_error(*args: object, **kwargs: object) -> None:
    raise MemoryError("no room for buffers")


def test_what_fails_on_one_rank_while_the_next_step_is_prepared_is_raised_on_all(
    ranks: RankPools,
) -> None:
    (_, expected, _), *_ = ranks(3).run(fail_to_prepare, False)
    for rank, (raised, bits, overlapped) in enumerate(ranks(3).run(fail_to_prepare, True)):
        told = "Disagreement: preparing the next step failed on 1 of 3 ranks: rank 1: "
        own = "MemoryError: no room for buffers"
        assert raised == [f"0 {own}" if rank == 1 else f"0 {told}{own}"]
        # The step itself has been taken, and the ones after it; all but two while backward ran.
        assert overlapped == 6
        assert all(map(torch.equal, bits, expected))


def with_a_group_more(rank: int, world_size: int, what: str) -> tuple[str, int]:
    """Rank 0 alone makes one more group."""
    model, options = new_model(), {}
    if what == "subgroup":
        options = {"process_group": dist.new_group(list(range(world_size)))}
    optimizer = optimizer_of(model, overlap=True, **options)
    if rank == 0:
        dist.new_group([0], use_local_synchronization=what != "everyone")
    model(batches(rank, 1)[0][0]).backward()
    try:
        optimizer.step()
    except Disagreement as error:
        return str(error), optimizer.steps
    return "accepted", optimizer.steps


@pytest.mark.parametrize(
    ("what", "world_size", "message"),
    [
        ("subgroup", 2, "ranks are members of different numbers of process groups, [3, 2]"),
        ("everyone", 2, "ranks made different numbers of process groups, [2, 1]"),
    ],
)
def test_ranks_with_different_numbers_of_groups_are_told_instead_of_hanging(
    what: str, world_size: int, message: str
) -> None:
    # In processes of its own: the numbers stay different.
    for said, steps in run_ranks(world_size, with_a_group_more, what):
        assert said.startswith(message)
        assert steps == 1, "the step has been taken"


def alone(rank: int, world_size: int) -> int:
    model = new_model()
    optimizer = optimizer_of(model, overlap=True)
    for step in batches(rank, 1):
        model(step[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(optimizer._engine.early._ready) + len(
        optimizer._engine.early._gradient_scale._before
    )


def test_one_rank_keeps_no_account_of_gradients(ranks: RankPools) -> None:
    assert ranks(1).run(alone) == [0]


def train_two(rank: int, world_size: int) -> list[list[Tensor]]:
    """Two optimizers whose gradients become ready in another order on each rank."""
    models = [new_model(), new_model()]
    optimizers = [optimizer_of(model, overlap=True, exchange="two_phase") for model in models]
    with short_messages():
        for t in range(5):
            tokens = torch.randint(0, 11, (3, 5), generator=_generator(rank, t))
            for model in models if (rank + t) % 2 else reversed(models):
                model(tokens).backward()
            # A collective of the loop's own, on the same ranks.
            dist.all_reduce(torch.ones(3))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert all(optimizer.wire.overlapped == 4 for optimizer in optimizers)
    return [bits_of(model) for model in models]


def test_two_optimizers_need_no_common_order(ranks: RankPools) -> None:
    results = ranks(3).run(train_two)
    for models in results:
        for bits in models:
            assert all(map(torch.equal, bits, results[0][0]))


def use_sometimes(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Rank 1 leaves out the branch from the second step on: it was ready early in the first."""
    model = new_model()
    optimizer = optimizer_of(model, overlap=True, exchange="two_phase")
    left = []
    with short_messages():
        for t in range(8):
            tokens = torch.randint(0, 11, (3, 5), generator=_generator(rank, t))
            model(tokens, branch=rank == 0 or t == 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            left.append((optimizer.wire.sent_in_backward, len(optimizer._engine.messages)))
    assert optimizer.wire.overlapped == 7
    return left


def test_parameters_that_are_often_unused_come_last(ranks: RankPools) -> None:
    first, second = ranks(2).run(use_sometimes)
    assert [sent for sent, _ in second[1:4]] == [0, 0, 0]
    # The branch's weight and bias have messages of their own at the end.
    assert second[-1][0] == second[-1][1] - 2 > 3
    assert first[-1][0] == first[-1][1]


def count_bytes(rank: int, world_size: int, exchange: str) -> list[tuple[int, int]]:
    model = new_model()
    optimizer = optimizer_of(model, overlap=True, exchange=exchange)
    found = []
    with short_messages():
        for step in batches(rank, 1):
            model(step[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            formula = sum(
                sum(m._exchange.wire_bytes(m._layout, world_size, Options()))
                for m in optimizer._engine.messages
            )
            assert formula == sum(m.wire_bytes for m in optimizer._engine.messages)
            found.append((optimizer.wire.last_bytes_sent, formula + 8 * (world_size - 1) * 7))
    return found[2:]


@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_bytes_of_a_step_are_the_documented_formula(ranks: RankPools, exchange: str) -> None:
    for found in ranks(3).run(count_bytes, exchange):
        for sent, formula in found:
            assert sent == formula


def accumulate(rank: int, world_size: int) -> list[int]:
    """Returns how many messages had left after each micro-step of a late step."""
    model = new_model()
    optimizer = optimizer_of(model, overlap=True)
    holder = [DistributedDataParallel(model)]
    left: list[int] = []
    with released(holder), short_messages():
        for step in batches(rank, 3):
            for number, tokens in enumerate(step):
                quiet = holder[0].no_sync() if number < 2 else contextlib.nullcontext()
                with quiet:
                    holder[0](tokens).backward()
                flight = optimizer._engine.early._flight
                left.append(flight._sent if flight.began else 0)
            optimizer.step()
            optimizer.zero_grad()
        total = len(optimizer._engine.messages)
    return [*left[-3:], total]


@pytest.mark.smoke
def test_votes_leave_in_the_last_backward_of_an_accumulation(ranks: RankPools) -> None:
    for first, second, last, total in ranks(2).run(accumulate):
        assert first == second == 0
        assert last == total > 3


@pytest.mark.parametrize("factor", [1.0, 0.25, 2.0**-16, 0.3])
def test_the_scale_is_that_between_backward_and_step(factor: float) -> None:
    params = [nn.Parameter(torch.randn(40, 9)) for _ in range(12)]
    probes = GradientScale()
    for param in params:
        param.grad = torch.randn(40, 9)
        probes.before_one(param)
    for param in params:
        param.grad *= factor
    probes.compare()
    assert probes.scale == pytest.approx(factor, rel=1e-6)
    if factor in (1.0, 0.25, 2.0**-16):
        assert probes.scale == factor


def test_of_several_backward_passes_the_last_is_what_is_compared() -> None:
    """Nor are the others kept, as many as there may be before the first step."""
    param = nn.Parameter(torch.ones(50))
    probes = GradientScale()
    for size in (1.0, 2.0, 4.0):
        param.grad = torch.full((50,), size)
        probes.before_one(param)
    assert len(probes._before) == 1
    param.grad *= 0.5
    probes.compare()
    assert probes.scale == 0.5
    assert not probes.rescaled_oddly


@pytest.mark.parametrize("after", [0.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_not_taken(after: float) -> None:
    param = nn.Parameter(torch.ones(5))
    param.grad = torch.ones(5)
    probes = GradientScale()
    probes.scale = 0.5
    probes.before_one(param)
    param.grad.fill_(after)
    probes.compare()
    assert probes.scale == 0.5


def test_a_gradient_that_was_not_scaled_like_the_others_is_odd() -> None:
    params = [nn.Parameter(torch.ones(5000)) for _ in range(4)]
    probes = GradientScale()
    for param in params:
        param.grad = torch.randn(5000)
        probes.before_one(param)
        param.grad *= 0.3
    params[1].grad[:400] = 0.0
    params[2].grad *= 0.5
    probes.compare()
    assert {id(params[1]), id(params[2])} <= probes.rescaled_oddly
    for param in params:
        probes.before_one(param)
        param.grad *= 0.1
    probes.compare()
    assert probes.rescaled_oddly == set()
