"""Whatever is trained, on however many ranks, every step is that of the rule, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.support.drawn_training import Case, Group, Odd, Param, Step, cases, replay, train
from tests.support.spawn import RankPools

# Exchanges during backward, and nodes, make process groups, which a process keeps to its end, with
# threads that wake up a hundred times a second.
RUNS_PER_POOL = 50


def hold_to_the_rule(
    ranks: RankPools, world_size: int, examples: int, *, derandomize: bool
) -> None:
    count = 0

    @settings(
        max_examples=examples,
        derandomize=derandomize,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(cases(world_size))
    def check(case: Case) -> None:
        nonlocal count
        count += 1
        if count % RUNS_PER_POOL == 0:
            ranks.close()
        replay(case, ranks(world_size).run(train, case, timeout=30.0))

    check()


# Where one fails, hypothesis looks for a smaller one for up to five minutes.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_every_step_of_any_training_equals_the_simulation(
    ranks: RankPools, world_size: int
) -> None:
    hold_to_the_rule(ranks, world_size, 20, derandomize=True)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_step_of_a_thousand_trainings_equals_the_simulation(
    ranks: RankPools, world_size: int
) -> None:
    hold_to_the_rule(ranks, world_size, 1000, derandomize=False)


@pytest.mark.parametrize(
    "case",
    [
        # A stretch of a parameter with gaps in memory was sent as if it had none.
        Case(2, (Group((Param((128,), layout="sliced"),)),), (Step(),), {"local_group": 2}),
        # The hash of one element with gaps in memory took it for contiguous.
        Case(2, (Group((Param((1,), "float64", layout="sliced"),)),), (Step(),)),
        # The mean was written into a gradient whose elements share memory.
        Case(
            2,
            (Group((Param((5,)),)),),
            (Step(odd=(Odd(rank=1, param=0, kind="normal", how="expanded"),)),),
            {"local_group": 2},
        ),
        # A node that abstained from its first step saved a state that it refused to load.
        Case(
            2,
            (Group((Param(),)),),
            (Step(odd=(Odd(rank=0, param=0, kind="nan"),)), Step(reload=True)),
            {"local_group": 2},
        ),
    ],
    ids=["stretch with gaps", "element with gaps", "expanded gradient", "first step abstained"],
)
def test_what_was_found_once_stays_mended(ranks: RankPools, case: Case) -> None:
    replay(case, ranks(case.world_size).run(train, case))


@pytest.mark.full
def test_the_trainings_that_are_drawn_are_worth_a_test() -> None:
    drawn: list[Case] = []

    @settings(max_examples=200, derandomize=True, database=None)
    @given(cases(4))
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    assert len({repr(case) for case in drawn}) > 125
    for option in ("aggregation", "ties", "overlap", "local_group", "momentum_dtype"):
        assert 25 < sum(option in case.options for case in drawn) < 175, option
    steps = [step for case in drawn for step in case.steps]
    kinds = {odd.kind for step in steps for odd in step.odd}
    assert {"nan", "inf", "absent", "zeros", "zero rows"} <= kinds
    assert any(step.reload for step in steps)
    assert any(len(case.groups) > 1 and case.groups[-1].joins for case in drawn)
    assert any(param.frozen for case in drawn for param in case.params)
    assert {param.dtype for case in drawn for param in case.params} == {
        str(dtype).removeprefix("torch.")
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    }
