"""What the runs of a method say together, how far they are from Lion, and what they would cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.convergence.compressors import DENSITY
from benchmarks.convergence.records import Record, Records
from benchmarks.convergence.search import Choice, Trial, chosen, loss_of
from benchmarks.convergence.setting import Setting
from hf_dlion.momentum.divergence import by_kind

REFERENCE = "lion"
FULL = 32.0
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


@dataclass(frozen=True)
class Result:
    """A method in a cell, at its best learning rate.

    Attributes:
        setting: Of the method, with the chosen learning rate; its seed does not count.
        choice: The learning rate, and how the others did.
        losses: The last validation loss by seed.
        records: Of these runs.
        gaps: The difference to global Lion's loss by seed, of seeds that both have.
    """

    setting: Setting
    choice: Choice
    losses: dict[int, float]
    records: Sequence[Record] = field(repr=False)
    gaps: dict[int, float]

    @property
    def mean(self) -> float:
        """Mean loss over the seeds."""
        return statistics.fmean(self.losses.values())

    def average(self, key: str) -> float:
        """Returns the mean of a number in the records."""
        return statistics.fmean(float(record[key]) for record in self.records)

    @property
    def before(self) -> float:
        """Mean loss before training, NaN where none was finite."""
        first = (record["curve"][0][1] for record in self.records)
        return mean_of(loss for loss in first if loss is not None)

    @property
    def bits_per_step(self) -> float:
        """Bits that a rank sends per parameter and step."""
        return 8 * self.average("bytes_per_step") / int(self.records[0]["parameters"])

    def curve(self) -> tuple[list[int], list[float], list[float]]:
        """Returns steps, the mean loss after each, and its standard deviation, 0 of one seed."""
        curves = [record["curve"] for record in self.records if record["failure"] is None]
        whole = zip(*curves, strict=False)
        columns = [column for column in whole if all(point[1] is not None for point in column)]
        losses = [[point[1] for point in column] for column in columns]
        return (
            [column[0][0] for column in columns],
            [statistics.fmean(found) for found in losses],
            [finite(spread(found)) or 0.0 for found in losses],
        )

    def sign_agreement(self) -> dict[str, float]:
        """Returns the share of verdicts that agree with Lion's sign, by kind of parameter."""
        first, *others = [by_kind(record["sign_agreement"]) for record in self.records]
        # A run that diverged may have measured nothing.
        common = [kind for kind in first if all(kind in found for found in others)]
        return {
            kind: statistics.fmean([first[kind], *(found[kind] for found in others)])
            for kind in common
        }

    def as_json(self) -> dict[str, Any]:
        """Returns the summary."""
        return {
            "setting": self.setting.replace(seed=-1).identity(),
            "grid": {str(lr): finite(loss) for lr, loss in self.choice.losses.items()},
            "lr": self.choice.lr,
            "lr_at_edge": self.choice.at_edge,
            "loss": {str(seed): finite(loss) for seed, loss in self.losses.items()},
            "mean": finite(self.mean),
            "spread": finite(spread(self.losses.values())),
            "before": finite(self.before),
            "gap": finite(mean_of(self.gaps.values())),
            "gap_spread": finite(spread(self.gaps.values())),
            "bytes_per_step": self.average("bytes_per_step"),
            "bits_per_step": self.bits_per_step,
            "server_bits": server_bits(self.setting.method, self.setting.workers),
            "sign_agreement": self.sign_agreement(),
            "metrics": {
                name: statistics.fmean(record["metrics"][name] for record in self.records)
                for name in self.records[0]["metrics"]
                if all(name in record["metrics"] for record in self.records)
            },
        }


def results(trials: Sequence[Trial], records: Records) -> list[Result]:
    """Returns the results of all trials that have a learning rate and a seed, in their order."""
    found = [result for trial in trials if (result := _result(trial, records)) is not None]
    # Gaps are paired by seed: seeds differ by more than methods do.
    lions = {cell(r.setting): r.losses for r in found if r.setting.method == REFERENCE}
    for result in found:
        lion = lions.get(cell(result.setting), {})
        for seed in result.losses:
            gap = result.losses[seed] - lion.get(seed, math.nan)
            if math.isfinite(gap):
                result.gaps[seed] = gap
    return found


def _result(trial: Trial, records: Records) -> Result | None:
    choice = chosen(trial, records)
    if choice is None:
        return None
    runs = [(run.seed, records.of(run)) for run in trial.other_runs(choice)]
    done = {seed: record for seed, record in runs if record is not None}
    losses = {seed: loss_of(record) for seed, record in done.items()}
    return Result(trial.setting.replace(lr=choice.lr), choice, losses, list(done.values()), {})


def cell(setting: Setting) -> Setting:
    """Returns what settings have in common that are compared with one another."""
    return setting.replace(method="", lr=0.0, seed=0)


def server_bits(method: str, workers: int) -> float | None:
    """Returns bits per parameter and iteration of a worker to a server and back.

    Without a server, `Result.bits_per_step` is what really left a rank.

    Args:
        method: A name in `recipes.METHODS`; the result is None for those that are not the paper's.
        workers: Number of workers.

    >>> server_bits("majority", 4), server_bits("lion", 4), server_bits("bits8", 4)
    (2.0, 64.0, None)
    """
    of_method = _SERVER_BITS.get(method)
    return None if of_method is None else sum(of_method(workers))


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
