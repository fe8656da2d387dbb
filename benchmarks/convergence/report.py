"""The study's results as tables and pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import print_table
from benchmarks.convergence.results import Result, spread, with_spread
from benchmarks.convergence.setting import WARMUP
from benchmarks.emulate import bits_per_s
from benchmarks.plot import figure, logarithmic, look, save

# What Ethernet, IP and TCP leave of a link.
TCP_EFFICIENCY = 1448 / 1538
# Losses further apart than by this factor are drawn on a logarithmic axis.
FLAT = 4.0

# Seconds of a step of one of the results that are compared, by link.
StepTimes = Mapping[str, Callable[[Result], float]]


def step_times(together: Sequence[Result], links: Sequence[str], gradient_s: float) -> StepTimes:
    """Returns computed step times: a rank's gradient, then the bytes; nothing overlaps.

    Latencies and the optimizers' own work are left out.

    Args:
        together: Results that are compared.
        links: Rates, for example "1gbit".
        gradient_s: Seconds of a gradient; 0 uses the median of the runs.
    """
    own = [1e-3 * run["gradient_ms"] for one in together for run in one.records.values()]
    gradient_s = gradient_s or statistics.median(own)

    def seconds(result: Result, rate: float) -> float:
        return gradient_s + 8 * result.average("bytes_per_step") / (rate * TCP_EFFICIENCY)

    return {link: partial(seconds, rate=bits_per_s(link)) for link in links}


def title(together: Sequence[Result]) -> str:
    """Returns what results that are compared have in common."""
    own, (record, *_) = together[0].setting, together[0].records.values()
    workers = ", ".join(map(str, sorted({result.setting.workers for result in together})))
    images = own.scene in ("vision", "cifar10")
    return (
        f"{own.scene}: {record['parameters']:,} parameters, {workers} "
        f"{'real ranks' if own.real else 'workers'}"
        f" x {f'{own.batch} images' if images else f'{own.batch} x {own.sequence}'}, "
        f"{own.steps} steps, betas {own.betas[0]:g} {own.betas[1]:g}, "
        f"weight decay {own.weight_decay:g}"
        + (f", clipped to {own.clip:g}" if own.clip else "")
        + (f", warm-up {own.warmup:g}" if own.warmup != WARMUP else "")
        + "".join(f", {pattern} x{factor:g}" for pattern, factor in own.lr_factors)
    )


def print_tables(together: Sequence[Result], times: StepTimes) -> None:
    """Prints losses, gaps to Lion on the mean gradient, bytes, times, and the learning rates."""
    columns = {"method": "method", "lr": "best lr", "seeds": "seeds", "loss": "validation loss"}
    columns |= {"gap": "to lion", "bits": "bits/param/step", "bytes": "bytes/step"}
    columns |= {link: f"ms at {link}, computed" for link in times}
    columns |= {name: name for result in together for name in result.metrics()}
    rows = [
        {
            "method": result.setting.method,
            "lr": f"{result.setting.lr:g}{' (edge)' if result.at_edge else ''}",
            "seeds": len(result.losses),
            "loss": with_spread(result.losses.values()),
            "gap": with_spread(result.gaps.values(), sign=True),
            "bits": result.bits_per_step,
            "bytes": round(result.average("bytes_per_step")),
            **{link: f"{1e3 * seconds(result):,.0f}" for link, seconds in times.items()},
            **{name: f"{value:.3f}" for name, value in result.metrics().items()},
        }
        for result in together
    ]
    print(f"\n{title(together)}\n")
    print_table(columns, rows)
    lrs = sorted({lr for result in together for lr in result.grid})
    grids = [
        {"method": result.setting.method}
        | {f"{lr:g}": f"{loss:.3f}" for lr, loss in result.grid.items()}
        for result in together
    ]
    print()
    print_table({"method": "loss of seed 0"} | {f"{lr:g}": f"{lr:g}" for lr in lrs}, grids)


def draw(found: Sequence[Sequence[Result]], times: Sequence[StepTimes], folder: Path) -> list[Path]:
    """Writes all pictures into a folder; returns their paths."""
    written, apart = [], dict[Any, list[Result]]()
    for together, own in zip(found, times, strict=True):
        setting = together[0].setting
        name = f"{setting.scene}-{setting.workers}x{setting.batch}.png"
        written.append(_curves(together, own, folder / f"curves-{name}"))
        label, path = "bits per parameter, out of a rank", folder / f"bits-{name}"
        written.append(_points(together, lambda own: own.bits_per_step, label, path))
        place = setting.replace(method="", lr=0.0, seed=0, workers=0)
        apart.setdefault(place, []).extend(together)
    for place, group in apart.items():
        if len({result.setting.workers for result in group}) > 1:
            path = folder / f"workers-{place.scene}-{place.batch}.png"
            written.append(_points(group, lambda own: own.setting.workers, "workers", path))
    return written


def _curves(together: Sequence[Result], times: StepTimes, path: Path) -> Path:
    """Draws loss against steps, bytes sent, and time at each link: the same losses in each."""
    axes: dict[str, Callable[[Result], float]] = {
        "steps": lambda result: 1.0,
        "MB sent by a rank": lambda result: 1e-6 * result.average("bytes_per_step"),
        **{f"s at {link} (computed)": seconds for link, seconds in times.items()},
    }
    drawn, panels = figure(len(axes))
    for panel, (label, per_step) in zip(panels, axes.items(), strict=True):
        for result in together:
            # The loss before training has no place on a logarithmic axis.
            columns = result.curve()
            first = columns[0][:1] == [0]
            steps, losses, deviations = (column[first:] for column in columns)
            places, how = [per_step(result) * step for step in steps], look(result.setting.method)
            panel.plot(places, losses, how.dash, color=how.color, label=how.label)
            pairs = list(zip(losses, deviations, strict=True))
            low, high = [loss - own for loss, own in pairs], [loss + own for loss, own in pairs]
            panel.fill_between(places, low, high, color=how.color, alpha=0.15, linewidth=0)
        panel.set_xlabel(label)
        if label != "steps":
            logarithmic(panel, "x")
    return _finished(drawn, panels, together, path)


def _points(
    found: Sequence[Result], place: Callable[[Result], float], label: str, path: Path
) -> Path:
    """Draws the last loss of each method against a number."""
    drawn, panels = figure(1)
    drawable = [own for own in found if all(map(math.isfinite, own.losses.values()))]
    means = {id(own): statistics.fmean(own.losses.values()) for own in drawable}
    for method in dict.fromkeys(own.setting.method for own in drawable):
        line = sorted((own for own in drawable if own.setting.method == method), key=place)
        how, deviations = look(method), [spread(own.losses.values()) for own in line]
        panels[0].errorbar(
            [*map(place, line)], [means[id(own)] for own in line], deviations,
            fmt=f"o{how.dash}", color=how.color, capsize=3, label=how.label, mfc=how.face,
        )  # fmt: skip
    panels[0].set_xlabel(label)
    logarithmic(panels[0], "x")
    if label == "workers":
        places = sorted({place(own) for own in found})
        panels[0].set_xticks(places, [f"{number:g}" for number in places])
    if means and 0.0 < FLAT * min(means.values()) < max(means.values()):
        logarithmic(panels[0], "y")
    return _finished(drawn, panels, found, path)


def _finished(drawn: Any, panels: Any, found: Sequence[Result], path: Path) -> Path:
    panels[0].set_ylabel("validation loss")
    low, high = panels[0].get_ylim()
    # One method that diverged must not flatten all others.
    panels[0].set_ylim(low, min(high, low + 4.0) if math.isfinite(high) else None)
    return save(drawn, panels, title(found), path)
