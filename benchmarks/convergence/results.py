"""Records of finished runs, and the results of each method.

A method's learning rate is chosen on the first seed, and the other seeds use it. If several rates
have run on all seeds, a result is that of the best mean.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.convergence.setting import Setting

Record = dict[str, Any]
REFERENCE = "lion"


class Records:
    """A file of finished runs, one JSON line each. These runs are not made again."""

    def __init__(self, path: Path) -> None:
        """Reads the file, and removes an incomplete last line that a crash left."""
        self.path, self._found = path, dict[str, Record]()
        content = path.read_bytes() if path.exists() else b""
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.truncate(path, end)
        for number, line in enumerate(content[:end].splitlines(), 1):
            try:
                record = json.loads(line)
                self._found[record["key"]] = record
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}, line {number} is not a record of a run; remove the line"
                ) from None

    def __len__(self) -> int:
        return len(self._found)

    def of(self, setting: Setting) -> Record | None:
        """Returns the record of a run, or None if it has not run.

        Real ranks and those in one process have the same results, but for the order of sums, so
        each stands for the other. Not for `lion` with clipping, which one process once did to the
        mean gradient.
        """
        found = self._found.get(setting.key)
        if found is None and not (setting.method == REFERENCE and setting.clip):
            found = self._found.get(setting.replace(real=not setting.real).key)
        return found

    def add(self, record: Record) -> None:
        """Appends a record and waits until it is on the disk."""
        line = json.dumps(record, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._found[record["key"]] = record


@dataclass(frozen=True)
class Result:
    """A method at its best learning rate.

    Attributes:
        setting: Setting of the method with its best learning rate; the seed is ignored.
        grid: Loss by learning rate on the first seed; infinite if the run diverged.
        records: Records of the runs with the best learning rate, by seed.
        gaps: Loss minus the loss of Lion on the mean gradient, by common seed.
    """

    setting: Setting
    grid: Mapping[float, float]
    records: Mapping[int, Record] = field(repr=False)
    gaps: dict[int, float] = field(default_factory=dict)

    @property
    def losses(self) -> dict[int, float]:
        """The last validation loss by seed."""
        return {seed: loss_of(record) for seed, record in self.records.items()}

    @property
    def at_edge(self) -> bool:
        """Whether the best learning rate is at an edge of the grid."""
        return len(self.grid) > 1 and self.setting.lr in (min(self.grid), max(self.grid))

    @property
    def bits_per_step(self) -> float:
        """Bits that a rank sends per parameter and step."""
        (parameters,) = {record["parameters"] for record in self.records.values()}
        return 8 * self.average("bytes_per_step") / int(parameters)

    def gaps_to(self, reference: Result) -> dict[int, float]:
        """Returns the loss minus that of another method, by common seed, without diverged runs.

        They are paired by seed, because seeds differ by more than methods.
        """
        theirs = reference.losses
        gaps = {seed: loss - theirs[seed] for seed, loss in self.losses.items() if seed in theirs}
        return {seed: gap for seed, gap in gaps.items() if math.isfinite(gap)}

    def average(self, key: str) -> float:
        """Returns the mean of a number in the records."""
        return statistics.fmean(float(record[key]) for record in self.records.values())

    def curve(self) -> tuple[list[int], list[float], list[float]]:
        """Returns steps, mean losses, and their standard deviations, which are 0 for one seed."""
        curves = [run["curve"] for run in self.records.values() if run["failure"] is None]
        columns = [[list(point) for point in points] for points in zip(*curves, strict=False)]
        columns = [points for points in columns if all(loss is not None for _, loss in points)]
        losses = [[loss for _, loss in points] for points in columns]
        return (
            [c[0][0] for c in columns],
            [statistics.fmean(x) for x in losses],
            [*map(spread, losses)],
        )


@dataclass(frozen=True)
class Trial:
    """The runs of one method in one setting.

    Attributes:
        setting: Setting of the runs; learning rate and seed are ignored.
        lrs: Learning rates to choose from.
        seeds: Number of seeds; seed 0 chooses the learning rate.
    """

    setting: Setting
    lrs: tuple[float, ...]
    seeds: int

    def missing(self, records: Records) -> list[Setting]:
        """Returns the missing runs that can be made now."""
        grid = [self.setting.replace(lr=lr, seed=0) for lr in self.lrs]
        wanted = [run for run in grid if records.of(run) is None]
        if wanted:
            return wanted
        best = self._best(records)[0]
        runs = [self.setting.replace(lr=best, seed=seed) for seed in range(self.seeds)]
        return [run for run in runs if records.of(run) is None]

    def result(self, records: Records) -> Result | None:
        """Returns the result of the finished runs, or None if there are none."""
        best, grid = self._best(records)
        found = {lr: self._by_seed(lr, records) for lr in grid}
        complete = [lr for lr in grid if len(found[lr]) == self.seeds]
        if complete:
            best = min(complete, key=lambda lr: sum(map(loss_of, found[lr].values())))
        return Result(self.setting.replace(lr=best), grid, found[best]) if grid else None

    def _by_seed(self, lr: float, records: Records) -> dict[int, Record]:
        runs = [self.setting.replace(lr=lr, seed=seed) for seed in range(self.seeds)]
        return {run.seed: record for run in runs if (record := records.of(run)) is not None}

    def _best(self, records: Records) -> tuple[float, dict[float, float]]:
        """Returns the (smallest) learning rate with the lowest loss, and all losses."""
        runs = {lr: records.of(self.setting.replace(lr=lr, seed=0)) for lr in sorted(self.lrs)}
        grid = {lr: loss_of(record) for lr, record in runs.items() if record is not None}
        return min(grid, key=lambda lr: grid[lr], default=0.0), grid


def results(trials: Sequence[Trial], records: Records) -> list[list[Result]]:
    """Returns the results of all trials; each list has the results of one comparison."""
    found: dict[Setting, list[Result]] = {}
    for trial in trials:
        if (result := trial.result(records)) is not None:
            cell = trial.setting.replace(method="", lr=0.0, seed=0)
            found.setdefault(cell, []).append(result)
    for together in found.values():
        for lion in [result for result in together if result.setting.method == REFERENCE]:
            for result in (result for result in together if result is not lion):
                result.gaps.update(result.gaps_to(lion))
    return list(found.values())


def read(files: Iterable[Path]) -> list[Record]:
    """Returns the records of files of runs."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def best(
    records: Iterable[Record],
    method: str,
    *,
    workers: int,
    steps: int,
    betas: tuple[float, float] | None = None,
) -> Result:
    """Returns a method's result at the setting with most seeds, and of those the lowest mean loss.

    Args:
        records: Records of any runs.
        method: Name of the method.
        workers: Number of ranks. Real ranks and those in one process have the same results.
        steps: Steps of a run.
        betas: Betas of Lion; None for any.

    Raises:
        ValueError: If the method has no such record.
    """
    found: dict[Setting, dict[int, Record]] = defaultdict(dict)
    for record in records:
        setting = Setting.of(record["setting"])
        if (setting.method, setting.workers, setting.steps) == (method, workers, steps):
            if betas in (None, setting.betas):
                found[setting.replace(seed=0, real=False)][setting.seed] = record
    if not found:
        raise ValueError(f"no record of {method} with {workers} ranks and {steps} steps")

    def rank(setting: Setting) -> tuple[int, float]:
        runs = found[setting].values()
        return -len(runs), statistics.fmean(map(loss_of, runs))

    chosen = min(found, key=rank)
    same = {s.lr: runs for s, runs in found.items() if s.replace(lr=chosen.lr) == chosen}
    grid = {lr: loss_of(same[lr][0]) for lr in sorted(same) if 0 in same[lr]}
    return Result(chosen, grid, found[chosen])


def loss_of(record: Record) -> float:
    """Returns the last validation loss, infinite if the run diverged."""
    return math.inf if record["loss"] is None else float(record["loss"])


def spread(values: Iterable[float]) -> float:
    """Returns the standard deviation over the seeds, 0 for one."""
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 else 0.0


def with_spread(values: Iterable[float], *, sign: bool = False) -> str:
    """Returns a mean and its spread as text.

    >>> with_spread([2.3, 2.302]), with_spread([0.026], sign=True), with_spread([])
    ('2.301 ± 0.001', '+0.026', '-')
    """
    values = list(values)
    if not values:
        return "-"
    if not all(map(math.isfinite, values)):
        return "diverged"
    text = f"{statistics.fmean(values):{'+' if sign else ''}.3f}"
    return text if len(values) < 2 else f"{text} ± {spread(values):.3f}"
