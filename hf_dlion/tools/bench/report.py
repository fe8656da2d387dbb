"""What a benchmark prints and writes: times with their spread, and where they were taken."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch


class MissingPackageError(RuntimeError):
    """A package that only the benchmarks need is not installed."""


def require_rich() -> None:
    """Checks, before anything is measured, that the table can be printed.

    Raises:
        MissingPackageError: If rich is not installed.
    """
    if importlib.util.find_spec("rich") is None:
        raise MissingPackageError(
            "the benchmarks print their tables with rich, which is not installed: "
            "pip install 'hf-dlion[bench]' (or rich)"
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
    cuda = torch.cuda.is_available()
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "hf_dlion": _own_version(),
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
    from rich.console import Console

    result = {
        "bench": name,
        "config": dict(config),
        "environment": dict(before),
        "load_average_after": list(os.getloadavg()),
        "rows": [dict(row) for row in rows],
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    print_table(f"hf_dlion bench {name}", columns, rows)
    console = Console(width=_width())
    where = [before["processor"], f"{before['usable_cores']} of {before['cores']} cores"]
    versions = f"torch {before['torch']}, {before['threads']} threads"
    load = f"load {before['load_average'][0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    console.print(f"{', '.join(where)}, {versions}, {load}", highlight=False)
    console.print(" ".join(f"{key}={value}" for key, value in config.items()), highlight=False)
    console.print(f"written: {target}", highlight=False)


def print_table(title: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows under their titles, numbers to the right.

    Args:
        title: Of the table.
        columns: Titles of the printed columns by the rows' keys.
        rows: One mapping per line.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for place, heading in enumerate(columns.values()):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in columns))
    Console(width=_width()).print(table)


def _width() -> int | None:
    """Returns None in a terminal; piped output is not cut to the width that one would have."""
    return None if os.isatty(1) else 160


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _own_version() -> str:
    try:
        return importlib.metadata.version("hf-dlion")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
