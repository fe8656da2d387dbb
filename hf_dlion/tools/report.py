"""What the commands print and write: tables, JSON, and where the times in them were taken."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
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
        script = {"train": "step_time"}.get(name, name)
        raise ValueError(f"{path} is not the JSON of benchmarks/{script}.py")
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
