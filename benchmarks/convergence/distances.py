"""Prints a Markdown table of losses: those of the first method, and how far the others are from it.

A column is a number of ranks, with a pair of Lion's betas. A cell has the mean over the seeds,
their standard deviation, and the learning rate: the best of those with most seeds, with a star if
no lower, or no higher one was tried. Distances are paired by seed. Bytes are those of the first
column that has runs.

Examples:
  python -m benchmarks.convergence.distances RUNS.jsonl --methods adamw localsgd32 majority
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import exit_code_of
from benchmarks.convergence.results import Record, Result, best, read, with_spread
from benchmarks.methods import BETAS, method_of
from hf_dlion.cli.arguments import Parser, positive


def table(
    records: Sequence[Record],
    methods: Sequence[str],
    *,
    workers: Sequence[int],
    betas: Sequence[tuple[float, float]],
    steps: int,
) -> list[list[str]]:
    """Returns the rows, the first one with titles; a setting without records is an empty cell.

    The last column has the bytes of the first number of workers.
    """
    columns = list(itertools.product(workers, betas))
    titles = [f"{n} ranks" + f", {pair}" * (len(betas) > 1) for n, pair in columns]
    rows = [["", *titles, f"bytes per step, {workers[0]} ranks"]]
    references = {n: best(records, methods[0], workers=n, steps=steps) for n in workers}
    for method in methods:
        lion = method_of(method).family == "lion"
        found: list[Result | None] = []
        for n, pair in columns:
            try:
                result = best(records, method, workers=n, steps=steps, betas=pair if lion else None)
            except ValueError:
                result = None
            found.append(result)
        cells = [
            _cell(result, references[n]) if result else ""
            for result, (n, _) in zip(found, columns, strict=True)
        ]
        of_first = [result for result in found[: len(betas)] if result]
        sent = f"{of_first[0].average('bytes_per_step'):,.0f}" if of_first else ""
        rows.append([method_of(method).title, *cells, sent])
    return rows


def _cell(result: Result, reference: Result) -> str:
    is_reference = result.setting.method == reference.setting.method
    values = result.losses if is_reference else result.gaps_to(reference)
    rate = np.format_float_scientific(result.setting.lr, trim="-", exp_digits=1)
    star = "*" if result.at_edge or len(result.grid) == 1 else ""
    return f"{with_spread(values.values(), sign=not is_reference)} ({rate}){star}"


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)

    def run() -> None:
        rows = table(
            read(args.files), args.methods,
            workers=args.workers, betas=args.betas, steps=args.steps,
        )  # fmt: skip
        for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
            print(f"| {' | '.join(row)} |")

    return exit_code_of(parser, run)


def _betas(text: str) -> tuple[float, float]:
    try:
        first, second = map(float, text.split(","))
    except ValueError:
        message = f"must be two numbers such as 0.9,0.98 (got {text})"
        raise argparse.ArgumentTypeError(message) from None
    return first, second


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.convergence.distances", description=__doc__)
    add: Any = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="Records of runs.")
    methods = "Methods, as in the records, in the order of the rows."
    add("--methods", nargs="+", required=True, metavar="METHOD", help=methods)
    add("--workers", nargs="+", type=positive, default=[2, 8], help="Ranks (default: 2 8).")
    betas = "Betas of Lion (default: {:g},{:g}).".format(*BETAS)
    add("--betas", nargs="+", type=_betas, default=[BETAS], metavar="B1,B2", help=betas)
    add("--steps", type=positive, default=2000, help="Steps of a run (default: 2000).")
    return parser


if __name__ == "__main__":
    sys.exit(main())
