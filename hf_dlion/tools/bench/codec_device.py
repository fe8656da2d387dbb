"""Encode, count and apply on a GPU, beside a copy of as many bytes as each of them must move."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hf_dlion.codec import codec_for
from hf_dlion.codec.eager import EagerCodec
from hf_dlion.ranks.fingerprint import fingerprints
from hf_dlion.tools.bench.clock import in_turns, seconds_of
from hf_dlion.tools.bench.work import Work
from hf_dlion.tools.report import environment, publish, summary

COLUMNS = {
    "name": "work",
    "dtype": "dtype",
    "median_ms": "median ms",
    "min_ms": "min",
    "max_ms": "max",
    "megabytes": "MB moved",
    "gigabytes_per_second": "GB/s",
    "ratio": "x copy of as much",
}
WORLD_SIZE = 4
SLEEP_CYCLES = 20_000_000


def run(
    args: argparse.Namespace, shapes: Sequence[torch.Size], dtypes: dict[str, torch.dtype]
) -> None:
    """Measures, prints and writes.

    Args:
        args: The command line's options.
        shapes: Of the parameters.
        dtypes: torch's dtypes by name.
    """
    device = torch.device(args.device)
    before = environment()
    codec, eager = codec_for(device), EagerCodec()
    rows: list[dict[str, Any]] = []
    for name, dtype in dtypes.items():
        torch.manual_seed(0)
        params = [torch.randn(shape, device=device).mul_(0.02).to(dtype) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        work = Work(params, WORLD_SIZE)
        # The bytes that each part must read and write: gradient, momentum and its new value are
        # encoded, a parameter and its new value applied.
        values, words = sum(param.nbytes for param in params), 8 * work.words
        encoded, applied, counted = 3 * values + words, 2 * values + words, (WORLD_SIZE + 1) * words
        tasks: list[tuple[str, int, Callable[[], object]]] = [
            ("encode", encoded, partial(work.encode, codec)),
            ("apply", applied, partial(work.apply, codec)),
            ("count", counted, work.count),
            ("hash", values, partial(fingerprints, params)),
            ("eager encode", encoded, partial(work.encode, eager)),
            ("eager apply", applied, partial(work.apply, eager)),
        ]
        for task, moved, call in tasks:
            source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
            copy = partial(torch.empty_like(source).copy_, source)
            both = {"work": partial(_busy_s, call, device), "copy": partial(_busy_s, copy, device)}
            # The first three rounds compile and warm up.
            times = in_turns(both, args.repeats, warmup=3)
            row = {"name": task, "dtype": name, **summary(times["work"]), "megabytes": moved / 1e6}
            row["copy_ms"] = summary(times["copy"])["median_ms"]
            row["gigabytes_per_second"] = moved / 1e6 / row["median_ms"]
            row["ratio"] = row["median_ms"] / row["copy_ms"]
            rows.append(row)
    config = {key: getattr(args, key) for key in ("parameters", "repeats", "device")}
    config["codec"] = type(codec).__name__
    publish("codec", args.json, config, before, rows, COLUMNS)


def _busy_s(call: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that the device is busy with the work, or the CPU with all of it."""
    if device.type != "cuda":
        return seconds_of(call, device)
    event: Any = torch.cuda.Event  # without types
    begin, end = (event(enable_timing=True) for _ in range(2))
    # While the device sleeps the host gets ahead, so no launch is waited for.
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3
