"""Starts a benchmark's ranks, or takes part where torchrun or accelerate launch started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from hf_dlion.tools.ranks import RENDEZVOUS

from benchmarks.emulate import INTERFACE, Emulation, EmulationRefusedError, Network

# What is left of a failed run ends by itself, with its own error, or is killed after this long.
GRACE_S = 3.0


def is_rank() -> bool:
    """Returns whether a launcher, or `launch`, started this process."""
    return "RANK" in os.environ


def refuse_under_launcher(network: Network | None) -> None:
    """Checks that no emulated network is asked for on a real one."""
    if network is not None and RENDEZVOUS not in os.environ:
        raise EmulationRefusedError("--emulate starts its own ranks: run it without torchrun")


def launch(
    script: str,
    words: Sequence[str],
    count: int,
    local_ranks: int,
    threads: int,
    network: Network | None,
) -> int:
    """Runs a script on every rank, and ends all of them whatever happens.

    Returns:
        The first exit code that is not 0, or 0.
    """
    command = [sys.executable, script, *words]
    with _termination_raises(), contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hf_dlion_bench_"))
        names = []
        if network is not None:
            names = stack.enter_context(Emulation(network)).namespaces
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        # Every rank gets what torchrun would tell it, and on a network the namespace of its host.
        for rank in range(count):
            host = None if network is None else rank // local_ranks
            prefix = [] if host is None else ["ip", "netns", "exec", names[host]]
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % local_ranks),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(local_ranks),
                "OMP_NUM_THREADS": str(threads),
                "GLOO_SOCKET_IFNAME": "lo" if network is None else INTERFACE,
                RENDEZVOUS: str(Path(folder, "rendezvous")),
            }
            prepare = _preparation(host)
            processes.append(subprocess.Popen([*prefix, *command], env=env, preexec_fn=prepare))
        return _wait(processes)


def _preparation(host: int | None) -> Callable[[], None] | None:
    """Returns what a new process does first: take its host's core, and die with its parent."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    cores = sorted(os.sched_getaffinity(0))

    def prepare() -> None:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if host is not None:
            os.sched_setaffinity(0, {cores[host % len(cores)]})

    return prepare


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Returns the first exit code that is not 0, some time after the first failure, or 0."""
    deadline = None
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if all(code is not None for code in codes):
            return failed[0] if failed else 0
        if failed:
            deadline = deadline or time.monotonic() + GRACE_S
            if time.monotonic() > deadline:
                return failed[0]
        time.sleep(0.05)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


@contextlib.contextmanager
def _termination_raises() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise SystemExit, so the stack unwinds."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
