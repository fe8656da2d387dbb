"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys

from hf_dlion.bench import codec
from hf_dlion.bench.report import MissingPackageError, require_rich


def main(argv: list[str] | None = None) -> int:
    """Runs a benchmark; returns the exit code.

    Args:
        argv: The words after `python -m hf_dlion.bench`; by default those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    args.json = args.json or f"outputs/bench_{args.bench}.json"
    try:
        require_rich()
        codec.run(args)
    except MissingPackageError as error:
        print(f"hf_dlion.bench: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-dlion bench", description=__doc__)
    benches = parser.add_subparsers(dest="bench", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", help="where to write the result (outputs/bench_NAME.json)")
    common.add_argument("--threads", type=_positive, default=1, help="torch's threads (1)")

    one = benches.add_parser("codec", parents=[common], help=codec.__doc__)
    one.add_argument("--parameters", type=_positive, default=50_000_000)
    one.add_argument("--repeats", type=_positive, default=7)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value
