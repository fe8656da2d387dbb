"""Short messages, so that a small model makes several of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from hf_dlion.step.engine import Engine

# Of this thread: ranks may be threads of one process.
_numel: ContextVar[int | None] = ContextVar("message_numel", default=None)


@contextlib.contextmanager
def message_numel(numel: int | None) -> Iterator[None]:
    """Has every plan that is made inside cut messages of at most `numel` elements."""
    token = _numel.set(numel)
    try:
        yield
    finally:
        _numel.reset(token)


def _read(engine: Engine) -> int | None:
    return vars(engine).get("message_numel") or _numel.get()


def _write(engine: Engine, numel: int | None) -> None:
    vars(engine)["message_numel"] = numel


# The argument that an engine hands to its plans, by default that of the context.
Engine.message_numel = property(_read, _write)  # type: ignore[assignment, misc]
