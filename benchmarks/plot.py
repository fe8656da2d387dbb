"""Draws the JSON files of step_time.py: the step time of each method, one panel per file.

The pictures of benchmarks.convergence have the same colors and layout.

Examples:
  python benchmarks/plot.py outputs/bench_step_time.json
  python benchmarks/plot.py slow.json fast.json --out outputs/networks.png
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # A script's own folder is there.

from benchmarks.command import exit_code_of, middle_ms
from benchmarks.emulate import Network
from benchmarks.methods import METHODS
from hf_dlion.cli.arguments import Parser, rate

# Color and line style by name of the method. All-reduces are gray, this package is blue.
STYLES = {
    "none": ("#000000", ":"),
    "alone": ("#6C757D", "-"),
    "adamw-alone": ("#6C757D", ":"),
    "adamw": ("#6C757D", "-"),
    "ddp-lion": ("#E07A1F", "-"),
    "lion": ("#E07A1F", "-"),
    "majority": ("#1D5F8A", "-"),
    "average": ("#20A39E", "-"),
    "bits2": ("#4FA3D1", "-"),
    "bits4": ("#7B5EA7", "-"),
    "sync16": ("#2E8B57", "-"),
    "every16": ("#0B3C5D", "-"),
    "every32": ("#0B3C5D", "--"),
    "node": ("#1D5F8A", ":"),
    "bf16": ("#ADB5BD", "-"),
    "powersgd": ("#D4A017", "-"),
    "localsgd8": ("#B22222", "-"),
    "localsgd32": ("#B22222", "--"),
    "localsgd160": ("#B22222", ":"),
    "localsgd32-bf16": ("#E57373", "--"),
    "diloco16": ("#F4A300", "-"),
    "diloco50": ("#F4A300", "--"),
    "demo": ("#5C4033", "-"),
}
_NAMES = {method.title: name for name, method in METHODS.items()}
NONE = METHODS["none"].title
ALONE = [METHODS[name].title for name in ("alone", "adamw-alone")]


def look(name: str) -> dict[str, Any]:
    """Returns a method's style as matplotlib's arguments; points of dashed lines are hollow.

    Args:
        name: Name of a method, or its title in a result of step_time.py.
    """
    name = _NAMES.get(name, name)
    color, dash = STYLES.get(name, ("#9C6644", "-"))
    label = METHODS[name].title if name in METHODS else name
    return {"color": color, "ls": dash, "mfc": color if dash == "-" else "white", "label": label}


def figure(count: int, height: float = 4.6, width: float = 3.4) -> tuple[Any, Any]:
    """Returns a figure and its panels, which share one vertical axis; sizes are in inches."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(max(width * count, 6.4), height), layout="constrained")
    return made, made.subplots(1, count, sharey=True, squeeze=False)[0]


def logarithmic(panel: Any, which: str) -> None:
    """Makes an axis logarithmic, with plain numbers as ticks: 0.5, 20, 1,000.

    Args:
        panel: Panel on which everything has been drawn.
        which: Axis, "x" or "y".
    """
    from matplotlib.ticker import LogLocator, NullLocator

    getattr(panel, f"set_{which}scale")("log")
    low, high = getattr(panel, f"get_{which}lim")()
    axis = getattr(panel, f"{which}axis")
    decades = math.log10(high / low)
    subs = (1, 1.5, 2, 3, 4, 6, 8) if decades < 0.6 else (1, 2, 5) if decades < 1.5 else (1, 3)
    axis.set_major_locator(LogLocator(subs=subs, numticks=99))
    axis.set_major_formatter("{x:,.10g}")
    axis.set_minor_locator(NullLocator())


def save(drawn: Any, panels: Any, title: str, path: Path, *, legend: bool = True) -> Path:
    """Adds title and legend, and writes the picture; returns its path.

    Args:
        drawn: Figure from `figure`.
        panels: Panels of the figure, which show the same methods.
        title: Title of the picture.
        path: Path of the picture, whose suffix chooses the format.
        legend: Whether to add a legend below the panels.
    """
    inches = drawn.get_size_inches()[0]
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    drawn.suptitle(textwrap.fill(title, int(15 * inches)), fontsize="small")
    if legend:
        found = panels[0].get_legend_handles_labels()
        columns = max(1, int(inches / 2.6))
        drawn.legend(*found, loc="outside lower center", ncols=columns, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=120)
    return path


def read(path: str) -> dict[str, Any]:
    """Returns the content of a JSON file of step_time.py.

    Raises:
        ValueError: If the file is something else.
    """
    try:
        result: dict[str, Any] = json.loads(Path(path).read_text())
        if result["bench"] == "train":
            return result
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is not a JSON file of benchmarks/step_time.py")


def run(files: Sequence[str], path: Path) -> None:
    """Reads the files, draws, and writes the picture."""
    results = [read(file) for file in files]
    found = [{row["name"]: row for row in result["rows"]} for result in results]
    names = [name for name in {name: 0 for rows in found for name in rows} if name != NONE]
    if not names:
        raise ValueError(
            f"{files[0]} has no method to compare; run step_time.py with more --methods"
        )
    drawn, panels = figure(len(results), height=1.6 + 0.42 * len(names), width=4.4)
    for panel, result, rows in zip(panels, results, found, strict=True):
        # A dot is the median, or the mean of periods; a line spans smallest to largest time.
        for place, name in enumerate(names):
            if name in rows:
                row, style = rows[name], look(name)
                panel.hlines(place, row["min_ms"], row["max_ms"], color=style["color"])
                panel.plot([middle_ms(row)], [place], "o", ms=8, **style)
                panel.annotate(
                    f"{middle_ms(row):,.0f}", (middle_ms(row), place), (0, 8),
                    textcoords="offset points", ha="center", fontsize="small",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                )  # fmt: skip
        subtitle = "no emulated network"
        if result["config"].get("emulate"):
            network = Network.parse(result["config"]["emulate"])
            subtitle = f"{network.hosts} nodes, {rate(network.rate) / 1e6:,.0f} Mbit/s"
        if NONE in rows:
            free = middle_ms(rows[NONE])
            panel.axvline(free, color="black", ls=":", lw=1)
            subtitle += f"\n{NONE}: {free:,.0f} ms"
        panel.set_title(subtitle, fontsize="medium")
        panel.set_xlabel("ms per step")
    emulated = results[0]["config"].get("emulate")
    batches = f"\n(1 batch instead of {Network.parse(emulated).hosts})" if emulated else ""
    labels = [name + batches * (name in ALONE) for name in names]
    panels[0].set_yticks(range(len(names)), labels)
    panels[0].set_ylim(len(names) - 0.5, -0.7)
    measured = [row for rows in found for row in rows.values()]
    low, high = min(row["min_ms"] for row in measured), max(row["max_ms"] for row in measured)
    for panel in panels:
        panel.set_xlim(low / 1.3, 1.5 * high)  # One scale for all.
        logarithmic(panel, "x")
    parameters = results[0]["config"]["parameters"]
    title = f"Median or mean, smallest and largest time of a step; {parameters:,} parameters"
    print(f"written: {save(drawn, panels, title, path, legend=False)}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="benchmarks/plot.py", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON file of step_time.py.")
    out = "outputs/step-time.png"
    parser.add_argument("--out", default=out, help=f"Path of the picture (default: {out}).")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    return exit_code_of(parser, lambda: run(args.files, Path(args.out)))


if __name__ == "__main__":
    raise SystemExit(main())
