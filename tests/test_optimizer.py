"""Real ranks take steps that equal the definition in NumPy, and fail together."""

from __future__ import annotations

import math
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_optimizer import Lion
from torch import nn

from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Disagreement
from hf_dlion.ranks.routes import wire_bytes
from tests.support.definition import Lions, phase_of
from tests.support.forms import form
from tests.support.gradients import KINDS, Pair
from tests.support.local_definition import LocalLions
from tests.support.spawn import on_ranks
from tests.support.steps import backward, give_gradients, plain, single, take_step
from tests.support.training import batch, error_of, model_of, same


def equal_the_definition(
    rank: int, ranks: int, options: dict[str, Any], kinds: list[torch.dtype], seed: int,
    *, faults: bool = True, name: str = "cpu",
) -> DistributedLion:  # fmt: skip
    """Compares steps of a form with the definition; returns the optimizer."""
    with form(name) as device:
        if "vote_every" in options:
            local = Pair(LocalLions, rank, ranks, options, kinds, seed, device)
            take_local_steps(local)
            return local.optimizer
        pair = Pair(Lions, rank, ranks, options, kinds, seed, device)
        for step in range(7):
            pair.step(step, faults)
            pair.check(pair.lions.params, step)
    return pair.optimizer


def take_local_steps(pair: Pair[LocalLions]) -> None:
    """Compares own and common weights, which change; the last exchange comes in a period."""
    lions, optimizer, lrs = pair.lions, pair.optimizer, pair.lions.lrs
    for step in range(12):
        if step < 11:
            scale = min(1.0, (step + 1) / 4)  # warm-up
            for group, lr in zip(optimizer.param_groups, (0.1, 0.01), strict=True):
                group["lr"] = lr * scale
            lions.lrs = [lr * scale for lr in lrs]
            pair.step(step, faults=True)
        else:
            lions.exchange()
            optimizer.exchange_now()
        pair.check(lions.own[pair.rank], step)
        with optimizer.common_weights():
            pair.check(lions.params, step, "anchor")
            if step % 4 == 1:  # Within a period, and between two.
                for k, param in enumerate(pair.params):
                    lions.write(k, param.data.clamp_(-0.5, 0.5).cpu())
        pair.check(lions.own[pair.rank], step, "own")
    assert (optimizer.local.exchanges if optimizer.local else 0) == lions.exchanges


CASES: list[dict[str, Any]] = [
    {"exchange": "gather"},
    {"exchange": "two_phase"},
    {"exchange": "gather", "ties": "zero"},
    {"exchange": "two_phase", "ties": "zero"},
    {"exchange": "gather", "aggregation": "average"},
    {"exchange": "two_phase", "aggregation": "average"},
    {"bits": 2},
    {"exchange": "two_phase", "bits": 4},
    {"exchange": "gather", "bits": 8},
    {"bits": 2, "level_scale": "tensor"},
    {"exchange": "two_phase", "bits": 4, "level_scale": "tensor"},
    {"bits": 8, "ties": "zero", "level_scale": "tensor"},
    {"momentum_dtype": torch.bfloat16},
]
LOCAL_CASES: list[dict[str, Any]] = [
    {"vote_every": 3},
    {"vote_every": 4, "exchange": "two_phase"},
    {"vote_every": 2, "bits": 2},
    {"vote_every": 3, "bits": 1},
    {"vote_every": 4, "bits": 1, "exchange": "two_phase"},
    {"vote_every": 3, "bits": 8},
    {"vote_every": 3, "momentum_sync_every": 1},
    {"vote_every": 2, "bits": 1, "momentum_sync_every": 2, "momentum_dtype": torch.bfloat16},
]


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        *(pytest.param(2, case, marks=pytest.mark.smoke) for case in CASES + LOCAL_CASES),
        *((ranks, case) for ranks in (3, 4) for case in CASES + LOCAL_CASES),
        *((5, case) for case in ({"exchange": "two_phase", "bits": 4}, {"vote_every": 3})),
    ],
    ids=str,
)
@on_ranks("ranks")
def test_ranks_equal_the_definition(rank: int, ranks: int, case: dict[str, Any]) -> None:
    equal_the_definition(rank, ranks, case, [torch.float32], 7 * ranks)


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS[:3]], ids=str)
@pytest.mark.parametrize(
    ("ranks", "case", "seed"),
    [
        (3, {"seed": 2**40 + 1}, 5),
        (2, {"momentum_dtype": torch.bfloat16}, 6),
        (3, {"vote_every": 3, "seed": 2**40 + 1}, 5),
        (2, {"vote_every": 2, "bits": 2, "momentum_sync_every": 1}, 6),
    ],
)
@on_ranks("ranks")
def test_ranks_equal_the_definition_in_other_dtypes(
    rank: int, ranks: int, case: dict[str, Any], kinds: list[torch.dtype], seed: int
) -> None:
    equal_the_definition(rank, ranks, case, kinds, seed)


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        *((case, KINDS[:2]) for case in (*CASES[:6], CASES[-1], *LOCAL_CASES[:2])),
        *((case, [kind]) for case in (CASES[0], LOCAL_CASES[0]) for kind in KINDS[:2]),
    ],
    ids=str,
)
@on_ranks(2, timeout=300)
def test_kernels_equal_the_definition(
    rank: int, case: dict[str, Any], kinds: list[torch.dtype]
) -> None:
    equal_the_definition(rank, 2, case, kinds, 7, name="kernels")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks("ranks")
def test_bytes_equal_the_formula(rank: int, ranks: int, case: dict[str, Any]) -> None:
    optimizer = equal_the_definition(rank, ranks, case, [torch.float32], 1, faults=False)
    # Each step begins with a header, and the first one compares layouts, and gradients of attached
    # models and of others.
    expected = (7 * 64 + 3 * 16) * (ranks - 1)
    planes = 2 if case.get("ties") == "zero" else 1
    if case.get("aggregation") == "average":
        planes = ranks.bit_length()
    for own in optimizer.params.fresh_layout().messages:
        numbers = {"words": own.words, "rows": len(own.rows), "bits": case.get("bits", 1)}
        gather, two_phase = (
            wire_bytes(name, ranks=ranks, planes=planes, **numbers)
            for name in ("gather", "two_phase")
        )
        by_name = {"auto": min(gather, two_phase), "gather": gather, "two_phase": two_phase}
        expected += 7 * by_name[case.get("exchange", "auto")]
    assert optimizer.steps == 7
    assert optimizer.wire.bytes_sent == expected


def test_one_rank_is_lion() -> None:
    torch.manual_seed(1)
    models = [torch.nn.Linear(70, 9) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    options = {"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}
    ours = DistributedLion(models[0].parameters(), **options)
    theirs = Lion(models[1].parameters(), **options, weight_decouple=True)
    for _ in range(20):
        x = torch.randn(8, 70)
        take_step(ours, models[0], x)
        take_step(theirs, models[1], x)
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@on_ranks(2)
def test_a_forward_that_changes_weights_is_named(rank: int) -> None:
    """Shortens the row that the rank reads."""
    model, optimizer = plain(nn.Embedding(2, 64, max_norm=0.1))
    model(torch.tensor([rank])).sum().backward()
    text = r"first in 'weight': rank 1 from rank 0 \(no majority\)\. Replicas must start equal"
    with pytest.raises(Disagreement, match=rf"{text}.*set max_norm=None in nn\.Embedding"):
        optimizer.step()


@on_ranks(2)
def test_a_failing_closure_raises_on_all_ranks_as_often_as_it_fails(rank: int) -> None:
    """Raises the same object twice."""
    param, optimizer = single()
    assert optimizer.step(lambda: 0.25) == 0.25
    before, error = param.detach().clone(), ValueError("the same object")

    def closure() -> float:
        if rank == 1:
            raise error
        return 0.0

    others = "Disagreement: step failed on 1 of 2 ranks: rank 1: "
    for _ in range(2):
        said = error_of(optimizer.step, closure)
        assert said == f"{'' if rank == 1 else others}ValueError: the same object"
        assert torch.equal(param, before)


@on_ranks(3, timeout=30)
def test_what_another_optimizer_raises_on_fewer_ranks_is_raised_on_all(rank: int) -> None:
    few = dist.new_group([0, 1])
    _, optimizer = single()
    optimizer.step()
    other = single(process_group=few)[1] if rank < 2 else None

    def closure() -> float:
        if other is not None:
            other.param_groups[0]["lr"] *= 1 + rank
            other.step()
        return 0.0

    begin = "ranks differ, first in" if rank < 2 else "step failed on 2 of 3 ranks"
    assert error_of(optimizer.step, closure).startswith(f"Disagreement: {begin}")
    assert error_of(optimizer.step) == ""


@pytest.mark.parametrize("vote_every", [1, 2])
@on_ranks(2)
def test_a_step_that_fails_keeps_no_gradient(rank: int, vote_every: int) -> None:
    param, optimizer = single(vote_every=vote_every)
    optimizer.step()
    param.grad = torch.ones_like(param)
    optimizer.param_groups[0]["lr"] *= 1 + rank
    gradient = weakref.ref(param.grad.untyped_storage())
    assert error_of(optimizer.step).startswith("Disagreement: ")
    param.grad = None
    assert gradient() is None


@on_ranks(2)
def test_all_ranks_raise_if_one_abstains_too_often(rank: int) -> None:
    param, optimizer = single(max_abstained_steps=2)
    param.grad[5] = torch.inf if rank == 1 else 1.0
    optimizer.step()
    with pytest.raises(RuntimeError, match="gradients of rank 1 held a NaN or an Inf in 2 steps"):
        optimizer.step()


@on_ranks(2)
def test_a_rank_without_any_gradient_counts_as_abstaining_if_another_has_some(rank: int) -> None:
    """Gradients are None on rank 1, as after ms-swift's guard against NaN, and then on both."""
    params = [nn.Parameter(torch.ones(64)) for _ in range(2)]
    optimizer = DistributedLion(params, lr=0.1, max_abstained_steps=3)
    params[rank].grad = torch.ones(64)  # Each rank has one, so both vote.
    optimizer.step()
    assert optimizer.wire.abstentions == 0
    params[0].grad, params[1].grad = (torch.ones(64), None) if rank == 0 else (None, None)
    for count in (1, 2):
        optimizer.step()
        assert optimizer.wire.abstentions == count
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.wire.abstentions == 2
    for _ in range(3):
        params[0].grad = torch.ones(64) if rank == 0 else None
        said = error_of(optimizer.step)
    assert said.startswith("RuntimeError: gradients of rank 1 held a NaN or an Inf in 3 steps in a")
    assert "or were all missing" in said


@pytest.mark.parametrize("vote_every", [1, 2])
@on_ranks(2)
def test_parameters_that_share_memory_are_refused(rank: int, vote_every: int) -> None:
    for first, says in ((4, ""), (3, "'a' and 'b' are two parameters that share memory")):
        memory = torch.ones(8, 64)
        params = [nn.Parameter(memory[:4]), nn.Parameter(memory[first:].t())]
        optimizer = DistributedLion(zip("ab", params, strict=True), lr=0.01, vote_every=vote_every)
        give_gradients(params, rank)
        assert says in error_of(optimizer.step)
        assert optimizer.steps == (not says)


@on_ranks(2)
def test_a_parameter_that_is_not_a_leaf_can_be_trained(rank: int) -> None:
    param = nn.Parameter(torch.ones(64)) * 2
    param.retain_grad()
    optimizer = DistributedLion([param], lr=0.5)
    param.sum().backward()
    optimizer.step()
    assert param.tolist() == [1.5] * 64


@on_ranks(2)
def test_ties_cancel_out_at_any_rhythm(rank: int) -> None:
    """Votes always tie. The ranks disagree on half of the elements; the others are zero."""
    params = [nn.Parameter(torch.zeros(64)) for _ in range(12)]
    optimizer = DistributedLion(params, lr=1.0)
    k, expected = torch.arange(64), torch.zeros(12, 64)
    grad = (k < 32).float() * (1 - 2 * rank)
    for step in range(1, 145):
        for every, param in enumerate(params, 1):
            param.grad = grad.clone() if step % every == 0 else None
            if param.grad is not None:  # Both zeros vote against the tie-break.
                expected[every - 1] += 2.0 * ((k + phase_of(step) + (k >= 32)) % 2) - 1
        optimizer.step()
    for every, param in enumerate(params, 1):
        assert param.tolist() == expected[every - 1].tolist(), every
        assert param.abs().max() <= 3 * math.sqrt(144 / every), every


@pytest.mark.parametrize(("ranks", "bits", "share"), [(2, 1, 1.0), (3, 1, 2 / 3), (4, 2, 0.75)])
@on_ranks("ranks")
def test_where_one_rank_alone_is_not_zero_it_moves_the_weight(
    rank: int, ranks: int, bits: int, share: float
) -> None:
    """Zeros of the others must not outvote it, whichever rank it is, nor at any rhythm."""
    params = [nn.Parameter(torch.zeros(64)) for _ in range(4)]
    optimizer = DistributedLion(params, lr=1.0, bits=bits)
    owner, sign = torch.arange(64) // 2 % ranks, 1 - 2.0 * (torch.arange(64) < 32)
    for step in range(1, 241):
        for every, param in enumerate(params, 1):
            param.grad = sign * (owner == rank) if step % every == 0 else None
        optimizer.step()
    for every, param in enumerate(params, 1):
        moved = -sign * param.detach() / (240 // every)
        means = [float(moved[owner == own].mean()) for own in range(ranks)]
        assert means == pytest.approx([share] * ranks, abs=0.0 if ranks == 2 else 0.05), every


@on_ranks(3)
def test_a_rank_outside_the_process_group_is_refused(rank: int) -> None:
    group = dist.new_group([0, 1])
    said = error_of(lambda: single(process_group=group))
    assert said.startswith("ValueError: this rank isn't in process_group" if rank == 2 else "")
    assert bool(said) == (rank == 2)


@on_ranks(2)
def test_a_step_before_the_process_group_counts_no_ranks(rank: int) -> None:
    _, optimizer = single()
    with mock.patch.object(dist, "is_initialized", return_value=False):
        optimizer.step()
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2


@pytest.mark.parametrize("size", [128, 70])
@on_ranks(2)
def test_agreement_is_the_share_of_this_ranks_votes_that_equal_the_verdict(
    rank: int, size: int
) -> None:
    """Without words that end in padding, in which all ranks agree."""
    param = nn.Parameter(torch.ones(size))
    optimizer = DistributedLion([param])
    assert math.isnan(optimizer.wire.agreement)
    found = []
    for other in (1.0, -1.0):
        optimizer.state.clear()
        param.grad = torch.full_like(param, other if rank == 1 else 1.0)
        optimizer.step()
        found.append(optimizer.wire.agreement)
    assert found == [1.0, 0.5]  # Half of the ties go each way.


@pytest.mark.parametrize("ties", ["alternate", "zero"])
@on_ranks(2)
def test_agreement_looks_at_rows_that_have_votes(rank: int, ties: str) -> None:
    param = nn.Parameter(torch.ones(10, 128))
    optimizer = DistributedLion([param], ties=ties, max_abstained_steps=9)
    found = []
    for gradients in ([1.0, 1.0], [1.0, -1.0], [0.0, 0.0]):
        optimizer.state.clear()
        param.grad = torch.zeros(10, 128)
        param.grad[7] = gradients[rank]
        optimizer.step()
        found.append(optimizer.wire.agreement)
    assert found[:2] == [1.0, 0.5]
    assert math.isnan(found[2])


@on_ranks(3)
def test_errors_name_ranks_by_their_numbers_in_the_default_group(rank: int) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    found = []
    for name, value in (("lr", 0.1 * rank), ("weight_decay", 0.0)):
        param, optimizer = single(process_group=group, max_abstained_steps=1, **{name: value})
        param.grad *= math.nan if rank == 1 else 1.0
        found.append(error_of(optimizer.step))
        with torch.no_grad():
            param.add_(rank)
        found.append(error_of(DistributedLion([param], process_group=group).step))
    assert "first in 'group 0 lr': rank 1: 0.1, rank 2: 0.2" in found[0]
    assert "rank 2 from rank 1 (no majority)" in found[1]
    assert "gradients of rank 1 held a NaN" in found[2]
    closure = (lambda: 1 / 0) if rank == 2 else (lambda: 0.0)
    said = error_of(single(process_group=group)[1].step, closure)
    assert said.startswith(
        "ZeroDivisionError" if rank == 2 else "Disagreement: step failed on 1 of"
    )
    assert rank == 2 or "2 ranks: rank 2: ZeroDivisionError" in said


@pytest.mark.parametrize("vote_every", [1, 2])
@on_ranks(2)
def test_weights_that_were_moved_elsewhere_free_their_memory(vote_every: int) -> None:
    """Offloads a model between steps, as `model.cpu()` does."""
    param, optimizer = single(vote_every=vote_every)

    def look() -> None:
        with optimizer.common_weights():
            pass

    for call in (
        optimizer.step,
        look,
        optimizer.exchange_now,
        look,
        optimizer.synchronize_momentum,
    ):
        call()
        old = weakref.ref(param.untyped_storage())
        param.data = param.data.clone()
        assert old() is None, call


@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "gather", "full_precision": "*bias"},
        {"exchange": "two_phase", "momentum_sync_every": 2},
        {"bits": 4},
        {"vote_every": 2, "momentum_sync_every": 1},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16, "vote_every": 2},
    ],
    ids=str,
)
@on_ranks(2)
def test_torchs_default_device_changes_nothing(rank: int, options: dict[str, Any]) -> None:
    """A user sets it to a GPU, for example; nothing that is made on "meta" has values."""
    dtype = options.pop("dtype", torch.float32)
    pairs = [plain(model_of().to(dtype), **options) for _ in range(2)]
    for step in range(4):
        for (model, optimizer), device in zip(pairs, ("cpu", "meta"), strict=True):
            backward(model, batch(step, rank).to(dtype))
            torch.set_default_device(device)
            try:
                optimizer.step()
                optimizer.exchange_now()
            finally:
                torch.set_default_device(None)
    assert same(*(list(model.parameters()) for model, _ in pairs))


@on_ranks(3)
def test_drifted_replicas_are_found(rank: int) -> None:
    model, optimizer = plain(nn.Linear(64, 3), check_replicas_every=2)
    take_step(optimizer, model, torch.ones(2, 64))
    if rank == 1:
        model.bias.data[0] += 1
    text = "after step 2 in 1 of 2 parameters, first in 'bias': rank 1 from ranks 0"
    with pytest.raises(Disagreement, match=text):
        optimizer.step()


@pytest.mark.parametrize("vote_every", [1, 4])
@on_ranks(3)
def test_replicas_are_checked_when_asked(rank: int, vote_every: int) -> None:
    """Not within a period of local steps, where ranks hold other weights."""
    model, optimizer = plain(nn.Linear(64, 3), vote_every=vote_every)
    for seed in (rank, 3 + rank):
        take_step(optimizer, model, batch(seed, rank))
    if vote_every > 1:
        with pytest.raises(RuntimeError, match=r"call optimizer.exchange_now\(\) on every rank"):
            optimizer.check_replicas()
    optimizer.exchange_now()
    optimizer.check_replicas()
    if rank == 1:
        model.bias.data[0] += 1
    text = "after step 2 in 1 of 2 parameters, first in 'bias': rank 1 from ranks 0 and 2"
    with pytest.raises(Disagreement, match=text):
        optimizer.check_replicas()
    text = "rank 1 synchronizes momenta while ranks 0 and 2 check replicas: "
    with pytest.raises(Disagreement, match=text):
        optimizer.synchronize_momentum() if rank == 1 else optimizer.check_replicas()


@pytest.mark.parametrize("vote_every", [1, 2])
@on_ranks(2)
def test_a_compiled_function_may_step(rank: int, vote_every: int) -> None:
    def trained(compiled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model, optimizer = plain(nn.Linear(64, 2), vote_every=vote_every)

        def train(x: torch.Tensor) -> None:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(train, backend="eager") if compiled else train
        for number in range(4):
            step(batch(number, rank))
        return model.weight.detach()

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=0)
