"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

from hf_dlion.options import BITS
from hf_dlion.tools.arguments import Parser, add_format, exit_code, positive
from hf_dlion.tools.bench import codec, exchange, memory, plot, ranks, train
from hf_dlion.tools.bench.emulate import EmulationRefusedError, Network
from hf_dlion.tools.bench.methods import METHODS, VOTING, check_methods
from hf_dlion.tools.bench.model import made, sizes_of
from hf_dlion.tools.report import MissingPackageError

RUNS = {"exchange": exchange.run, "train": train.run, "memory": memory.run}


def main(argv: list[str] | None = None) -> int:
    """Runs a benchmark; returns the exit code.

    Args:
        argv: The words after `hf-dlion bench`; by default those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    if args.bench == "plot":
        drawn = (MissingPackageError, OSError, ValueError)
        return exit_code("bench plot", lambda: plot.run(args), *drawn)
    args.json = args.json or f"outputs/bench_{args.bench}.json"
    told = (EmulationRefusedError, ImportError, OSError, ValueError)
    return exit_code("bench", lambda: _run(args, words), *told)


def _run(args: argparse.Namespace, words: list[str]) -> int:
    # Where the result will lie: better refused now than after minutes.
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    if args.bench == "codec":
        codec.run(args)
        return 0
    if args.bench == "train":
        check_methods(args.methods or ())
        sizes_of(lambda: made(args.parameters, args.model))
        methods = args.methods or list(VOTING)
        if args.bits != [1] and VOTING.keys().isdisjoint(methods):
            raise ValueError(f"--bits is of votes, and of --methods {' '.join(methods)} none votes")
    network: Network | None = args.emulate
    if ranks.is_rank():
        ranks.refuse_under_launcher(network)
        ranks.take_part(RUNS[args.bench], args)
        return 0
    if network is not None and args.ranks is not None:
        raise ValueError("--emulate says how many hosts there are: give --local-ranks, not --ranks")
    count = args.ranks or 2 if network is None else network.hosts * args.local_ranks
    if count % args.local_ranks:
        raise ValueError(
            f"--ranks={count} cannot be divided into nodes of --local-ranks={args.local_ranks}"
        )
    local_ranks = count if network is None and args.local_ranks == 1 else args.local_ranks
    return ranks.launch(words, count, local_ranks, args.threads, network)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="hf-dlion bench", description=__doc__)
    benches = parser.add_subparsers(dest="bench", required=True)
    common = Parser(add_help=False)
    common.add_argument("--json", help="where to write the result (outputs/bench_NAME.json)")
    add_format(common)
    common.add_argument("--threads", type=positive, default=1, help="torch's threads (1)")

    add = benches.add_parser("codec", parents=[common], help=_summary(codec)).add_argument
    add("--parameters", type=positive, default=50_000_000)
    add("--repeats", type=positive, default=7)
    add("--device", default="cpu", help='"cuda" times the Triton kernels beside a copy (cpu)')
    add("--bits", type=int, nargs="+", choices=BITS, default=[1], help="of a vote; on the CPU (1)")

    several = Parser(add_help=False, parents=[common])
    add = several.add_argument
    add("--parameters", type=positive, default=29_500_000)
    add("--ranks", type=positive, help="processes to start (2)")
    several.set_defaults(emulate=None, local_ranks=1)
    timed = Parser(add_help=False, parents=[several])
    add = timed.add_argument
    add(
        "--emulate",
        type=_network,
        metavar="2x100mbit",
        help="ranks on hosts of one core with links of this rate; root, Linux",
    )
    add(
        "--local-ranks",
        type=positive,
        default=1,
        help="ranks on each emulated host; without --emulate, of --ranks, on each pretended node",
    )
    add("--seconds", type=float, default=25.0, help="a method stops after 3 repeats beyond this")
    add = benches.add_parser("exchange", parents=[timed], help=_summary(exchange)).add_argument
    add("--repeats", type=positive, default=7)

    benches.add_parser("memory", parents=[several], help=_summary(memory))

    add = benches.add_parser("train", parents=[timed], help=_summary(train)).add_argument
    add("--model", help="a folder, or a name on the hub, whose config takes --parameters' place")
    add("--batch", type=positive, default=1, help="sequences per rank (1)")
    add("--sequence", type=positive, default=128, help="tokens in each (128)")
    add("--warmup", type=positive, default=2)
    add("--steps", type=positive, default=5, help="measured steps (5)")
    add(
        "--message-numel",
        type=positive,
        metavar="N",
        help="elements per message, in place of the package's own numbers",
    )
    add("--methods", nargs="+", choices=list(METHODS), help="(those that torch alone can run)")
    add("--bits", type=int, nargs="+", choices=BITS, default=[1], help="of DistributedLion's votes")

    add = benches.add_parser("plot", help=_summary(plot)).add_argument
    add("files", nargs="+", metavar="FILE", help="JSON of bench train")
    add("--out", default="outputs/step-time.png", help="the picture (outputs/step-time.png)")
    return parser


def _summary(module: ModuleType) -> str:
    """Returns the first line of a benchmark's docstring."""
    return (module.__doc__ or "").partition("\n")[0]


def _network(text: str) -> Network:
    try:
        return Network.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
