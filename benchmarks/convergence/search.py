"""Which runs a study takes: a learning rate for each method first, then the other seeds with it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.convergence.records import Record, Records
from benchmarks.convergence.setting import Setting


@dataclass(frozen=True)
class Trial:
    """A method in a cell of the study, that is, with all else given.

    Attributes:
        setting: With a learning rate and a seed that do not count.
        lrs: The grid.
        seeds: All of them.
        tuning: How many of the seeds choose the learning rate.
    """

    setting: Setting
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    tuning: int

    def first_runs(self) -> list[Setting]:
        """Returns the runs that choose the learning rate."""
        return [
            self.setting.replace(lr=lr, seed=seed)
            for lr in self.lrs
            for seed in self.seeds[: self.tuning]
        ]

    def made(self, records: Records) -> Trial:
        """Returns the trial with the learning rates whose runs are there."""
        todo = {setting.lr for setting in self.first_runs() if records.of(setting) is None}
        return replace(self, lrs=tuple(lr for lr in self.lrs if lr not in todo))

    def other_runs(self, choice: Choice) -> list[Setting]:
        """Returns the runs with the chosen learning rate."""
        return [self.setting.replace(lr=choice.lr, seed=seed) for seed in self.seeds]


@dataclass(frozen=True)
class Choice:
    """The best learning rate of a grid.

    Attributes:
        lr: The best.
        losses: The mean over the tuning seeds of each; infinite where a run diverged.
    """

    lr: float
    losses: Mapping[float, float]

    @property
    def at_edge(self) -> bool:
        """Whether a value beyond the grid might be better still."""
        return len(self.losses) > 1 and self.lr in (min(self.losses), max(self.losses))


def choose(losses: Mapping[float, Sequence[float]]) -> Choice:
    """Returns the learning rate with the lowest mean loss, of equal ones the smallest.

    Losses are by learning rate, of the same seeds each.
    """
    means = {lr: statistics.fmean(losses[lr]) for lr in sorted(losses)}
    return Choice(min(means, key=lambda lr: means[lr]), means)


def chosen(trial: Trial, records: Records) -> Choice | None:
    """Returns the trial's choice, or None while runs that it takes are missing."""
    losses: dict[float, list[float]] = {}
    for setting in trial.first_runs():
        record = records.of(setting)
        if record is None:
            return None
        losses.setdefault(setting.lr, []).append(loss_of(record))
    return choose(losses) if losses else None


def missing(trials: Iterable[Trial], records: Records, *, ahead: bool = False) -> Iterator[Setting]:
    """Yields the runs that can be made now and have not been.

    Args:
        trials: What the study consists of.
        records: Of the runs that are there.
        ahead: Also yield a run for each that waits for a learning rate, whichever it will be.
    """
    for trial in trials:
        # First the learning rate is chosen, then the other seeds run with it.
        choice = chosen(trial, records)
        wanted = trial.first_runs() if choice is None else trial.other_runs(choice)
        yield from (setting for setting in wanted if records.of(setting) is None)
        if ahead and choice is None:
            yield from (trial.setting.replace(seed=seed) for seed in trial.seeds[trial.tuning :])


def loss_of(record: Record) -> float:
    """Returns the last validation loss, infinite where the run diverged."""
    loss: Any = record["loss"]
    return math.inf if loss is None else float(loss)
