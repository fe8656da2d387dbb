"""Times the local work of a rank in a step of DistributedLion: encode, tally, and move.

A fused AdamW step and a copy of all parameters are timed in the same run. On a GPU, each case has
two forms: with kernels, and with torch operations only. Each row of the second form also has the
number of operations of one message of 24 tensors, each of which is a launch.

Examples:
  python benchmarks/codec.py --bits 1 --ranks 2 8
  python benchmarks/codec.py --device cuda --json outputs/codec_gpu.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # A script's own folder is there.

from benchmarks.command import (
    TIMES,
    add_result_options,
    environment,
    exit_code_of,
    publish,
    summary,
    track,
)
from hf_dlion.cli.arguments import Parser, positive
from hf_dlion.cli.plan.machine import seconds_of, vote_work
from hf_dlion.core.codec import TOP
from hf_dlion.gpu.form import refusal

PARTS = ("encode", "tally", "move")
COLUMNS = {
    **{"name": "work", "dtype": "dtype", **TIMES},
    **{"ns_per_element": "ms per million", "ratio": "x fused AdamW"},
    **{f"{part}_ms": part for part in PARTS},
    "launches": "launches per message",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROW, LARGEST = 1024, 4096 * 1024
# Views and allocations, which launch no kernel.
FREE = ("empty", "new_empty", "_reshape_alias", "_unsafe_view", "alias", "detach", "lift_fresh")


class Counting(TorchDispatchMode):
    """Counts the kernels that a device launches."""

    launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launches += not (func.is_view or func.overloadpacket.__name__.startswith(FREE))
        return func(*args, **(kwargs or {}))


def launches(bits: int, ranks: int, dtype: torch.dtype, device: str = "meta") -> int:
    """Returns the number of launches of torch for one message of 24 tensors on a GPU."""
    shapes = 4 * [(512, 2048), (2048,), (2048, 512), (512,), (512, 512), (512,)]
    params = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    for param in params:
        param.grad = torch.empty_like(param)
    work = vote_work(params, bits, [ranks])
    with Counting() as mode:
        for call in work.values():
            call()
    return mode.launches


def run(args: argparse.Namespace) -> None:
    """Measures, prints, and writes the result."""
    # Fails now rather than after minutes.
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, but torch finds none; use --device cpu")
    before = environment()
    rows = [row for name in DTYPES for row in _rows_of(name, args, device)]
    config = {key: getattr(args, key) for key in ("parameters", "repeats", "threads", "device")}
    publish("codec", args, config, before, rows, COLUMNS)


def _rows_of(name: str, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    dtype = DTYPES[name]
    params = [torch.randn(s, device=device).mul_(0.02).to(dtype) for s in shapes(args.parameters)]
    for param in params:
        param.grad = torch.randn_like(param)
    copies = [torch.empty_like(param) for param in params]
    adamw = torch.optim.AdamW(params, lr=1e-4, fused=True)
    tasks: dict[str, list[Callable[[], object]]] = {
        "fused AdamW step": [adamw.step],
        "copy": [partial(torch._foreach_copy_, copies, params)],
    }
    counts: dict[str, tuple[int, int]] = {}
    forms = {"": False} if refusal(device) else {", kernels": True, ", torch": False}
    for (bits, ranks), (form, kernels) in itertools.product(
        itertools.product(args.bits, args.ranks), forms.items()
    ):
        case = f"{bits} bit{'s' * (bits > 1)}, {ranks} ranks{form}"
        work = vote_work(params, bits, [ranks], kernels=kernels)
        tasks[case], counts[case] = list(work.values()), (bits, ranks)
    laps: dict[str, list[list[float]]] = {task: [] for task in tasks}
    # Tasks take turns, so all see the same load of the machine. The first round warms up.
    for turn in track(range(1 + args.repeats), name):
        for task, calls in tasks.items():
            lap = [seconds_of(call, device) for call in calls]
            if turn:
                laps[task].append(lap)
    adamw_ms = summary([sum(lap) for lap in laps["fused AdamW step"]])["median_ms"]
    rows = []
    for task, found in laps.items():
        row = {"name": task, "dtype": name, **summary([sum(lap) for lap in found])}
        row["ns_per_element"] = 1e6 * row["median_ms"] / args.parameters
        row["ratio"] = row["median_ms"] / adamw_ms
        if task in counts:
            row["bits"], row["ranks"] = counts[task]
            if not task.endswith("kernels"):
                row["launches"] = launches(*counts[task], dtype)
            for part, times in zip(PARTS, zip(*found, strict=True), strict=True):
                row[f"{part}_ms"] = summary(times)["median_ms"]
        rows.append(row)
    return rows


def shapes(parameters: int) -> list[tuple[int, ...]]:
    """Returns matrices with rows of 1024 elements, and a vector for the rest.

    >>> shapes(4_194_304 + 5000)
    [(4096, 1024), (4, 1024), (904,)]
    """
    whole, rest = divmod(parameters, LARGEST)
    found: list[tuple[int, ...]] = [(LARGEST // ROW, ROW)] * whole
    found += [(rest // ROW, ROW)] if rest >= ROW else []
    return found + ([(rest % ROW,)] if rest % ROW else [])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="benchmarks/codec.py", description=__doc__)
    add_result_options(parser, "codec")
    add = parser.add_argument
    elements = "Number of parameters (default: 50000000)."
    add("--parameters", type=positive, default=50_000_000, help=elements)
    add("--repeats", type=positive, default=7, help="Measured rounds (default: 7).")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="Device (default: cpu).")
    bits = "Bits per vote (default: 1 2 4 8)."
    add("--bits", type=int, nargs="+", choices=list(TOP), default=list(TOP), help=bits)
    ranks = "Numbers of ranks whose votes are counted (default: 2)."
    add("--ranks", type=positive, nargs="+", default=[2], help=ranks)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    return exit_code_of(parser, lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
