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
from benchmarks.methods import ADAMW_BETAS
from benchmarks.plot import figure, logarithmic, look, save
from hf_dlion.cli.arguments import rate

# Share of a link's rate that Ethernet, IP, and TCP leave for payload.
TCP_EFFICIENCY = 1448 / 1538
# Losses that differ by more than this factor are drawn on a logarithmic axis.
FLAT = 4.0

# Functions that return the seconds per step of a result, by link.
StepTimes = Mapping[str, Callable[[Result], float]]


def step_times(together: Sequence[Result], links: Sequence[str], gradient_s: float) -> StepTimes:
    """Returns computed step times: forward and backward, then the bytes, without overlap.

    Latencies and the work of the optimizer are left out.

    Args:
        together: Results that are compared.
        links: Rates of the links, for example "1gbit".
        gradient_s: Seconds of forward and backward; 0 uses the median of the runs.
    """
    runs = [run for result in together for run in result.records.values()]
    gradient_s = gradient_s or statistics.median(1e-3 * run["gradient_ms"] for run in runs)

    def seconds(result: Result, bits_per_s: float) -> float:
        return gradient_s + 8 * result.average("bytes_per_step") / (bits_per_s * TCP_EFFICIENCY)

    return {link: partial(seconds, bits_per_s=rate(link)) for link in links}


def title(together: Sequence[Result]) -> str:
    """Returns the settings that compared results have in common."""
    common, (record, *_) = together[0].setting, together[0].records.values()
    betas = common.adamw_betas
    workers = ", ".join(map(str, sorted({result.setting.workers for result in together})))
    return (
        f"{common.task}: {record['parameters']:,} parameters, {workers} "
        f"{'real ranks' if common.real else 'workers'} x {common.batch} x {common.sequence}, "
        f"{common.steps} steps, betas {common.betas[0]:g} {common.betas[1]:g}, "
        f"weight decay {common.weight_decay:g}"
        + (f", AdamW's betas {betas[0]:g} {betas[1]:g}" if betas != ADAMW_BETAS else "")
        + (f", clipped to {common.clip:g}" if common.clip else "")
        + (f", warm-up {common.warmup:g}" if common.warmup != WARMUP else "")
        + "".join(f", {pattern} x{factor:g}" for pattern, factor in common.lr_factors)
    )


def print_tables(together: Sequence[Result], times: StepTimes) -> None:
    """Prints losses, gaps to Lion on the mean gradient, bytes, times, and learning rates."""
    columns = {"method": "method", "lr": "best lr", "seeds": "seeds", "loss": "validation loss"}
    columns |= {"gap": "to lion", "bits": "bits/param/step", "bytes": "bytes/step"}
    columns |= {link: f"ms at {link}, computed" for link in times}
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
        }
        for result in together
    ]
    print(f"\n{title(together)}")
    print_table(columns, rows)
    lrs = sorted({lr for result in together for lr in result.grid})
    grids = [
        {"method": result.setting.method}
        | {f"{lr:g}": f"{loss:.3f}" for lr, loss in result.grid.items()}
        for result in together
    ]
    print_table({"method": "loss of seed 0"} | {f"{lr:g}": f"{lr:g}" for lr in lrs}, grids)


def draw(found: Sequence[Sequence[Result]], times: Sequence[StepTimes], folder: Path) -> list[Path]:
    """Writes all pictures into a folder; returns their paths."""
    written, by_workers = [], dict[Any, list[Result]]()
    for together, step_s in zip(found, times, strict=True):
        if not any(math.isfinite(loss) for result in together for loss in result.losses.values()):
            continue  # All runs diverged.
        setting = together[0].setting
        name = f"{setting.task}-{setting.workers}x{setting.batch}.png"
        written.append(_curves(together, step_s, folder / f"curves-{name}"))
        minutes = {f"minutes at {link} (computed)": _minutes(step_s[link]) for link in step_s}
        written.append(_points(together, minutes, folder / f"minutes-{name}"))
        place = setting.replace(method="", lr=0.0, seed=0, workers=0)
        by_workers.setdefault(place, []).extend(together)
    for place, group in by_workers.items():
        if len({result.setting.workers for result in group}) > 1:
            path = folder / f"workers-{place.task}-{place.batch}.png"
            written.append(_points(group, {"workers": lambda result: result.setting.workers}, path))
    return written


def _minutes(step_s: Callable[[Result], float]) -> Callable[[Result], float]:
    return lambda result: step_s(result) * result.setting.steps / 60


def _curves(together: Sequence[Result], times: StepTimes, path: Path) -> Path:
    """Draws the losses in one panel each against steps, bytes sent, and time at each link."""
    axes: dict[str, Callable[[Result], float]] = {
        "steps": lambda result: 1.0,
        "MB sent by a rank": lambda result: 1e-6 * result.average("bytes_per_step"),
        **{f"s at {link} (computed)": seconds for link, seconds in times.items()},
    }
    drawn, panels = figure(len(axes))
    for panel, (label, per_step) in zip(panels, axes.items(), strict=True):
        for result in together:
            # A logarithmic axis can't show the loss before training, at step 0.
            columns = result.curve()
            first = columns[0][:1] == [0]
            steps, losses, deviations = (column[first:] for column in columns)
            places, style = [per_step(result) * step for step in steps], look(result.setting.method)
            panel.plot(places, losses, **style)
            pairs = list(zip(losses, deviations, strict=True))
            low, high = [loss - dev for loss, dev in pairs], [loss + dev for loss, dev in pairs]
            panel.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)
        panel.set_xlabel(label)
        if label != "steps":
            logarithmic(panel, "x")
    return _finished(drawn, panels, together, path)


def _points(
    found: Sequence[Result], axes: Mapping[str, Callable[[Result], float]], path: Path
) -> Path:
    """Draws the last loss of each method, in one panel each against the numbers of `axes`."""
    drawn, panels = figure(len(axes))
    drawable = [result for result in found if all(map(math.isfinite, result.losses.values()))]
    means = {id(result): statistics.fmean(result.losses.values()) for result in drawable}
    for panel, (label, place) in zip(panels, axes.items(), strict=True):
        for method in dict.fromkeys(result.setting.method for result in drawable):
            line = [result for result in drawable if result.setting.method == method]
            line.sort(key=place)
            deviations = [spread(result.losses.values()) for result in line]
            panel.errorbar(
                [*map(place, line)], [means[id(result)] for result in line], deviations,
                marker="o", capsize=3, **look(method),
            )  # fmt: skip
        panel.set_xlabel(label)
        logarithmic(panel, "x")
        if label == "workers":
            places = sorted({place(result) for result in found})
            panel.set_xticks(places, [f"{number:g}" for number in places])
    if means and 0.0 < FLAT * min(means.values()) < max(means.values()):
        logarithmic(panels[0], "y")
    return _finished(drawn, panels, found, path)


def _finished(drawn: Any, panels: Any, found: Sequence[Result], path: Path) -> Path:
    panels[0].set_ylabel("validation loss")
    low, high = panels[0].get_ylim()
    # A method that diverged must not flatten the curves of all other methods.
    panels[0].set_ylim(low, min(high, low + 4.0) if math.isfinite(high) else None)
    return save(drawn, panels, title(found), path)
