"""Helpers with which tests start several ranks.

`RankPool` keeps `world_size` processes with one gloo process group alive, so a test module starts
them once. `on_ranks` makes a test that runs on each of them. `run_script` runs a complete command
under torchrun. A rank function is a top-level function `f(rank, world_size, *args)` of an
importable module, and what it returns must be picklable (arrays and tensors are).
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hf_dlion.ranks.topology import _created_groups

# One thread per rank: the machines that run these tests have fewer cores than ranks. OpenBLAS must
# not start its pool in the fork server either, because a fork copies none of its threads.
RANK_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Kernels run in Triton's interpreter where there is no GPU.
    "TRITON_INTERPRET": str(int(not torch.cuda.is_available())),
}
if sys.platform == "linux":
    # gloo otherwise looks up the host's name, which need not resolve in a container.
    RANK_ENV["GLOO_SOCKET_IFNAME"] = "lo"

FORKS = multiprocessing.get_context("forkserver")
# What the fork server imports once, so that a new rank starts in milliseconds. torch._dynamo is
# here because the first optimizer made in a process imports it.
PRELOAD = ["pytest", "hf_dlion.checkpoint", "torch._dynamo", "torch.distributed.fsdp"]
if not torch.cuda.is_available():  # Imports may start CUDA, which no fork survives.
    PRELOAD += ["transformers.trainer", "transformers.models.llama.modeling_llama"]

# Seconds that the other ranks get to end with their own error after one rank has failed.
GRACE_S = 5.0
# Timeout of collectives, after which a rank without a parent ends.
GROUP_TIMEOUT = datetime.timedelta(seconds=180)

# Process groups that outlive the case that made them: torch's meshes keep using theirs.
LASTING: set[dist.ProcessGroup] = set()


class RanksFailedError(AssertionError):
    """At least one rank raised, died or did not answer in time; the text has a part per rank."""


class RankPool:
    """Processes with one process group between them, reused from call to call.

    They are started at the first `run`. After a failure all of them are killed, and the next `run`
    starts new ones, so that no test inherits a broken group.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[_Worker] = []
        self._folder = ""

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        """Calls `function(rank, world_size, *args)` on every rank and returns a result per rank.

        Raises:
            RanksFailedError: If a rank raises, dies, or takes longer than `timeout` seconds
                (default: 60).
        """
        if not self._workers:
            self._start()
        call, limit = pickle.dumps((function, args)), timeout or 60.0
        for worker in self._workers:
            worker.send(call)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = {worker.connection: worker for worker in self._workers}
        deadline = time.monotonic() + limit
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                worker = pending.pop(connection)
                failed, value = worker.answer()
                (failures if failed else results)[worker.rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for worker in pending.values():
            failures[worker.rank] = "did not answer in time; its stacks end its output"
            worker.dump_stacks()
        if failures:
            name = f"{function.__module__}.{function.__qualname__}"
            self._fail(f"{name} failed on {len(failures)} ranks (limit {limit:g} s)", failures)
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Ends the processes.

        Raises:
            RanksFailedError: If one of them did not end cleanly (a gloo abort, say).
        """
        for worker in self._workers:
            worker.send(b"")
        failures: dict[int, str] = {}
        deadline = time.monotonic() + 30.0
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.dump_stacks()
            if worker.process.exitcode != 0:
                failures[worker.rank] = f"ended with exit code {worker.process.exitcode}"
        if failures:
            self._fail("the ranks did not end cleanly", failures)
        self._kill()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        ranks = range(self.world_size)
        self._workers = [_Worker(rank, self.world_size, self._folder) for rank in ranks]

    def _fail(self, head: str, failures: dict[int, str]) -> NoReturn:
        parts = [
            f"rank {worker.rank}:\n{failures.get(worker.rank, 'returned')}\n{worker.output()}"
            for worker in self._workers
        ]
        self._kill()
        raise RanksFailedError("\n\n".join([head, *parts]))

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join(10.0)
            worker.connection.close()
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)


def forked(function: Callable[..., None], *args: Any) -> multiprocessing.process.BaseProcess:
    """Starts a process that calls a function, which it finds with what `PRELOAD` imports."""
    FORKS.set_forkserver_preload(PRELOAD)
    with mock.patch.dict(os.environ, RANK_ENV):
        # The server hands its environment down to every process, so it must start inside.
        multiprocessing.forkserver.ensure_running()
        process = FORKS.Process(target=function, args=args, daemon=True)
        process.start()
    return process


def ends_of(
    processes: Sequence[multiprocessing.process.BaseProcess], seconds: float = 60.0
) -> list[int | None]:
    """Waits for forked processes, kills those that are late, and returns their exit codes."""
    for process in processes:
        process.join(seconds)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


class RankPools(dict[int, RankPool]):
    """One pool per world size: `pools(2).run(f)`."""

    def __call__(self, world_size: int) -> RankPool:
        return self.setdefault(world_size, RankPool(world_size))

    def close(self) -> None:
        """Ends all pools, also if one of them did not end cleanly."""
        with contextlib.ExitStack() as stack:
            for pool in self.values():
                stack.callback(pool.close)


def on_ranks(
    world_size: int | str, *, timeout: float | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a test that every rank of a pool runs.

    The function may take its `rank`, in addition to the fixtures and parameters of the test, which
    must be picklable. `world_size` is a number, or the name of the parameter that has it, which the
    function need not take. Every case begins with the same seed on all ranks.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        module, name = function.__module__, function.__name__
        names = [own for own in inspect.signature(function).parameters if own != "rank"]
        if isinstance(world_size, str) and world_size not in names:
            names.append(world_size)

        def test(pools: RankPools, **arguments: Any) -> None:
            size = arguments[world_size] if isinstance(world_size, str) else world_size
            pools(size).run(_run_test, module, name, arguments, timeout=timeout)

        test = functools.wraps(function)(test)
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(own, inspect.Parameter.KEYWORD_ONLY) for own in ("pools", *names)]
        )
        return pytest.mark.multiproc(test)

    return decorate


def _run_test(
    rank: int, world_size: int, module: str, name: str, arguments: dict[str, Any]
) -> None:
    function = getattr(importlib.import_module(module), name).__wrapped__
    known = {"rank": rank, **arguments}
    function(**{own: known[own] for own in inspect.signature(function).parameters})


def run_script(
    nproc: int, argv: Sequence[str | os.PathLike[str]], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs `argv` (a script or `-m module`, and its arguments) on `nproc` ranks under torchrun.

    torchrun unbuffers its ranks, so the pieces of two ranks' `print` interleave; let one rank
    print, or write whole lines. `options` are those of `run_command`.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={nproc}"]
    # Port 0 lets the system choose, so parallel test runs never collide.
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"]
    return run_command([*torchrun, *argv], **options)


def run_command(
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float = 120.0,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs a complete command (`accelerate launch ...`), and kills all that it has started.

    `env` is added to this process's environment. After `timeout` seconds, all processes dump their
    stacks to stderr first.

    Raises:
        RanksFailedError: On a timeout, or on another exit code than 0 if `check`.
    """
    words = [os.fspath(word) for word in command]
    # What a launcher sets for its ranks must not leak from a run around the tests into this one.
    outer = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    full = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
    full |= {**RANK_ENV, "PYTHONFAULTHANDLER": "1", **(env or {})}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # Files, not pipes: a grandchild that survives would keep a pipe open forever.
        process = subprocess.Popen(words, stdout=out, stderr=err, env=full, cwd=cwd)
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_tree(process)
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(words, process.returncode, out.read(), err.read())
    if code is None or (check and code != 0):
        what = f"took longer than {timeout:g} s" if code is None else f"ended with code {code}"
        output = f"stdout:\n{_tail(done.stdout)}\nstderr:\n{_tail(done.stderr)}"
        raise RanksFailedError(f"{' '.join(words)}\n{what}\n{output}")
    return done


class _Worker:
    """The parent's side of one rank."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        self.rank = rank
        self.connection, theirs = FORKS.Pipe()
        self._log = Path(folder, f"rank{rank}.log")
        self._log.touch()
        self._seen = 0
        self.process = forked(_serve, rank, world_size, folder, theirs)
        # Only then does the end of the child show as the end of the pipe.
        theirs.close()

    def send(self, call: bytes) -> None:
        self._seen = self._log.stat().st_size
        with contextlib.suppress(OSError):  # A dead rank shows in `answer`.
            self.connection.send_bytes(call)

    def answer(self) -> tuple[bool, Any]:
        """Returns whether the rank failed, and its result or the text of its failure."""
        try:
            data = self.connection.recv_bytes()
        except (EOFError, OSError):
            self.process.join(5.0)
            return True, f"died with exit code {self.process.exitcode}"
        return torch.load(io.BytesIO(data), weights_only=False)

    def dump_stacks(self) -> None:
        """Makes all threads write their stacks, which works while the rank is stuck in C."""
        start = size = self._log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.1)
            before, size = size, self._log.stat().st_size
            if start < before == size:  # No longer growing: the dump is complete.
                break

    def output(self) -> str:
        return _tail(self._log.read_bytes()[self._seen :].decode(errors="replace").strip())


def _serve(rank: int, world_size: int, folder: str, connection: Connection) -> None:
    """Runs in a rank's process: calls what the parent sends until that is empty."""
    log = os.open(Path(folder, f"rank{rank}.log"), os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    torch.set_num_threads(1)
    # For libraries that take these from the environment (Accelerate, Trainer).
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=GROUP_TIMEOUT,
    )
    with contextlib.suppress(EOFError):  # The parent is gone.
        while call := connection.recv_bytes():
            if gc.get_freeze_count() == 0:
                pickle.loads(call)  # Imports the tests. What is imported stays: without this a
                gc.freeze()  # collection takes a quarter of a second.
            connection.send_bytes(_answer(rank, world_size, call))
            del call
    # A DDP model that outlives its gloo group sometimes aborts the process.
    gc.collect()
    dist.destroy_process_group()


def free_port() -> str:
    """Returns a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _answer(rank: int, world_size: int, call: bytes) -> bytes:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    answer = io.BytesIO()
    try:
        function, args = pickle.loads(call)
        # Pickle would write a file per tensor, and multiprocessing share memory of this process.
        torch.save((False, function(rank, world_size, *args)), answer)
    except BaseException:
        answer = io.BytesIO()
        torch.save((True, traceback.format_exc()), answer)
    else:
        _end_groups()
    return answer.getvalue()


def _end_groups() -> None:
    """Ends the process groups that a case made: each has threads that wake 100 times a second."""
    gc.collect()  # A DDP model must not outlive its group.
    tables = list(_created_groups.values())
    made = [group for table in tables for group in table.values()]
    kept = {dist.group.WORLD, *made, *LASTING}
    for group in [group for group in distributed_c10d._world.pg_map if group not in kept]:
        dist.destroy_process_group(group)


def _tail(text: str, limit: int = 8000) -> str:
    return text if len(text) <= limit else f"[{len(text) - limit} characters]...{text[-limit:]}"


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kills a command with all its descendants; a stuck one first dumps its stacks to stderr."""
    # torchrun puts each rank into a session of its own, so killing a process group misses them.
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(process.pid).children(recursive=True)
        for signum, patience in ((signal.SIGABRT, 2.0), (signal.SIGKILL, 5.0)):
            for child in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(signum)
            _, ranks = psutil.wait_procs(ranks, patience)
    process.kill()
    process.wait()
