"""Warnings that show the line of the user's code."""

from __future__ import annotations

import sys
import warnings

# Packages between the user's code and a warning.
_LIBRARIES = {"hf_dlion", "torch", "accelerate", "transformers", "trl"}


def warn_user(text: str) -> None:
    """Warns at the user's call, whatever is between that and this package.

    A learning rate scheduler of torch wraps `step`, and transformers turns off the warnings of
    torch's schedulers.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__")).partition(".")[0]
