"""Warnings that a process gives once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

_given: set[str] = set()
_kept_back: dict[str, list[str]] = {}


def warn_once(key: str, message: str) -> None:
    """Warns, unless this process has warned under the same key before.

    Args:
        key: Identifies the warning.
        message: What it says.
    """
    if key in _kept_back:
        _kept_back[key].append(message)
    elif key not in _given:
        _given.add(key)
        warnings.warn(message, stacklevel=3)


@contextlib.contextmanager
def kept_back(key: str) -> Iterator[list[str]]:
    """Gives no warning under this key inside; yields a list of those that would have been given."""
    messages = _kept_back.setdefault(key, [])
    try:
        yield messages
    finally:
        _kept_back.pop(key, None)
