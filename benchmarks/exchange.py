"""Times the exchange of votes beside the all-reduce of as many gradients."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # of a script its own folder is there

from hf_dlion.codec.layout import MessageLayout
from hf_dlion.step.plan import split_into_messages
from hf_dlion.tools.arguments import Parser, positive
from hf_dlion.tools.clock import slowest
from hf_dlion.tools.ranks import device_of_rank
from hf_dlion.tools.report import environment, track
from hf_dlion.tools.work import step_rule

from benchmarks.command import TIMES, add_ranks, is_over, parser_of, publish, shapes, start, summary
from hf_dlion.exchange import STRATEGIES, Exchange, Wire, WireStats, make_exchange
from hf_dlion.options import Options

COLUMNS = {
    "name": "exchange",
    **TIMES,
    "repeats": "repeats",
    "ratio": "x fp32",
    "bytes_per_step": "bytes sent",
    "bits_per_parameter": "bits/parameter",
}


class Votes:
    """All messages of a step, full of random votes, and the strategy that carries them."""

    def __init__(self, strategy: str, parameters: int, wire: Wire, device: torch.device) -> None:
        """Makes votes and buffers."""
        self._wire, self._step = wire, 0
        self._parts: list[tuple[Exchange, torch.Tensor | None, torch.Tensor]] = []
        found = enumerate(torch.empty(shape, device="meta") for shape in shapes(parameters))
        for group in split_into_messages(list(found), wire.world_size, device.type != "cpu"):
            layout = MessageLayout.of([(index, tensor.shape) for index, tensor in group])
            words = None
            active = torch.ones(layout.rows, dtype=torch.bool, device=device)
            exchange = make_exchange(strategy, layout, wire, device, Options())
            if exchange.votes is None:
                words = torch.empty(layout.words, dtype=torch.int64, device=device)
            for votes in (words, exchange.votes):
                if votes is not None:
                    votes.random_(-(2**62), 2**62)
            self._parts.append((exchange, words, active))

    def __call__(self) -> None:
        """Exchanges every message once; every rank calls this."""
        self._step += 1
        rule = step_rule(self._step, self._wire.rank, self._wire.world_size)
        for exchange, words, active in self._parts:
            exchange.start(words, active)
            exchange.leave()
        for exchange, _, _ in self._parts:
            exchange.count(rule)
        for exchange, *_ in self._parts:
            exchange.verdict()


def run(args: argparse.Namespace) -> None:
    """Measures on this rank; rank 0 prints and writes. Every rank calls this."""
    before = environment()
    device = device_of_rank()
    torch.manual_seed(dist.get_rank())
    group = dist.group.WORLD
    assert group is not None, "called inside a process group"
    wire = Wire(group, WireStats(), device)
    tasks: dict[str, Callable[[], None]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        gradient = torch.zeros(args.parameters, dtype=dtype, device=device)
        tasks[f"all-reduce {name}"] = partial(wire.all_reduce, gradient, "gradients")
    for strategy in STRATEGIES:
        tasks[strategy] = Votes(strategy, args.parameters, wire, device)
    times: dict[str, list[float]] = {name: [] for name in tasks}
    sent: dict[str, int] = {}
    # In turns, so whatever else the machine does hits all alike; the first round is warm-up.
    for turn in track(range(args.repeats + 1), "rounds"):
        for name, task in tasks.items():
            if is_over(times[name], args.seconds):
                continue
            begin = wire.stats.bytes_sent
            taken = slowest(task, device)
            sent[name] = wire.stats.bytes_sent - begin
            if turn:
                times[name].append(taken)
    rows: list[dict[str, Any]] = []
    for name, found in times.items():
        row = {"name": name, **summary(found), "bytes_per_step": sent[name]}
        row["bits_per_parameter"] = 8 * sent[name] / args.parameters
        rows.append(row)
        row["ratio"] = row["median_ms"] / rows[0]["median_ms"]
    if dist.get_rank() == 0:
        config = {"parameters": args.parameters, "ranks": dist.get_world_size()}
        config |= {"repeats": args.repeats, "threads": args.threads}
        config["emulate"] = args.emulate and str(args.emulate)
        config["backend"] = dist.get_backend()
        publish("exchange", args, config, before, rows, COLUMNS)


def _parser() -> Parser:
    made = parser_of(__file__, __doc__)
    add_ranks(made, timed=True)
    made.add_argument("--repeats", type=positive, default=7)
    return made


def main(argv: list[str] | None = None) -> int:
    return start(__file__, run, _parser(), argv)


if __name__ == "__main__":
    raise SystemExit(main())
