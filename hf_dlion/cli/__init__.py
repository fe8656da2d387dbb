"""The command `hf-dlion`: `doctor` checks a setup, `plan` predicts whether the exchange pays."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from hf_dlion import __version__
from hf_dlion.cli import arguments
from hf_dlion.cli.arguments import GPUS, Parser, did_you_mean

COMMANDS = ("doctor", "plan")

_DOCTOR = """\
Check whether this machine can train. Under torchrun, also what each rank has, whether the ranks
train together, and how fast the links between them are. The exit code is 1 if training would fail.
"""
_DOCTOR_EXAMPLES = """\
examples:
  hf-dlion doctor
  torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 --master_addr 10.0.0.1 --master_port 29500 \\
      -m hf_dlion doctor
"""
_PLAN = """\
Predict the time and the bytes of a training step under each method, and say whether the exchange of
votes pays. Without --gpu, the work of a rank is measured on this machine, in about 20 seconds.
"""
_PLAN_EXAMPLES = """\
columns: "sent" is what a rank sends in a step, "network" the part of a step that waits for the
network, "memory" weights, gradients and optimizer state of a rank, without activations.

examples:
  hf-dlion plan 7b --ranks 8 --ranks-per-node 4 --link 10gbit --dtype bf16 --gpu h100
  hf-dlion plan ./my-model --ranks 2 --link 1gbit --step-ms 450
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    Args:
        argv: Words after `hf-dlion` (default: those of this process).

    Raises:
        SystemExit: With code 2 and a message, if `argv` cannot be run; with code 0 after help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"unknown command {words[0]!r}{did_you_mean(words[0], COMMANDS)}")
    args = parser.parse_args(words)
    try:
        code: int = import_module(f"hf_dlion.cli.{args.command}").run(args)
    except (OSError, ValueError) as error:
        print(f"hf-dlion {args.command}: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="hf-dlion",
        description="Check a setup for Distributed Lion, or predict whether it pays.",
        epilog="examples:\n  hf-dlion doctor\n  hf-dlion plan 7b --link 10gbit --gpu h100\n",
    )
    parser.add_argument("--version", action="version", version=f"hf-dlion {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser(
        "doctor",
        help="what this machine, or each rank under torchrun, has, and whether it can train",
        description=_DOCTOR,
        epilog=_DOCTOR_EXAMPLES,
    )
    plan = commands.add_parser(
        "plan",
        help="predicted time and bytes of a step, and whether the exchange pays",
        description=_PLAN,
        epilog=_PLAN_EXAMPLES,
    )
    _add_options_of_plan(plan)
    return parser


def _add_options_of_plan(plan: Parser) -> None:
    add = plan.add_argument
    add(
        "model",
        metavar="MODEL",
        type=arguments.model,
        help="parameter count such as 350m or 7b, folder with a config.json, or name on the hub",
    )
    add(
        "--link",
        required=True,
        metavar="RATE",
        type=arguments.rate,
        help="rate of a node's network card, such as 100mbit, 1gbit, or 25g (required)",
    )
    add("--ranks", type=arguments.positive, metavar="N", help="number of ranks (default: two nodes)")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    add(
        "--ranks-per-node",
        type=arguments.positive,
        metavar="L",
        help=f"number of ranks that share a network card (default: --shard, or {local_ranks})",
    )
    add(
        "--shard",
        type=arguments.positive,
        default=1,
        metavar="L",
        help="number of ranks that shard a model with FSDP2, all on one node (default: 1, DDP)",
    )
    add(
        "--gpu",
        type=arguments.gpu,
        metavar="NAME",
        help=f"GPU of each rank, {', '.join(GPUS)}: the work is computed from its published "
        f"limits (default: this machine, measured)",
    )
    add(
        "--dtype",
        type=arguments.dtype,
        default="float32",
        help="dtype of weights and gradients, float32 or bfloat16 (default: float32)",
    )
    add(
        "--trainable",
        type=arguments.count,
        metavar="COUNT",
        help="number of trained parameters, such as 40m with LoRA (default: all)",
    )
    add(
        "--step-ms",
        type=arguments.above_zero,
        metavar="MS",
        help="measured time of forward and backward of a rank, in ms (default: estimated)",
    )
    add(
        "--batch",
        type=arguments.positive,
        default=1,
        help="number of sequences of a rank per step, accumulated ones included (default: 1)",
    )
    add(
        "--sequence",
        type=arguments.positive,
        help="number of tokens per sequence (default: 2048 on a GPU, else 128)",
    )
    add(
        "--mfu",
        type=arguments.share,
        help="share of the GPU's peak that training reaches, with --gpu (default: 0.4)",
    )
    add(
        "--latency-ms",
        type=arguments.above_zero,
        default=0.1,
        metavar="MS",
        help="time of a short message from one node to another, in ms (default: 0.1)",
    )
    add(
        "--efficiency",
        type=arguments.share,
        default=0.94,
        help="share of the rate that carries payload; 1 for a measured rate (default: 0.94, TCP)",
    )
    add(
        "--format",
        choices=("table", "markdown", "json"),
        default="table",
        help="format of the output (default: table)",
    )
