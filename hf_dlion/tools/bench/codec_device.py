"""Encode, count and apply on a GPU, beside a copy of as many bytes as each of them must move."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_dlion.codec import ApplyJob, Codec, EncodeJob, codec_for
from hf_dlion.codec.eager import EagerCodec
from hf_dlion.codec.layout import MessageLayout
from hf_dlion.codec.rule import StepRule, TensorRule, Verdict
from hf_dlion.ranks.fingerprint import fingerprints
from hf_dlion.tools.bench.report import environment, publish, summary

COLUMNS = {
    "name": "work",
    "dtype": "dtype",
    "median_ms": "median ms",
    "min_ms": "min",
    "max_ms": "max",
    "megabytes": "MB moved",
    "gigabytes_per_second": "GB/s",
    "ratio": "x copy of as much",
}
WORLD_SIZE = 4
SLEEP_CYCLES = 20_000_000


class Step:
    """One step's work of a rank on a set of tensors, without the wire."""

    def __init__(self, params: list[Tensor]) -> None:
        """Makes gradients, momenta and votes.

        Args:
            params: On the device.
        """
        device = params[0].device
        self._params = params
        self._layout = MessageLayout.of([(i, p.shape) for i, p in enumerate(params)])
        self._shard = self._layout.shard(0, self._layout.words)
        self._row_numels = self._shard.row_numels(device)
        shape = (WORLD_SIZE, self._layout.words)
        self._votes = torch.randint(-(2**62), 2**62, shape, device=device)
        shape = (WORLD_SIZE, self._layout.rows)
        self._active = torch.ones(shape, dtype=torch.bool, device=device)
        self._rule = StepRule(
            step=1, rank=0, world_size=WORLD_SIZE, aggregation="majority", ties="alternate",
            stochastic_rounding=True, seed=0,
        )  # fmt: skip
        words, active = self._votes[0], self._active[0]
        planes, counts = words[None], active.int()
        self._encoding, self._applying = [], []
        for slot, param in zip(self._layout.slots, params, strict=True):
            rule = TensorRule(
                step_rule=self._rule, index=slot.index, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1
            )
            of_words = slice(slot.word, slot.word + slot.words)
            of_rows = slice(slot.row, slot.row + slot.rows)
            grad, momentum = torch.randn_like(param), torch.zeros_like(param)
            votes = words[of_words], active[of_rows]
            self._encoding.append(EncodeJob(grad, momentum, *votes, rule))
            part = Verdict(planes[:, of_words], counts[of_rows])
            self._applying.append(ApplyJob(param, part, rule))

    def encode(self, codec: Codec) -> None:
        """Encodes all gradients."""
        codec.encode_all(self._encoding)

    def apply(self, codec: Codec) -> None:
        """Applies a verdict to all parameters."""
        codec.apply_all(self._applying)

    def count(self, codec: Codec) -> None:
        """Counts all ranks' votes. It waits for the device: its time has the host's in it."""
        codec.count(self._votes, self._active, self._shard, self._row_numels, self._rule)

    def hash(self) -> None:
        """Hashes all parameters. It waits for the device too."""
        fingerprints(self._params)

    def bytes_of(self, name: str) -> int:
        """Returns the bytes that the work must read and write."""
        values = sum(param.numel() * param.element_size() for param in self._params)
        words = 8 * self._layout.words
        encoded, counted = 3 * values + words, (WORLD_SIZE + 1) * words
        applied = 2 * values + words
        return {"encode": encoded, "count": counted, "apply": applied, "hash": values}[name]


def run(args: argparse.Namespace, shapes: list[torch.Size], dtypes: dict[str, Any]) -> None:
    """Measures, prints and writes.

    Args:
        args: The command line's options.
        shapes: Of the parameters.
        dtypes: torch's dtypes by name.
    """
    device = torch.device(args.device)
    before = environment()
    codec = codec_for(device)
    rows: list[dict[str, Any]] = []
    for name, dtype in dtypes.items():
        torch.manual_seed(0)
        step = Step([torch.randn(s, device=device).mul_(0.02).to(dtype) for s in shapes])
        tasks: list[tuple[str, str, Callable[[], None]]] = [
            ("encode", "encode", partial(step.encode, codec)),
            ("apply", "apply", partial(step.apply, codec)),
            ("count", "count", partial(step.count, codec)),
            ("hash", "hash", step.hash),
            ("eager encode", "encode", partial(step.encode, EagerCodec())),
            ("eager apply", "apply", partial(step.apply, EagerCodec())),
        ]
        for task, part, call in tasks:
            moved = step.bytes_of(part)
            source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            copy = partial(target.copy_, source)
            times, copies = _in_turns(call, copy, args.repeats, device)
            row = {"name": task, "dtype": name, **summary(times), "megabytes": moved / 1e6}
            row["copy_ms"] = summary(copies)["median_ms"]
            row["gigabytes_per_second"] = moved / 1e6 / row["median_ms"]
            row["ratio"] = row["median_ms"] / row["copy_ms"]
            rows.append(row)
    config = {key: getattr(args, key) for key in ("parameters", "repeats", "device")}
    config["codec"] = type(codec).__name__
    publish("codec", args.json, config, before, rows, COLUMNS)


def _in_turns(
    call: Callable[[], Any], copy: Callable[[], Any], repeats: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Returns the seconds of both, in turns; the first three rounds compile and warm up."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 3):
        for found, work in zip(times, (call, copy), strict=True):
            seconds = _timed(work, device)
            if turn >= 3:
                found.append(seconds)
    return times


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    """Returns the seconds that the device is busy with the work, or the CPU with all of it."""
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    event: Any = torch.cuda.Event  # without types
    begin_event, end_event = (event(enable_timing=True) for _ in range(2))
    # While the device sleeps the host gets ahead, so that no launch is waited for.
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    begin_event.record()
    work()
    end_event.record()
    torch.cuda.synchronize(device)
    milliseconds: float = begin_event.elapsed_time(end_event)
    return milliseconds / 1e3
