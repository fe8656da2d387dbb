"""Times the local work of a rank in a step of DistributedLion: encode, tally, and move.

A fused AdamW step and a copy of all parameters are timed in the same run. Each row also has the
number of operations of one message of 24 tensors on a GPU, each of which is a launch.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # A script's own folder is there.

from benchmarks.command import (
    TIMES,
    add_result_options,
    environment,
    exit_code_of,
    parser_of,
    positive,
    publish,
    summary,
    track,
)
from hf_dlion.cli.plan.machine import seconds_of
from hf_dlion.exchange.rule import Majority
from hf_dlion.options import Options
from hf_dlion.vote.codec import TOP, spread, tally
from hf_dlion.vote.message import Shape, messages
from hf_dlion.vote.update import Scratch, Turn, encode, move

PARTS = ("encode", "tally", "move")
COLUMNS = {
    **{"name": "work", "dtype": "dtype", **TIMES},
    **{"ns_per_element": "ms per million", "ratio": "x fused AdamW"},
    **{f"{part}_ms": part for part in PARTS},
    "launches": "launches per message",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROW, LARGEST = 1024, 4096 * 1024
GROUP = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.99)}
# Views and allocations, which launch no kernel.
FREE = ("empty", "new_empty", "_reshape_alias", "_unsafe_view", "alias", "detach", "lift_fresh")


class Work:
    """The work of one rank in one step, without the network.

    Args:
        params: Parameters with gradients on one device; `move` updates them.
        bits: Bits per vote.
        ranks: Number of ranks whose votes are counted; the votes are random.
    """

    def __init__(self, params: Sequence[Tensor], bits: int, ranks: int) -> None:
        device = params[0].device
        self._messages = messages([Shape.of(param, 0) for param in params])
        self._params = [param.view(-1) for param in params]
        self._grads = [param.grad.view(-1) for param in params if param.grad is not None]
        self._momenta = [torch.zeros_like(param) for param in self._params]
        self._turn = Turn(
            step=1, voter=0, options=Options(bits=bits), groups=[GROUP], scratch=Scratch(),
        )  # fmt: skip
        self._bits, self._rule = bits, Majority("alternate")
        self._votes, self._voters, self._totals = [], [], []
        for message in self._messages:
            shape = ranks, bits, message.words
            votes = torch.empty(shape, dtype=torch.int64, device=device).random_(-(2**62), 2**62)
            self._votes.append([list(planes) for planes in votes])
            # On a GPU, checking whether all ranks vote would synchronize, so rows are counted.
            voters, total = None, ranks * TOP[bits]
            if device.type != "cpu":
                voters = torch.full((message.rows.count,), ranks, device=device)
                _ = message.rows.of_word
            self._voters.append(voters)
            self._totals.append(total)

    def encode(self) -> None:
        """Encodes all gradients, and updates the momenta."""
        for message in self._messages:
            encode(message, self._grads, self._momenta, self._turn, ())

    def tally(self) -> None:
        """Counts the votes of all ranks."""
        self._verdicts = []
        columns = zip(self._messages, self._votes, self._voters, self._totals, strict=True)
        for message, votes, voters, total in columns:
            if voters is not None:
                by_word = voters[message.rows.of_word] * TOP[self._bits]
                total = spread(by_word, total.bit_length())
            self._verdicts.append(self._rule.decide(tally(votes, self._bits), total, 1))

    def move(self) -> None:
        """Updates all parameters by the verdict."""
        for message, planes, voters in zip(
            self._messages, self._verdicts, self._voters, strict=True
        ):
            move(message, self._params, planes, voters, self._rule, self._turn)


class Counting(TorchDispatchMode):
    """Counts the kernels that a device launches."""

    launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launches += not (func.is_view or func.overloadpacket.__name__.startswith(FREE))
        return func(*args, **(kwargs or {}))


def launches(bits: int, ranks: int, dtype: torch.dtype) -> int:
    """Returns the number of launches of one message of 24 tensors on a GPU."""
    shapes = 4 * [(512, 2048), (2048,), (2048, 512), (512,), (512, 512), (512,)]
    params = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    for param in params:
        param.grad = torch.empty_like(param)
    work = Work(params, bits, ranks)
    with Counting() as mode:
        for part in PARTS:
            getattr(work, part)()
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
    for bits, ranks in itertools.product(args.bits, args.ranks):
        case, work = f"{bits} bit{'s' * (bits > 1)}, {ranks} ranks", Work(params, bits, ranks)
        tasks[case], counts[case] = [getattr(work, part) for part in PARTS], (bits, ranks)
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
    examples = ("--bits 1 --ranks 2 8", "--device cuda --json outputs/codec_gpu.json")
    parser = parser_of("codec", __doc__ or "", examples)
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
