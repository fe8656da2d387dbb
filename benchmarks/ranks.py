"""Starts the ranks of a benchmark, or joins the ranks that torchrun started."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from benchmarks.emulate import INTERFACE, Emulation, Network, address
from hf_dlion.cli.plan.machine import seconds_of

# Environment variable with the rendezvous file of ranks that `launch` started.
RENDEZVOUS = "HF_DLION_BENCH_RENDEZVOUS"
# Seconds that other ranks have to end by themselves after one has failed.
GRACE_S = 3.0


def take_part(run: Callable[[], None], threads: int) -> None:
    """Calls `run` inside a process group."""
    torch.set_num_threads(threads)
    device = device_of_rank()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    file = os.environ.get(RENDEZVOUS)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if file is None:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size)
    run()
    # gloo may abort the process if a DDP model outlives its process group.
    gc.collect()
    dist.destroy_process_group()


def device_of_rank() -> torch.device:
    """Returns this rank's GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Ranks that `launch` started are all on this machine, even if they emulate several nodes.
    place = "RANK" if RENDEZVOUS in os.environ else "LOCAL_RANK"
    return torch.device("cuda", int(os.environ.get(place, "0")) % torch.cuda.device_count())


def slowest(call: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of the slowest rank, equal on all ranks; all ranks must call this."""
    dist.barrier()
    taken = torch.tensor([seconds_of(call, device)], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def launch(
    command: Sequence[str], count: int, local_ranks: int, threads: int, network: Network | None
) -> int:
    """Runs a command on every rank; all ranks have ended when this returns or raises.

    Returns:
        The first exit code that is not 0, or 0.
    """
    with _termination_raises(), contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hf_dlion_bench_"))
        hosts = [] if network is None else stack.enter_context(Emulation(network)).namespaces
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        for rank in range(count):
            host = rank // local_ranks
            prefix = ["ip", "netns", "exec", hosts[host]] if hosts else []
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % local_ranks),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(local_ranks),
                "OMP_NUM_THREADS": str(threads),
                "GLOO_SOCKET_IFNAME": INTERFACE if hosts else "lo",
                "MASTER_ADDR": address(0) if hosts else "127.0.0.1",
                RENDEZVOUS: str(Path(folder, "rendezvous")),
            }
            prepare = _preparation(host if hosts else None)
            processes.append(subprocess.Popen([*prefix, *command], env=env, preexec_fn=prepare))
        return _wait(processes)


def _preparation(host: int | None) -> Callable[[], None] | None:
    """Returns a function for a new process: it pins its host's core, and dies with its parent."""
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
    deadline = None
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if None not in codes:
            return failed[0] if failed else 0
        if failed:
            deadline = deadline or time.monotonic() + GRACE_S
            if time.monotonic() > deadline:
                return failed[0]
        time.sleep(0.05)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


@contextlib.contextmanager
def _termination_raises() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise SystemExit, so emulated networks are removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
