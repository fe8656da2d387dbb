"""A damaged state dict is refused before anything changes, or loaded as it says."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_dlion import DistributedLion
from tests.support.oracle import bits_of
from tests.support.random_training import ignored_warnings, random_param, take_steps

SHAPES = [(5, 3), (7,), ()]

JUNK: list[Any] = [
    *(None, True, -1, 0, 7, 2**70, 0.5, math.nan, math.inf, "", "many", "0", b"x"),
    *([], [0], [0, 0], {}, {0: 1}, (0.9, 0.99), object, 1j),
    *(torch.ones(3), torch.tensor(math.nan), torch.zeros(5, 3, dtype=torch.int64)),
    *(torch.zeros(7), torch.zeros(5, 3).to_sparse(), torch.zeros(7, device="meta")),
    torch.zeros(7, dtype=torch.complex64),
]

Damage = tuple[int, str, int]
damages = st.lists(
    st.tuples(
        st.integers(0, 200),
        st.sampled_from(("delete", "replace", "rename", "repeat")),
        st.integers(0, len(JUNK) - 1),
    ),
    min_size=1,
    max_size=3,
)


def trained(
    dtype: torch.dtype, momentum_dtype: torch.dtype | None, named: bool
) -> tuple[DistributedLion, list[nn.Parameter]]:
    params = [random_param(*shape, seed=k, dtype=dtype) for k, shape in enumerate(SHAPES)]
    items: list[Any] = [(f"p{k}", p) for k, p in enumerate(params)] if named else params
    groups = [{"params": items[:2], "lr": 0.5}, {"params": items[2:], "weight_decay": 0.25}]
    optimizer = DistributedLion(groups, lr=0.1, momentum_dtype=momentum_dtype)
    take_steps(optimizer, params, range(2))
    return optimizer, params


def saved(dtype: torch.dtype, named: bool, sharded: bool) -> dict[str, Any]:
    state = copy.deepcopy(trained(dtype, None, named)[0].state_dict())
    if sharded:
        state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].view(-1)[3:9].clone()
        state["dlion"]["shard"] = {"members": [[0, 1]], "ranges": {0: [3, 9]}}
    return state


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Returns every container in a state dict with each of its keys, in a fixed order."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    found = [(value, key) for key in keys]
    return found + [place for key in keys for place in places_in(value[key])]


def damage(state: dict[str, Any], marks: list[Damage]) -> None:
    for number, how, junk in marks:
        places = places_in(state)
        if not places:
            return
        container, key = places[number % len(places)]
        if how == "replace":
            container[key] = copy.deepcopy(JUNK[junk])
        elif isinstance(container, list):
            container.insert(key, container[key]) if how == "repeat" else container.pop(key)
        elif how == "delete":
            del container[key]
        else:
            value = container[key] if how == "repeat" else container.pop(key)
            container[f"{key}_" if isinstance(key, str) else key + 1] = copy.copy(value)


def snapshot(optimizer: DistributedLion) -> list[Any]:
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        | {"params": [id(p) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    momenta = [
        {name: (value.dtype, tuple(value.shape), bits_of(value)) for name, value in state.items()}
        for state in (optimizer.state[p] for p in params)
    ]
    return [repr(groups), momenta, [bits_of(p) for p in params], optimizer.steps, optimizer.options]


def hold(
    marks: list[Damage], dtype: torch.dtype, momentum_dtype: torch.dtype | None, *, named: bool,
    sharded: bool,
) -> bool:  # fmt: skip
    """Loads a damaged state; returns whether it was accepted."""
    state = saved(dtype, named, sharded)
    damage(state, marks)
    optimizer, params = trained(dtype, momentum_dtype, named)
    twin, twins = trained(dtype, momentum_dtype, named)
    before = snapshot(optimizer)
    refused = ""
    try:
        # A state without its entry, but with the copies in its groups, is told to be of a file.
        with ignored_warnings():
            optimizer.load_state_dict(state)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert len(refused) > 20, refused
        assert snapshot(optimizer) == before, f"changed by a refused state: {refused}"
        take_steps(optimizer, params, range(2, 4))
        take_steps(twin, twins, range(2, 4))
        assert snapshot(optimizer)[1:] == snapshot(twin)[1:]
        return False
    copies = [group["dlion"] for group in state["param_groups"] if "dlion" in group]
    own = state["dlion"] if "dlion" in state else copies[0] if copies else None
    if own is not None:
        assert optimizer.steps == own["steps"]
        assert optimizer.options.seed == own["seed"]
    for ours, theirs in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for name in ("lr", "betas", "weight_decay"):
            assert ours[name] == theirs[name]
        for param, key in zip(ours["params"], theirs["params"], strict=True):
            if key in state["state"] and own and not own.get("shard"):
                loaded = state["state"][key]["exp_avg"].to(momentum_dtype or dtype)
                assert bits_of(optimizer.state[param]["exp_avg"]) == bits_of(loaded)
    with ignored_warnings():
        take_steps(optimizer, params, range(2, 3))
    return True


def fuzz(examples: int, *, derandomize: bool) -> list[bool]:
    accepted: list[bool] = []

    @settings(max_examples=examples, derandomize=derandomize, database=None)
    @given(
        damages,
        st.sampled_from((torch.float32, torch.bfloat16)),
        st.sampled_from((None, torch.float32, torch.float16)),
        st.booleans(),
        st.booleans(),
    )
    def check(marks: Any, dtype: Any, momentum_dtype: Any, named: bool, sharded: bool) -> None:
        accepted.append(hold(marks, dtype, momentum_dtype, named=named, sharded=sharded))

    check()
    return accepted


def test_a_damaged_state_changes_nothing_or_is_loaded_as_it_says() -> None:
    accepted = fuzz(250, derandomize=True)
    # Both must come often, or the damages are the wrong ones.
    assert 0.05 < sum(accepted) / len(accepted) < 0.8


@pytest.mark.parametrize("place", ["state", "world_size", "rank"])
@pytest.mark.parametrize("junk", [torch.ones(3), np.zeros(2)], ids=["tensor", "array"])
def test_a_copied_entry_of_tensors_is_refused_as_any_other(place: str, junk: Any) -> None:
    state = saved(torch.float32, False, False)
    entry = state.pop("dlion")
    state["param_groups"][0]["dlion"] = entry
    (state if place == "state" else entry)[place] = junk
    optimizer, _ = trained(torch.float32, None, False)
    before = snapshot(optimizer)
    with ignored_warnings(), pytest.raises(ValueError, match="state"):
        optimizer.load_state_dict(state)
    assert snapshot(optimizer) == before


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_thousand_damaged_states_change_nothing_or_are_loaded_as_they_say() -> None:
    fuzz(10_000, derandomize=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
    ],
    ids=["AdamW", "SGD momentum", "SGD", "RMSprop", "Adafactor"],
)
def test_another_optimizer_s_state_is_refused_and_training_goes_on(make: Any) -> None:
    optimizer, params = trained(torch.float32, None, named=False)
    others = [random_param(*shape) for shape in SHAPES]
    other = make([{"params": others[:2]}, {"params": others[2:]}])
    take_steps(other, others, range(2))
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"DistributedLion's|lacks betas"):
        optimizer.load_state_dict(other.state_dict())
    assert snapshot(optimizer) == before
    take_steps(optimizer, params, range(2, 3))
