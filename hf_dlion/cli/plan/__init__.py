"""`hf-dlion plan`: one table of methods, and a sentence of advice."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from hf_dlion.cli.plan.advice import advice, warning
from hf_dlion.cli.plan.machine import (
    GPUS,
    MFU,
    TOKENS,
    Machine,
    computed,
    computed_compute_s,
    here,
    measured,
)
from hf_dlion.cli.plan.methods import NONE, Case, Link, Prediction, predict
from hf_dlion.cli.plan.workload import Workload, workload


def run(args: argparse.Namespace) -> int:
    """Predicts and prints.

    Raises:
        ValueError: If the arguments don't describe a training that can be predicted.
        OSError: If a model's folder cannot be read.
    """
    if args.efficiency > 1:
        raise ValueError(f"--efficiency must be at most 1 (got {args.efficiency})")
    work = workload(args.model, args.trainable)
    dtype: torch.dtype = getattr(torch, args.dtype)
    per_node = args.ranks_per_node or args.shard
    link = Link(bits_per_s=args.link, latency_s=1e-3 * args.latency_ms, efficiency=args.efficiency)
    with Console(stderr=True).status("Measuring this machine" if args.gpu is None else "Computing"):
        costs, others, notes = _costs(args, work, dtype)
    cases = [
        Case(
            work=work, ranks=args.ranks or 2 * per_node, per_node=per_node, shard=args.shard,
            link=link, machine=machine, compute_s=compute_s, dtype=dtype,
            vote_every=args.vote_every,
        )
        for machine, compute_s in costs
    ]  # fmt: skip
    case, found = cases[0], [predict(own) for own in cases]
    if work.note:
        notes.append(f"shapes: assumed, {work.note}")
    if case.per_node > 1:
        notes.append("traffic inside a node: not counted")
    warned, told = warning(found, others), advice(case, found, others)
    if args.format == "json":
        result = _result(case, found[0])
        print(
            json.dumps(
                {**result, "assumptions": notes, "warning": warned, "advice": told}, indent=1
            )
        )
        return 0
    _print(_table(case, found[0], markdown=args.format == "markdown"))
    _print("Assumptions: " + "; ".join(notes) + ".")
    if warned:
        _print("\n" + warned)
    _print("\n" + told)
    return 0


def _costs(
    args: argparse.Namespace, work: Workload, dtype: torch.dtype
) -> tuple[list[tuple[Machine, float]], float, list[str]]:
    """Returns what `measured` returns, also for a GPU that is not here, and notes.

    Raises:
        ValueError: If this machine would have to stand for one that can train the model.
    """
    given_s, others = None if args.step_ms is None else 1e-3 * args.step_ms, 0.0
    if args.gpu is None:
        _check_judge(args, work, dtype)
        tokens = args.tokens or TOKENS[here()[0].type]
        costs, others = measured(work, dtype, tokens, given_s)
        source = f"{tokens:,} tokens per rank, from two small transformers on this machine"
    else:
        gpu, tokens = GPUS[args.gpu], args.tokens or TOKENS["cuda"]
        costs = [(computed(gpu, dtype), given_s or computed_compute_s(gpu, work, tokens))]
        source = f"{tokens:,} tokens per rank at {MFU:.0%} of the peak of an {gpu.name}"
    machine, compute_s = costs[0]
    return costs, others, [
        f"forward and backward: {1e3 * compute_s:,.0f} ms ({'given' if given_s else source})",
        f"optimizer and votes: {machine.source}",
    ]  # fmt: skip


def _check_judge(args: argparse.Namespace, work: Workload, dtype: torch.dtype) -> None:
    """Refuses to judge a model by the CPU of a machine that cannot train it."""
    device, _, memory = here()
    needed = dtype.itemsize * (work.parameters + 2 * work.trainable) / args.shard
    if device.type == "cpu" and needed > memory:
        raise ValueError(
            f"training {work.name} needs {needed / 1e9:,.0f} GB per rank even with Lion, and this "
            f"machine has {memory / 1e9:,.0f} GB and no GPU, so its CPU says nothing about the "
            f"time of a step. Pass the GPU that you will train on, such as --gpu h100, or run this "
            f"command there"
        )


def _table(case: Case, predictions: dict[str, Prediction], *, markdown: bool) -> Table:
    work, rate = case.work, case.link.bits_per_s
    unit, size = ("Gbit/s", 1e9) if rate >= 1e9 else ("Mbit/s", 1e6)
    trained = "" if work.trainable == work.parameters else f", {work.trainable:,} trained"
    found = Table(
        title=f"{work.name} ({work.parameters:,} parameters{trained}), {case.ranks} ranks on "
        f"{case.nodes} nodes, {rate / size:.3g} {unit}: predicted, per step and rank",
        box=box.MARKDOWN if markdown else box.ROUNDED,
        title_justify="left",
    )
    found.add_column("method", no_wrap=True)
    for heading in ("sent", "step", "network", "vs. no network", "memory"):
        found.add_column(heading, justify="right", no_wrap=True)
    for name, own in predictions.items():
        found.add_row(
            name,
            _size(own.wire_bytes),
            f"{1e3 * own.step_s:,.0f} ms",
            f"{1e3 * own.parts.get('network', 0.0):,.0f} ms",
            f"{own.step_s / predictions[NONE].step_s:.2f}",
            _size(own.memory_bytes),
        )
    return found


def _result(case: Case, predictions: dict[str, Prediction]) -> dict[str, Any]:
    work = case.work
    return {
        "model": {"name": work.name, "parameters": work.parameters, "trainable": work.trainable},
        "ranks": case.ranks,
        "nodes": case.nodes,
        "shard": case.shard,
        "link_bits_per_s": case.link.bits_per_s,
        "methods": [
            {
                "name": name,
                "wire_bytes": own.wire_bytes,
                "step_ms": 1e3 * own.step_s,
                **{f"{part}_ms": 1e3 * seconds for part, seconds in own.parts.items()},
                "memory_bytes": own.memory_bytes,
            }
            for name, own in predictions.items()
        ],
    }


def _print(what: Table | str) -> None:
    """Prints to a terminal as wide as it is; elsewhere nothing is cut or wrapped."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False)
    if isinstance(what, Table) and not sys.stdout.isatty():
        console.width = 200
    console.print(what)


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.{1 if count < 100 * size else 0}f} {unit}"
    return f"{count:,.0f} B"
