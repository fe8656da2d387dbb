"""Whatever is given as an option is taken as it is, or refused by the option's name."""

from __future__ import annotations

import dataclasses
import fractions
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_dlion import DistributedLion
from hf_dlion.options import Options
from hf_dlion.options.optim_args import parse_optim_args
from tests.options.test_optim_args import EXAMPLES, NEEDS, needed
from tests.support.random_training import random_param, take_steps

OPTIONS = [field.name for field in dataclasses.fields(Options)]
IN_GROUPS = ("lr", "betas", "weight_decay")

numbers = st.one_of(
    st.integers(),
    st.sampled_from((2**31 - 1, 2**31, 2**64 - 1, 2**64, 10**400, -(10**400))),
    st.floats(),
    st.fractions(),
    st.just(fractions.Fraction(10**400, 3)),
    st.floats(width=32).map(np.float32),
    st.integers(-9, 9).map(np.int64),
    st.floats(width=32).map(torch.tensor),
    st.integers(-9, 9).map(torch.tensor),
)
anything = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.sampled_from((*OPTIONS, "majority", "average", "zero", "gather", "node", "mean", "repair")),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.lists(numbers, max_size=3),
    st.tuples(numbers, numbers),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float64, torch.int8, np.float32)),
    st.sampled_from((np.bool_(True), np.zeros(0), np.zeros(2), np.array(0.5), object, 1j)),
    st.sampled_from((torch.zeros(0), torch.zeros(2), torch.tensor(True), torch.tensor(1j))),
    st.just(torch.zeros(1, device="meta")),
)


def hold(name: str, value: Any) -> bool:
    """Gives an option a value; returns whether it was taken."""
    param = random_param(3)
    refused: Exception | None = None
    try:
        optimizer = DistributedLion([param], **needed(name), **{name: value})
    except (TypeError, ValueError) as error:
        refused = error
    if refused is not None:
        assert name in str(refused), repr(refused)
        return False
    if name in IN_GROUPS:
        assert optimizer.param_groups[0][name] is value
    elif name == "local_group" and value == torch.distributed.GroupMember.NON_GROUP_MEMBER:
        # What torch hands to a rank that is no member of the group: refused on all ranks together.
        return False
    elif name != "process_group":
        assert getattr(optimizer.options, name) is value
        assert type(value) in (str, int, bool, torch.dtype, type(None)), type(value)
    take_steps(optimizer, [param], range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    return True


@pytest.mark.parametrize("name", [*IN_GROUPS, *OPTIONS, "process_group"])
def test_any_value_is_taken_as_it_is_or_refused_by_name(name: str) -> None:
    @settings(max_examples=50, derandomize=True, database=None)
    @given(anything)
    def check(value: Any) -> None:
        hold(name, value)

    check()


@pytest.mark.long
@pytest.mark.parametrize("name", [*IN_GROUPS, *OPTIONS, "process_group"])
def test_a_thousand_values_are_taken_as_they_are_or_refused_by_name(name: str) -> None:
    @settings(max_examples=1000, database=None)
    @given(anything)
    def check(value: Any) -> None:
        hold(name, value)

    check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 10**400),
        ("weight_decay", -(10**400)),
        ("betas", (10**400, 0.9)),
        ("lr", torch.zeros(1, device="meta")),
        ("momentum_dtype", np.zeros(2)),
        ("local_group", torch.zeros(2)),
        ("local_group", np.zeros(2)),
    ],
    ids=str,
)
def test_what_once_ended_in_an_error_without_a_name_is_refused(name: str, value: Any) -> None:
    assert not hold(name, value)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_in_a_group_is_refused_and_not_ignored(name: str) -> None:
    optimizer = DistributedLion([random_param(3)])
    value = EXAMPLES[name][1]
    with pytest.raises(ValueError, match=name):
        optimizer.add_param_group({"params": [random_param(2)], name: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_twice_in_a_group_is_refused() -> None:
    p, q = random_param(3), random_param(2)
    with pytest.raises(ValueError, match="one and the same"):
        DistributedLion([p, q, p])
    optimizer = DistributedLion(iter([q]))
    with pytest.raises(ValueError, match="one and the same"):
        optimizer.add_param_group({"params": [p, p]})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def near(word: str) -> st.SearchStrategy[str]:
    """A word, or one with a typo."""
    return st.one_of(
        st.just(word),
        st.tuples(st.integers(0, len(word)), st.text("=;, .-_'x1é\t\n", max_size=2)).map(
            lambda cut: word[: cut[0]] + cut[1] + word[cut[0] :]
        ),
        st.integers(0, len(word)).map(lambda cut: word[:cut] + word[cut + 1 :]),
    )


values = st.sampled_from([text for text, _ in EXAMPLES.values()] + ["none", "-1", "1e400", "nan"])
items = st.tuples(
    st.sampled_from([*OPTIONS, "beta1", "betas", "lr", "eps"]).flatmap(near),
    st.sampled_from(("=", "=", "=", "==", "", " = ")),
    values.flatmap(near) | st.text(max_size=4),
).map("".join)
right = st.sampled_from([f"{name}={text}" for name, (text, _) in EXAMPLES.items()])
texts = st.lists(right | items, max_size=3).map(",".join) | st.text(max_size=12)


def hold_text(text: str) -> bool:
    """Parses a text; returns whether it was taken."""
    refused = ""
    try:
        parsed = parse_optim_args(text)
    except (TypeError, ValueError) as error:
        refused = str(error)
    if refused:
        assert refused.startswith("optim_args"), refused
        return False
    given_names = [item.split("=")[0] for item in text.replace(" ", "").split(",") if item]
    twins = {"betas": ["beta1", "beta2"]}
    asked = [name for given_name in given_names for name in twins.get(given_name, [given_name])]
    assert sorted(parsed) == sorted(asked)
    options = {name: value for name, value in parsed.items() if name in OPTIONS}
    try:
        optimizer = DistributedLion([("0.norm.bias", nn.Parameter(torch.ones(2)))], **options)
    except (ValueError, NotImplementedError) as error:
        refused = str(error)
    if refused:
        # Patterns of names that match none, and options that do not go together.
        assert any(f"{name}=" in refused for name in options), refused
        return False
    for name, value in options.items():
        assert getattr(optimizer.options, name) == value
    assert all(0.0 <= parsed.get(name, 0.0) < 1.0 for name in ("beta1", "beta2"))
    return True


def test_any_text_asks_for_what_it_says_or_is_refused() -> None:
    taken: list[bool] = []

    @settings(max_examples=400, derandomize=True, database=None)
    @given(texts)
    def check(text: str) -> None:
        taken.append(hold_text(text))

    check()
    assert 0.02 < sum(taken) / len(taken) < 0.9


# What does not go with the example of an option.
APART = {
    "local_group": {
        *("level_scale", "full_precision", "warmup_full_steps", "momentum_sync", "overlap"),
    },
    "aggregation": {"bits", "ties"},
}


@given(st.permutations(list(EXAMPLES.items())), st.integers(0, 12), st.sampled_from(("", " ")))
@settings(max_examples=50, derandomize=True, database=None)
def test_any_choice_of_options_in_any_order_is_read_back(
    order: list[tuple[str, tuple[str, Any]]], count: int, space: str
) -> None:
    names = {name for name, _ in order[:count]}
    apart = set().union(*(APART[name] for name in names & APART.keys()))
    names -= apart
    # In two rounds: what was needed may itself lack something.
    for _ in range(2):
        names = {name for name in names if names.issuperset(NEEDS.get(name, ()))}
    chosen = [item for item in order[:count] if item[0] in names]
    text = f"{space},{space}".join(f"{name}{space}={text}" for name, (text, _) in chosen)
    parsed = parse_optim_args(text)
    assert parsed == {name: value for name, (_, value) in chosen}
    assert not any(isinstance(v, float) and math.isnan(v) for v in parsed.values())
