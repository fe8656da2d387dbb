"""Warnings that a process gives once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

_given: set[str] = set()
_muted: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Warns, unless this process has warned under the same key before.

    Args:
        key: Identifies the warning.
        message: What it says.
    """
    if key not in _given | _muted:
        _given.add(key)
        warnings.warn(message, stacklevel=3)


@contextlib.contextmanager
def muted(key: str) -> Iterator[None]:
    """Gives no warning under this key inside."""
    _muted.add(key)
    try:
        yield
    finally:
        _muted.discard(key)
