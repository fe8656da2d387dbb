"""A thread in the background: in order, errors to whoever asks, and no hold on the process."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import time

import pytest

from hf_dlion.backward.background import Background, InLine

STUCK = """
import threading, time
from hf_dlion.backward import background
background.PATIENCE_S = 0.5
worker = background.Background("stuck")
done = background.Background("done")
begun = threading.Event()
worker.submit(lambda: (begun.set(), time.sleep(600)))
done.submit(lambda: print("done", flush=True))
begun.wait()
raise SystemExit(3)
"""


def test_tasks_are_done_in_the_order_of_their_submission() -> None:
    worker, seen = Background("test"), list[int]()
    futures = [worker.submit(functools.partial(seen.append, number)) for number in range(50)]
    assert all(future.result(10) is None for future in futures)
    assert seen == list(range(50))


def test_in_line_each_task_waits_for_the_next_one() -> None:
    line, seen = InLine(), list[int]()
    futures = []
    for number in range(3):
        futures.append(line.submit(functools.partial(seen.append, number)))
        assert seen == list(range(number))
    line.finish()
    line.finish()
    assert seen == [0, 1, 2]
    assert all(future.result(0) is None for future in futures)


def test_in_line_nothing_follows_a_failure() -> None:
    line, seen = InLine(), list[int]()
    failed = line.submit(functools.partial(int, "x"))
    after = line.submit(functools.partial(seen.append, 1))
    line.finish()
    assert isinstance(line.failure, ValueError)
    assert not seen
    for future in (failed, after):
        with pytest.raises(ValueError, match="invalid literal"):
            future.result(0)


def test_an_error_is_raised_where_the_result_is_asked_for_and_ends_nothing() -> None:
    worker = Background("test")
    failed = worker.submit(functools.partial(int, "x"))
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result(10)
    assert worker.submit(lambda: None).result(10) is None


def test_the_thread_ends_with_its_owner() -> None:
    worker = Background("owned")
    worker.submit(lambda: None).result(10)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "owned")
    del worker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_task_that_never_ends_does_not_keep_the_process_from_ending() -> None:
    began = time.monotonic()
    found = subprocess.run([sys.executable, "-c", STUCK], timeout=120, capture_output=True)
    assert found.returncode == 3, found.stderr
    assert found.stdout == b"done\n"
    assert time.monotonic() - began < 100
