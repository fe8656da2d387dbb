"""What the benchmarks' command lines share, and what they print and write."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hf_dlion.tools.arguments import Parser, add_format, exit_code, positive
from hf_dlion.tools.ranks import take_part
from hf_dlion.tools.report import MissingPackageError, Output, write_json

from benchmarks import ranks
from benchmarks.emulate import EmulationRefusedError, Network

# Titles of the columns of a `summary`.
TIMES = {"median_ms": "median ms", "min_ms": "min", "max_ms": "max"}
# A slow task may stop after so many repeats: the fewest that have a median and a spread.
FEWEST = 3
# A matrix of this many rows and columns is a usual tensor of a model of this kind.
ROW = 1024
LARGEST = 4096 * ROW


def parser_of(script: str, about: str | None) -> Parser:
    """Returns the options that all benchmarks have."""
    parser = Parser(prog=f"benchmarks/{Path(script).name}", description=about)
    name = {"step_time": "train"}.get(Path(script).stem, Path(script).stem)
    out = f"outputs/bench_{name}.json"
    parser.add_argument("--json", default=out, help=f"where to write the result ({out})")
    parser.add_argument("--threads", type=positive, default=1, help="torch's threads (1)")
    add_format(parser)
    return parser


def add_ranks(parser: Parser, *, timed: bool) -> None:
    """Adds the options of what several ranks do; of what is timed, where these are."""
    add = parser.add_argument
    add("--parameters", type=positive, default=29_500_000)
    add("--ranks", type=positive, help="processes to start (2)")
    parser.set_defaults(emulate=None, local_ranks=1)
    if timed:
        emulated = "ranks on hosts of one core with links of this rate; root, Linux"
        add("--emulate", type=_network, metavar="2x100mbit", help=emulated)
        local = "on each emulated host; without --emulate, of --ranks, on each pretended node"
        add("--local-ranks", type=positive, default=1, help=f"ranks {local}")
        stop = "a method stops after 3 repeats beyond this"
        add("--seconds", type=float, default=25.0, help=stop)


def told(parser: Parser, run: Callable[[], object]) -> int:
    """Returns the exit code of `run`; an error that a user can put right takes one line."""
    errors = EmulationRefusedError, MissingPackageError, ImportError, OSError, ValueError
    return exit_code(parser.prog, run, *errors)


def start(
    script: str, run: Callable[[argparse.Namespace], None], parser: Parser, argv: list[str] | None
) -> int:
    """Returns the exit code of a benchmark of several ranks.

    Where a launcher started this process it takes part, and otherwise starts them.

    Args:
        script: The benchmark's file.
        run: What every rank calls.
        parser: With all options.
        argv: The words of the command line; by default those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    return told(parser, lambda: _start(script, run, args, words))


def _start(
    script: str,
    run: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    words: list[str],
) -> int:
    network: Network | None = args.emulate
    # Where the result will lie: better refused now than after minutes.
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    if "check" in args:
        args.check(args)
    if ranks.is_rank():
        ranks.refuse_under_launcher(network)
        take_part(lambda: run(args), args.threads)
        return 0
    if network is not None and args.ranks is not None:
        raise ValueError("--emulate says how many hosts there are: give --local-ranks, not --ranks")
    count = args.ranks or 2 if network is None else network.hosts * args.local_ranks
    if count % args.local_ranks:
        raise ValueError(
            f"--ranks={count} cannot be divided into nodes of --local-ranks={args.local_ranks}"
        )
    local_ranks = count if network is None and args.local_ranks == 1 else args.local_ranks
    return ranks.launch(script, words, count, local_ranks, args.threads, network)


def shapes(parameters: int) -> list[torch.Size]:
    """Returns matrices of rows of 1024, and a vector for the rest."""
    found = [torch.Size((LARGEST // ROW, ROW))] * (parameters // LARGEST)
    rest = parameters % LARGEST
    if rest >= ROW:
        found.append(torch.Size((rest // ROW, ROW)))
    if rest % ROW:
        found.append(torch.Size((rest % ROW,)))
    return found


def is_over(times: Sequence[float], seconds: float) -> bool:
    """Returns whether a task has had its share of time: after as many repeats as have a spread."""
    return len(times) >= FEWEST and sum(times) > seconds


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Returns the median and the spread of repeated times, in milliseconds."""
    times = [1e3 * value for value in seconds]
    return {
        "repeats": len(times),
        "median_ms": statistics.median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "times_ms": times,
    }


def publish(
    name: str,
    args: argparse.Namespace,
    config: Mapping[str, Any],
    before: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
) -> None:
    """Prints the rows as a table and writes them as JSON."""
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
    out.table(f"{name} on this machine", columns, rows)
    where = f"{before['processor']}, {before['usable_cores']} of {before['cores']} cores"
    versions = f"torch {before['torch']}, {before['threads']} threads"
    load = f"load {before['load_average'][0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    out.line(f"{where}, {versions}, {load}")
    out.line(" ".join(f"{key}={value}" for key, value in config.items()))
    out.line(f"written: {args.json}")
    out.result(result)


def _network(text: str) -> Network:
    try:
        return Network.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
