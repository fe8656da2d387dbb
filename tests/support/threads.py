"""Pools of ranks that are threads of this process: tests of what ranks agree on, without gloo.

A `ThreadPool` stands where a `RankPool` does. Its ranks meet in a `Hub`, whose group is the default
one of every optimizer that they make; there is no `torch.distributed`. What a process has for
itself (random numbers, environment, warnings, what `pytest.MonkeyPatch` changed) each rank gets
back when it is its turn again. What a rank function changes otherwise, other ranks see: such
functions need processes.
"""

from __future__ import annotations

import os
import pickle
import random
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from hf_dlion.backward.background import Background
from hf_dlion.exchange.memory import Hub
from hf_dlion.options import warn_once
from tests.support.spawn import RankFunction, RanksFailedError, rank_environment, sections


class ThreadPool:
    """Threads that take turns, reused from call to call.

    Args:
        world_size: The number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        """Remembers the argument; nothing starts yet."""
        self.world_size = world_size
        self._hub: _TestHub | None = None

    def run(self, function: RankFunction, *args: Any, timeout: float | None = None) -> list[Any]:
        """Calls `function(rank, world_size, *args)` on every rank and returns a result per rank.

        Args:
            function: As for `RankPool.run`.
            args: Pickled, so ranks share no argument.
            timeout: Ignored: a rank that waits in vain is found out at once.

        Raises:
            RanksFailedError: With the traceback of every rank that raised.
        """
        self._hub = self._hub or _TestHub(self.world_size)
        call = pickle.dumps((function, args))
        results: dict[int, bytes] = {}
        failures: dict[int, str] = {}

        def work(rank: int) -> None:
            _begin(rank, self.world_size)
            try:
                own, arguments = pickle.loads(call)
                results[rank] = pickle.dumps(own(rank, self.world_size, *arguments))
            except BaseException:
                failures[rank] = traceback.format_exc()
                raise

        outside = _Process()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Background, "submit", _at_once)
                # Of the class: rank functions make their own.
                patch.setattr(pytest.MonkeyPatch, "setattr", _setattr)
                self._hub.run([lambda rank=rank: work(rank) for rank in range(self.world_size)])
        except BaseException as error:
            name = f"{function.__module__}.{function.__qualname__}"
            head = f"{name} failed on {len(failures)} of {self.world_size} ranks"
            told = {rank: failures.get(rank, "returned") for rank in range(self.world_size)}
            raise RanksFailedError(sections(head, told)) from error
        finally:
            outside.restore()
        return [pickle.loads(results[rank]) for rank in range(self.world_size)]

    def close(self) -> None:
        """Ends the threads."""
        if self._hub is not None:
            self._hub.close()


class _TestHub(Hub):
    """Hands over what a process has for itself, too."""

    def pause(self, over: Callable[[], bool]) -> None:
        own = _Process()
        patched = [entry for patch in _own.patches for entry in patch._setattr]
        values = [getattr(target, name) for target, name, _ in patched]
        for target, name, before in reversed(patched):
            setattr(target, name, before)
        super().pause(over)
        for (target, name, _), value in zip(patched, values, strict=True):
            setattr(target, name, value)
        own.restore()


def _at_once(background: Background, task: Callable[[], None]) -> Future[None]:
    """Does what a rank has a thread for lest backward wait; here no model has collectives."""
    future: Future[None] = Future()
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)
    return future


_own = threading.local()
_pytest_setattr = pytest.MonkeyPatch.setattr


def _setattr(patch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> None:
    """Notes which rank patches."""
    if patch not in _own.patches:
        _own.patches.append(patch)
    _pytest_setattr(patch, *args, **kwargs)


class _Process:
    """What a process has for itself, as it is now."""

    def __init__(self) -> None:
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._environment = dict(os.environ)
        self._warned = warn_once._given
        shown = ("filters", "showwarning", "_showwarnmsg_impl")
        self._warnings = {name: getattr(warnings, name) for name in shown}

    def restore(self) -> None:
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])
        _set_environment(self._environment)
        warn_once._given = self._warned
        for name, value in self._warnings.items():
            setattr(warnings, name, value)
        warnings._filters_mutated()  # type: ignore[attr-defined]


def _begin(rank: int, world_size: int) -> None:
    """Makes this thread what a new rank's process is."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    _own.patches = []
    _set_environment({**os.environ, **rank_environment(rank, world_size)})
    warn_once._given = set()
    # In a list of its own, which the rank may change; pytest's makes errors of warnings.
    warnings.filters = [("default", None, Warning, None, 0)]  # type: ignore[assignment]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _set_environment(values: dict[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    for name, value in values.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
