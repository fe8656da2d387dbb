"""How long a step of each method takes over a network: measured by `step_time.py`, or computed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.convergence.results import Result
from benchmarks.convergence.setting import Setting
from benchmarks.methods import DEMO, DILOCO, LOCAL
from hf_dlion.tools.names import BF16, DLION, FP32, NONE, POWER, name_of
from hf_dlion.tools.plan.cost import Link
from hf_dlion.tools.plan.link import DEFAULT_LATENCY_MS, given
from hf_dlion.tools.report import read_bench

# The rows of `step_time.py` that time a method of the study.
ROWS = {
    "adamw": FP32,
    "lion": "DDP fp32, Lion",
    "majority": DLION,
    **{f"bits{bits}": name_of(bits) for bits in (2, 4)},
    "bf16": BF16,
    "powersgd": POWER,
    **{f"localsgd{every}": LOCAL.format(every) for every in (8, 32)},
    **{f"diloco{every}": DILOCO.format(every) for every in (16, 50)},
    "demo": DEMO,
}


@dataclass(frozen=True)
class Time:
    """Of a step, measured or computed."""

    seconds: float
    measured: bool = False


@dataclass(frozen=True)
class Clock:
    """Step times of what the study compares.

    Attributes:
        links: The networks, by what users write, for example "1gbit".
        compute_s: Of a worker's gradient, where nothing was measured.
        measured: By link and name of the row, seconds of a step and bytes out of a rank.
    """

    links: Mapping[str, Link]
    compute_s: float
    measured: Mapping[str, Mapping[str, tuple[float, float]]]

    def step(self, result: Result, name: str) -> Time:
        """Returns the time of a method's step on a link.

        To what was measured comes the network's time for what the run sent beyond it, for example
        in PowerSGD's first steps. What was measured on another link is taken from the fastest, and
        the network's time for the bytes put in place of what it took there. Otherwise it is the
        gradient's time and then the network's: nothing overlaps, and the optimizers' own work is
        left out.
        """
        link = self.links[name]
        sent = result.average("bytes_per_step")
        # What meets in every k-th step has a k-th of its messages in each.
        rounds = round(result.average("rounds_per_step"))
        row = ROWS.get(result.setting.method, "")
        if row in self.measured.get(name, ()):
            seconds, timed = self.measured[name][row]
            return Time(seconds + link.seconds(max(sent - timed, 0.0), 0), measured=True)
        elsewhere = [known for known, times in self.measured.items() if row in times]
        if not elsewhere:
            return Time(self.compute_s + link.seconds(sent, rounds))
        fastest = max(elsewhere, key=lambda known: link_of(known).bits_per_s)
        seconds, timed = self.measured[fastest][row]
        own_s = seconds - link_of(fastest).seconds(timed, rounds)
        return Time(max(own_s, 0.0) + link.seconds(sent, rounds))


def clock_of(
    links: Sequence[str],
    files: Sequence[str],
    compute_s: float | None,
    results: Sequence[Result],
) -> Clock:
    """Returns the step times of results that are compared with one another.

    The times of each file are moved by what its step without communication differs from the median
    of all files'.

    Args:
        links: As users write them.
        files: JSON of `step_time.py --emulate` with the model that was trained.
        compute_s: Of a worker's gradient; by default a step without communication, the median of
            the files, or else that of the runs.
        results: Of one cell.

    Raises:
        ValueError: If a link is none, or a file is of another model, batch or number of ranks.
    """
    runs, size = [], results[0].records[0]["parameters"]
    for file in files:
        found = read_bench(file, "train")
        config = _checked(file, found["config"], results[0].setting)
        if config["parameters"] != size:
            raise ValueError(
                f"{Path(file).name} times {config['parameters']:,} parameters, and the study "
                f"trained {size:,}"
            )
        rows = {r["name"]: (1e-3 * r["median_ms"], r["bytes_per_step"]) for r in found["rows"]}
        runs.append((str(config["emulate"]).partition("x")[2], rows))
    places = {name: link_of(name) for name in links}
    if compute_s is not None:
        return Clock(places, compute_s, {})
    free = [rows[NONE][0] for _, rows in runs if NONE in rows]
    gradients = [1e-3 * record["gradient_ms"] for own in results for record in own.records]
    compute_s = statistics.median(free or gradients)
    measured: dict[str, dict[str, tuple[float, float]]] = {}
    for link, rows in runs:
        # The machine is not equally fast in all runs.
        slower = rows[NONE][0] - compute_s if NONE in rows else 0.0
        own = measured.setdefault(link, {})
        own.update((name, (seconds - slower, sent)) for name, (seconds, sent) in rows.items())
    return Clock(places, compute_s, measured)


def check_clock(links: Sequence[str], files: Sequence[str], settings: Iterable[Setting]) -> None:
    """Checks before any work starts that links are links, and files benchmarks of such steps.

    Raises:
        ValueError: If they are not.
        OSError: If a file cannot be read.
    """
    for name in links:
        link_of(name)
    for setting in settings:
        for file in files:
            _checked(file, read_bench(file, "train")["config"], setting)


def _checked(file: str, config: Mapping[str, Any], setting: Setting) -> Mapping[str, Any]:
    """Returns the configuration of a benchmark, which is that of the study's steps."""
    if config["emulate"] is None:
        raise ValueError(f"{Path(file).name} is of no emulated network")
    timed = [config[name] for name in ("ranks", "batch", "sequence")]
    if timed != [setting.workers, setting.batch, setting.sequence]:
        raise ValueError(
            f"{Path(file).name} times steps of {{}} ranks x {{}} x {{}} tokens, and the study has "
            f"{setting.workers} x {setting.batch} x {setting.sequence}".format(*timed)
        )
    return config


def link_of(name: str) -> Link:
    """Returns a network by what users write."""
    try:
        return given(name, DEFAULT_LATENCY_MS, nccl=False)
    except ValueError:
        raise ValueError(f"--links {name}: write a rate, for example 25gbit") from None
