"""The command line of the plan."""

from __future__ import annotations

import argparse
import math
import os
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hf_dlion.options import BITS
from hf_dlion.tools import pictures, report
from hf_dlion.tools.arguments import Parser, add_format, checked, exit_code, positive
from hf_dlion.tools.names import NONE
from hf_dlion.tools.plan import asked, gpu, link, table, validate
from hf_dlion.tools.plan.cost import TCP_EFFICIENCY
from hf_dlion.tools.plan.gpu import GPUS
from hf_dlion.tools.plan.methods import NODE_VOTES, PARTS, Case, predict
from hf_dlion.tools.plan.model import parse_count, workload
from hf_dlion.tools.plan.report import EXPLAINED, names_of_ours, rate, rows_of, verdict
from hf_dlion.tools.report import (
    MissingPackageError,
    Output,
    read_bench,
    require_matplotlib,
    write_json,
)

COLUMNS = {
    "name": "method",
    "bytes_per_step": "bytes sent",
    "predicted_ms": "predicted ms",
    "ratio": "x no comm.",
    **{f"{part}_ms": part for part in PARTS},
}
SHARDED = (
    "--shard: FSDP2 shares the model out inside each node; the rows of DDP are then HSDP, whose "
    "all-reduce goes between nodes, and what FSDP sends inside a node is not counted; no GPU ran it"
)
EXPLANATION = (
    "best all-reduce / {ours}, each relative to a step without communication; * {bits}-bit "
    "exchange does not pay"
)
TOGETHER = (
    "{row}: what the ranks of a node send one another is not counted (over NVLink it is little)"
)


def main(argv: list[str] | None = None) -> int:
    """Predicts and prints; returns the exit code.

    Args:
        argv: The words after `hf-dlion plan`; by default those of this process.
    """
    parser = _parser()
    args = parser.parse_args(argv)

    def run() -> None:
        asked.check(args, parser)
        if args.plot is not None:
            require_matplotlib()
            pictures.check_path(Path(args.plot))
        torch.set_num_threads(args.threads)
        if args.validate is not None:
            _validate(args)
        else:
            _plan(args)

    told = (MissingPackageError, link.UnmeasurableError, OSError, ValueError)
    return exit_code("hf-dlion plan", run, *told)


def _plan(args: argparse.Namespace) -> None:
    # What is trained, who takes part, and what one rank's own work costs ...
    work = workload(args.model, args.trainable)
    found = asked.link_of(args)
    if found is None:
        return  # another rank than the first: it has measured its part
    cluster, own = asked.cluster_of(args), asked.machine_of(args)
    compute_s, source = asked.compute_of(args, work)
    case = Case(
        work=work, cluster=cluster, link=found, machine=own, compute_s=compute_s,
        dtype=asked.DTYPES[args.dtype], bits=args.bits, sharded=args.shard > 1,
        on_gpu=asked.on_gpu(args),
    )  # fmt: skip
    # ... give the predictions, which are printed, drawn and written.
    out = Output(args.format)
    result: dict[str, Any] = {
        "plan": "table" if args.table else "step",
        "model": {"name": work.name, "parameters": work.parameters, "trainable": work.trainable},
        "cluster": asdict(cluster),
        "link": asdict(found),
        "machine": asdict(own),
        "compute_ms": 1e3 * compute_s,
        "bits": args.bits,
        "environment": report.environment(),
    }
    predictions = predict(case)
    if args.table:
        result["rows"] = _print_tables(out, case)
    else:
        result["rows"] = rows_of(predictions)
        out.table(_title(case), COLUMNS, result["rows"])
    result["assumed"] = [
        f"forward and backward: {1e3 * case.compute_s:,.0f} ms ({source})",
        *_of_link_and_machine(case, several=args.table),
        *filter(None, (work.note, SHARDED * case.sharded)),
        *([TOGETHER.format(row=NODE_VOTES)] if NODE_VOTES in predictions else []),
        "rows and columns: hf-dlion plan --help",
        *asked.notes_of(args, work),
    ]
    for sentence in result["assumed"]:
        out.line(sentence)
    if not args.table:
        result["verdict"] = verdict(case, predictions)
        out.line(result["verdict"])
    if args.plot is not None:
        rates = table.RATES if args.table else (found.bits_per_s,)
        title = f"{work.name}: predicted time of a step{_of_votes(case)}"
        per_node = cluster.ranks_per_node
        title += f", {per_node} ranks per node" if per_node > 1 else ""
        table.draw(table.points(case, rates=rates), title, Path(args.plot))
        out.line(f"written: {args.plot}")
    _write(out, args, result)


def _write(out: Output, args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.json is not None:
        write_json(args.json, result)
        out.line(f"written: {args.json}")
    out.result(result)


def _print_tables(out: Output, case: Case) -> list[dict[str, Any]]:
    """Prints the table of nodes and links; returns a row per method, number of nodes and link."""
    found = table.points(case)
    lines = table.rows(found)
    title = (
        f"{case.work.name}: predicted time of a step{_of_votes(case)}, relative to no communication"
    )
    out.table(title, {key: key for key in lines[0]}, lines)
    ours = " / ".join(names_of_ours(found[0].predictions))
    out.line(EXPLANATION.format(bits=case.bits, ours=ours))
    return [
        {"nodes": point.nodes, "link": point.link, **row}
        for point in found
        for row in rows_of(point.predictions)
    ]


def _validate(args: argparse.Namespace) -> None:
    out = Output(args.format)
    result = read_bench(args.validate, "train")
    torch.set_num_threads(result["config"]["threads"])
    seen = asked.given_link(args, args.link or validate.emulated_rate(result))
    own = asked.machine_of(args)
    case = replace(validate.case_of(result, own, seen), bits=args.bits)
    lines = validate.rows(result, case)
    network = result["config"].get("emulate") or "the network of the run"
    out.table(f"predicted and measured on {network}", validate.COLUMNS, lines)
    free = next(row["measured_ms"] for row in lines if row["name"] == NONE)
    out.line(f"compute: {1e3 * case.compute_s:,.0f} ms, from the measured {free:,.0f} ms of {NONE}")
    for sentence in _of_link_and_machine(case):
        out.line(sentence)
    parts = {"bits": args.bits, "link": asdict(seen), "machine": asdict(own)}
    _write(out, args, {"plan": "validate", **parts, "rows": lines})


def _title(case: Case) -> str:
    cluster, work = case.cluster, case.work
    trained = "" if work.trainable == work.parameters else f", {work.trainable:,} trained"
    return (
        f"{work.name} ({work.parameters:,} parameters{trained}), {cluster.ranks} ranks on "
        f"{cluster.nodes} nodes, {rate(case.link)}{_of_votes(case)}: prediction"
    )


def _of_votes(case: Case) -> str:
    return "" if case.bits == 1 else f" with votes of {case.bits} bits"


def _of_link_and_machine(case: Case, several: bool = False) -> list[str]:
    seen, own = case.link, asdict(case.machine)
    source = own.pop("source")
    each = ", ".join(f"{key.removesuffix('_ns')} {value:.3g}" for key, value in own.items())
    speed = "" if several else f"{rate(seen)}, "
    lost = f", {1e3 * seen.restart_s:.0f} ms lost at a start" if seen.restart_s else ""
    return [
        f"link: {speed}latency {1e3 * seen.latency_s:.3g} ms, {100 * seen.efficiency:.0f} % of it "
        f"payload{lost}",
        f"ns per element, {source}: {each}",
    ]


_above_zero = checked(float, lambda value: 0 < value < math.inf, "must be a number above 0")
_share = checked(float, lambda value: 0 < value <= 1, "must be above 0 and at most 1")
_count = checked(parse_count, lambda value: value is not None, 'is no count such as "40m"')


def _step_ms(text: str) -> float | str:
    try:
        return text if text == asked.MEASURE else _above_zero(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number of ms, nor measure") from None


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, EXPLAINED))
    made = Parser(
        prog="hf-dlion plan",
        description="Predict what a training step costs, and whether the exchange of votes pays.",
        epilog="rows and columns of the output:\n"
        + "\n".join(
            textwrap.fill(f"  {name:{width}}  {told}", 80, subsequent_indent=" " * (width + 4))
            for name, told in EXPLAINED.items()
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("model", nargs="?", help='a count ("7b"), a folder with a config.json, or a hub name')
    add("--ranks", type=positive, help="number of ranks (the launcher's, or those of two nodes)")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share = f"ranks that share a machine ({local_ranks})"
    add("--ranks-per-node", type=positive, default=local_ranks, metavar="L", help=share)
    add("--shard", type=positive, default=1, metavar="L", help="ranks of FSDP2 in each node (1)")
    add("--link", metavar="1gbit", help="a rate, the JSON of benchmarks/exchange.py, or measure")
    late = link.DEFAULT_LATENCY_MS
    add("--latency-ms", type=_above_zero, default=late, metavar="MS", help=f"one way ({late})")
    payload = f"payload's share of the rate ({TCP_EFFICIENCY:.2f})"
    add("--efficiency", type=_share, default=TCP_EFFICIENCY, help=payload)
    add("--backend", choices=("gloo", "nccl"), help="nccl, that of GPUs, has trees beside rings")
    add("--trainable", type=_count, help='trained parameters ("40m"), as for LoRA')
    add("--dtype", choices=list(asked.DTYPES), default="float32", help="of gradients (float32)")
    add("--bits", type=int, choices=BITS, default=1, help="of a vote (1)")
    add("--step-ms", type=_step_ms, metavar="MS", help="forward and backward, or measure")
    add("--gpu", choices=list(GPUS), help="compute the work of such a GPU, and measure nothing")
    add("--mfu", type=_share, help=f"of its peak, in forward and backward ({gpu.MFU})")
    add("--batch", type=positive, default=1, help="sequences of a rank per step (1)")
    add("--sequence", type=positive, help=f"tokens in each (128; with --gpu {gpu.SEQUENCE})")
    threads = torch.get_num_threads()
    add("--threads", type=positive, default=threads, help="of each rank that is timed (torch's)")
    add("--codec", metavar="FILE", help="take constants of benchmarks/codec.py's JSON")
    add("--table", action="store_true", help="2 to 1024 nodes, 0.1 to 100 Gbit/s")
    add("--validate", metavar="FILE", help="compare with benchmarks/step_time.py's JSON")
    add("--json", metavar="FILE", help="write the result")
    add("--plot", metavar="FILE", help="draw step times over nodes")
    add_format(made)
    return made
