"""Fixtures that every test module may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from spawn import RankPools


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    """Pools of ranks that live as long as the test module: `ranks(2).run(f, *args)`."""
    pools = RankPools()
    yield pools
    pools.close()
