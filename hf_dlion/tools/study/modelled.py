"""How long a run would have taken over a network, from what it sent."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hf_dlion.tools.plan.cost import Link
from hf_dlion.tools.plan.link import DEFAULT_LATENCY_MS, given
from hf_dlion.tools.study.result import Result

LINKS = ("100mbit", "1gbit")


def link(name: str) -> Link:
    """Returns the link of a name, with the latency of two hosts in a rack."""
    return given(name, DEFAULT_LATENCY_MS, tree=False)


def compute_s(results: Sequence[Result]) -> float:
    """Returns the time of a worker's gradient, the same for all methods: the median of the runs."""
    times = [float(record["gradient_ms"]) for result in results for record in result.records]
    return 1e-3 * statistics.median(times)


def step_s(result: Result, compute: float, over: Link) -> float:
    """Returns the modelled time of a step: all workers' gradients at once, then the network.

    Nothing overlaps, and the optimizers' own work is left out: at these sizes it says nothing of
    that of real models.

    Args:
        result: Of the method.
        compute: Seconds for a worker's gradient.
        over: The network.
    """
    rounds = round(result.average("rounds_per_step"))
    return compute + over.seconds(result.average("bytes_per_step"), rounds)
