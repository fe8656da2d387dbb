"""The link: as the user gives it, as a benchmark measured it, or measured on the spot."""

from __future__ import annotations

import os
import re
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from hf_dlion.exchange.mean import average_wire_bytes
from hf_dlion.tools.clock import slowest
from hf_dlion.tools.plan.cost import Cluster, Link, all_reduce_rounds
from hf_dlion.tools.ranks import device_of_rank
from hf_dlion.tools.report import read_bench, track

# Of TCP between two hosts of one rack, with a collective library's software on both ends.
DEFAULT_LATENCY_MS = 0.1
REPEATS = 3
# The measurement grows its messages until one takes this long, or is this large.
LONG_S, LARGEST_BYTES = 0.5, 64 << 20
SHORT_BYTES, FIRST_LONG_BYTES, PAUSE_S = 64, 1 << 20, 0.3
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class UnmeasurableError(RuntimeError):
    """The link cannot be measured here; the text says what to do."""


def given(text: str, latency_ms: float, nccl: bool) -> Link:
    """Returns the link that "100mbit" or "25gbit" stands for.

    Raises:
        ValueError: If the text has another form.
    """
    bits = bits_per_s(text)
    if bits is None:
        raise ValueError(
            f"{text!r} is no link: write a rate in kbit, mbit or gbit, for example 25gbit, the "
            f"JSON of benchmarks/exchange.py, or measure"
        )
    return Link(bits_per_s=bits, latency_s=1e-3 * latency_ms, nccl=nccl)


def bits_per_s(rate: str) -> float | None:
    """Returns what a rate such as "2.5gbit" stands for, None for other texts and for 0."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.lower())
    return float(found[1]) * _UNITS[found[2]] or None if found else None


def from_exchange_bench(path: Path, nccl: bool) -> Link:
    """Returns the link that a run of benchmarks/exchange.py saw, one rank per node.

    Its two all-reduces tell the rate, and its votes what a short transfer loses besides. For the
    latency it sends nothing short enough: that is `DEFAULT_LATENCY_MS`.

    Raises:
        ValueError: If the file is something else.
    """
    result = read_bench(path, "exchange")
    seen = {row["name"]: (row["bytes_per_step"], 1e-3 * row["median_ms"]) for row in result["rows"]}
    ranks, latency_s = result["config"]["ranks"], 1e-3 * DEFAULT_LATENCY_MS
    link = fitted(latency_s, ranks, seen["all-reduce bf16"], seen["all-reduce fp32"], nccl)
    losses = [
        seconds - link.seconds(size, ranks - 1)
        for size, seconds in (seen["gather"], seen["two_phase"])
    ]
    return replace(link, restart_s=max(statistics.mean(losses), 0.0))


def fitted(
    latency_s: float, ranks: int, long: tuple[int, float], longer: tuple[int, float], nccl: bool
) -> Link:
    """Returns the link that explains two long all-reduces, each begun on an idle link.

    Args:
        latency_s: Of a message without size.
        ranks: How many took part.
        long: Bytes on the busiest card, and seconds.
        longer: The same of a longer one.
        nccl: As in `Link`.
    """
    rate = (longer[0] - long[0]) / max(longer[1] - long[1], 1e-9)
    waited = all_reduce_rounds(ranks, nccl) * latency_s
    lost = max(long[1] - waited - long[0] / rate, 0.0)
    return Link(bits_per_s=8 * rate, latency_s=latency_s, efficiency=1.0, restart_s=lost, nccl=nccl)


def check_measurable() -> None:
    """Checks that there is somebody to talk to.

    Raises:
        UnmeasurableError: If this process is not one of several ranks.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UnmeasurableError(
            "--link measure needs at least two ranks on two nodes, and this is one process: start "
            "it on every node with torchrun --nnodes 2 --nproc_per_node 1 ... -m "
            "hf_dlion.tools.plan ..., or with accelerate launch, or give the rate: --link 1gbit"
        )


def measured() -> Link:
    """Returns the link between the nodes of the default group; every rank calls this.

    All-reduces of growing size, each timed by its slowest rank.

    Raises:
        UnmeasurableError: On every rank, if all are on one node.
    """
    ranks = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if per_node >= ranks:
        raise UnmeasurableError(
            f"all {ranks} ranks are on this node, so --link measure would time its memory: "
            f"start ranks on two nodes at least, or give the rate: --link 1gbit"
        )
    Cluster(ranks=ranks, ranks_per_node=per_node)
    return measured_all_reduces()


def measured_all_reduces() -> Link:
    """Returns the link that all-reduces of growing size see; every rank calls this."""
    ranks, nccl = dist.get_world_size(), device_of_rank().type == "cuda"
    latency_s = _all_reduce_s(SHORT_BYTES) / all_reduce_rounds(ranks, nccl)
    size = FIRST_LONG_BYTES
    long, longer = _all_reduce_s(size), _all_reduce_s(2 * size)
    # The slowest rank's time is the same on all, so all stop together.
    while longer < LONG_S and size < LARGEST_BYTES:
        size *= 2
        long, longer = longer, _all_reduce_s(2 * size)
    sent = [average_wire_bytes(count, ranks, torch.uint8) for count in (size, 2 * size)]
    return fitted(latency_s, ranks, (sent[0], long), (sent[1], longer), nccl)


def _all_reduce_s(size: int) -> float:
    """Returns the median time of all-reduces of `size` bytes, each after a pause."""
    device = device_of_rank()
    reduce = partial(dist.all_reduce, torch.zeros(size, dtype=torch.uint8, device=device))
    times = []
    for _ in track(range(REPEATS + 1), f"all-reduces of {size:,} bytes"):
        # Longer than TCP remembers how fast the link was.
        time.sleep(PAUSE_S)
        times.append(slowest(reduce, device))
    return statistics.median(times[1:])
