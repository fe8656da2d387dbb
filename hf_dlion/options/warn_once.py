"""Warnings that a process gives once."""

from __future__ import annotations

import warnings

_given: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Warns, unless this process has warned under the same key before.

    Args:
        key: Identifies the warning.
        message: What it says.
    """
    if key not in _given:
        _given.add(key)
        warnings.warn(message, stacklevel=3)
