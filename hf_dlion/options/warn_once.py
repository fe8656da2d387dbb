"""Warnings that are given once per process."""

from __future__ import annotations

import warnings

_given: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Gives a warning unless one with the same key was given in this process.

    Args:
        key: Identifies the warning.
        message: What it says.
    """
    if key not in _given:
        _given.add(key)
        warnings.warn(message, stacklevel=3)
