"""Fixtures that every test module may use, and the two tiers of tests.

Of the tests that start processes plain `pytest` runs those marked `smoke`; `-m "not long"` runs
all of them.
"""

from __future__ import annotations

import collections
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.spawn import RankPools

# How many times as long as another test one that is marked `slow` takes, about.
SLOW = 40

# A time limit per example fails at random on a machine that is busy with several ranks.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns the processes among which pytest shares the files; none for the long tests."""
    tiers = config.option.markexpr
    if "not long" not in tiers:
        return 0
    config.option.dist = "loadfile"
    config.option.loadscopereorder = False  # The order is that of `_longest_first`.
    # Ranks wait for one another: with two, two processors are idle for almost half of the time.
    return 3


def pytest_collection_finish() -> None:
    """Tells the garbage collector that what was imported and collected stays."""
    gc.freeze()


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    """Pools of ranks that live as long as the test module: `pools(2).run(f, *args)`."""
    with contextlib.closing(RankPools()) as pools:
        yield pools


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Leaves tests that need processes to the full tier, unless they are marked `smoke`."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "multiproc" in marks and "smoke" not in marks:
            item.add_marker("full")
    yield  # -m selects
    items[:] = _longest_first(items)


def _longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the items by file, so no worker begins with a long one when the others are done."""
    cost = collections.Counter[Path]()
    for item in items:
        cost[item.path] += SLOW if item.get_closest_marker("slow") else 1
    return sorted(items, key=lambda item: -cost[item.path])
