"""Encode, count, apply and hash, beside what a step does anyway.

On a CPU that is a fused AdamW step and a copy of all parameters, on a GPU a copy of as many bytes
as each part of the work must move.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # of a script its own folder is there

from hf_dlion.codec import codec_for
from hf_dlion.codec.eager import EagerCodec
from hf_dlion.codec.native import library as native_library
from hf_dlion.tools.arguments import Parser, positive
from hf_dlion.tools.clock import seconds_of
from hf_dlion.tools.report import environment, track
from hf_dlion.tools.work import Work

from benchmarks.command import TIMES, parser_of, publish, shapes, summary, told
from hf_dlion.options import BITS
from hf_dlion.ranks.fingerprint import fingerprints

COLUMNS = {
    **{"name": "work", "dtype": "dtype", **TIMES},
    **{"ns_per_element": "ns/element", "ratio": "x fused AdamW"},
    **{f"{part}_ms": part for part in ("encode", "count", "apply")},
}
DEVICE_COLUMNS = {
    **{"name": "work", "dtype": "dtype", **TIMES},
    **{"megabytes": "MB moved", "gigabytes_per_second": "GB/s", "ratio": "x copy of as much"},
}
T = TypeVar("T")
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WORLD_SIZES = (2, 4)
DEVICE_WORLD_SIZE = 4
SLEEP_CYCLES = 20_000_000

# Seconds by part of the work; "total" is always there.
Lap = dict[str, float]


def run(args: argparse.Namespace) -> None:
    """Measures, prints and writes."""
    # Where the result will lie: better refused now than after minutes.
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    if device_of(args.device).type != "cpu":
        if args.bits != [1]:
            raise ValueError("--bits is timed on the CPU: leave out --device")
        run_on_device(args)
        return
    torch.manual_seed(0)
    before = environment()
    rows = [row for name in DTYPES for row in _rows_of(name, args)]
    config = {key: getattr(args, key) for key in ("parameters", "repeats", "threads", "bits")}
    config["compiler"] = native_library.library() is not None
    publish("codec", args, config, before, rows, COLUMNS)


def _rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    params = _params(args.parameters, name, CPU)
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
    # One step's work with the compiled library, if there is one, and without.
    for bits, world_size in itertools.product(args.bits, WORLD_SIZES):
        work, case = Work(params, world_size, bits), f"{world_size} ranks"
        case += "" if bits == 1 else f", {bits} bits"
        if native_library.library() is not None:
            tasks[f"native, {case}"] = partial(_lap, work)
        tasks[f"eager, {case}"] = without_compiler()(partial(_lap, work))
    laps = in_turns(tasks, args.repeats, text=name)
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
    work.count(codec)
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


def run_on_device(args: argparse.Namespace) -> None:
    """Measures on `args.device`, prints and writes."""
    device = torch.device(args.device)
    before = environment()
    codec, eager = codec_for(device), EagerCodec()
    rows: list[dict[str, Any]] = []
    for name in DTYPES:
        torch.manual_seed(0)
        params = _params(args.parameters, name, device)
        work = Work(params, DEVICE_WORLD_SIZE)
        # The bytes that each part must read and write: gradient, momentum and its new value are
        # encoded, a parameter and its new value applied.
        values, words = sum(param.nbytes for param in params), 8 * work.words
        encoded, applied = 3 * values + words, 2 * values + words
        counted = (DEVICE_WORLD_SIZE + 1) * words
        tasks: list[tuple[str, int, Callable[[], object]]] = [
            ("encode", encoded, partial(work.encode, codec)),
            ("apply", applied, partial(work.apply, codec)),
            ("count", counted, partial(work.count, codec)),
            ("hash", values, partial(fingerprints, params)),
            ("eager encode", encoded, partial(work.encode, eager)),
            ("eager apply", applied, partial(work.apply, eager)),
        ]
        # Beside each, a copy that reads and writes as many bytes.
        for task, moved, call in track(tasks, name):
            source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
            copy = partial(torch.empty_like(source).copy_, source)
            both = {"work": partial(_busy_s, call, device), "copy": partial(_busy_s, copy, device)}
            # The first three rounds compile and warm up.
            times = in_turns(both, args.repeats, warmup=3, text="")
            row = {"name": task, "dtype": name, **summary(times["work"]), "megabytes": moved / 1e6}
            row["copy_ms"] = summary(times["copy"])["median_ms"]
            row["gigabytes_per_second"] = moved / 1e6 / row["median_ms"]
            row["ratio"] = row["median_ms"] / row["copy_ms"]
            rows.append(row)
    config = {key: getattr(args, key) for key in ("parameters", "repeats", "device")}
    config["codec"] = type(codec).__name__
    publish("codec", args, config, before, rows, DEVICE_COLUMNS)


def _busy_s(call: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that the device is busy with the work, or the CPU with all of it."""
    if device.type != "cuda":
        return seconds_of(call, device)
    event: Any = torch.cuda.Event  # without types
    begin, end = (event(enable_timing=True) for _ in range(2))
    # While the device sleeps the host gets ahead, so no launch is waited for.
    torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3


def _params(parameters: int, dtype: str, device: torch.device) -> list[torch.Tensor]:
    """Returns parameters with gradients."""
    sizes = shapes(parameters)
    params = [torch.randn(s, device=device).mul_(0.02).to(DTYPES[dtype]) for s in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def in_turns(
    tasks: Mapping[str, Callable[[], T]], repeats: int, warmup: int = 1, text: str = ""
) -> dict[str, list[T]]:
    """Returns what each task measured in every round but the first ones.

    In turns, so whatever else the machine does hits all tasks alike.
    """
    found: dict[str, list[T]] = {name: [] for name in tasks}
    for turn in track(range(warmup + repeats), text):
        for name, task in tasks.items():
            lap = task()
            if turn >= warmup:
                found[name].append(lap)
    return found


def device_of(name: str) -> torch.device:
    """Returns the CPU, or a GPU that torch can use."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name} is no device: give cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {name} needs a GPU that torch can use, and torch sees "
            f"{torch.cuda.device_count() or 'none'} here: give --device cpu"
        )
    return device


def _parser() -> Parser:
    made = parser_of(__file__, __doc__)
    add = made.add_argument
    add("--parameters", type=positive, default=50_000_000)
    add("--repeats", type=positive, default=7)
    add("--device", default="cpu", help='"cuda" times the Triton kernels beside a copy (cpu)')
    add("--bits", type=int, nargs="+", choices=BITS, default=[1], help="of a vote; on the CPU (1)")
    return made


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return told(_parser(), lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
