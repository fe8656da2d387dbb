"""`hf-dlion plan`: one table of methods, and a sentence of advice.

The work of a rank (`machine`) on the tensors of a model (`workload`) and the bytes of each method
give the time of a step (`methods`), and the times give the advice.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from hf_dlion.cli.gpus import GPUS
from hf_dlion.cli.plan.advice import advice, warning
from hf_dlion.cli.plan.machine import computed, here, measured
from hf_dlion.cli.plan.methods import Case, Link, Prediction, check_ranks, predict
from hf_dlion.cli.plan.workload import Workload, workload


def run(args: argparse.Namespace) -> int:
    """Predicts and prints, or raises ValueError or OSError with a message for the user."""
    per_node = args.ranks_per_node or args.shard
    ranks = args.ranks or 2 * per_node
    check_ranks(ranks, per_node, args.shard, args.vote_every)  # Before it measures.
    work, dtype = workload(args.model, args.trainable), getattr(torch, args.dtype)
    link = Link(bits_per_s=args.link, latency_s=1e-3 * args.latency_ms, efficiency=args.efficiency)
    given_s, busy = None if args.step_ms is None else 1e-3 * args.step_ms, 0.0
    if args.gpu is None:
        _check_memory(work, dtype, args.shard)
        with Console(stderr=True).status("Measuring this machine"):
            try:
                machines, busy = measured(work, dtype, args.tokens, given_s)
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    "this GPU has too little free memory for a measurement: end other processes "
                    "that use it, or pass --gpu"
                ) from error
    else:
        machines = [computed(GPUS[args.gpu], work, dtype, args.tokens, given_s)]
    cases = [
        Case(
            work=work, ranks=ranks, per_node=per_node, shard=args.shard,
            link=link, machine=machine, dtype=dtype, vote_every=args.vote_every,
        )
        for machine in machines
    ]  # fmt: skip
    predictions = [predict(case) for case in cases]
    result = _result(cases[0], predictions[0])
    result["assumptions"] = _assumptions(cases[0], given_s is not None)
    result["warning"] = warning(predictions, busy)
    result["advice"] = advice(cases[0], predictions, busy)
    if args.format == "json":
        print(json.dumps(result, indent=1))
        return 0
    _print(_table(result, markdown=args.format == "markdown"))
    _print(f"Assumptions: {'; '.join(result['assumptions'])}.")
    for text in filter(None, (result["warning"], result["advice"])):
        _print(f"\n{text}")
    return 0


def _check_memory(work: Workload, dtype: torch.dtype, shard: int) -> None:
    """Refuses to judge a model by the CPU of a machine that cannot train it."""
    device, _, memory = here()
    needed = (work.weight_bytes(dtype) + 2 * dtype.itemsize * work.trainable) / shard
    if device.type == "cpu" and needed > memory:
        raise ValueError(
            f"training {work.name} needs {needed / 1e9:,.0f} GB per rank even with Lion, and this "
            f"machine has {memory / 1e9:,.0f} GB and no GPU, so its CPU cannot predict the time of "
            f"a step. Pass the GPU that you will train on, such as --gpu h100, or run this command "
            f"on the machine that trains."
        )


def _assumptions(case: Case, given: bool) -> list[str]:
    compute, votes = case.machine.sources
    ms, note = f"{1e3 * case.machine.compute_s:,.0f} ms", case.work.note
    share = case.work.active_share
    return [
        f"forward and backward: {ms} ({'given' if given else compute})",
        f"optimizer and votes: {votes}",
        *([f"shapes: assumed, {note}"] if note else []),
        *(["frozen weights: bfloat16"] if case.work.trainable < case.work.parameters else []),
        *([f"a token uses {share:.0%} of the parameters"] if share < 1 else []),
        *(["traffic inside a node: not counted"] if case.per_node > 1 else []),
    ]


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
                "wire_bytes": found.wire_bytes,
                "step_ms": 1e3 * found.step_s,
                **{f"{part}_ms": 1e3 * seconds for part, seconds in found.parts.items()},
                "memory_bytes": found.memory_bytes,
            }
            for name, found in predictions.items()
        ],
    }


def _table(result: dict[str, Any], *, markdown: bool) -> Table:
    model = result["model"]
    methods = result["methods"]
    rate = result["link_bits_per_s"]
    total, trained = model["parameters"], model["trainable"]
    some = "" if trained == total else f", {trained:,} trained"
    link = f"{rate / 1e9:.3g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mbit/s"
    table = Table(
        title=f"{model['name']} ({total:,} parameters{some}), {result['ranks']} ranks on "
        f"{result['nodes']} nodes, {link}: predicted, per step and rank",
        box=box.MARKDOWN if markdown else box.ROUNDED,
        title_justify="left",
    )
    # In a narrow terminal, names wrap, and numbers don't.
    table.add_column("method", min_width=len("DistributedLion,"), overflow="fold")
    for heading in ("sent", "step", "network", "vs. no network", "memory"):
        table.add_column(heading, justify="right", no_wrap=heading != "vs. no network")
    for method in methods:
        table.add_row(
            method["name"],
            _size(method["wire_bytes"]),
            f"{method['step_ms']:,.0f} ms",
            f"{method['network_ms']:,.0f} ms",
            f"{method['step_ms'] / methods[0]['step_ms']:.2f}",
            _size(method["memory_bytes"]),
        )
    return table


def _print(what: Table | str) -> None:
    """Prints in the width of the terminal, or without cuts and wraps into a file or pipe."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False)
    if isinstance(what, Table):
        console.width = max(console.width, 80) if sys.stdout.isatty() else 200
    console.print(what)


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.{1 if count < 100 * size else 0}f} {unit}"
    return f"{count:,.0f} B"
