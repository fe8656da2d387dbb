"""Ranks that disagree raise one error together; ranks that agree need one gather of eight words."""

from __future__ import annotations

import contextlib
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_dlion.ranks import header
from hf_dlion.ranks.agreement import FROZEN, Agreed, Meetings, Report, agree_on_gradients
from hf_dlion.ranks.header import Disagreement, Kind, raise_together
from hf_dlion.ranks.stats import WireStats
from hf_dlion.ranks.wire import Wire
from tests.support.spawn import on_ranks

WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3])

OPTIONS = {"bits": 1, "ties": "alternate", "momentum_sync": ("embed*",)}
OPTIONS |= {"group 0 lr": 0.1, "group 0 weight_decay": 0.0}
OPTIONS[FROZEN] = [f"layer {k}" for k in range(200)]
LAYOUT = (
    ("weight", (4, 3), torch.float32, (3, 1), None, "cpu"),
    ("bias", (4,), torch.float32, (1,), None, "cpu"),
)
VALUES = [(name, torch.tensor(value)) for name, value in (("weight", 1.1), ("bias", 2.2))]
VALUES += [("frozen", torch.tensor(3.3))]


def report(**changes: Any) -> tuple[Report, int, Any, Any, Any]:
    usual: dict[str, Any] = {
        "kind": Kind.STEP,
        "step": 0,
        "values": OPTIONS,
        "signatures": LAYOUT,
        "present": [True, True],
        "parameters": lambda: VALUES,
    }
    given = usual | changes
    step, values = given.pop("step"), given.pop("values")
    signatures, parameters = given.pop("signatures"), given.pop("parameters")
    return Report(**given), step, values, signatures, parameters


def wire_of() -> Wire:
    """Returns a wire with a new group, so optimizers of other cases aren't counted."""
    group = dist.new_group()
    assert group is not None
    return Wire(group, WireStats())


def meetings_of(wire: Wire) -> Meetings:
    return Meetings(wire, [[*range(wire.world_size)]])


# Agreement.


@pytest.mark.smoke
@WORLD_SIZES
@on_ranks("world_size")
def test_a_step_after_the_first_is_one_gather_of_eight_words(rank: int, world_size: int) -> None:
    wire = wire_of()
    meetings = meetings_of(wire)
    values = mock.Mock(return_value=VALUES)
    present = [[True, True]] * world_size
    for step, sent in enumerate((80, 64, 64)):
        before = wire.stats.bytes_sent
        finite = [(other, step) != (1, 2) for other in range(world_size)]
        found = meetings.agree(*report(step=step, parameters=values, finite=finite[rank]))
        assert (found, meetings.comparisons) == (Agreed(finite, present), 1)
        assert wire.stats.bytes_sent - before == sent * (world_size - 1)
    values.assert_called_once()


@WORLD_SIZES
@pytest.mark.parametrize("parameters", [1, 64, 65])
@on_ranks("world_size")
def test_differing_presence_adds_one_bit_per_parameter(
    rank: int, world_size: int, parameters: int
) -> None:
    wire = wire_of()
    meetings = meetings_of(wire)
    layout = [(f"p{number}",) for number in range(parameters)]
    meetings.agree(*report(signatures=layout, present=[True] * parameters))
    before = wire.stats.bytes_sent
    wanted = [
        [(number * 7 + other) % 3 > 0 for number in range(parameters)]
        for other in range(world_size)
    ]
    assert meetings.agree(*report(signatures=layout, present=wanted[rank])).present == wanted
    words = 8 + -(-parameters // 64)
    assert wire.stats.bytes_sent - before == 8 * words * (world_size - 1)


# Differences.

OTHER_LAYOUT = (LAYOUT[0], ("bias", (5,), torch.float32, (1,), None, "cpu"))
DIFFERENCES = {
    "option": (
        {"values": OPTIONS | {"bits": 2}},
        "ranks differ, first in 'bits': {others}: 1, rank 1: 2. Create the optimizer "
        "with the same options on every rank",
    ),
    "missing option": (
        {"values": {name: OPTIONS[name] for name in OPTIONS if name != "momentum_sync"}},
        "first in 'momentum_sync': {others}: ['embed*'], rank 1: 'missing'",
    ),
    "rate": (
        {"values": OPTIONS | {"group 0 lr": 0.2}},
        "first in 'group 0 lr': {others}: 0.1, rank 1: 0.2. Give groups the same values on every "
        "rank, and step a scheduler on all ranks together, ",
    ),
    "frozen": (
        {"values": OPTIONS | {FROZEN: [*OPTIONS[FROZEN], "late"]}},
        "first in 'frozen parameters': {others}: [], rank 1: ['late']. Freeze and unfreeze the "
        "same parameters on every rank, ",
    ),
    "kind of number": (
        {"values": OPTIONS | {"group 0 weight_decay": 0}},
        "first in 'group 0 weight_decay': {others}: 0.0, rank 1: 0",
    ),
    "step": (
        {"step": 1},
        "ranks are at different steps: {others}: 0, rank 1: 1. Take the same number of steps on "
        "every rank, and load the same checkpoint on all ranks",
    ),
    "layout": (
        {"signatures": OTHER_LAYOUT},
        "ranks differ in trainable parameters, first in 'parameter 1': {others}: 'bias (4,) "
        "torch.float32 (1,) None cpu', rank 1: 'bias (5,) torch.float32 (1,) None cpu'. Load "
        "them with the same shapes and dtypes",
    ),
    "order": (
        {"signatures": LAYOUT[::-1]},
        "ranks have the same trainable parameters in different orders, first in 'parameter 0': "
        "{others}: 'weight (4, 3) torch.float32 (3, 1) None cpu', rank 1: 'bias (4,) torch.float32 "
        "(1,) None cpu'. Pass the parameters in the same order on every rank, not as a set",
    ),
    "number of parameters": (
        {"signatures": LAYOUT[:1], "present": [True]},
        "first in 'parameter 1': {others}: 'bias (4,) torch.float32 (1,) None cpu', rank 1: "
        "'missing'. Freeze and unfreeze the same parameters on every rank, ",
    ),
    "save": ({"kind": Kind.SAVE}, "rank 1 saves while {others} step{s}: a rank is at another"),
    "load": ({"kind": Kind.LOAD}, "rank 1 loads while {others} step{s}: "),
    "unknown kind": ({"kind": 77}, "rank 1 does something else while {others} step{s}: "),
}


@WORLD_SIZES
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "case", [pytest.param("option", marks=pytest.mark.smoke), *list(DIFFERENCES)[1:]]
)
@on_ranks("world_size")
def test_a_difference_is_one_error_on_all_ranks(
    rank: int, world_size: int, case: str, first: bool
) -> None:
    wire = wire_of()
    meetings = meetings_of(wire)
    if not first:
        meetings.agree(*report())
    changes, text = DIFFERENCES[case]
    others, s = ("rank 0", "s") if world_size == 2 else ("ranks 0 and 2", "")
    with pytest.raises(Disagreement, match=re.escape(text.format(others=others, s=s))):
        meetings.agree(*report(**(changes if rank == 1 else {})))
    before = wire.stats.bytes_sent
    meetings.agree(*report())  # The ranks agree again.
    assert wire.stats.bytes_sent - before == (80 if first else 64) * (world_size - 1)


@on_ranks(2)
def test_a_new_layout_compares_values_again(rank: int) -> None:
    meetings = meetings_of(wire_of())
    meetings.agree(*report(signatures=LAYOUT[:1], present=[True]))
    changed = [("weight", torch.tensor(1.0)), ("bias", torch.tensor(2.0 + rank))]
    with pytest.raises(Disagreement, match=r"first in 'bias': rank 1 from rank 0 \(no majority\)"):
        meetings.agree(*report(step=1, parameters=lambda: changed))
    meetings.agree(*report(step=1))


@WORLD_SIZES
@pytest.mark.parametrize("version", [5, 24298, -1])
@on_ranks("world_size")
def test_another_version_or_other_data_is_refused_by_all(
    rank: int, world_size: int, version: int
) -> None:
    meetings = meetings_of(wire_of())
    zero = "rank 0" if world_size == 2 else "ranks 0 and 2"
    text = "rank 1 sent other data than a header, so a rank is at another point of its program"
    if version == 5:
        text = f"versions of the wire format, {zero}: 1, rank 1: 5: install .*another point of"
    with (
        mock.patch.object(header, "WIRE_VERSION", version if rank == 1 else 1),
        pytest.raises(Disagreement, match=text),
    ):
        meetings.agree(*report())


# Several optimizers.


# The optimizers that each rank steps in turns, and whether the last step is refused.
ORDERS = {
    "crossed later": (["aba", "abb", "abb"], True),
    "a new one": (["aba", "abc", "aba"], True),
    "in order": (["ababab"] * 3, False),
}


@WORLD_SIZES
@pytest.mark.parametrize("case", ORDERS)
@on_ranks("world_size")
def test_optimizers_that_step_in_another_order_on_a_rank_are_refused(rank: int, case: str) -> None:
    wire, (orders, is_refused) = wire_of(), ORDERS[case]
    meetings = {name: meetings_of(wire) for name in "abc"}
    for k, name in enumerate(orders[rank][:-1]):
        meetings[name].agree(*report(step=k // 2))
    last = meetings[orders[rank][-1]]
    text = "ranks use different optimizers: step several"
    with pytest.raises(Disagreement, match=text) if is_refused else contextlib.nullcontext():
        last.agree(*report(step=(len(orders[rank]) - 1) // 2))


# Failures.


class Silent(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


FAILURES = {
    "plain": (ValueError("no space left"), "ValueError: no space left"),
    "long": (ValueError("x" * 9000), f"ValueError: {'x' * 3988} ... (9012 characters)"),
    "strange": (ValueError("ä\ud800"), "ValueError: ä\\ud800"),
    "silent": (Silent(), "Silent (its text raised KeyError)"),
    "^C": (KeyboardInterrupt(), "KeyboardInterrupt: "),
}


@pytest.mark.parametrize("kind", FAILURES)
@on_ranks(3)
def test_a_failure_is_raised_on_its_rank_and_named_on_the_others(rank: int, kind: str) -> None:
    failure, expected = FAILURES[kind]
    meetings = meetings_of(wire_of())
    meetings.agree(*report())
    if rank == 1:
        said = report(kind=Kind.SAVE, failure=failure, values={}, signatures=[], present=[])
        with pytest.raises(type(failure)) as caught:
            meetings.agree(*said)
        assert caught.value is failure
    else:
        with pytest.raises(Disagreement) as disagreed:
            meetings.agree(*report(kind=Kind.SAVE))
        assert str(disagreed.value) == f"save failed on 1 of 3 ranks: rank 1: {expected}"
    meetings.agree(*report(step=1))


@on_ranks(2)
def test_a_failed_comparison_of_parameters_is_named_on_the_others(rank: int) -> None:
    meetings = meetings_of(wire_of())
    broken = {"parameters": mock.Mock(side_effect=MemoryError("too large"))}
    text = "the comparison of parameters failed on 1 of 2 ranks: rank 1: MemoryError: too"
    with pytest.raises(MemoryError if rank else Disagreement, match=None if rank else text):
        meetings.agree(*report(**broken if rank else {}))
    meetings.agree(*report())


@on_ranks(2)
def test_ranks_of_a_node_reach_the_header_if_one_exchanges_without_a_step(rank: int) -> None:
    """`exchange_now` has no gradients, whose presence would be another number of words."""
    node = wire_of()
    agree_on_gradients(Report(Kind.EXCHANGE, present=[True] * (1 - rank)), None, node)
    assert node.stats.bytes_sent == 24


@on_ranks(3)
def test_raise_together_names_every_rank_that_failed(rank: int) -> None:
    wire = wire_of()
    raise_together(None, wire, "loading")
    failure, error, text = OSError("gone"), OSError, "gone"
    if rank == 0:
        failure, error = None, Disagreement
        text = "loading failed on 2 of 3 ranks: rank 1: OSError: gone; rank 2: OSError: gone"
    with pytest.raises(error, match=text):
        raise_together(failure, wire, "loading")
