"""Encode, count, apply and hash on one core, beside a fused AdamW step and a copy of them all."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from hf_dlion.codec import codec_for
from hf_dlion.codec.native import library as native_library
from hf_dlion.ranks.fingerprint import fingerprints
from hf_dlion.tools.bench import codec_device
from hf_dlion.tools.bench.clock import in_turns, seconds_of
from hf_dlion.tools.bench.work import Work, shapes
from hf_dlion.tools.report import environment, publish, summary

COLUMNS = {
    "name": "work",
    "dtype": "dtype",
    "median_ms": "median ms",
    "min_ms": "min",
    "max_ms": "max",
    "ns_per_element": "ns/element",
    "ratio": "x fused AdamW",
    "encode_ms": "encode",
    "count_ms": "count",
    "apply_ms": "apply",
}
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WORLD_SIZES = (2, 4)

# Seconds by part of the work; "total" is always there.
Lap = dict[str, float]


def run(args: argparse.Namespace) -> None:
    """Measures, prints and writes."""
    torch.set_num_threads(args.threads)
    if args.device != "cpu":
        codec_device.run(args, shapes(args.parameters), DTYPES)
        return
    torch.manual_seed(0)
    before = environment()
    rows = [row for name in DTYPES for row in _rows_of(name, args)]
    config = {key: getattr(args, key) for key in ("parameters", "repeats", "threads", "bits")}
    config["compiler"] = native_library.library() is not None
    publish("codec", args.json, config, before, rows, COLUMNS)


def _rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    params = [torch.randn(shape).mul_(0.02).to(DTYPES[name]) for shape in shapes(args.parameters)]
    for param in params:
        param.grad = torch.randn_like(param)
    copies = [torch.empty_like(param) for param in params]
    adamw = torch.optim.AdamW(params, lr=1e-4, fused=True)

    def copy() -> None:
        for target, source in zip(copies, params, strict=True):
            target.copy_(source)

    tasks: dict[str, Callable[[], Lap]] = {
        "fused AdamW step": lambda: {"total": seconds_of(adamw.step, CPU)},
        "copy": lambda: {"total": seconds_of(copy, CPU)},
        "hash of all parameters": lambda: {"total": seconds_of(partial(fingerprints, params), CPU)},
    }
    for bits, world_size in itertools.product(args.bits, WORLD_SIZES):
        work, case = Work(params, world_size, bits), f"{world_size} ranks"
        case += "" if bits == 1 else f", {bits} bits"
        if native_library.library() is not None:
            tasks[f"native, {case}"] = partial(_lap, work)
        tasks[f"eager, {case}"] = without_compiler()(partial(_lap, work))
    laps = in_turns(tasks, args.repeats)
    adamw_ms = summary([lap["total"] for lap in laps["fused AdamW step"]])["median_ms"]
    rows = []
    for task, found in laps.items():
        row = {"name": task, "dtype": name, **summary([lap["total"] for lap in found])}
        row["ns_per_element"] = 1e6 * row["median_ms"] / args.parameters
        row["ratio"] = row["median_ms"] / adamw_ms
        for part in found[0].keys() - {"total"}:
            row[f"{part}_ms"] = summary([lap[part] for lap in found])["median_ms"]
        rows.append(row)
    return rows


def _lap(work: Work) -> Lap:
    """Does the work of a step once, with the codec that this process has now."""
    codec = codec_for(CPU)
    begin = time.perf_counter()
    work.encode(codec)
    encoded = time.perf_counter()
    work.count()
    counted = time.perf_counter()
    work.apply(codec)
    applied = time.perf_counter()
    return {
        "total": applied - begin,
        "encode": encoded - begin,
        "count": counted - encoded,
        "apply": applied - counted,
    }


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Makes codecs and counts run without the compiled library, in this process."""
    before = os.environ.get(native_library.ENVIRONMENT)
    os.environ[native_library.ENVIRONMENT] = "0"
    native_library.library.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del os.environ[native_library.ENVIRONMENT]
        else:
            os.environ[native_library.ENVIRONMENT] = before
        native_library.library.cache_clear()
