"""Times the exchange of votes beside the all-reduce of as many gradients."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hf_dlion.codec.layout import MessageLayout
from hf_dlion.codec.rule import StepRule
from hf_dlion.exchange import STRATEGIES, Exchange, Wire, WireStats, make_exchange
from hf_dlion.options import Options
from hf_dlion.step.plan import split_into_messages
from hf_dlion.tools.bench.codec import shapes
from hf_dlion.tools.bench.ranks import device_of_rank
from hf_dlion.tools.bench.report import environment, publish, summary
from hf_dlion.tools.bench.train import FEWEST, slowest

COLUMNS = {
    "name": "exchange",
    "median_ms": "median ms",
    "min_ms": "min",
    "max_ms": "max",
    "repeats": "repeats",
    "ratio": "x fp32",
    "bytes_per_step": "bytes sent",
    "bits_per_parameter": "bits/parameter",
}


class Votes:
    """All messages of a step, full of random votes, and the strategy that carries them."""

    def __init__(self, strategy: str, parameters: int, wire: Wire, device: torch.device) -> None:
        """Makes votes and buffers.

        Args:
            strategy: A name in `STRATEGIES`.
            parameters: How many elements are voted on.
            wire: Carries them and counts the bytes.
            device: Where the votes lie.
        """
        self._wire, self._step = wire, 0
        self._parts: list[tuple[Exchange, torch.Tensor, torch.Tensor]] = []
        found = enumerate(torch.empty(shape, device="meta") for shape in shapes(parameters))
        for group in split_into_messages(list(found), wire.world_size):
            layout = MessageLayout.of([(index, tensor.shape) for index, tensor in group])
            words = torch.randint(-(2**62), 2**62, (layout.words,), device=device)
            active = torch.ones(layout.rows, dtype=torch.bool, device=device)
            exchange = make_exchange(strategy, layout, wire, device, Options())
            self._parts.append((exchange, words, active))

    def __call__(self) -> None:
        """Exchanges every message once; every rank calls this."""
        self._step += 1
        rule = StepRule(
            step=self._step, rank=self._wire.rank, world_size=self._wire.world_size,
            aggregation="majority", ties="alternate", stochastic_rounding=True, seed=0,
        )  # fmt: skip
        for exchange, words, active in self._parts:
            exchange.start(words, active)
        for exchange, _, _ in self._parts:
            exchange.count(rule)
        for exchange, _, _ in self._parts:
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
        tasks[f"all-reduce {name}"] = _reduction(wire, gradient)
    for strategy in STRATEGIES:
        tasks[strategy] = Votes(strategy, args.parameters, wire, device)
    times: dict[str, list[float]] = {name: [] for name in tasks}
    sent: dict[str, int] = {}
    # In turns, so that whatever else the machine does hits all alike; the first round is warm-up.
    for turn in range(args.repeats + 1):
        for name, task in tasks.items():
            if len(times[name]) >= FEWEST and sum(times[name]) > args.seconds:
                continue
            begin = wire.stats.bytes_sent
            taken = slowest(_finished(task, device))
            sent[name] = wire.stats.bytes_sent - begin
            if turn:
                times[name].append(taken)
    if dist.get_rank() == 0:
        rows = _rows(times, sent, args.parameters)
        config = {"parameters": args.parameters, "ranks": dist.get_world_size()}
        config |= {"repeats": args.repeats, "threads": args.threads}
        config["emulate"] = args.emulate and f"{args.emulate.hosts}x{args.emulate.rate}"
        config["backend"] = dist.get_backend()
        publish("exchange", args.json, config, before, rows, COLUMNS)


def _rows(
    times: dict[str, list[float]], sent: dict[str, int], parameters: int
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, found in times.items():
        row = {"name": name, **summary(found), "bytes_per_step": sent[name]}
        row["bits_per_parameter"] = 8 * sent[name] / parameters
        rows.append(row)
    for row in rows:
        row["ratio"] = row["median_ms"] / rows[0]["median_ms"]
    return rows


def _reduction(wire: Wire, gradient: torch.Tensor) -> Callable[[], None]:
    return lambda: wire.all_reduce(gradient, "gradients")


def _finished(task: Callable[[], None], device: torch.device) -> Callable[[], None]:
    def call() -> None:
        task()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return call
