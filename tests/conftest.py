"""Fixtures that every test module may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.spawn import RankPools

# Needs its environment from the start: tests/test_triton.py runs it in a process of its own.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED else ["codec/interpreted_triton.py"]

# A time limit per example fails at random on a machine that is busy with several ranks.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    """Pools of ranks that live as long as the test module: `ranks(2).run(f, *args)`."""
    pools = RankPools()
    yield pools
    pools.close()
