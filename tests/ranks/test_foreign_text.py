"""Text that others wrote, which ranks tell one another: no rank waits because one cannot say it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_dlion import DistributedLion, load_momentum, saving
from hf_dlion.checkpoint.agreed import agreed_checkpoint
from hf_dlion.ranks import agreement
from tests.support.random_training import random_param
from tests.support.spawn import RankPools


class Mute(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Wordless(ValueError):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


class Text(str):
    """Text of another kind, which cannot be shown."""

    def __format__(self, spec: str) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__ = __format__  # type: ignore[assignment]


class Odd(ValueError):
    def __str__(self) -> str:
        return Text("odd")


FAILURES: dict[str, Callable[[], Exception]] = {
    "Mute": Mute,
    "Wordless": Wordless,
    "Odd": Odd,
    "OSError": lambda: OSError("\ud800 is half a character"),
    "KeyError": lambda: KeyError("x" * 10**5),
}


def fail(
    rank: int, world_size: int, name: str, doing: str, options: dict[str, Any], folder: str
) -> tuple[str, str]:
    """Returns the name of the error, and what it says, if rank 1 fails."""
    param = random_param(4, 5)
    optimizer = DistributedLion([("weight", param)], **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    make = FAILURES[name]

    def closure() -> float:
        if rank == 1:
            raise make()
        return 0.0

    try:
        if doing == "step":
            optimizer.step(closure)
        elif doing == "save":
            with saving(optimizer, folder):
                closure()
        elif doing == "load":
            load_momentum(optimizer, folder, failure=make() if rank == 1 else None)
        else:
            asked_for = Unseen(make) if rank == 1 else folder
            agreed_checkpoint(optimizer._engine.gather_objects, rank, asked_for, folder)
    except Exception as error:
        text = "" if type(error).__name__ == name else str(error)
        text.encode()  # So that it can be printed and logged.
        return type(error).__name__, text
    return "", ""


class Unseen:
    """A path that fails where it is first looked at."""

    def __init__(self, make: Callable[[], Exception]) -> None:
        self.make = make

    def __fspath__(self) -> str:
        raise self.make()


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"local_group": 2}], ids=str)
@pytest.mark.parametrize("doing", ["step", "save"])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_that_cannot_be_told_is_heard_of_by_all_ranks(
    ranks: RankPools, tmp_path: Path, name: str, doing: str, options: dict[str, Any]
) -> None:
    first, second = ranks(2).run(fail, name, doing, options, str(tmp_path), timeout=20)
    assert second == (name, "")
    assert first[0] == "Disagreement"
    assert f"failed on 1 of 2 ranks: rank 1: {name}" in first[1][:1000]
    assert len(first[1]) < 10_000


@pytest.mark.parametrize("doing", ["load", "look"])
@pytest.mark.parametrize("name", FAILURES)
def test_a_checkpoint_whose_failure_cannot_be_told_fails_on_all_ranks(
    ranks: RankPools, tmp_path: Path, name: str, doing: str
) -> None:
    for kind, text in ranks(2).run(fail, name, doing, {}, str(tmp_path), timeout=20):
        assert kind == "CheckpointError"
        assert f"rank 1: {name}" in text.replace("it is not whole: ", "rank 1: ")[:1000]
        assert len(text) < 10_000


def test_a_failure_is_told_in_its_own_words() -> None:
    assert agreement.told(ValueError("lr is bad")) == "ValueError: lr is bad"
    assert agreement.told(OSError("\udcff")) == "OSError: \\udcff"
    assert agreement.told(ValueError("é" * 9999)).startswith("ValueError: ééé")


def disagree(rank: int, world_size: int, what: str) -> str:
    params = [random_param(4, 5), random_param(3)]
    names: list[str] = ["\udcff.weight", "bias"]
    options: dict[str, Any] = {}
    if what == "names" and rank == 1:
        names[1] = "\ud800"
    if what == "shapes" and rank == 1:
        params[1] = random_param(2)
    if what == "kinds of names":
        names = list(map(Text, names))
        params[1] = random_param(2 + rank)
    optimizer = DistributedLion(zip(names, params, strict=True), **options)
    if what == "options" and rank == 1:
        chosen = {"momentum_sync_every": 2, "momentum_sync": [Text("*bias")]}
        optimizer._engine.options = dataclasses.replace(optimizer.options, **chosen)
    if what == "too few names":
        optimizer.param_groups[0]["param_names"] = names[: 1 + rank]
        params[1].data = torch.ones(2 + rank)
    if what == "exchange" and rank == 1:
        optimizer.param_groups[0]["exchange"] = Text("full")
    for param in params:
        param.grad = torch.ones_like(param)
    try:
        optimizer.step()
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
        text.encode()
        return text
    return "accepted"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("names", "names of trainable parameters"),
        ("shapes", "trainable parameters"),
        ("kinds of names", "trainable parameters"),
        ("too few names", "trainable parameters"),
        ("options", "options, first in 'momentum_sync_every'"),
        ("exchange", "trainable parameters"),
    ],
)
def test_ranks_that_differ_in_odd_names_and_options_say_so(
    ranks: RankPools, what: str, told: str
) -> None:
    results = ranks(2).run(disagree, what)
    assert len(set(results)) == 1
    assert results[0].startswith(f"Disagreement: ranks differ in {told}"), results[0]


def test_options_of_odd_kinds_are_compared_by_value(ranks: RankPools) -> None:
    assert ranks(2).run(choose_oddly) == [1, 1]


class Number(int):
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def choose_oddly(rank: int, world_size: int) -> int:
    seed = Number(3) if rank else 3
    patterns = (Text("weight"),) if rank else ["weight"]
    param = nn.Parameter(torch.ones(3))
    optimizer = DistributedLion(
        [("weight", param)], seed=seed, momentum_sync=patterns, momentum_sync_every=2
    )
    param.grad = torch.ones(3)
    optimizer.step()
    return optimizer.steps
