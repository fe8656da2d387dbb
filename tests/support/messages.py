"""Short messages, so that a small model makes several of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from hf_dlion.step.engine import Engine

# Of this thread: ranks may be threads of one process.
_numel: ContextVar[int | None] = ContextVar("message_numel", default=None)


@contextlib.contextmanager
def message_numel(numel: int | None) -> Iterator[None]:
    """Has every optimizer that is made inside cut messages of at most `numel` elements."""
    token = _numel.set(numel)
    try:
        yield
    finally:
        _numel.reset(token)


def _made(self: Engine, *args: Any) -> None:
    _make(self, *args)
    self.message_numel = _numel.get()


_make = Engine.__init__
Engine.__init__ = _made  # type: ignore[method-assign]
