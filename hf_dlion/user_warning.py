"""Warnings that show the line of the user's code."""

from __future__ import annotations

import sys
import warnings

# Packages between the user's code and a warning.
_LIBRARIES = {"hf_dlion", "torch", "accelerate", "transformers", "trl"}
_deferred: list[str] = []
TRAINS_ALONE = "this process trains alone, so DistributedLion exchanges nothing and is plain Lion. "


def warn_user(text: str) -> None:
    """Warns at the user's call, whatever is between that and this package.

    A learning rate scheduler of torch wraps `step`, and transformers turns off the warnings of
    torch's schedulers.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def defer_warning(text: str) -> None:
    """Keeps a warning for the end of the step, until which other ranks wait for this one.

    A warning may be an error.
    """
    _deferred.append(text)


def warn_deferred(error: BaseException | None = None) -> None:
    """Gives the warnings that were deferred since the last call, or adds them to an error."""
    texts = [*_deferred]
    _deferred.clear()
    for text in texts:
        if error is None:
            warn_user(text)
        else:
            error.add_note(text)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__")).partition(".")[0]
