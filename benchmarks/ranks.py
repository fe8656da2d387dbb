"""Starts the ranks of a benchmark, or joins the ranks that torchrun started."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.emulate import INTERFACE, Network, address, emulated, enter
from hf_dlion.cli.plan.machine import seconds_of


def launch(
    run: Callable[[], None],
    count: int,
    *,
    local_ranks: int,
    threads: int = 1,
    network: Network | None = None,
) -> None:
    """Calls `run`, which can be pickled, on new ranks; all have ended when this returns or raises.

    With a network, each host has `local_ranks` ranks and one core.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with _termination_raises(), contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hf_dlion_bench_"))
        hosts = [] if network is None else stack.enter_context(emulated(network))
        arguments = run, count, local_ranks, threads, hosts, f"file://{folder}/rendezvous"
        spawn(_rank, arguments, nprocs=count, daemon=True)


def _rank(
    rank: int,
    run: Callable[[], None],
    count: int,
    local_ranks: int,
    threads: int,
    hosts: Sequence[str],
    rendezvous: str,
) -> None:
    """Is one rank that `launch` started."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: dies with its parent.
    if hosts:
        enter(hosts, rank // local_ranks)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_ranks),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "GLOO_SOCKET_IFNAME": INTERFACE if hosts else "lo",
        "MASTER_ADDR": address(0) if hosts else "127.0.0.1",
    }
    take_part(run, threads, rendezvous)


def take_part(run: Callable[[], None], threads: int, rendezvous: str = "env://") -> None:
    """Calls `run` inside a process group, as the rank that the environment names."""
    torch.set_num_threads(threads)
    device, backend = device_of_rank(), "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
    run()
    # gloo may abort the process if a DDP model outlives its process group.
    gc.collect()
    dist.destroy_process_group()


def device_of_rank() -> torch.device:
    """Returns this rank's GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A node's ranks follow one another, and emulated nodes share the GPUs of this machine.
    return torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())


def slowest(call: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of the slowest rank, equal on all ranks; all ranks must call this."""
    dist.barrier()
    taken = torch.tensor([seconds_of(call, device)], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


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
