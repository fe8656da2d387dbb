"""What the commands print and write: tables, JSON, and where the times in them were taken."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import track as tracked
from rich.table import Table

T = TypeVar("T")

# Titles of the columns of a `summary`.
TIMES = {"median_ms": "median ms", "min_ms": "min", "max_ms": "max"}
FORMATS = ("table", "markdown", "json")


class MissingPackageError(RuntimeError):
    """A package that only these commands need is not installed."""


def require_matplotlib() -> None:
    """Checks, before anything is measured, that pictures can be drawn.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError(
            "pictures are drawn with matplotlib, which is not installed: pip install matplotlib"
        )


class Output:
    """What a command prints to stdout, in one of `FORMATS`; of "json" the result alone.

    Nothing is cut: a terminal that is too narrow gets a table in parts, and anything else than a
    terminal gets the same lines whatever the width of the user's window.
    """

    def __init__(self, form: str) -> None:
        """Keeps the format.

        Args:
            form: One of `FORMATS`.
        """
        self._form = form
        self._terminal = form == "table" and sys.stdout.isatty()

    def line(self, text: str = "") -> None:
        """Prints a sentence, in lines that end with whole words where it is longer than they."""
        if self._form != "json":
            # What is not a terminal gets one line, and Markdown a paragraph.
            wrap = not self._terminal
            self._console().print(text, markup=False, highlight=False, soft_wrap=wrap)
            if self._form == "markdown":
                print()

    def table(
        self, title: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Prints rows under their titles, numbers to the right, without columns that have no value.

        Args:
            title: Of the table.
            columns: Titles of the printed columns by the rows' keys.
            rows: One mapping per line.
        """
        if self._form == "json":
            return
        self.line(title)
        found = [
            [heading, *(_cell(row.get(key)) for row in rows)]
            for place, (key, heading) in enumerate(columns.items())
            if not place or any(row.get(key) is not None for row in rows)
        ]
        if self._form == "markdown":
            rule = ["---", *["---:"] * (len(found) - 1)]
            first, *others = zip(*found, strict=True)
            self.line("\n".join(f"| {' | '.join(cells)} |" for cells in (first, rule, *others)))
            return
        for part in self._parts(found):
            self._print(part)

    def result(self, result: Any) -> None:
        """Prints what `write_json` writes, if that is the format."""
        if self._form == "json":
            print(json.dumps(result, indent=1))

    def _parts(self, columns: Sequence[list[str]]) -> list[list[list[str]]]:
        """Returns groups of columns that fit, each behind the first column."""
        first, *others = columns
        limit = self._console().width if self._terminal else sys.maxsize
        parts = [[first]]
        for column in others:
            if len(parts[-1]) > 1 and _width([*parts[-1], column]) > limit:
                parts.append([first])
            parts[-1].append(column)
        return parts

    def _print(self, columns: list[list[str]]) -> None:
        table = Table()
        for place, (heading, *_) in enumerate(columns):
            table.add_column(heading, justify="right" if place else "left", no_wrap=True)
        for cells in list(zip(*columns, strict=True))[1:]:
            table.add_row(*cells)
        self._console(_width(columns)).print(table)

    def _console(self, width: int | None = None) -> Console:
        return Console(width=width)


def track(items: Iterable[T], text: str, total: float | None = None) -> Iterable[T]:
    """Yields the items; a terminal at stderr shows how many are done, and the time that is left.

    Of several ranks the first one shows it. It is drawn between two items alone, so it takes no
    time from what is measured.

    Args:
        items: In their order.
        text: What is going on; "" shows nothing, inside of something that is shown.
        total: How many there are, if they do not know.
    """
    if not text or not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        return items
    console = Console(stderr=True)
    return tracked(items, text, total, console=console, transient=True, auto_refresh=False)


def duration(seconds: float) -> str:
    """Returns a time for people, rounded up.

    >>> duration(42.5), duration(600), duration(9000)
    ('43 s', '10 min', '2 h 30 min')
    """
    if seconds <= 59:
        return f"{math.ceil(seconds)} s"
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


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
    args: argparse.Namespace,
    config: Mapping[str, Any],
    before: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
) -> None:
    """Prints the rows as a table and writes them as JSON.

    Args:
        name: The benchmark.
        args: With `json`, the file, whose folder is made, and `format`.
        config: The options of the run.
        before: `environment()` from before the run; the load average then tells who else ran.
        rows: One dict per measured thing.
        columns: Titles of the printed columns by the rows' keys.
    """
    out = Output(args.format)
    result = {
        "bench": name,
        "config": dict(config),
        "environment": dict(before),
        "load_average_after": list(os.getloadavg()),
        "rows": [dict(row) for row in rows],
    }
    # Written first: a terminal that is gone must not cost the measurement.
    write_json(args.json, result)
    out.table(f"hf_dlion bench {name}", columns, rows)
    where = f"{before['processor']}, {before['usable_cores']} of {before['cores']} cores"
    versions = f"torch {before['torch']}, {before['threads']} threads"
    load = f"load {before['load_average'][0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    out.line(f"{where}, {versions}, {load}")
    out.line(" ".join(f"{key}={value}" for key, value in config.items()))
    out.line(f"written: {args.json}")
    out.result(result)


def write_json(path: str | Path, result: Any) -> None:
    """Writes plain data as JSON; the file's folder is made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def read_bench(path: str | Path, name: str) -> dict[str, Any]:
    """Returns the JSON that a benchmark wrote.

    Raises:
        ValueError: If the file is something else.
    """
    try:
        result = json.loads(Path(path).read_text())
    except ValueError:
        result = None
    parts = {"bench", "config", "rows"}
    if not isinstance(result, dict) or not parts <= result.keys() or result["bench"] != name:
        raise ValueError(f"{path} is not the JSON of `hf-dlion bench {name}`")
    return result


def _width(columns: Sequence[Sequence[str]]) -> int:
    """Returns how wide a table is, with its borders."""
    return 1 + sum(3 + max(map(len, column)) for column in columns)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:z.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        if found is not None:
            return found[1].strip()
    return platform.processor() or platform.machine()
