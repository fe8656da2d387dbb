"""Ranks that share a node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


def nodes_of(nodes: int, size: int) -> list[list[int]]:
    return [list(range(first, first + size)) for first in range(0, nodes * size, size)]


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        yield
