"""Draws the loss against the bytes that a rank has sent, in one panel per number of ranks.

Of each method, it draws the learning rate and betas with the lowest mean loss, among those with the
most seeds.

Examples:
  python -m benchmarks.convergence.loss_by_bytes RUNS.jsonl --methods adamw localsgd32 majority
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import exit_code_of
from benchmarks.convergence.results import Result, best, read
from benchmarks.methods import method_of
from benchmarks.plot import figure, logarithmic, look, save
from hf_dlion.cli.arguments import Parser, positive


def draw(results: Sequence[Sequence[Result]], path: Path) -> Path:
    """Draws one panel for each list of results; returns the path."""
    drawn, panels = figure(len(results), width=5.0)
    for panel, together in zip(panels, results, strict=True):
        for result in together:
            steps, losses, deviations = (column[1:] for column in result.curve())
            sent = [1e-6 * result.average("bytes_per_step") * step for step in steps]
            key, _, options = result.setting.method.partition(":")
            style = look(key) | {"label": method_of(result.setting.method).title}
            mark = "D" if "momentum_sync" in options else "o"
            panel.errorbar(sent, losses, deviations, marker=mark, ms=4, capsize=2, **style)
        panel.set_xlabel("MB sent by a rank")
        panel.set_title(f"{together[0].setting.workers} ranks", fontsize="medium")
        logarithmic(panel, "x")
    panels[0].set_ylabel("validation loss")
    common = results[0][0].setting
    title = f"{common.task}: {common.steps} steps of {common.batch} x {common.sequence} per rank"
    return save(drawn, panels, title, path)


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)

    def run() -> None:
        records = read(args.files)
        results = [
            [best(records, method, workers=n, steps=args.steps) for method in args.methods]
            for n in args.workers
        ]
        for together in results:
            for result in together:
                setting, mean = result.setting, statistics.fmean(result.losses.values())
                adamw = method_of(setting.method).family == "adamw"
                print(
                    f"{setting.workers} {setting.method} lr {setting.lr:g} betas "
                    f"{setting.adamw_betas if adamw else setting.betas}: {mean:.3f}, "
                    f"{len(result.losses)} seeds"
                )
        print(f"drawn: {draw(results, args.out)}")

    return exit_code_of(parser, run)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.convergence.loss_by_bytes", description=__doc__)
    add: Any = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="Records of runs.")
    methods = "Methods, as in the records."
    add("--methods", nargs="+", required=True, metavar="METHOD", help=methods)
    add("--workers", nargs="+", type=positive, default=[2, 8], help="Ranks (default: 2 8).")
    add("--steps", type=positive, default=2000, help="Steps of a run (default: 2000).")
    out = Path("outputs/loss_by_bytes.png")
    add("--out", type=Path, default=out, help=f"Path of the picture (default: {out}).")
    return parser


if __name__ == "__main__":
    sys.exit(main())
