"""Measures the peak memory of a training step under each method, beside Lion in plain DDP."""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # of a script its own folder is there

from hf_dlion.tools.arguments import Parser
from hf_dlion.tools.models import llama
from hf_dlion.tools.ranks import device_of_rank
from hf_dlion.tools.report import environment, track

from benchmarks.command import add_ranks, parser_of, publish, start
from benchmarks.methods import METHODS, Method, sizes_of

COLUMNS = {
    "name": "method",
    "peak_mib": "peak MiB",
    "bytes_per_parameter": "bytes/parameter",
    "extra_bytes_per_parameter": "more than Lion in DDP",
}
# The first is what the others are compared with.
COMPARED = ("lion", "alone", "dlion", "overlap")
# mallopt(M_MMAP_THRESHOLD, ...): large blocks then go back to the system at once. glibc's own
# threshold grows with the blocks that were freed, and what it keeps would be taken for used.
M_MMAP_THRESHOLD, THRESHOLD = -3, 1 << 16
# Overlapped exchanges begin with the second step, and settle with the third.
STEPS = 4


def run(args: argparse.Namespace) -> None:
    """Measures on this rank; rank 0 prints and writes. Every rank calls this."""
    before = environment()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, THRESHOLD)
    device = device_of_rank()
    size, tokens = sizes_of(lambda: llama(args.parameters))
    # As few tokens as there can be: activations are not what is measured.
    batch = torch.randint(tokens, (1, 2)).to(device)
    rows: list[dict[str, Any]] = []
    # What a process allocates once and for all belongs to no method.
    for name in COMPARED:
        _steps(METHODS[name](lambda: llama(1).to(device)), torch.zeros_like(batch))
    for name in track(COMPARED, "methods"):
        start = _reset_peak(device)
        method = METHODS[name](lambda: llama(args.parameters).to(device))
        _steps(method, batch)
        peak = _peak(device) - start
        rows.append({"name": method.name, "peak_bytes": peak, "peak_mib": peak / 2**20})
        rows[-1]["bytes_per_parameter"] = peak / size
        rows[-1]["extra_bytes_per_parameter"] = (peak - rows[0]["peak_bytes"]) / size
        del method
        dist.barrier()
    if dist.get_rank() == 0:
        config = {"parameters": size, "ranks": dist.get_world_size(), "steps": STEPS}
        publish("memory", args, config, before, rows, COLUMNS)


def _steps(method: Method, batch: torch.Tensor) -> None:
    for _ in range(STEPS):
        method.step(batch)


def _reset_peak(device: torch.device) -> int:
    """Begins to watch the peak anew; returns the bytes in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    # glibc keeps freed blocks, and the next method would find its memory there.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(field: str) -> int:
    """Returns a field of /proc/self/status in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _parser() -> Parser:
    made = parser_of(__file__, __doc__)
    add_ranks(made, timed=False)
    return made


def main(argv: list[str] | None = None) -> int:
    return start(__file__, run, _parser(), argv)


if __name__ == "__main__":
    raise SystemExit(main())
