"""The command `hf-dlion`: `run` starts commands, `doctor` checks a setup, `plan` predicts times."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from hf_dlion import __version__
from hf_dlion.cli import arguments
from hf_dlion.cli.arguments import Parser, above_zero, did_you_mean, positive
from hf_dlion.cli.gpus import GPUS

COMMANDS = ("run", "doctor", "plan")

_RUN = """\
Run a command in whose Python processes optim="dlion" is a valid name, also in those that it starts
on this machine. On several nodes, if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is unset, each rank
sets it to the network interface that leads to MASTER_ADDR.
"""
_RUN_EXAMPLES = """\
examples:
  hf-dlion run torchrun --nproc_per_node 2 train.py --optim dlion
  hf-dlion run accelerate launch --multi_gpu --num_processes 2 train.py --optim dlion
  FORCE_TORCHRUN=1 hf-dlion run llamafactory-cli train config.yaml
"""
_DOCTOR = """\
Check whether this machine can train. Under torchrun, also check what each rank has, whether the
ranks train together, and how fast the links between them are. The exit code is 1 if training would
fail.
"""
_DOCTOR_EXAMPLES = """\
examples:
  hf-dlion doctor
  torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 --master_addr 10.0.0.1 --master_port 29500 \\
      -m hf_dlion doctor
"""
_PLAN = """\
Predict the time, the bytes, and the memory of a training step under each method, and whether the
exchange of votes pays. Without --gpu, the work of a rank is measured on this machine: stop other
work first.
"""
_PLAN_EXAMPLES = """\
columns: "sent" is what a rank sends in a step, "network" the part of a step that waits for the
network, "vs. no network" the ratio to a step of AdamW without network, and "memory" the weights,
gradients, DDP's buckets, and optimizer state of a rank, without activations, for which the advice
leaves a tenth of a GPU. "AdamW on one node" accumulates the batches of all nodes.

examples:
  hf-dlion plan 1b --ranks 8 --ranks-per-node 4 --link 10gbit --gpu h100 --tokens 16384
  hf-dlion plan ./my-model --ranks 2 --link 1gbit --step-ms 450
"""
_EXAMPLES = """\
examples:
  hf-dlion doctor
  hf-dlion plan 1b --link 1gbit --gpu rtx4090
  hf-dlion run torchrun --nproc_per_node 2 train.py --optim dlion
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in `argv` (default: this process's arguments) and returns its exit code.

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
    except BrokenPipeError:  # The reader, such as `head`, closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For the flush at the end.
        return 1
    except (OSError, ValueError) as error:
        print(f"hf-dlion {args.command}: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> Parser:
    about = "Train with Distributed Lion, check a setup for it, or predict whether it pays."
    parser = Parser(prog="hf-dlion", description=about, epilog=_EXAMPLES)
    parser.add_argument(
        "--version",
        action="version",
        version=f"hf-dlion {__version__}",
        help="Print the version and exit.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    summary = 'Run a command in whose Python processes optim="dlion" is a valid name.'
    run = commands.add_parser("run", help=summary, description=_RUN, epilog=_RUN_EXAMPLES)
    text = "Command to run, with its arguments."
    run.add_argument("words", nargs=argparse.PARSER, metavar="COMMAND", help=text)
    summary = "Check whether this machine, or each rank under torchrun, can train."
    commands.add_parser("doctor", help=summary, description=_DOCTOR, epilog=_DOCTOR_EXAMPLES)
    summary = "Predict the time and the bytes of a step, and whether the exchange pays."
    plan = commands.add_parser("plan", help=summary, description=_PLAN, epilog=_PLAN_EXAMPLES)
    _add_options_of_plan(plan)
    return parser


def _add_options_of_plan(plan: Parser) -> None:
    def add(name: str, kind: Callable[[str], Any], unit: str, text: str, **rest: Any) -> None:
        plan.add_argument(name, type=kind, metavar=unit, help=text, **rest)

    add("model", arguments.model, "MODEL", "Parameter count such as 7b, model folder, or hub name.")
    card = "Rate of a node's network card, such as 100mbit, 1gbit, or 25g (required)."
    add("--link", arguments.rate, "RATE", card, required=True)
    add("--ranks", positive, "N", "Number of ranks (default: two nodes).")
    add("--ranks-per-node", positive, "L", "Ranks per node (default: --shard).")
    shard = "Ranks of a node that shard a model with FSDP2 (default: 1, DDP)."
    add("--shard", positive, "L", shard, default=1)
    add(
        "--gpu", arguments.gpu, "NAME", f"GPU of a rank: {', '.join(GPUS)} (default: this machine)."
    )
    weights = "Dtype of trained weights and of gradients, fp32 or bf16 (default: fp32)."
    add("--dtype", arguments.dtype, "DTYPE", weights, default="float32")
    trained = "Trained parameters, as with LoRA; the others are bfloat16 (default: all)."
    add("--trainable", arguments.count, "COUNT", trained)
    add("--step-ms", above_zero, "MS", "Time of forward and backward (default: estimated).")
    tokens = "Tokens of a rank per step, with accumulation (default: 8192, on a CPU 128)."
    add("--tokens", positive, "N", tokens)
    every = "Steps per exchange (default: the fewest from 2 to 32 for 10%% of the time or less)."
    add("--vote-every", positive, "K", every)
    latency = "Time of a short message between nodes (default: 0.1)."
    add("--latency-ms", above_zero, "MS", latency, default=0.1)
    payload = "Payload's share of the rate, 1 for a measured rate (default: 0.94, TCP)."
    add("--efficiency", partial(above_zero, most=1.0), "SHARE", payload, default=0.94)
    formats = ("table", "markdown", "json")
    text = "Output: table, markdown, or json (default: table)."
    plan.add_argument("--format", choices=formats, default="table", metavar="FORMAT", help=text)
