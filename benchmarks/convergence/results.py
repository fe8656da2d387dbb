"""Finished runs, which of them a study takes, and what those of a method say together.

A learning rate is chosen for each method first, on the first seed; the other seeds follow with it.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.convergence.compressors import DENSITY
from benchmarks.convergence.setting import Setting

Record = dict[str, Any]
REFERENCE, FULL = "lion", 32.0
# What the Distributed Lion paper's methods would exchange with a parameter server (Liu et al. 2024,
# arXiv 2404.00438, algorithm 1): bits per parameter on the way up and down, from the number of
# workers n, as the logarithm of how many values there are. A sum of n signs takes n + 1 values, one
# of n ternary numbers 2 n + 1. Of the sparse methods values count, and positions do not.
_SERVER_BITS: dict[str, Callable[[int], tuple[float, float]]] = {
    "adamw": lambda n: (FULL, FULL),
    "lion": lambda n: (FULL, FULL),
    "terngrad": lambda n: (math.log2(3), math.log2(2 * n + 1)),
    "graddrop": lambda n: (DENSITY * FULL, FULL),
    "dgc": lambda n: (DENSITY * FULL, FULL),
    "average": lambda n: (1.0, math.log2(n + 1)),
    "majority": lambda n: (1.0, 1.0),
}


class Records:
    """A file of finished runs, one JSON line each: what is there need not be run again."""

    def __init__(self, path: Path) -> None:
        """Reads what is there; a last line that a crash cut short is left out, and cut off."""
        self.path = path
        self._found: dict[str, Record] = {}
        if path.exists():
            whole = path.read_bytes()
            end = whole.rfind(b"\n") + 1
            if end < len(whole):
                os.truncate(path, end)
            for number, line in enumerate(whole[:end].splitlines(), 1):
                try:
                    record = json.loads(line)
                    self._found[record["key"]] = record
                except (ValueError, KeyError, TypeError):
                    raise ValueError(f"{path}, line {number}: this is no record of a run") from None

    def __len__(self) -> int:
        return len(self._found)

    def of(self, setting: Setting) -> Record | None:
        """Returns the record of a run, or None if it has not been made."""
        return self._found.get(setting.key)

    def all(self) -> list[Record]:
        """Returns all records, in the order in which they came."""
        return list(self._found.values())

    def add(self, record: Mapping[str, Any]) -> None:
        """Appends a record; it is on the disk when this returns."""
        line = json.dumps(dict(record), allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self._found[record["key"]] = dict(record)


@dataclass(frozen=True)
class Trial:
    """A method with all else given.

    Attributes:
        setting: With a learning rate and a seed that do not count.
        lrs: The grid.
        seeds: All of them; the first chooses the learning rate.
    """

    setting: Setting
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]

    def first_runs(self) -> list[Setting]:
        """Returns the runs that choose the learning rate."""
        return [self.setting.replace(lr=lr, seed=self.seeds[0]) for lr in self.lrs]

    def made(self, records: Records) -> Trial:
        """Returns the trial with the learning rates whose runs are there."""
        found = [run.lr for run in self.first_runs() if records.of(run) is not None]
        return replace(self, lrs=tuple(found))

    def other_runs(self, lr: float) -> list[Setting]:
        """Returns the runs with the chosen learning rate."""
        return [self.setting.replace(lr=lr, seed=seed) for seed in self.seeds]

    def losses(self, records: Records) -> dict[float, float] | None:
        """Returns the loss at each learning rate, or None while runs of these are missing."""
        found = {run.lr: records.of(run) for run in self.first_runs()}
        if not found or None in found.values():
            return None
        return {lr: loss_of(record) for lr, record in found.items() if record is not None}


def best(losses: Mapping[float, float]) -> float:
    """Returns the learning rate with the lowest loss, of equal ones the smallest."""
    return min(sorted(losses), key=lambda lr: losses[lr])


def missing(trials: Iterable[Trial], records: Records) -> Iterator[Setting]:
    """Yields the runs that can be made now and have not been."""
    for trial in trials:
        losses = trial.losses(records)
        wanted = trial.first_runs() if losses is None else trial.other_runs(best(losses))
        yield from (setting for setting in wanted if records.of(setting) is None)


@dataclass(frozen=True)
class Result:
    """A method at its best learning rate.

    Attributes:
        setting: Of the method, with that learning rate; its seed does not count.
        grid: The loss at each learning rate; infinite where the run diverged.
        losses: The last validation loss by seed.
        records: Of these runs.
        gaps: The difference to global Lion's loss by seed, of seeds that both have.
    """

    setting: Setting
    grid: Mapping[float, float]
    losses: dict[int, float]
    records: Sequence[Record] = field(repr=False)
    gaps: dict[int, float] = field(default_factory=dict)

    @property
    def at_edge(self) -> bool:
        """Whether a learning rate beyond the grid might be better still."""
        return len(self.grid) > 1 and self.setting.lr in (min(self.grid), max(self.grid))

    @property
    def mean(self) -> float:
        """Mean loss over the seeds."""
        return statistics.fmean(self.losses.values())

    @property
    def spread(self) -> float:
        """Standard deviation of the loss over the seeds."""
        return spread(self.losses.values())

    @property
    def bits_per_step(self) -> float:
        """Bits that a rank sends per parameter and step."""
        return 8 * self.average("bytes_per_step") / int(self.records[0]["parameters"])

    def average(self, key: str) -> float:
        """Returns the mean of a number in the records."""
        return statistics.fmean(float(record[key]) for record in self.records)

    def curve(self) -> tuple[list[int], list[float], list[float]]:
        """Returns steps, the mean loss after each, and its standard deviation, 0 of one seed."""
        curves = [record["curve"] for record in self.records if record["failure"] is None]
        whole = zip(*curves, strict=False)
        columns = [column for column in whole if all(point[1] is not None for point in column)]
        losses = [[point[1] for point in column] for column in columns]
        deviations = [finite(spread(found)) or 0.0 for found in losses]
        return [c[0][0] for c in columns], [statistics.fmean(found) for found in losses], deviations

    def as_json(self) -> dict[str, Any]:
        """Returns the summary."""
        metrics = [record["metrics"] for record in self.records]
        return {
            "setting": self.setting.replace(seed=-1).identity(),
            "grid": {str(lr): finite(loss) for lr, loss in self.grid.items()},
            "lr": self.setting.lr,
            "lr_at_edge": self.at_edge,
            "loss": {str(seed): finite(loss) for seed, loss in self.losses.items()},
            "mean": finite(self.mean),
            "spread": finite(self.spread),
            "gap": finite(mean_of(self.gaps.values())),
            "gap_spread": finite(spread(self.gaps.values())),
            "bytes_per_step": self.average("bytes_per_step"),
            "bits_per_step": self.bits_per_step,
            "server_bits": server_bits(self.setting.method, self.setting.workers),
            "metrics": {
                name: statistics.fmean(found[name] for found in metrics)
                for name in metrics[0]
                if all(name in found for found in metrics)
            },
        }


def results(trials: Sequence[Trial], records: Records) -> list[Result]:
    """Returns the results of all trials that have a learning rate and a seed, in their order."""
    found = []
    for trial in trials:
        if (grid := trial.losses(records)) is None:
            continue
        runs = [(run.seed, records.of(run)) for run in trial.other_runs(best(grid))]
        done = {seed: record for seed, record in runs if record is not None}
        losses = {seed: loss_of(record) for seed, record in done.items()}
        setting = trial.setting.replace(lr=best(grid))
        found.append(Result(setting, grid, losses, list(done.values())))
    # Gaps are paired by seed: seeds differ by more than methods do.
    lions = {cell(r.setting): r.losses for r in found if r.setting.method == REFERENCE}
    for result in found:
        for seed, loss in lions.get(cell(result.setting), {}).items():
            gap = result.losses.get(seed, math.nan) - loss
            if math.isfinite(gap):
                result.gaps[seed] = gap
    return found


def cell(setting: Setting) -> Setting:
    """Returns what settings have in common that are compared with one another."""
    return setting.replace(method="", lr=0.0, seed=0)


def cells(results: Sequence[Result]) -> list[list[Result]]:
    """Returns the results that are compared with one another, together."""
    found: dict[object, list[Result]] = {}
    for result in results:
        found.setdefault(cell(result.setting), []).append(result)
    return list(found.values())


def server_bits(method: str, workers: int) -> float | None:
    """Returns bits per parameter and iteration of a worker to a server and back, as the paper does.

    Without a server, `Result.bits_per_step` is what really left a rank. None for other methods.

    >>> server_bits("majority", 4), server_bits("lion", 4), server_bits("bits4", 4)
    (2.0, 64.0, None)
    """
    of_method = _SERVER_BITS.get(method)
    return None if of_method is None else sum(of_method(workers))


def loss_of(record: Record) -> float:
    """Returns the last validation loss, infinite where the run diverged."""
    return math.inf if record["loss"] is None else float(record["loss"])


def mean_of(values: Iterable[float]) -> float:
    """Returns the mean, NaN of nothing."""
    values = list(values)
    return statistics.fmean(values) if values else math.nan


def spread(values: Iterable[float]) -> float:
    """Returns the standard deviation over the seeds, NaN below two."""
    values = list(values)
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


def finite(value: float) -> float | None:
    """Returns a number as JSON can hold it, None for what it cannot."""
    return value if math.isfinite(value) else None
