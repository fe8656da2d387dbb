"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from hf_dlion.options import BITS
from hf_dlion.tools.bench import codec, exchange, memory, ranks, train
from hf_dlion.tools.bench.emulate import EmulationRefusedError, Network
from hf_dlion.tools.bench.methods import METHODS, VOTING
from hf_dlion.tools.bench.report import MissingPackageError, require_rich

RUNS = {"exchange": exchange.run, "train": train.run, "memory": memory.run}


def main(argv: list[str] | None = None) -> int:
    """Runs a benchmark; returns the exit code.

    Args:
        argv: The words after `hf-dlion bench`; by default those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    args.json = args.json or f"outputs/bench_{args.bench}.json"
    try:
        require_rich()
        return _run(args, words)
    except (MissingPackageError, EmulationRefusedError, ValueError) as error:
        print(f"hf-dlion bench: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, words: list[str]) -> int:
    if args.bench == "codec":
        codec.run(args)
        return 0
    if args.bench == "train" and args.bits != [1]:
        _check_votes(args.methods or METHODS)
    network: Network | None = args.emulate
    if not ranks.started_by_launcher():
        count = args.ranks if network is None else network.hosts * args.local_ranks
        if count % args.local_ranks:
            raise ValueError(
                f"--ranks={count} cannot be divided into nodes of --local-ranks={args.local_ranks}"
            )
        local_ranks = None if network is None and args.local_ranks == 1 else args.local_ranks
        return ranks.launch(words, count, args.threads, network, local_ranks)
    ranks.refuse_under_launcher(network)
    ranks.take_part(RUNS[args.bench], args)
    return 0


def _check_votes(methods: Iterable[str]) -> None:
    if VOTING.keys().isdisjoint(methods):
        raise ValueError(f"--bits is of votes, and of --methods {' '.join(methods)} none votes")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-dlion bench", description=__doc__)
    benches = parser.add_subparsers(dest="bench", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", help="where to write the result (outputs/bench_NAME.json)")
    common.add_argument("--threads", type=_positive, default=1, help="torch's threads (1)")

    one = benches.add_parser("codec", parents=[common], help=codec.__doc__)
    one.add_argument("--parameters", type=_positive, default=50_000_000)
    one.add_argument("--repeats", type=_positive, default=7)
    one.add_argument(
        "--device", default="cpu", help='"cuda" times the Triton kernels beside a copy (cpu)'
    )

    one.add_argument(
        "--bits", type=int, nargs="+", choices=BITS, default=[1], help="of a vote; on the CPU (1)"
    )

    several = argparse.ArgumentParser(add_help=False, parents=[common])
    several.add_argument("--ranks", type=_positive, default=2, help="processes to start (2)")
    several.add_argument(
        "--emulate",
        type=_network,
        metavar="2x100mbit",
        help="ranks on hosts of one core with links of this rate; root, Linux",
    )
    several.add_argument(
        "--local-ranks",
        type=_positive,
        default=1,
        help="ranks on each emulated host; without --emulate, of --ranks, on each pretended node",
    )
    several.add_argument(
        "--seconds", type=float, default=25.0, help="a method stops after 3 repeats beyond this"
    )
    wire = benches.add_parser("exchange", parents=[several], help=exchange.__doc__)
    wire.add_argument("--parameters", type=_positive, default=29_500_000)
    wire.add_argument("--repeats", type=_positive, default=7)

    peak = benches.add_parser("memory", parents=[several], help=memory.__doc__)
    peak.add_argument("--parameters", type=_positive, default=29_500_000)

    step = benches.add_parser("train", parents=[several], help=train.__doc__)
    step.add_argument("--parameters", type=_positive, default=29_500_000)
    step.add_argument("--batch", type=_positive, default=1, help="sequences per rank (1)")
    step.add_argument("--sequence", type=_positive, default=128, help="tokens in each (128)")
    step.add_argument("--warmup", type=_positive, default=2)
    step.add_argument("--steps", type=_positive, default=5, help="measured steps (5)")
    step.add_argument(
        "--message-numel",
        type=_positive,
        metavar="N",
        help="elements per message, in place of the package's own numbers",
    )
    step.add_argument("--methods", nargs="+", choices=list(METHODS))
    step.add_argument(
        "--bits", type=int, nargs="+", choices=BITS, default=[1], help="of DistributedLion's votes"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _network(text: str) -> Network:
    try:
        return Network.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
