"""The least that a step with an overlapped exchange can take, from what was measured beside it."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dlion.optimizer import DistributedLion
from hf_dlion.tools.bench.methods import Method

REPEATS = 3


@dataclass(frozen=True)
class Departure:
    """One message of an overlapped exchange.

    Attributes:
        ready_s: Seconds from the start of backward until its last gradient is ready.
        wire_bytes: Bytes that a rank sends for it.
    """

    ready_s: float
    wire_bytes: int


def exposed_wire_s(departures: Sequence[Departure], backward_s: float, bits_per_s: float) -> float:
    """Returns how long the wire is still busy when backward ends.

    The messages travel one after another, each as soon as it is ready and the wire is free: what
    becomes ready last, like a tied embedding, cannot overlap.

    Args:
        departures: In the order in which they leave.
        backward_s: Seconds that backward takes.
        bits_per_s: Of the link, one way.
    """
    free_s = 0.0
    for departure in departures:
        free_s = max(free_s, departure.ready_s) + departure.wire_bytes * 8 / bits_per_s
    return max(0.0, free_s - backward_s)


def departures_of(
    overlapped: Method, alone: Method, batch: Tensor
) -> tuple[list[Departure], float] | None:
    """Returns when each message could leave, and the seconds of backward, on this rank alone.

    Args:
        overlapped: Has made steps with `overlap=True`.
        alone: The same model without a wrapper; its gradients are dropped.
        batch: Tokens.

    Returns:
        Medians, or None where nothing is exchanged during backward.
    """
    optimizer = overlapped.optimizer
    assert isinstance(optimizer, DistributedLion), "the overlapped method"
    messages = optimizer._engine.messages
    if not messages:
        return None
    params = list(alone.model.parameters())
    ready: dict[int, float] = {}
    handles = [
        param.register_post_accumulate_grad_hook(functools.partial(_note, ready, index))  # type: ignore[no-untyped-call]
        for index, param in enumerate(params)
    ]
    laps: list[tuple[list[float], float]] = []
    for _ in range(REPEATS):
        loss = alone.loss(batch)
        begin = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        end = time.perf_counter()
        alone.optimizer.zero_grad()
        last = [max(ready[index] for index, _ in message.params) - begin for message in messages]
        laps.append((last, end - begin))
    for handle in handles:
        handle.remove()
    median = [statistics.median(lap[k] for lap, _ in laps) for k in range(len(messages))]
    departures = [
        Departure(seconds, message.wire_bytes)
        for seconds, message in zip(median, messages, strict=True)
    ]
    return departures, statistics.median(seconds for _, seconds in laps)


def _note(ready: dict[int, float], index: int, param: torch.Tensor) -> None:
    ready[index] = time.perf_counter()
