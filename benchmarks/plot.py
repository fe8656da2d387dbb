"""Draws what `step_time.py` wrote: the median step of each method, a panel for each file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # of a script its own folder is there

from hf_dlion.tools.arguments import Parser
from hf_dlion.tools.names import NONE
from hf_dlion.tools.pictures import check_path, figure, logarithmic, look, save
from hf_dlion.tools.report import read_bench, require_matplotlib

from benchmarks.command import told
from benchmarks.emulate import Network


def run(args: argparse.Namespace) -> None:
    """Reads, draws and writes."""
    require_matplotlib()
    path = Path(args.out)
    check_path(path)
    results = [read_bench(file, "train") for file in args.files]
    found = [{row["name"]: row for row in result["rows"]} for result in results]
    names = [name for name in {name: 0 for rows in found for name in rows} if name != NONE]
    if not names:
        raise ValueError(f"{args.files[0]} has no row to compare: run step_time.py with --methods")
    drawn, panels = figure(len(results), height=1.6 + 0.42 * len(names), width=4.4)
    for panel, result, rows in zip(panels, results, found, strict=True):
        # A dot at the median, and a thin line from the smallest time to the largest.
        for place, name in enumerate(names):
            if name in rows:
                row, own = rows[name], look(name)
                panel.plot([row["min_ms"], row["max_ms"]], [place, place], color=own.color, lw=1.5)
                panel.plot([row["median_ms"]], [place], "o", color=own.color, mfc=own.face, ms=8)
                panel.annotate(
                    f"{row['median_ms']:,.0f}", (row["median_ms"], place), (0, 8),
                    textcoords="offset points", ha="center", fontsize="small",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                )  # fmt: skip
        subtitle = "no emulated network"
        if result["config"].get("emulate"):
            network = Network.parse(result["config"]["emulate"])
            subtitle = f"{network.hosts} hosts, {network.bits_per_s / 1e6:,.0f} Mbit/s"
        if NONE in rows:
            free = rows[NONE]["median_ms"]
            panel.axvline(free, color=look(NONE).color, ls=look(NONE).dash, lw=1)
            subtitle += f"\n{look(NONE).label}: {free:,.0f} ms"
        panel.set_title(subtitle, fontsize="medium")
        panel.set_xlabel("ms per step")
    panels[0].set_yticks(range(len(names)), [look(name).label for name in names])
    panels[0].set_ylim(len(names) - 0.5, -0.7)
    measured = [row for rows in found for row in rows.values()]
    low, high = min(row["min_ms"] for row in measured), max(row["max_ms"] for row in measured)
    for panel in panels:
        # The same scale in all of them.
        panel.set_xlim(low / 1.3, 1.5 * high)
        logarithmic(panel, "x")
    parameters = results[0]["config"]["parameters"]
    title = f"Median, smallest and largest time of a step; {parameters:,} parameters"
    print(f"written: {save(drawn, panels, title, path, legend=False)}")


def _parser() -> Parser:
    made = Parser(prog="benchmarks/plot.py", description=__doc__)
    made.add_argument("files", nargs="+", metavar="FILE", help="JSON of step_time.py")
    out = "outputs/step-time.png"
    made.add_argument("--out", default=out, help=f"the picture ({out})")
    return made


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return told(_parser(), lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
