"""Times a training step under every method, in turns within one process group."""

from __future__ import annotations

import argparse
import functools
import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # of a script its own folder is there

from hf_dlion.tools.arguments import Parser, positive
from hf_dlion.tools.clock import slowest
from hf_dlion.tools.models import made
from hf_dlion.tools.names import NONE
from hf_dlion.tools.ranks import device_of_rank
from hf_dlion.tools.report import environment, track

from benchmarks.command import TIMES, add_ranks, is_over, parser_of, publish, start, summary
from benchmarks.emulate import INTERFACE
from benchmarks.methods import (
    METHODS,
    VOTING,
    Method,
    check_methods,
    methods_of,
    sensible_methods,
    sizes_of,
)
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options import BITS

# Of the seconds in `DistributedLion.wire`.
PARTS = ("encode", "exchange", "apply")
COLUMNS = {
    "name": "method",
    **TIMES,
    "repeats": "steps",
    "ratio": "x no comm.",
    "bytes_per_step": "bytes sent",
    "interface_bytes": "on the link",
    **{f"{part}_ms": part for part in PARTS},
}


def run(args: argparse.Namespace) -> None:
    """Measures on this rank; rank 0 prints and writes. Every rank calls this."""
    before = environment()
    device = device_of_rank()
    size, tokens = sizes_of(lambda: made(args.parameters, args.model))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (args.batch, args.sequence)
    batch = torch.randint(tokens, shape, generator=generator).to(device)
    names = args.methods or sensible_methods()
    methods = methods_of(names, args.bits, lambda: made(args.parameters, args.model).to(device))
    rows = _measured(methods, args, batch)
    for method in methods:
        method.close()
    # gloo may abort the process if a DDP model outlives its process group.
    methods.clear()
    gc.collect()
    if dist.get_rank() == 0:
        config = {"parameters": size, "model": args.model, "ranks": dist.get_world_size()}
        config["steps"] = args.steps
        for key in ("batch", "sequence", "warmup", "threads", "local_ranks"):
            config[key] = getattr(args, key)
        config["emulate"] = args.emulate and str(args.emulate)
        config["backend"] = dist.get_backend()
        publish("train", args, config, before, rows, COLUMNS)


def _measured(
    methods: list[Method], args: argparse.Namespace, batch: torch.Tensor
) -> list[dict[str, Any]]:
    """Returns a row per method, in the same order on every rank."""
    # DDP settles its buckets, and an overlapped exchange its order, in the first steps.
    for method in track(methods, "warming up"):
        # Of what meets in every k-th step, until it has met.
        for _ in range(max(args.warmup, method.period)):
            method.step(batch)
    times: list[list[float]] = [[] for _ in methods]
    links: list[list[int]] = [[] for _ in methods]
    parts: list[list[dict[str, float]]] = [[] for _ in methods]
    # In turns, so whatever else the machines do hits all methods alike.
    for _ in track(range(args.steps), "steps"):
        for place, method in enumerate(methods):
            if is_over(times[place], args.seconds):
                continue
            before, link = _parts(method), _interface_bytes()
            times[place].append(slowest(functools.partial(method.lap, batch), batch.device))
            links[place].append(_interface_bytes() - link)
            after = _parts(method)
            parts[place].append({part: after[part] - before[part] for part in after})
    rows = []
    for method, found, sent, laps in zip(methods, times, links, parts, strict=True):
        each = [seconds / method.period for seconds in found]
        row = {"name": method.name, **summary(each), "bytes_per_step": method.bytes_sent}
        row["steps_per_time"] = method.period
        row["interface_bytes"] = None
        if args.emulate:
            row["interface_bytes"] = sorted(sent)[len(sent) // 2] // method.period
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


def _parser() -> Parser:
    options = parser_of(__file__, __doc__)
    options.set_defaults(check=check)
    add_ranks(options, timed=True)
    add = options.add_argument
    add("--model", help="a folder, or a name on the hub, whose config takes --parameters' place")
    add("--batch", type=positive, default=1, help="sequences per rank (1)")
    add("--sequence", type=positive, default=128, help="tokens in each (128)")
    add("--warmup", type=positive, default=2)
    add("--steps", type=positive, default=5, help="measured steps (5)")
    add("--methods", nargs="+", choices=list(METHODS), help="(those that torch alone can run)")
    add("--bits", type=int, nargs="+", choices=BITS, default=[1], help="of DistributedLion's votes")
    return options


def check(args: argparse.Namespace) -> None:
    """Checks what is asked for before any rank starts."""
    check_methods(args.methods or ())
    sizes_of(lambda: made(args.parameters, args.model))
    methods = args.methods or list(VOTING)
    if args.bits != [1] and VOTING.keys().isdisjoint(methods):
        raise ValueError(f"--bits is of votes, and of --methods {' '.join(methods)} none votes")


def main(argv: list[str] | None = None) -> int:
    return start(__file__, run, _parser(), argv)


if __name__ == "__main__":
    raise SystemExit(main())
