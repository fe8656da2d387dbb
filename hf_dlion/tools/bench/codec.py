"""Encode, count, apply and hash on one core, beside a fused AdamW step and a copy of them all."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hf_dlion.codec import Codec, codec_for
from hf_dlion.codec.layout import MessageLayout
from hf_dlion.codec.native import library as native_library
from hf_dlion.codec.rule import StepRule, TensorRule, Verdict
from hf_dlion.ranks.fingerprint import fingerprints
from hf_dlion.tools.bench import codec_device
from hf_dlion.tools.bench.report import environment, publish, summary

COLUMNS = {
    "name": "work",
    "dtype": "dtype",
    "median_ms": "median ms",
    "min_ms": "min",
    "max_ms": "max",
    "ns_per_element": "ns/element",
    "ratio": "x fused AdamW",
    "encode_ms": "encode",
    "count_ms": "count",
    "apply_ms": "apply",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WORLD_SIZES = (2, 4)
# A matrix of this many rows and columns is a usual tensor of a model of this kind.
ROW = 1024
LARGEST = 4096 * ROW

Lap = dict[str, float]


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Makes codecs and counts run without the compiled library, in this process."""
    before = os.environ.get(native_library.ENVIRONMENT)
    os.environ[native_library.ENVIRONMENT] = "0"
    native_library.library.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del os.environ[native_library.ENVIRONMENT]
        else:
            os.environ[native_library.ENVIRONMENT] = before
        native_library.library.cache_clear()


def shapes(parameters: int) -> list[torch.Size]:
    """Returns matrices of rows of 1024, and a vector for the rest."""
    found = [torch.Size((LARGEST // ROW, ROW))] * (parameters // LARGEST)
    rest = parameters % LARGEST
    if rest >= ROW:
        found.append(torch.Size((rest // ROW, ROW)))
    if rest % ROW:
        found.append(torch.Size((rest % ROW,)))
    return found


class Work:
    """One step's work of a rank on a set of tensors, without the wire."""

    def __init__(self, params: list[Tensor], world_size: int, bits: int) -> None:
        """Makes momenta, buffers, and the other ranks' votes.

        Args:
            params: Parameters with gradients.
            world_size: Number of ranks whose votes are counted.
            bits: Of a vote.
        """
        self._params = params
        self._momenta = [torch.zeros_like(param) for param in params]
        self._layout = MessageLayout.of([(i, p.shape) for i, p in enumerate(params)])
        self._votes = torch.randint(-(2**62), 2**62, (world_size, bits * self._layout.words))
        self._active = torch.ones((world_size, self._layout.rows), dtype=torch.bool)
        self._shard = self._layout.shard(0, self._layout.words)
        self._row_numels = self._shard.row_numels(torch.device("cpu"))
        self._world_size, self._bits, self._step = world_size, bits, 0

    def __call__(self, codec: Codec) -> Lap:
        """Does the work once; returns its seconds by part."""
        self._step += 1
        rule = StepRule(
            step=self._step, rank=0, world_size=self._world_size, aggregation="majority",
            ties="alternate", stochastic_rounding=True, seed=0, bits=self._bits,
        )  # fmt: skip
        rules = [
            TensorRule(step_rule=rule, index=i, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1)
            for i in range(len(self._params))
        ]
        work = list(zip(self._layout.slots, self._params, self._momenta, rules, strict=True))
        begin = time.perf_counter()
        for slot, param, momentum, tensor_rule in work:
            first, count = self._bits * slot.word, self._bits * slot.words
            words = self._votes[0, first : first + count]
            active = self._active[0, slot.row : slot.row + slot.rows]
            assert param.grad is not None, "made with the parameter"
            codec.encode(param.grad, momentum, words, active, tensor_rule)
        encoded = time.perf_counter()
        found = codec.count(self._votes, self._active, self._shard, self._row_numels, rule)
        counted = time.perf_counter()
        for slot, param, _, tensor_rule in work:
            planes = found.planes[:, slot.word : slot.word + slot.words]
            counts = found.counts[slot.row : slot.row + slot.rows]
            codec.apply(param, Verdict(planes, counts), tensor_rule)
        applied = time.perf_counter()
        return {
            "total": applied - begin,
            "encode": encoded - begin,
            "count": counted - encoded,
            "apply": applied - counted,
        }


def run(args: argparse.Namespace) -> None:
    """Measures, prints and writes."""
    torch.set_num_threads(args.threads)
    if args.device != "cpu":
        codec_device.run(args, shapes(args.parameters), DTYPES)
        return
    torch.manual_seed(0)
    before = environment()
    rows: list[dict[str, Any]] = []
    for name in DTYPES:
        rows += _rows_of(name, args)
    config = {key: getattr(args, key) for key in ("parameters", "repeats", "threads", "bits")}
    config["compiler"] = native_library.library() is not None
    publish("codec", args.json, config, before, rows, COLUMNS)


def _rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    parameters, repeats = args.parameters, args.repeats
    params = [torch.randn(shape).mul_(0.02).to(DTYPES[name]) for shape in shapes(parameters)]
    for param in params:
        param.grad = torch.randn_like(param)
    copies = [torch.empty_like(param) for param in params]
    adamw = torch.optim.AdamW(params, lr=1e-4, fused=True)
    tasks: dict[str, Callable[[], Lap]] = {
        "fused AdamW step": lambda: _timed(adamw.step),
        "copy": lambda: _timed(lambda: _copy(copies, params)),
        "hash of all parameters": lambda: _timed(lambda: fingerprints(params)),
    }
    compiled = native_library.library() is not None
    for bits, world_size in itertools.product(args.bits, WORLD_SIZES):
        work, case = Work(params, world_size, bits), f"{world_size} ranks"
        case += "" if bits == 1 else f", {bits} bits"
        if compiled:
            tasks[f"native, {case}"] = _native(work)
        tasks[f"eager, {case}"] = _eager(work)
    laps: dict[str, list[Lap]] = {task: [] for task in tasks}
    # In turns, so that whatever else the machine does hits all alike; the first round is warm-up.
    for turn in range(repeats + 1):
        for task, call in tasks.items():
            lap = call()
            if turn:
                laps[task].append(lap)
    adamw_ms = summary([lap["total"] for lap in laps["fused AdamW step"]])["median_ms"]
    rows = []
    for task, found in laps.items():
        row = {"name": task, "dtype": name, **summary([lap["total"] for lap in found])}
        row["ns_per_element"] = 1e6 * row["median_ms"] / parameters
        row["ratio"] = row["median_ms"] / adamw_ms
        for part in found[0].keys() - {"total"}:
            row[f"{part}_ms"] = summary([lap[part] for lap in found])["median_ms"]
        rows.append(row)
    return rows


def _native(work: Work) -> Callable[[], Lap]:
    return lambda: work(codec_for(torch.device("cpu")))


def _eager(work: Work) -> Callable[[], Lap]:
    def call() -> Lap:
        with without_compiler():
            return work(codec_for(torch.device("cpu")))

    return call


def _timed(call: Callable[[], Any]) -> Lap:
    begin = time.perf_counter()
    call()
    return {"total": time.perf_counter() - begin}


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
