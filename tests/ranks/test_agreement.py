"""Ranks that disagree raise one error together; ranks that agree need one gather of eight words."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_dlion.exchange.wire import Wire, WireStats
from hf_dlion.ranks import agreement
from hf_dlion.ranks.agreement import Agreed, Disagreement, Meetings, Report, raise_together
from hf_dlion.ranks.header import Kind
from tests.support.spawn import RankPools

pytestmark = pytest.mark.multiproc

WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3])

OPTIONS = {"bits": 1, "ties": "alternate", "momentum_sync": ("embed*",)}
OPTIONS |= {"group 0 lr": 0.1, "group 0 weight_decay": 0.0}
LAYOUT = (
    ("weight", (4, 3), torch.float32, (3, 1), None, "cpu"),
    ("bias", (4,), torch.float32, (1,), None, "cpu"),
)
VALUES = [(name, torch.tensor(value)) for name, value in (("weight", 1.1), ("bias", 2.2))]
VALUES += [("frozen", torch.tensor(3.3))]


def report(**changes: Any) -> Report:
    usual: dict[str, Any] = {
        "kind": Kind.STEP,
        "step": 0,
        "options": OPTIONS,
        "layout": LAYOUT,
        "present": (True, True),
        "parameters": lambda: VALUES,
    }
    return Report(**(usual | changes))


def wire_of() -> Wire:
    """Returns a wire with a new group, so optimizers of other cases aren't counted."""
    group = dist.new_group()
    assert group is not None
    return Wire(group, WireStats())


def refused(meetings: Meetings, said: Report) -> str:
    with pytest.raises(Disagreement) as caught:
        meetings.meet(said)
    return str(caught.value)


# Agreement.


def agreed_steps(rank: int, world_size: int) -> Any:
    wire = wire_of()
    meetings = Meetings(wire, 1)
    calls, sent, found = [], [0], []

    def values() -> list[tuple[str, torch.Tensor]]:
        calls.append(rank)
        return VALUES

    for step in range(3):
        finite = (rank, step) != (1, 2)
        said = report(step=step, parameters=values, finite=finite)
        found.append(meetings.meet(said))
        sent.append(wire.stats.bytes_sent)
    return found, [b - a for a, b in itertools.pairwise(sent)], len(calls)


@pytest.mark.smoke
@WORLD_SIZES
def test_a_step_after_the_first_is_one_gather_of_eight_words(
    pools: RankPools, world_size: int
) -> None:
    results = pools(world_size).run(agreed_steps)
    others = world_size - 1
    present = [[True, True]] * world_size
    all_finite = Agreed([True] * world_size, present)
    one_is_not = Agreed([rank != 1 for rank in range(world_size)], present)
    for found, sent, calls in results:
        assert found == [all_finite, all_finite, one_is_not]
        assert sent == [88 * others, 64 * others, 64 * others]
        assert calls == 1


def present_apart(rank: int, world_size: int, parameters: int) -> Any:
    wire = wire_of()
    layout = [(f"p{number}",) for number in range(parameters)]
    present = [(number * 7 + rank) % 3 > 0 for number in range(parameters)]
    meetings = Meetings(wire, 1)
    meetings.meet(report(layout=layout, present=[True] * parameters))
    before = wire.stats.bytes_sent
    found = meetings.meet(report(layout=layout, present=present))
    return found.present, wire.stats.bytes_sent - before


@WORLD_SIZES
@pytest.mark.parametrize("parameters", [1, 64, 65])
def test_differing_presence_adds_one_bit_per_parameter(
    pools: RankPools, world_size: int, parameters: int
) -> None:
    wanted = [
        [(number * 7 + rank) % 3 > 0 for number in range(parameters)] for rank in range(world_size)
    ]
    words = 8 + -(-parameters // 64)
    for found, sent in pools(world_size).run(present_apart, parameters):
        assert found == wanted
        assert sent == 8 * words * (world_size - 1)


# Differences.

OTHER_LAYOUT = (LAYOUT[0], ("bias", (5,), torch.float32, (1,), None, "cpu"))
DIFFERENCES = {
    "option": (
        {"options": OPTIONS | {"bits": 2}},
        "ranks differ in options, first in 'bits': {others}: 1, rank 1: 2. ",
    ),
    "missing option": (
        {"options": {name: OPTIONS[name] for name in OPTIONS if name != "momentum_sync"}},
        "first in 'momentum_sync': {others}: ['embed*'], rank 1: 'missing'",
    ),
    "rate": (
        {"options": OPTIONS | {"group 0 lr": 0.2}},
        "first in 'group 0 lr': {others}: 0.1, rank 1: 0.2",
    ),
    "kind of number": (
        {"options": OPTIONS | {"group 0 weight_decay": 0}},
        "first in 'group 0 weight_decay': {others}: 0.0, rank 1: 0",
    ),
    "step": ({"step": 1}, "ranks are at different steps: {others}: 0, rank 1: 1. "),
    "layout": (
        {"layout": OTHER_LAYOUT},
        "ranks differ in trainable parameters, first in 'parameter 1': {others}: 'bias (4,) "
        "torch.float32 (1,) None cpu', rank 1: 'bias (5,) torch.float32 (1,) None cpu'. ",
    ),
    "number of parameters": (
        {"layout": LAYOUT[:1], "present": (True,)},
        "first in 'parameter 1': {others}: 'bias (4,) torch.float32 (1,) None cpu', rank 1: "
        "'missing'",
    ),
    "save": ({"kind": Kind.SAVE}, "rank 1 saves while {others} step{s}: a rank is at another"),
    "load": ({"kind": Kind.LOAD}, "rank 1 loads while {others} step{s}: "),
    "unknown kind": ({"kind": 77}, "rank 1 does something else while {others} step{s}: "),
}
NEW_DIFFERENCES = {
    "value": (
        {"parameters": lambda: [*VALUES[:2], ("frozen", torch.tensor(3.4))]},
        "replicas differ in 1 of 3 parameters, first in 'frozen': rank 1 from {others} (",
    ),
    "name": (
        {"parameters": lambda: [*VALUES[:2], ("cold", torch.tensor(3.3))]},
        "replicas differ in 1 of 3 parameters, first in 'frozen': rank 1 from {others} (",
    ),
}


def differ(rank: int, world_size: int, case: str, first: bool) -> Any:
    wire = wire_of()
    meetings = Meetings(wire, 1)
    if not first:
        meetings.meet(report())
    changes = (DIFFERENCES | NEW_DIFFERENCES)[case][0] if rank == 1 else {}
    text = refused(meetings, report(**changes))
    before = wire.stats.bytes_sent
    meetings.meet(report())  # The ranks agree again.
    return text, wire.stats.bytes_sent - before


@WORLD_SIZES
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_difference_is_one_error_on_all_ranks(
    pools: RankPools, world_size: int, case: str, first: bool
) -> None:
    results = pools(world_size).run(differ, case, first)
    others, s = ("rank 0", "s") if world_size == 2 else ("ranks 0 and 2", "")
    wanted = DIFFERENCES[case][1].format(others=others, s=s)
    assert wanted in results[0][0]
    assert results == [(results[0][0], (88 if first else 64) * (world_size - 1))] * world_size


@pytest.mark.smoke
@WORLD_SIZES
@pytest.mark.parametrize("case", NEW_DIFFERENCES)
def test_parameters_must_start_equal(pools: RankPools, world_size: int, case: str) -> None:
    results = pools(world_size).run(differ, case, True)
    others = "rank 0" if world_size == 2 else "ranks 0 and 2"
    assert NEW_DIFFERENCES[case][1].format(others=others) in results[0][0]
    assert results == [(results[0][0], 88 * (world_size - 1))] * world_size


def unfrozen(rank: int, world_size: int) -> Any:
    meetings = Meetings(wire_of(), 1)
    meetings.meet(report(layout=LAYOUT[:1], present=(True,)))
    changed = [("weight", torch.tensor(1.0)), ("bias", torch.tensor(2.0 + rank))]
    text = refused(meetings, report(step=1, parameters=lambda: changed))
    meetings.meet(report(step=1))
    return text


def test_a_new_layout_compares_values_again(pools: RankPools) -> None:
    text, other = pools(2).run(unfrozen)
    assert text == other
    assert "first in 'bias': rank 1 from rank 0 (no majority)" in text


def sharded(rank: int, world_size: int, odd: int) -> str:
    meetings = Meetings(wire_of(), 1, same_parts=[[0, 2], [1, 3]])
    values = [("weight", torch.tensor(10.0 + rank % 2 + 5 * (rank == odd)))]
    if odd < 0:
        meetings.meet(report(parameters=lambda: values))
        return ""
    return refused(meetings, report(parameters=lambda: values))


@pytest.mark.parametrize(
    ("odd", "named"), [(-1, ""), (2, "rank 2 from rank 0"), (3, "rank 3 from rank 1")]
)
def test_shards_are_compared_with_the_same_shards(pools: RankPools, odd: int, named: str) -> None:
    texts = pools(4).run(sharded, odd)
    assert len(set(texts)) == 1
    assert named in texts[0]


def other_version(rank: int, world_size: int) -> str:
    meetings = Meetings(wire_of(), 1)
    before = agreement.WIRE_VERSION
    agreement.WIRE_VERSION = 5 if rank == 1 else 1
    try:
        return refused(meetings, report())
    finally:
        agreement.WIRE_VERSION = before


@WORLD_SIZES
def test_another_version_is_refused_by_all(pools: RankPools, world_size: int) -> None:
    text, *others = pools(world_size).run(other_version)
    assert others == [text] * (world_size - 1)
    zero = "rank 0" if world_size == 2 else "ranks 0 and 2"
    assert f"versions of the wire format, {zero}: 1, rank 1: 5: install the same" in text
    assert "another point of its program" in text


# Several optimizers.


def two_optimizers(rank: int, world_size: int, case: str) -> list[str]:
    wire = wire_of()
    created = 2 if (rank, case) == (1, "an unused one") else 1
    a, b = Meetings(wire, created), Meetings(wire, created + 1)
    if case == "crossed at first":
        a.meet(report()) if rank == 0 else b.meet(report())
        return [refused(b if rank == 0 else a, report())]
    a.meet(report())
    b.meet(report())
    if case == "crossed later":
        return [refused(b if rank == 1 else a, report(step=1))]
    if case == "a new one":
        return [refused(Meetings(wire, 3) if rank == 1 else a, report(step=1))]
    for step in (1, 2):
        a.meet(report(step=step))
        b.meet(report(step=step))
    return []


@WORLD_SIZES
@pytest.mark.parametrize("case", ["crossed at first", "crossed later", "a new one"])
def test_ranks_that_step_different_optimizers_all_raise(
    pools: RankPools, world_size: int, case: str
) -> None:
    text, *others = pools(world_size).run(two_optimizers, case)
    assert others == [text] * (world_size - 1)
    assert "ranks use different optimizers: create and step several" in text[0]


@WORLD_SIZES
@pytest.mark.parametrize("case", ["in order", "an unused one"])
def test_optimizers_stepped_in_one_order_meet(pools: RankPools, world_size: int, case: str) -> None:
    assert pools(world_size).run(two_optimizers, case) == [[]] * world_size


# Failures.


class Silent(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


def of_failure(kind: str) -> BaseException:
    texts = {"plain": "no space left", "long": "x" * 9000, "strange": "ä\ud800"}
    return (
        Silent()
        if kind == "silent"
        else KeyboardInterrupt()
        if kind == "^C"
        else ValueError(texts[kind])
    )


def failing(rank: int, world_size: int, kind: str) -> str:
    meetings = Meetings(wire_of(), 1)
    meetings.meet(report())
    if rank == 1:
        failure = of_failure(kind)
        with pytest.raises(type(failure)) as caught:
            meetings.meet(
                report(kind=Kind.SAVE, failure=failure, options={}, layout=[], present=[])
            )
        assert caught.value is failure
        text = ""
    else:
        text = refused(meetings, report(kind=Kind.SAVE))
    meetings.meet(report(step=1))
    return text


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("plain", "ValueError: no space left"),
        ("long", f"ValueError: {'x' * 3988} ... (9012 characters)"),
        ("strange", "ValueError: ä\\ud800"),
        ("silent", "Silent (its text raised KeyError)"),
        ("^C", "KeyboardInterrupt: "),
    ],
)
def test_a_failure_is_raised_on_its_rank_and_named_on_the_others(
    pools: RankPools, kind: str, expected: str
) -> None:
    wanted = f"save failed on 1 of 3 ranks: rank 1: {expected}"
    assert pools(3).run(failing, kind) == [wanted, "", wanted]


def failing_inside(rank: int, world_size: int, place: str) -> str:
    meetings = Meetings(wire_of(), 1)

    def values() -> list[tuple[str, torch.Tensor]]:
        raise MemoryError("too large")

    broken = report(parameters=values) if place == "values" else report(options={"x": {(1,): 2}})
    if rank == 0:
        text = refused(meetings, report())
    else:
        with pytest.raises(MemoryError if place == "values" else TypeError):
            meetings.meet(broken)
        text = ""
    meetings.meet(report())
    return text


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("values", "the comparison of parameters failed on 1 of 2 ranks: rank 1: MemoryError: too"),
        ("options", "step failed on 1 of 2 ranks: rank 1: TypeError: keys must be"),
    ],
)
def test_a_failure_in_the_report_is_named_on_the_others(
    pools: RankPools, place: str, expected: str
) -> None:
    assert pools(2).run(failing_inside, place)[0].startswith(expected)


def together(rank: int, world_size: int, failing: bool) -> str:
    wire = wire_of()
    if not failing:
        raise_together(None, wire, "loading")
        return ""
    failure = OSError("gone") if rank > 0 else None
    with pytest.raises(RuntimeError if rank == 0 else OSError) as caught:
        raise_together(failure, wire, "loading")
    return str(caught.value)


def test_raise_together_names_every_rank_that_failed(pools: RankPools) -> None:
    assert pools(3).run(together, False) == [""] * 3
    wanted = "loading failed on 2 of 3 ranks: rank 1: OSError: gone; rank 2: OSError: gone"
    assert pools(3).run(together, True) == [wanted, "gone", "gone"]
