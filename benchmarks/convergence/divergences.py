"""Draws how far the ranks' momenta differ in the course of a run with momentum_sync="auto".

Each kind of tensor is a line, the mean over its tensors. 0: all ranks have the same momentum;
1 - 1/N: the momenta of N ranks are independent.

Examples:
  python -m benchmarks.convergence.divergences outputs/study/runs.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.command import exit_code_of
from benchmarks.convergence.results import Record
from benchmarks.plot import figure, save
from hf_dlion.cli.arguments import Parser

# A Llama's kinds of tensors, by a part of their names; the first that matches counts.
KINDS = {
    "embed_tokens": "embedding",
    "norm": "norms",
    "q_proj": "queries and keys",
    "k_proj": "queries and keys",
    "v_proj": "values and output",
    "o_proj": "values and output",
    "mlp": "MLP",
}


def by_kind(record: Record) -> dict[str, list[tuple[int, float]]]:
    """Returns step and mean divergence for each measurement, by kind of tensor."""
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for step, divergences in record["divergences"]:
        kinds: dict[str, list[float]] = defaultdict(list)
        for name, value in divergences.items():
            kinds[next((KINDS[part] for part in KINDS if part in name), "others")].append(value)
        for kind, values in kinds.items():
            lines[kind].append((step, statistics.fmean(values)))
    return lines


def draw(record: Record, path: Path) -> Path:
    """Draws a line for each kind of tensor; returns the path."""
    drawn, panels = figure(1, height=3.6)
    for kind, points in by_kind(record).items():
        panels[0].plot(*zip(*points, strict=True), marker="o", ms=4, label=kind)
    panels[0].set_ylim(bottom=0)
    panels[0].set_xlabel("step")
    panels[0].set_ylabel("divergence of momenta")
    title = f'{record["setting"]["workers"]} ranks, momentum_sync="auto"'
    return save(drawn, panels, title, path)


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)

    def run() -> None:
        records = [json.loads(line) for line in args.file.read_text().splitlines()]
        measured = [record for record in records if record.get("divergences")]
        if not measured:
            raise ValueError(f'{args.file} has no run with momentum_sync="auto"')
        print(f"drawn: {draw(measured[-1], args.out)}")

    return exit_code_of(parser, run)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.convergence.divergences", description=__doc__)
    add: Any = parser.add_argument
    add("file", type=Path, metavar="FILE", help="Records of runs, of which the last one is drawn.")
    out = Path("outputs/divergences.png")
    add("--out", type=Path, default=out, help=f"Path of the picture (default: {out}).")
    return parser


if __name__ == "__main__":
    sys.exit(main())
