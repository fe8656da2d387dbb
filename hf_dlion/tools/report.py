"""What the commands print and write: tables, JSON, and where the times in them were taken."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

# Titles of the columns of a `summary`.
TIMES = {"median_ms": "median ms", "min_ms": "min", "max_ms": "max"}


class MissingPackageError(RuntimeError):
    """A package that only these commands need is not installed."""


def require_matplotlib() -> None:
    """Checks, before anything is measured, that what --plot draws with is there.

    Raises:
        MissingPackageError: If it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError(
            "--plot draws with matplotlib, which is not installed: pip install matplotlib"
        )


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Returns the median and the spread of repeated times, in milliseconds.

    Args:
        seconds: One time per repeat.
    """
    times = [1e3 * value for value in seconds]
    return {
        "repeats": len(times),
        "median_ms": statistics.median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "times_ms": times,
    }


def environment() -> dict[str, Any]:
    """Returns the hardware and the versions of this process."""
    try:
        version = importlib.metadata.version("hf-dlion")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "hf_dlion": version,
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()),
    }


def publish(
    name: str,
    path: str,
    config: Mapping[str, Any],
    before: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
) -> None:
    """Prints the rows as a table and writes them as JSON.

    Args:
        name: The benchmark.
        path: The JSON file; its folder is made.
        config: The options of the run.
        before: `environment()` from before the run; the load average then tells who else ran.
        rows: One dict per measured thing.
        columns: Titles of the printed columns by the rows' keys.
    """
    result = {
        "bench": name,
        "config": dict(config),
        "environment": dict(before),
        "load_average_after": list(os.getloadavg()),
        "rows": [dict(row) for row in rows],
    }
    # Written first: a terminal that is gone must not cost the measurement.
    write_json(path, result)
    print_table(f"hf_dlion bench {name}", columns, rows)
    where = f"{before['processor']}, {before['usable_cores']} of {before['cores']} cores"
    versions = f"torch {before['torch']}, {before['threads']} threads"
    load = f"load {before['load_average'][0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    print(f"{where}, {versions}, {load}")
    print(*(f"{key}={value}" for key, value in config.items()))
    print(f"written: {path}")


def write_json(path: str | Path, result: Any) -> None:
    """Writes plain data as JSON; the file's folder is made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def read_bench(path: str | Path, name: str) -> dict[str, Any]:
    """Returns the JSON that a benchmark wrote.

    Raises:
        ValueError: If the file is something else.
    """
    result: dict[str, Any] = json.loads(Path(path).read_text())
    if result.get("bench") != name:
        raise ValueError(f"{path} is not the JSON of `hf-dlion bench {name}`")
    return result


def print_table(title: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows under their titles, numbers to the right.

    Args:
        title: Of the table.
        columns: Titles of the printed columns by the rows' keys.
        rows: One mapping per line.
    """
    table = Table(title=title)
    for place, heading in enumerate(columns.values()):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in columns))
    # Piped output is not cut to the width that a terminal would have.
    Console(width=None if os.isatty(1) else 160).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        if found is not None:
            return found[1].strip()
    return platform.processor() or platform.machine()
