"""Times a training step under every method, in turns within one process group."""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_dlion.exchange import WireStats
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options import BITS
from hf_dlion.tools.bench.bound import departures_of, exposed_wire_s
from hf_dlion.tools.bench.emulate import INTERFACE
from hf_dlion.tools.bench.methods import ALONE, Method, methods_of, name_of, sensible_methods
from hf_dlion.tools.bench.model import llama, vocabulary
from hf_dlion.tools.bench.ranks import device_of_rank
from hf_dlion.tools.bench.report import environment, publish, summary

COLUMNS = {
    "name": "method",
    "median_ms": "median ms",
    "min_ms": "min",
    "max_ms": "max",
    "repeats": "steps",
    "ratio": "x no comm.",
    "bound_ms": "bound",
    "bytes_per_step": "bytes sent",
    "interface_bytes": "on the link",
    "encode_ms": "encode",
    "exchange_ms": "exchange",
    "apply_ms": "apply",
}
PARTS = ("encode", "exchange", "apply")
# A slow method may stop after so many steps: the fewest that have a median and a spread.
FEWEST = 3


def run(args: argparse.Namespace) -> None:
    """Measures on this rank; rank 0 prints and writes. Every rank calls this."""
    before = environment()
    device = device_of_rank()
    make = functools.partial(lambda: llama(args.parameters).to(device))
    model = make()
    size, tokens = sum(p.numel() for p in model.parameters()), vocabulary(model)
    del model
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (args.batch, args.sequence)
    batch = torch.randint(tokens, shape, generator=generator).to(device)
    methods = methods_of(args.methods or sensible_methods(), args.bits, make)
    rows = _measured(methods, args, functools.partial(_step, batch=batch, device=device))
    if args.emulate:
        _add_bound(rows, methods, batch, args.emulate.bits_per_s)
    # gloo may abort the process if a DDP model outlives its process group.
    methods.clear()
    gc.collect()
    if dist.get_rank() == 0:
        config = {key: getattr(args, key) for key in ("batch", "sequence", "warmup", "threads")}
        config = {"parameters": size, "ranks": dist.get_world_size(), "steps": args.steps, **config}
        config["local_ranks"] = args.local_ranks
        config["emulate"] = args.emulate and f"{args.emulate.hosts}x{args.emulate.rate}"
        config["message_numel"] = args.message_numel
        config["backend"] = dist.get_backend()
        publish("train", args.json, config, before, rows, COLUMNS)


def _step(method: Method, batch: torch.Tensor, device: torch.device) -> None:
    method.step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _add_bound(
    rows: list[dict[str, Any]], methods: list[Method], batch: torch.Tensor, bits_per_s: float
) -> None:
    """Adds to overlapped rows what they could take at least; every rank calls this."""
    by_name = {method.name: method for method in methods}
    alone = next((row["median_ms"] for row in rows if row["name"] == ALONE), None)
    if alone is None:
        return
    overlapped = {name_of(bits, overlap=True) for bits in BITS}
    for row in rows:
        if row["name"] not in overlapped:
            continue
        found = departures_of(by_name[row["name"]], by_name[ALONE], batch)
        if found is not None:
            departures, backward_s = found
            row["exposed_wire_ms"] = 1e3 * exposed_wire_s(departures, backward_s, bits_per_s)
            row["bound_ms"] = alone + row["exposed_wire_ms"]
            row["x_bound"] = row["median_ms"] / row["bound_ms"]


def _measured(
    methods: list[Method], args: argparse.Namespace, step: Callable[[Method], None]
) -> list[dict[str, Any]]:
    """Returns a row per method, in the same order on every rank."""
    for method in methods:
        for _ in range(args.warmup):
            step(method)
    times: list[list[float]] = [[] for _ in methods]
    links: list[list[int]] = [[] for _ in methods]
    parts: list[list[dict[str, float]]] = [[] for _ in methods]
    for _ in range(args.steps):
        for place, method in enumerate(methods):
            # Every rank has the same times, so that all of them stop together.
            if len(times[place]) >= FEWEST and sum(times[place]) > args.seconds:
                continue
            before, link = _parts(method), _interface_bytes()
            times[place].append(slowest(functools.partial(step, method)))
            links[place].append(_interface_bytes() - link)
            if before:
                after = _parts(method)
                parts[place].append({part: after[part] - before[part] for part in PARTS})
    rows = []
    for method, found, sent, laps in zip(methods, times, links, parts, strict=True):
        row = {"name": method.name, **summary(found), "bytes_per_step": method.bytes_sent}
        row["interface_bytes"] = sorted(sent)[len(sent) // 2] if args.emulate else None
        if isinstance(method.optimizer, DistributedLion):
            row["bits"] = method.optimizer.options.bits
            for part in PARTS:
                row[f"{part}_ms"] = summary([lap[part] for lap in laps])["median_ms"]
        rows.append(row)
    free = next((row["median_ms"] for row in rows if row["name"].startswith("no comm")), None)
    for row in rows:
        row["ratio"] = row["median_ms"] / free if free else None
    return rows


def slowest(call: Callable[[], object]) -> float:
    """Returns the seconds that the slowest rank took for `call`; all begin together."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def _parts(method: Method) -> dict[str, float]:
    if not isinstance(method.optimizer, DistributedLion):
        return {}
    wire: WireStats = method.optimizer.wire
    return {part: float(getattr(wire, f"{part}_s")) for part in PARTS}


def _interface_bytes() -> int:
    """Returns the bytes that have left the emulated host, 0 on a real one without that name."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return 0
    sent = [line.split(":")[1].split()[8] for line in lines if line.strip().startswith(INTERFACE)]
    return int(sent[0]) if sent else 0
