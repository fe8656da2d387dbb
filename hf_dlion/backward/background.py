"""Work put off: to a thread that does not keep the process from ending, or until later."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

# How long the end of the process waits for what is under way. A rank whose peers are gone waits for
# them in vain, in a call that cannot be interrupted, until the process group's timeout: half an
# hour by default, and as long would those wait that learn of its end from its closed connections.
PATIENCE_S = 5.0

_Tasks = SimpleQueue[tuple[Callable[[], None], Future[None]] | None]


class Background:
    """Does what is submitted in that order, on a thread of its own, started at the first use."""

    def __init__(self, name: str) -> None:
        """Starts nothing yet.

        Args:
            name: Of the thread.
        """
        self._name = name
        self._tasks: _Tasks = SimpleQueue()
        self._started = False
        # Its tasks' own futures tell of theirs.
        self.failure: BaseException | None = None

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Has the thread call `task`; returns a future that knows when that is done, or failed."""
        if not self._started:
            self._started = True
            thread = threading.Thread(
                target=_work, args=(self._tasks,), name=self._name, daemon=True
            )
            thread.start()
            _running[thread] = self._tasks
            weakref.finalize(self, self._tasks.put, None).atexit = False
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future

    def finish(self) -> None:
        """Does nothing: the thread goes on by itself."""


class InLine:
    """Does what is submitted on the thread that submits, one task late.

    After a failure nothing more is done: what it did not send, others would take for what follows.

    What the tasks send, and what is sent before each is submitted, has one order on all ranks: up
    0, up 1, down 0, up 2, down 1. Where nothing waits for another rank, as on NCCL, nobody is held
    up.
    """

    def __init__(self) -> None:
        """Holds nothing yet."""
        self._held: tuple[Callable[[], None], Future[None]] | None = None
        self.failure: BaseException | None = None

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Does the task before and keeps this one; returns a future as `Background.submit`."""
        self.finish()
        future: Future[None] = Future()
        self._held = task, future
        return future

    def finish(self) -> None:
        """Does what is left."""
        if self._held is not None:
            (task, future), self._held = self._held, None
            if self.failure is None:
                _do(task, future)
                self.failure = future.exception()
            else:
                future.set_exception(self.failure)


def _do(task: Callable[[], None], future: Future[None]) -> None:
    try:
        task()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


def _work(tasks: _Tasks) -> None:
    while (item := tasks.get()) is not None:
        _do(*item)
        # It may not live on until the next one comes.
        del item


_running: weakref.WeakKeyDictionary[threading.Thread, _Tasks] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    """Ends the threads: one that woke up in an interpreter that is going would abort it."""
    running = list(_running.items())
    for _, tasks in running:
        tasks.put(None)
    deadline = time.monotonic() + PATIENCE_S
    for thread, _ in running:
        thread.join(max(0.0, deadline - time.monotonic()))
