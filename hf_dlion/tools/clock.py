"""How times are taken: after warming up, and of the slowest rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from hf_dlion.tools.report import track

T = TypeVar("T")


def now(device: torch.device) -> float:
    """Returns the time in seconds at which a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that `call` takes on an idle device."""
    begin = now(device)
    call()
    return now(device) - begin


def median_s(
    call: Callable[[], object], device: torch.device, repeats: int = 3, text: str = ""
) -> float:
    """Returns the median seconds of `call`, after one call for warming up.

    Args:
        call: What is timed.
        device: Where it works.
        repeats: Calls that count.
        text: What is going on, for people.
    """
    times = [seconds_of(call, device) for _ in track(range(repeats + 1), text)]
    return statistics.median(times[1:])


def slowest(call: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that the slowest rank took for `call`, the same on every rank.

    Every rank calls this, and all begin together.
    """
    dist.barrier()
    taken = torch.tensor([seconds_of(call, device)], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)
