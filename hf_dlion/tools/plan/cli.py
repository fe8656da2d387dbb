"""The command line of the plan."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hf_dlion.options import BITS
from hf_dlion.tools.bench import ranks
from hf_dlion.tools.bench.report import MissingPackageError, environment, print_table, require_rich
from hf_dlion.tools.plan import compute, link, machine, plot, table, validate
from hf_dlion.tools.plan.cost import TCP_EFFICIENCY, Cluster, Link
from hf_dlion.tools.plan.machine import Machine
from hf_dlion.tools.plan.methods import NONE, PARTS, Case, predict
from hf_dlion.tools.plan.model import UnknownModelError, parse_count, workload
from hf_dlion.tools.plan.report import rate, rows_of, verdict, write_json

COLUMNS = {
    "name": "method",
    "bytes_per_step": "bytes sent",
    "predicted_ms": "predicted ms",
    "ratio": "x no comm.",
    **{f"{part}_ms": part for part in PARTS},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MEASURE = "measure"
EXPLANATION = (
    "best all-reduce / DistributedLion / DistributedLion with overlap (bound), each relative to a "
    "step without communication; * {bits}-bit exchange does not pay"
)


def main(argv: list[str] | None = None) -> int:
    """Predicts and prints; returns the exit code.

    Args:
        argv: The words after `hf-dlion plan`; by default those of this process.
    """
    args = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        require_rich()
        if args.plot is not None:
            plot.require_matplotlib()
        _run(args)
    except (
        MissingPackageError,
        UnknownModelError,
        link.UnmeasurableError,
        OSError,
        ValueError,
    ) as error:
        print(f"hf-dlion plan: {error}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    if args.validate is not None:
        _validate(args)
        return
    if args.model is None:
        raise ValueError("say what to train: a count such as 7b, a folder, or a name on the hub")
    if args.link is None and not args.table:
        raise ValueError("give --link (for example 1gbit, or measure), or --table for several")
    work = workload(args.model, args.trainable)
    found = _link(args)
    if found is None:
        return  # another rank than the first: it has measured its part
    count = args.ranks or int(os.environ.get("WORLD_SIZE", "0")) or 2 * args.ranks_per_node
    cluster = Cluster(ranks=count, ranks_per_node=args.ranks_per_node)
    own = _machine(args)
    compute_s, source = _compute(args, work.parameters)
    case = Case(
        work=work, cluster=cluster, link=found, machine=own, compute_s=compute_s,
        element_bytes=DTYPES[args.dtype].itemsize, bits=args.bits,
    )  # fmt: skip
    result: dict[str, Any] = {
        "plan": "table" if args.table else "step",
        "model": {"name": work.name, "parameters": work.parameters, "trainable": work.trainable},
        "cluster": asdict(cluster),
        "link": asdict(found),
        "machine": asdict(own),
        "compute_ms": 1e3 * compute_s,
        "bits": args.bits,
        "environment": environment(),
    }
    if args.table:
        result["rows"] = _print_tables(case)
    else:
        result["rows"] = rows_of(predict(case))
        print_table(_title(case), COLUMNS, result["rows"])
    result["assumed"] = _assumptions(case, source, several=args.table)
    for line in result["assumed"]:
        print(line)
    if not args.table:
        result["verdict"] = verdict(case, predict(case))
        print(result["verdict"])
    if args.plot is not None:
        rates = table.RATES if args.table else (found.bits_per_s,)
        title = f"{work.name}: predicted time of a step{_of_votes(case)}"
        plot.draw(table.points(case, rates=rates), title, Path(args.plot))
        print(f"written: {args.plot}")
    if args.json is not None:
        write_json(args.json, result)


def _print_tables(case: Case) -> list[dict[str, Any]]:
    """Prints the table of nodes and links; returns a row per method, number of nodes and link."""
    found = table.points(case)
    lines = table.rows(found)
    title = (
        f"{case.work.name}: predicted time of a step{_of_votes(case)}, relative to no communication"
    )
    print_table(title, {key: key for key in lines[0]}, lines)
    print(EXPLANATION.format(bits=case.bits))
    return [
        {"nodes": point.nodes, "link": point.link, **row}
        for point in found
        for row in rows_of(point.predictions)
    ]


def _validate(args: argparse.Namespace) -> None:
    result = validate.load(Path(args.validate))
    threads = result["config"]["threads"]
    torch.set_num_threads(threads)
    seen = validate.emulated_link(result) if args.link is None else _given(args, args.link)
    own = _machine(args)
    case = replace(validate.case_of(result, own, seen), bits=args.bits)
    lines = validate.rows(result, case)
    network = result["config"].get("emulate") or "the network of the run"
    print_table(f"predicted and measured on {network}", validate.COLUMNS, lines)
    free = next(row["measured_ms"] for row in lines if row["name"] == NONE)
    print(f"compute: {1e3 * case.compute_s:,.0f} ms, from the measured {free:,.0f} ms of {NONE}")
    for line in _of_link_and_machine(case):
        print(line)
    if args.json is not None:
        parts = {"bits": args.bits, "link": asdict(seen), "machine": asdict(own)}
        write_json(args.json, {"plan": "validate", **parts, "rows": lines})


def _link(args: argparse.Namespace) -> Link | None:
    """Returns the link, or None on a rank that has only helped to measure it."""
    if args.link is None:
        return _given(args, "1gbit")  # the table puts its own rates in
    if args.link != MEASURE:
        return _given(args, args.link)
    link.check_measurable()
    found: list[Link] = []
    ranks.take_part(lambda _: found.append(link.measured()), args)
    return found[0] if os.environ["RANK"] == "0" else None


def _given(args: argparse.Namespace, text: str) -> Link:
    tree = args.backend == "nccl"
    if text == MEASURE:
        raise ValueError("--validate compares with a run that is over: give its link as a rate")
    if text.endswith(".json"):
        return link.from_exchange_bench(Path(text), tree)
    return replace(link.given(text, args.latency_ms, tree), efficiency=args.efficiency)


def _machine(args: argparse.Namespace) -> Machine:
    # Before the seconds that measuring takes.
    known = None if args.codec is None else machine.of_codec_bench(Path(args.codec), args.bits)
    own = machine.measure(DTYPES[args.dtype], ranks.device_of_rank(), args.bits)
    if known is None:
        return own
    return replace(own, **known, source=f"{Path(args.codec).name}; the rest {own.source}")


def _compute(args: argparse.Namespace, parameters: int) -> tuple[float, str]:
    """Returns the seconds of forward and backward, and where they come from."""
    device, tokens = ranks.device_of_rank(), (args.batch, args.sequence)
    size = f"{args.batch} x {args.sequence} tokens"
    if args.step_ms is None:
        seconds = compute.of_stand_in(parameters, *tokens, device)
        return seconds, f"the benchmark's Llama on this machine ({size}), scaled by parameters"
    if args.step_ms == MEASURE:
        seconds = compute.of_model(args.model, DTYPES[args.dtype], *tokens, device)
        return seconds, f"measured on this machine ({size})"
    return 1e-3 * args.step_ms, "given"


def _title(case: Case) -> str:
    cluster, work = case.cluster, case.work
    trained = "" if work.trainable == work.parameters else f", {work.trainable:,} trained"
    return (
        f"{work.name} ({work.parameters:,} parameters{trained}), {cluster.ranks} ranks on "
        f"{cluster.nodes} nodes, {rate(case.link)}{_of_votes(case)}: prediction"
    )


def _of_votes(case: Case) -> str:
    return "" if case.bits == 1 else f" with votes of {case.bits} bits"


def _assumptions(case: Case, source: str, several: bool) -> list[str]:
    lines = [f"forward and backward: {1e3 * case.compute_s:,.0f} ms ({source})"]
    lines += _of_link_and_machine(case, several)
    return [*lines, case.work.note] if case.work.note else lines


def _of_link_and_machine(case: Case, several: bool = False) -> list[str]:
    seen, own = case.link, asdict(case.machine)
    source = own.pop("source")
    each = ", ".join(f"{key.removesuffix('_ns')} {value:.2f}" for key, value in own.items())
    speed = "" if several else f"{rate(seen)}, "
    lost = f", {1e3 * seen.restart_s:.0f} ms lost at a start" if seen.restart_s else ""
    return [
        f"link: {speed}latency {1e3 * seen.latency_s:.3g} ms, {100 * seen.efficiency:.0f} % of it "
        f"payload{lost}",
        f"ns per element, {source}: {each}",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-dlion plan", description=__doc__)
    parser.add_argument(
        "model", nargs="?", help='a count ("7b"), a folder with a config.json, or a hub name'
    )
    parser.add_argument("--ranks", type=_positive, help="number of ranks (those of the launcher)")
    parser.add_argument("--ranks-per-node", type=_positive, default=_local_ranks(), metavar="L")
    parser.add_argument(
        "--link", metavar="1gbit", help="a rate, the JSON of bench exchange, or measure"
    )
    parser.add_argument("--latency-ms", type=_positive_ms, default=link.DEFAULT_LATENCY_MS)
    parser.add_argument("--efficiency", type=_share, default=TCP_EFFICIENCY, help="payload's share")
    parser.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        default="nccl" if torch.cuda.is_available() else "gloo",
        help="nccl reduces through trees too",
    )
    parser.add_argument("--trainable", type=_count, help='trained parameters ("40m"), as for LoRA')
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="of gradients")
    parser.add_argument("--bits", type=int, choices=BITS, default=1, help="of a vote (1)")
    parser.add_argument(
        "--step-ms", type=_step_ms, metavar="MS", help="forward and backward, or measure"
    )
    parser.add_argument("--batch", type=_positive, default=1, help="sequences measured (1)")
    parser.add_argument("--sequence", type=_positive, default=128, help="tokens in each (128)")
    parser.add_argument("--threads", type=_positive, default=torch.get_num_threads())
    parser.add_argument("--codec", metavar="FILE", help="take constants of bench codec's JSON")
    parser.add_argument("--table", action="store_true", help="2 to 1024 nodes, 0.1 to 100 Gbit/s")
    parser.add_argument("--validate", metavar="FILE", help="compare with bench train's JSON")
    parser.add_argument("--json", metavar="FILE", help="write the result")
    parser.add_argument("--plot", metavar="FILE", help="draw step times over nodes")
    return parser


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _positive_ms(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return value


def _count(text: str) -> int:
    value = parse_count(text)
    if value is None:
        raise argparse.ArgumentTypeError(f'{text} is no count such as "40m"')
    return value


def _step_ms(text: str) -> float | str:
    return text if text == MEASURE else _positive_ms(text)
