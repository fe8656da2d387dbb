"""Times a training step under every method, in turns within one process group."""

from __future__ import annotations

import argparse
import functools
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_dlion.optimizer import DistributedLion
from hf_dlion.options import BITS
from hf_dlion.step import plan as step_plan
from hf_dlion.tools.bench.bound import departures_of, exposed_wire_s
from hf_dlion.tools.bench.clock import is_over, slowest
from hf_dlion.tools.bench.emulate import INTERFACE
from hf_dlion.tools.bench.methods import ALONE, NONE, Method, methods_of, name_of, sensible_methods
from hf_dlion.tools.bench.model import llama, sizes_of
from hf_dlion.tools.bench.ranks import device_of_rank
from hf_dlion.tools.report import environment, publish, summary

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


def run(args: argparse.Namespace) -> None:
    """Measures on this rank; rank 0 prints and writes. Every rank calls this."""
    before = environment()
    device = device_of_rank()
    size, tokens = sizes_of(args.parameters)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (args.batch, args.sequence)
    batch = torch.randint(tokens, shape, generator=generator).to(device)
    step_plan.MESSAGE_NUMEL = args.message_numel
    names = args.methods or sensible_methods()
    methods = methods_of(names, args.bits, lambda: llama(args.parameters).to(device))
    rows = _measured(methods, args, batch)
    if args.emulate:
        _add_bound(rows, methods, batch, args.emulate.bits_per_s)
    # gloo may abort the process if a DDP model outlives its process group.
    methods.clear()
    gc.collect()
    if dist.get_rank() == 0:
        config = {"parameters": size, "ranks": dist.get_world_size(), "steps": args.steps}
        for key in ("batch", "sequence", "warmup", "threads", "local_ranks"):
            config[key] = getattr(args, key)
        config["emulate"] = args.emulate and str(args.emulate)
        config["message_numel"] = args.message_numel
        config["backend"] = dist.get_backend()
        publish("train", args.json, config, before, rows, COLUMNS)


def _measured(
    methods: list[Method], args: argparse.Namespace, batch: torch.Tensor
) -> list[dict[str, Any]]:
    """Returns a row per method, in the same order on every rank."""
    for method in methods:
        for _ in range(args.warmup):
            method.step(batch)
    times: list[list[float]] = [[] for _ in methods]
    links: list[list[int]] = [[] for _ in methods]
    parts: list[list[dict[str, float]]] = [[] for _ in methods]
    for _ in range(args.steps):
        for place, method in enumerate(methods):
            if is_over(times[place], args.seconds):
                continue
            before, link = _parts(method), _interface_bytes()
            times[place].append(slowest(functools.partial(method.step, batch), batch.device))
            links[place].append(_interface_bytes() - link)
            after = _parts(method)
            parts[place].append({part: after[part] - before[part] for part in after})
    rows = []
    for method, found, sent, laps in zip(methods, times, links, parts, strict=True):
        row = {"name": method.name, **summary(found), "bytes_per_step": method.bytes_sent}
        row["interface_bytes"] = sorted(sent)[len(sent) // 2] if args.emulate else None
        if isinstance(method.optimizer, DistributedLion):
            row["bits"] = method.optimizer.options.bits
        for part in laps[0]:
            row[f"{part}_ms"] = summary([lap[part] for lap in laps])["median_ms"]
        rows.append(row)
    free = next((row["median_ms"] for row in rows if row["name"] == NONE), None)
    for row in rows:
        row["ratio"] = row["median_ms"] / free if free else None
    return rows


def _parts(method: Method) -> dict[str, float]:
    """Returns the seconds that DistributedLion has spent on each part of its steps so far."""
    if not isinstance(method.optimizer, DistributedLion):
        return {}
    return {part: float(getattr(method.optimizer.wire, f"{part}_s")) for part in PARTS}


def _interface_bytes() -> int:
    """Returns the bytes that have left the emulated host, 0 on a real one without that name."""
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return 0
    sent = [line.split(":")[1].split()[8] for line in lines if line.strip().startswith(INTERFACE)]
    return int(sent[0]) if sent else 0


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
