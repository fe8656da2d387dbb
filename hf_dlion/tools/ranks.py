"""This process as one of several ranks, started by torchrun, accelerate launch or a benchmark."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

# Where ranks that a benchmark started meet: a file.
RENDEZVOUS = "HF_DLION_BENCH_RENDEZVOUS"


def take_part(run: Callable[[], None], threads: int) -> None:
    """Calls `run` inside a process group, with so many of torch's threads."""
    torch.set_num_threads(threads)
    device = device_of_rank()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    file = os.environ.get(RENDEZVOUS)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A launcher has set the address of the ranks' meeting, a benchmark the file.
    if file is None:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size)
    run()
    # gloo may abort the process if a DDP model outlives its process group.
    gc.collect()
    dist.destroy_process_group()


def device_of_rank() -> torch.device:
    """Returns the GPU of this rank, or the CPU where there is none."""
    if torch.cuda.is_available():
        # Of ranks that a benchmark started all are on this machine, whatever node they stand for.
        place = "RANK" if RENDEZVOUS in os.environ else "LOCAL_RANK"
        return torch.device("cuda", int(os.environ.get(place, "0")) % torch.cuda.device_count())
    return torch.device("cpu")
