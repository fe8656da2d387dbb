"""Times a training step with each method; methods take turns within one process group.

Examples:
  python benchmarks/step_time.py --ranks 2 --methods none adamw majority
  python benchmarks/step_time.py --emulate 2x100mbit --methods none majority:bits=4,ties=zero
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # A script's own folder is there.

from benchmarks import command
from benchmarks.command import middle_ms
from benchmarks.emulate import INTERFACE, Network
from benchmarks.methods import METHODS, Hyper, method_of
from benchmarks.ranks import device_of_rank, launch, slowest, take_part
from hf_dlion.cli.arguments import Parser, positive

NONE = METHODS["none"].title
PARTS = ("encode", "exchange", "apply")  # Names of seconds in `DistributedLion.wire`.
COLUMNS = {
    "name": "method",
    **command.TIMES,
    "repeats": "steps",
    "ratio": "x no comm.",
    "bytes_per_step": "bytes sent",
    "interface_bytes": "on the link",
    **{f"{part}_ms": part for part in PARTS},
}
VOCABULARY, WIDTH, INNER = 8192, 512, 1376
LAYER = 4 * WIDTH**2 + 3 * WIDTH * INNER
# Fewest measured steps or periods of a slow method, enough for a spread.
FEWEST = 3


def model_of(parameters: int, name: str | None) -> nn.Module:
    """Returns a model with random weights, the same on every rank.

    Args:
        parameters: Size of a Llama with layers 512 wide; below one such layer the model is tiny.
        name: Folder with a config.json, or name on the Hugging Face hub; replaces `parameters`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name is not None:
        config = AutoConfig.from_pretrained(name)
        config.use_cache = False
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        return model
    layers = round((parameters - VOCABULARY * WIDTH) / LAYER)
    tiny = layers < 1
    config = LlamaConfig(
        vocab_size=64 if tiny else VOCABULARY, hidden_size=32 if tiny else WIDTH,
        intermediate_size=48 if tiny else INNER, num_hidden_layers=1 if tiny else layers,
        num_attention_heads=2 if tiny else 8, max_position_embeddings=2048,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Timed:
    """One method, its model, and its measurements.

    Attributes:
        times: Seconds of each lap, which is one period of the method, mostly one step.
    """

    def __init__(self, name: str, args: argparse.Namespace, tokens: Tensor) -> None:
        self._method, self._tokens = method_of(name), tokens
        model = model_of(args.parameters, args.model).to(tokens.device)
        self.rank = self._method.make(model, Hyper())
        self.times: list[float] = []
        self._emulated = args.emulate is not None
        self._counts: list[dict[str, float]] = []  # What each lap added to `_counters`.

    def lap(self) -> None:
        """Takes the steps of a period."""
        for _ in range(self._method.every):
            self.rank.model(input_ids=self._tokens, labels=self._tokens).loss.backward()
            self.rank.step()

    def warm_up(self, steps: int) -> None:
        """Takes complete periods, in which DDP rebuilds its buckets and ranks first synchronize."""
        for _ in range(-(-steps // self._method.every)):
            self.lap()

    def measure(self, seconds: float) -> None:
        """Times a lap, unless this method has used its time; all ranks must call this."""
        if len(self.times) >= FEWEST and sum(self.times) > seconds:
            return
        before = self._counters()
        self.times.append(slowest(self.lap, self._tokens.device))
        after = self._counters()
        self._counts.append({name: after[name] - before[name] for name in after})

    def row(self) -> dict[str, Any]:
        """Returns the row of the table, with times and bytes per step.

        These are medians over steps, or means over complete periods.
        """
        period = self._method.every
        middle = statistics.fmean if period > 1 else statistics.median
        found = {
            "name": self._method.title,
            **command.summary([seconds / period for seconds in self.times], mean=period > 1),
            "steps_per_time": period,
        }
        for name in self._counts[0]:
            per_step = middle([lap[name] for lap in self._counts]) / period
            found[name] = per_step if name.endswith("_ms") else round(per_step)
        return found

    def _counters(self) -> dict[str, float]:
        """Returns the bytes that this rank and its link have sent, and ms by part of a step."""
        found = {"bytes_per_step": self.rank.bytes_sent}
        if self._emulated:
            found["interface_bytes"] = _interface_bytes()
        if self._method.options is not None:
            wire = self.rank.optimizer.wire
            found |= {f"{part}_ms": 1e3 * getattr(wire, f"{part}_s") for part in PARTS}
        return found


def run(args: argparse.Namespace) -> None:
    """Measures on this rank; rank 0 prints and writes. Every rank must call this."""
    before = command.environment()
    with torch.device("meta"):
        model = model_of(args.parameters, args.model)
    size, vocabulary = sum(p.numel() for p in model.parameters()), model.config.vocab_size
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (args.batch, args.sequence)
    tokens = torch.randint(vocabulary, shape, generator=generator).to(device_of_rank())
    timed = [Timed(name, args, tokens) for name in args.methods or usual_methods()]
    for method in command.track(timed, "warming up"):
        method.warm_up(args.warmup)
    # Methods take turns, so all see the same load of the machine.
    for _ in command.track(range(args.steps), "steps"):
        for method in timed:
            method.measure(args.seconds)
    rows = [method.row() for method in timed]
    for method in timed:
        method.rank.close()
    timed.clear()
    gc.collect()
    free = next((middle_ms(row) for row in rows if row["name"] == NONE), None)
    for row in rows:
        row["ratio"] = middle_ms(row) / free if free else None
    if dist.get_rank() == 0:
        config = {"parameters": size, "model": args.model, "ranks": dist.get_world_size()}
        for key in ("steps", "batch", "sequence", "warmup", "threads"):
            config[key] = getattr(args, key)
        config["local_ranks"] = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        config["emulate"] = args.emulate and str(args.emulate)
        config["backend"] = dist.get_backend()
        command.publish("train", args, config, before, rows, COLUMNS)


def usual_methods() -> list[str]:
    """Returns the methods that need only torch; with several nodes also `node`."""
    several = 1 < int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < dist.get_world_size()
    return [name for name, method in METHODS.items() if method.usual] + ["node"] * several


def _interface_bytes() -> int:
    """Returns the bytes that the emulated host has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith(INTERFACE))
    return int(line.split(":")[1].split()[8])


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:17}{method.about}" for name, method in METHODS.items()]
    epilog = "\n".join(["methods:", *lines])
    parser = Parser(prog="benchmarks/step_time.py", description=__doc__, epilog=epilog)
    command.add_result_options(parser, "step_time")
    add = parser.add_argument
    size = "Size of the Llama to train (default: 29500000)."
    add("--parameters", type=positive, default=29_500_000, help=size)
    model = "Model folder or hub name, whose config replaces --parameters (default: none)."
    add("--model", help=model)
    add("--ranks", type=positive, help="Number of processes to start (default: 2).")
    emulated = (
        "Hosts and rate of an emulated network, on Linux as root (default: no emulated network)."
    )
    add("--emulate", type=Network.parse, metavar="2x100mbit", help=emulated)
    local = "Ranks per node or emulated host (default: all on one node, or 1 per host)."
    add("--local-ranks", type=positive, default=1, help=local)
    add("--batch", type=positive, default=1, help="Sequences per rank (default: 1).")
    add("--sequence", type=positive, default=128, help="Tokens of a sequence (default: 128).")
    add(
        "--warmup",
        type=partial(positive, least=0),
        default=2,
        help="Steps before the measured ones (default: 2).",
    )
    steps = "Measured steps, or periods if a method has them (default: 5)."
    add("--steps", type=positive, default=5, help=steps)
    stop = "Seconds after which a method stops, with at least 3 steps or periods (default: 25)."
    add("--seconds", type=float, default=25.0, help=stop)
    chosen = "Methods, with options as in majority:bits=4 (default: those that need only torch)."
    add("--methods", nargs="+", help=chosen)
    return parser


def _main(args: argparse.Namespace) -> None:
    work = partial(run, args)
    if "RANK" in os.environ:
        if args.emulate is not None:
            raise ValueError(
                "--emulate starts its own ranks; run it with python instead of torchrun"
            )
        take_part(work, args.threads)
        return
    # Fails now rather than after minutes.
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    for name in args.methods or ():
        method_of(name)
    if args.model is not None:
        with torch.device("meta"):
            model_of(args.parameters, args.model)
    local_ranks = args.local_ranks
    if args.emulate is not None:
        if args.ranks is not None:
            raise ValueError("--emulate sets the number of hosts; use --local-ranks, not --ranks")
        count = args.emulate.hosts * local_ranks
    else:
        count = args.ranks or 2
        if count % local_ranks:
            raise ValueError(
                f"--ranks ({count}) must be a multiple of --local-ranks ({local_ranks})"
            )
        local_ranks = count if local_ranks == 1 else local_ranks
    launch(work, count, local_ranks=local_ranks, threads=args.threads, network=args.emulate)


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    return command.exit_code_of(parser, lambda: _main(args))


if __name__ == "__main__":
    raise SystemExit(main())
