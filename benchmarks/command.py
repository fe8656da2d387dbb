"""Shared parts of the benchmarks' command lines: options, tables, and result files."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich import box, progress
from rich.console import Console
from rich.table import Table

from hf_dlion import __version__
from hf_dlion.cli.arguments import positive

T = TypeVar("T")
# Titles of the columns of a `summary`.
TIMES = {"median_ms": "median ms", "mean_ms": "mean ms", "min_ms": "min", "max_ms": "max"}
# Errors that a user can fix. They are printed in one line, without a traceback.
USER_ERRORS = (ImportError, OSError, ValueError)


def add_result_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the options of scripts that measure."""
    out = f"outputs/bench_{name}.json"
    parser.add_argument("--json", default=out, help=f"Result file (default: {out}).")
    threads = "Threads of a rank (default: 1)."
    parser.add_argument("--threads", type=positive, default=1, help=threads)


def exit_code_of(parser: argparse.ArgumentParser, run: Callable[[], int | None]) -> int:
    """Calls `run` and returns the exit code: 2 after an error that a user can fix."""
    try:
        return run() or 0
    except USER_ERRORS as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def track(items: Sequence[T], text: str) -> Iterable[T]:
    """Yields the items; rank 0 prints the progress on a terminal."""
    shown = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
    # A thread that refreshes would disturb what is timed.
    how = {"auto_refresh": False, "disable": not shown}
    return progress.track(items, text, console=Console(stderr=True), **how)


def environment() -> dict[str, Any]:
    """Returns the hardware and the versions that this process runs on."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        processor = found[1].strip() if found else processor
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "hf_dlion": __version__,
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()),
    }


def summary(seconds: Sequence[float], *, mean: bool = False) -> dict[str, Any]:
    """Returns the median, or the mean, and the spread of repeated times, in milliseconds."""
    times = [1e3 * value for value in seconds]
    name, middle = ("mean_ms", statistics.fmean) if mean else ("median_ms", statistics.median)
    return {
        "repeats": len(times),
        name: middle(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "times_ms": times,
    }


def middle_ms(row: Mapping[str, Any]) -> float:
    """Returns the mean time of a row that has one, or the median."""
    return float(row["mean_ms"] if "mean_ms" in row else row["median_ms"])


def write_json(path: str | Path, result: Any) -> None:
    """Writes plain data as JSON and creates the file's folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def publish(
    name: str,
    args: argparse.Namespace,
    config: Mapping[str, Any],
    before: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
) -> None:
    """Writes the rows as JSON and prints them as a table."""
    load = list(os.getloadavg())
    result = {"bench": name, "config": config, "environment": before, "load_average_after": load}
    # Write first, so a closed terminal doesn't lose the measurement.
    write_json(args.json, result | {"rows": rows})
    print_table(columns, rows)
    print(f"{before['processor']}, {before['usable_cores']} cores, torch {before['torch']}")
    print(" ".join(f"{key}={value}" for key, value in config.items()))
    print(f"written: {args.json}")


def print_table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints rows as a Markdown table, leaving out empty columns.

    Args:
        columns: Titles of the columns, by the keys of the rows.
        rows: One mapping per row.
    """
    rows, table = list(rows), Table(box=box.MARKDOWN)
    kept = [key for key in columns if any(row.get(key) is not None for row in rows)]
    for key in kept:
        table.add_column(columns[key], justify="right" if table.columns else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in kept))
    Console(width=1000, highlight=False, markup=False).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:z.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
