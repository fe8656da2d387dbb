"""What a plan's options ask for: the link, the nodes, a rank's own work."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch

from hf_dlion.tools import ranks
from hf_dlion.tools.plan import gpu, link, machine
from hf_dlion.tools.plan.cost import Cluster, Link
from hf_dlion.tools.plan.gpu import GPUS
from hf_dlion.tools.plan.machine import Machine
from hf_dlion.tools.plan.model import Workload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MEASURE = "measure"
_GPUS = f"{', '.join(list(GPUS)[:-1])} or {list(GPUS)[-1]}"
# Options that say nothing beside others.
_OF_A_PLAN = (
    *("model", "ranks", "ranks_per_node", "shard", "trainable", "dtype", "step_ms", "mfu"),
    *("gpu", "batch", "sequence", "threads", "table", "plot"),
)
_OF_A_RATE = ("latency_ms", "efficiency")


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Checks before any work starts that nothing was asked for in vain.

    Raises:
        ValueError: If something was, or something is missing.
    """

    def refuse(names: tuple[str, ...], why: str) -> None:
        for name in names:
            if getattr(args, name) != parser.get_default(name):
                word = name if name == "model" else f"--{name.replace('_', '-')}"
                raise ValueError(f"{word} says nothing beside {why}: leave it out")

    if args.validate is not None:
        refuse(_OF_A_PLAN, "--validate, whose run has all of that")
    elif args.model is None:
        raise ValueError("say what to train: a count such as 7b, a folder, or a name on the hub")
    elif args.link is None and not args.table:
        raise ValueError("give --link (for example 1gbit, or measure), or --table for several")
    if args.table:
        refuse(("ranks",), "--table, which has its own numbers of nodes")
    if args.link is not None and args.link.endswith(".json"):
        refuse(_OF_A_RATE, "the JSON of benchmarks/exchange.py")
    if args.link == MEASURE:
        refuse(_OF_A_RATE, "--link measure")
    if args.gpu is None and args.mfu is not None:
        raise ValueError(f"--mfu is a share of a GPU's peak: give --gpu {_GPUS}, too")
    if args.gpu is not None and args.codec is not None:
        raise ValueError("--gpu computes the constants that --codec reads: give one of them")
    if args.gpu is not None and args.step_ms == MEASURE:
        raise ValueError(
            "--gpu computes the time that --step-ms measure would measure here: give one of them, "
            "or --step-ms with the milliseconds that the GPU takes"
        )


def link_of(args: argparse.Namespace) -> Link | None:
    """Returns the link, or None on a rank that has only helped to measure it.

    Raises:
        ValueError: If there is no such link.
        UnmeasurableError: If it cannot be measured here.
    """
    if args.link is None:
        return given_link(args, "1gbit")  # the table puts its own rates in
    if args.link != MEASURE:
        return given_link(args, args.link)
    if args.backend == "nccl" and not torch.cuda.is_available():
        raise ValueError(
            "--backend nccl with --link measure needs a GPU that torch can use, and torch sees "
            "none here: leave out --backend, or give the rate: --link 1gbit"
        )
    link.check_measurable()
    found: list[Link] = []
    ranks.take_part(lambda: found.append(link.measured()), args.threads)
    return found[0] if os.environ["RANK"] == "0" else None


def given_link(args: argparse.Namespace, text: str) -> Link:
    """Returns the link of a rate, or of the JSON of benchmarks/exchange.py.

    Raises:
        ValueError: If the text is neither.
    """
    nccl = (args.backend or ("nccl" if on_gpu(args) else "gloo")) == "nccl"
    if text == MEASURE:
        raise ValueError("--validate compares with a run that is over: give its link as a rate")
    if text.endswith(".json"):
        return link.from_exchange_bench(Path(text), nccl)
    return replace(link.given(text, args.latency_ms, nccl), efficiency=args.efficiency)


def cluster_of(args: argparse.Namespace) -> Cluster:
    """Returns the nodes; those of a model that is sharded hold a replica each.

    Raises:
        ValueError: If they cannot.
    """
    per_node: int = args.shard if args.ranks_per_node == 1 else args.ranks_per_node
    if args.shard not in (1, per_node):
        raise ValueError(
            f"--shard={args.shard} with --ranks-per-node={per_node}: a plan has one replica in "
            f"each node, so leave out --ranks-per-node, or give the same number"
        )
    launched = int(os.environ.get("WORLD_SIZE", "0"))
    return Cluster(ranks=args.ranks or launched or 2 * per_node, ranks_per_node=per_node)


def on_gpu(args: argparse.Namespace) -> bool:
    """Returns whether the ranks have GPUs: the plan's, or those of this machine."""
    return args.gpu is not None or torch.cuda.is_available()


def machine_of(args: argparse.Namespace) -> Machine:
    """Returns what a rank's own work takes: computed, read, or measured in some seconds.

    Raises:
        ValueError: If `--codec` is no such file.
    """
    dtype = DTYPES[args.dtype]
    if args.gpu is not None:
        return gpu.machine_of(GPUS[args.gpu], dtype, args.bits)
    # Before the seconds that measuring takes.
    file = None if args.codec is None else Path(args.codec)
    known = {} if file is None else machine.of_codec_bench(file, args.dtype, args.bits)
    own = machine.measure(dtype, ranks.device_of_rank(), args.bits)
    return (
        own if file is None else replace(own, **known, source=f"{file.name}; the rest {own.source}")
    )


def compute_of(args: argparse.Namespace, work: Workload) -> tuple[float, str]:
    """Returns the seconds of forward and backward, and where they come from."""
    sequence = args.sequence or (gpu.SEQUENCE if args.gpu is not None else 128)
    device, tokens = ranks.device_of_rank(), (args.batch, sequence)
    size = f"{args.batch} x {sequence} tokens"
    if args.step_ms == MEASURE:
        seconds = machine.model_s(args.model, DTYPES[args.dtype], *tokens, device)
        return seconds, f"measured on this machine ({size})"
    if args.step_ms is not None:
        return 1e-3 * args.step_ms, "given"
    if args.gpu is None:
        seconds = machine.stand_in_s(work.parameters, *tokens, device)
        return seconds, f"two Llamas on this machine ({size}), and the line through their times"
    own, mfu = GPUS[args.gpu], args.mfu or gpu.MFU
    flops = (
        "6 FLOPs per parameter"
        if work.trainable == work.parameters
        else "4 FLOPs per parameter, 2 more per trained one,"
    )
    return gpu.compute_s(own, work, args.batch * sequence, mfu), (
        f"assumed: {flops} and token, {size} per rank, {100 * mfu:.0f} % of the "
        f"{own.flops / 1e12:.0f} TFLOPS of an {own.name} in bfloat16: {own.source}"
    )


def notes_of(args: argparse.Namespace, work: Workload) -> list[str]:
    """Returns what is to be said of the machine: what fits into it, and what it is not."""
    notes = []
    if args.gpu is not None:
        notes.append(gpu.memory_note(GPUS[args.gpu], work, DTYPES[args.dtype], args.shard))
    if not on_gpu(args):
        both = args.step_ms in (None, MEASURE)
        notes.append(
            f"CAUTION: the work per element{' and the compute time were' if both else ' was'} "
            f"measured on the CPU of this machine. A rank with a GPU is another thing: give --gpu "
            f"{_GPUS}, or run this where you will train."
        )
    return [note for note in notes if note]
