"""Ranks of which one is struck by a fault at a named point of its program.

A rank passes named points: before and after each phase of a step, within each file that it writes.
`Injector` counts them, from wrappers around the package's own methods that exist in the ranks only,
and strikes at the one that `Fault` names. `run_struck` starts real processes, each with an end of
its own, waits until all have ended, and returns what each of them logged; one that has not ended
by the deadline fails the test with its stacks.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import errno
import faulthandler
import functools
import gc
import io
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_dlion.checkpoint import whole as whole_checkpoint
from hf_dlion.exchange import Wire
from hf_dlion.ranks.agreement import Agreement
from hf_dlion.step.message import Message
from tests.support.spawn import PRELOAD, RANK_ENV, _environment

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}

# Far more than a rank needs, on a busy machine too, and far less than TIMEOUT: that nobody waits
# for the timeout when a process has ended is part of what is tested.
DEADLINE_S = 90.0
TIMEOUT_S = 600.0
# Of process groups one of whose ranks stalls.
SHORT_TIMEOUT_S = 8.0

# Tests may run several groups of ranks at a time, from threads. To start a process reads the exit
# codes of all others: two threads that read one at a time leave one of them with 255, and until the
# fork server closes its pipe, the sentinel of a process whose code was read looks as if it ran.
_processes = threading.Lock()

METHODS: dict[str, tuple[Any, str]] = {
    "a process group": (dist, "new_group"),
    "the header": (Agreement, "agree"),
    "a vote": (Message, "leave"),
    "counting": (Message, "count"),
    "a verdict": (Message, "verdict"),
    "applying": (Message, "apply"),
    "a gathering": (Wire, "all_gather"),
    "a scattering": (Wire, "all_to_all"),
    "a beginning": (whole_checkpoint, "begin"),
    "an end": (whole_checkpoint, "finish"),
}


class InjectedError(Exception):
    """What a fault of the kind "raise" raises."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one rank.

    Attributes:
        kind: "kill", "term" or "stop" (a signal), "raise" (an exception), "disk" (a full one); or
            "nan" or "inf": what a gradient holds then.
        rank: On which rank; -1 is all of them.
        step: In which step of the loop, 1 for the first.
        point: Where.
        nth: At which passage of that point in the step, 0 for the first.
    """

    kind: str
    rank: int
    step: int
    point: str
    nth: int = 0


class Injector:
    """A rank's points: counts them, and strikes at one.

    Attributes:
        step: Set by the loop.
        passed: For each step, how often each point was passed.
    """

    def __init__(self, fault: Fault | None, rank: int) -> None:
        """Strikes only if the fault is for this rank."""
        self._fault = fault if fault is not None and fault.rank in (rank, -1) else None
        self.step = 0
        self.passed: dict[int, collections.Counter[str]] = {}

    def reach(self, point: str) -> None:
        """Passes a point, or strikes.

        Raises:
            InjectedError: If that is the fault.
            OSError: If that is the fault.
        """
        if self._is_at(point) and self._fault is not None:
            kind = self._fault.kind
            if kind in SIGNALS:
                os.kill(os.getpid(), SIGNALS[kind])
            elif kind == "disk":
                raise OSError(errno.ENOSPC, "No space left on device (injected)")
            elif kind == "raise":
                raise InjectedError(f"injected at {point!r} in step {self.step}")

    def number(self, point: str) -> float:
        """Passes a point at which a gradient may be spoilt; returns what to add to it."""
        if self._is_at(point) and self._fault is not None and self._fault.kind in ("nan", "inf"):
            return float(self._fault.kind)
        return 0.0

    def _is_at(self, point: str) -> bool:
        passed = self.passed.setdefault(self.step, collections.Counter())
        passed[point] += 1
        fault = self._fault
        return fault is not None and (fault.step, fault.point, fault.nth) == (
            self.step,
            point,
            passed[point] - 1,
        )

    def wrap(self) -> None:
        """Makes methods of the package, and the writing of files, pass points; for good."""
        for name, (owner, method) in METHODS.items():
            setattr(owner, method, self._around(name, getattr(owner, method)))
        torch.save = self._in_halves(torch.save)
        os.replace = self._around("a renaming", os.replace)
        os.fsync = self._around("a sync", os.fsync)

    def _around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.reach(f"before {name}")
            try:
                return function(*args, **kwargs)
            finally:
                # Of ranks that rename the same file all but one fail: as often on every run.
                self.reach(f"after {name}")

        return wrapped

    def _in_halves(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def save_in_halves(payload: Any, target: Any) -> None:
            buffer = io.BytesIO()
            save(payload, buffer)
            data = buffer.getvalue()
            self.reach("before a file")
            with contextlib.ExitStack() as stack:
                file = target
                if isinstance(target, str | os.PathLike):
                    file = stack.enter_context(Path(target).open("wb"))
                file.write(data[: len(data) // 2])
                file.flush()
                self.reach("within a file")
                file.write(data[len(data) // 2 :])
            self.reach("after a file")

        return save_in_halves


class Journal:
    """What a rank writes down as it goes: whole lines that survive its sudden end."""

    def __init__(self, path: Path) -> None:
        """Opens the file."""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, **entry: Any) -> None:
        """Adds a line."""
        os.write(self._file, (json.dumps(entry) + "\n").encode())


@dataclass
class Fate:
    """What became of a rank.

    Attributes:
        code: Its exit code; of a signal, minus its number.
        digests: By step of the loop, a hash of its parameters after that step.
        abstained: By step, how often voters had abstained until then.
        error: Type and text of the exception that ended it, or None.
        passed: For each step, how often each point was passed; of a rank that ended well.
        output: What it printed.
    """

    code: int | None = None
    digests: dict[int, str] = field(default_factory=dict)
    abstained: dict[int, int] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    passed: dict[int, dict[str, int]] = field(default_factory=dict)
    output: str = ""


Body = Callable[[int, int, Any, Path, Injector, Journal], None]


def run_struck(
    body: Body,
    world_size: int,
    job: Any,
    folder: Path,
    fault: Fault | None = None,
    timeout_s: float | None = None,
) -> list[Fate]:
    """Calls `body(rank, world_size, job, folder, injector, journal)` on real processes.

    A rank that was stopped goes on when all others have ended.

    Args:
        body: A top-level function.
        world_size: Number of ranks.
        job: Picklable.
        folder: Common to the ranks.
        fault: What happens to one of them.
        timeout_s: Of the process group; by default short if a rank stalls, else long.

    Returns:
        What became of each.

    Raises:
        AssertionError: With the stacks of those that had not ended by the deadline.
    """
    if timeout_s is None:
        timeout_s = SHORT_TIMEOUT_S if fault is not None and fault.kind == "stop" else TIMEOUT_S
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "hf_dlion"])
    with tempfile.TemporaryDirectory(prefix="struck-") as scratch:
        with _processes, _environment(RANK_ENV):
            multiprocessing.forkserver.ensure_running()
            arguments = (world_size, body, job, folder, fault, timeout_s, Path(scratch))
            processes = [
                context.Process(target=_rank, args=(rank, *arguments), daemon=True)
                for rank in range(world_size)
            ]
            for process in processes:
                process.start()
        stopped = fault.rank if fault is not None and fault.kind == "stop" else None
        others = [rank for rank in range(world_size) if rank != stopped]
        try:
            _join(processes, others, Path(scratch), fault)
            if stopped is not None:
                early = (
                    f"rank {stopped} ended before it stalled:\n{_output(Path(scratch), stopped)}"
                )
                assert not _ended(processes[stopped]), early
                os.kill(processes[stopped].pid or 0, signal.SIGCONT)
                _join(processes, [stopped], Path(scratch), fault)
        finally:
            for process in processes:
                with _processes:
                    process.kill()
                _ended(process, 10.0)
        return [_fate(process, Path(scratch), rank) for rank, process in enumerate(processes)]


def _join(
    processes: Sequence[ForkServerProcess], ranks: Sequence[int], scratch: Path, fault: Fault | None
) -> None:
    deadline = time.monotonic() + DEADLINE_S
    for rank in ranks:
        _ended(processes[rank], max(0.0, deadline - time.monotonic()))
    stuck = [rank for rank in ranks if not _ended(processes[rank])]
    if stuck:
        for rank in stuck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(2.0)
        told = [f"rank {rank}:\n{_output(scratch, rank)}" for rank in range(len(processes))]
        raise AssertionError(
            "\n\n".join([f"ranks {stuck} had not ended after {DEADLINE_S:g} s, {fault}", *told])
        )


def _ended(process: ForkServerProcess, timeout_s: float = 0.0) -> bool:
    """Returns whether a process ends within the timeout."""
    connection.wait([process.sentinel], timeout_s)
    with _processes:
        return process.exitcode is not None


def _output(scratch: Path, rank: int) -> str:
    path = scratch / f"rank{rank}.out"
    return path.read_text(errors="replace")[-6000:] if path.exists() else ""


def _fate(process: ForkServerProcess, scratch: Path, rank: int) -> Fate:
    with _processes:
        code = process.exitcode
    fate = Fate(code=code, output=_output(scratch, rank))
    journal = scratch / f"rank{rank}.journal"
    for line in journal.read_text().splitlines() if journal.exists() else ():
        entry = json.loads(line)
        if "digest" in entry:
            fate.digests[entry["step"]] = entry["digest"]
            fate.abstained[entry["step"]] = entry["abstained"]
        elif "error" in entry:
            fate.error = (entry["error"], entry["text"])
        else:
            fate.passed = {int(step): points for step, points in entry["passed"].items()}
    return fate


def _rank(
    rank: int,
    world_size: int,
    body: Body,
    job: Any,
    folder: Path,
    fault: Fault | None,
    timeout_s: float,
    scratch: Path,
) -> None:
    """Runs in a rank's process."""
    out = os.open(scratch / f"rank{rank}.out", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    torch.set_num_threads(1)
    injector, journal = Injector(fault, rank), Journal(scratch / f"rank{rank}.journal")
    store = dist.FileStore(str(scratch / "rendezvous"), world_size)
    # On a busy machine processes start further apart than a short timeout.
    store.set(f"started/{rank}", "")
    started = [f"started/{other}" for other in range(world_size)]
    store.wait(started, datetime.timedelta(seconds=TIMEOUT_S))
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    injector.wrap()
    try:
        body(rank, world_size, job, folder, injector, journal)
    except BaseException as error:
        journal.note(error=type(error).__name__, text=str(error))
        # As an exception ends a script: with the process group, and threads, as they are.
        raise
    journal.note(passed=injector.passed)
    gc.collect()
    dist.destroy_process_group()
