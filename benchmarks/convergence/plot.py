"""The study's pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.convergence.clock import Clock, ClockOf
from benchmarks.convergence.result import Result, server_bits
from benchmarks.convergence.table import cells, name, title
from hf_dlion.tools.pictures import band, figure, logarithmic, look, save

# Losses further apart than by this factor are drawn on a logarithmic axis.
FLAT = 4.0


def draw(results: Sequence[Result], folder: Path, clock_of: ClockOf) -> list[Path]:
    """Writes all pictures into a folder; returns their paths."""
    written = []
    for together in cells(results):
        clock = clock_of(together)
        written.append(_curves(together, clock, folder / f"curves-{name(together)}.png"))
        written.append(_bits(together, folder / f"bits-{name(together)}.png"))
    for apart in _apart_from_workers(results):
        own = apart[0].setting
        written.append(_workers(apart, folder / f"workers-{own.scene}-{own.batch}.png"))
    return written


def _curves(together: Sequence[Result], clock: Clock, path: Path) -> Path:
    """Loss against steps, bytes sent, and time over each link."""
    axes: dict[str, Callable[[Result], float]] = {
        "steps": lambda result: 1.0,
        "MB sent by a rank": lambda result: 1e-6 * result.average("bytes_per_step"),
    }
    for link in clock.links:
        known = {clock.step(result, link).measured for result in together}
        how = "computed" if known == {False} else "measured" if known == {True} else "some computed"
        axes[f"s at {link} ({how})"] = partial(_seconds, clock, link)
    drawn, panels = figure(len(axes))
    # One panel per axis: the same losses over steps, bytes and seconds.
    for panel, (label, per_step) in zip(panels, axes.items(), strict=True):
        for result in together:
            # The loss before training is much higher, and has no place on a logarithmic axis.
            columns = result.curve()
            first = columns[0][:1] == [0]
            steps, losses, deviations = (column[first:] for column in columns)
            places = [per_step(result) * step for step in steps]
            band(panel, places, losses, deviations, result.setting.method)
        panel.set_xlabel(label)
        if label != "steps":
            logarithmic(panel, "x")
    before = f"loss before {together[0].before:.2f}"
    return _finished(drawn, panels, f"{title(together)}; {before}", path)


def _seconds(clock: Clock, link: str, result: Result) -> float:
    return clock.step(result, link).seconds


def _bits(together: Sequence[Result], path: Path) -> Path:
    """Loss against bits per parameter and step: as really sent, and by way of a server."""
    drawn, panels = figure(2)
    for result in _finite(together):
        own = result.setting
        deviation = result.as_json()["spread"] or 0.0
        of_server = server_bits(own.method, own.workers)
        how = look(own.method)
        for panel, bits in zip(panels, (result.bits_per_step, of_server), strict=True):
            # Drawn without a place where there is no count: all have their colours in common.
            place = [math.nan if bits is None else bits]
            panel.errorbar(
                place, [result.mean], [deviation], fmt="o", color=how.color, capsize=3,
                label=how.label, markerfacecolor=how.face,
            )  # fmt: skip
    labels = ("bits per parameter, out of a rank", "bits counted to and from a server")
    for panel, label in zip(panels, labels, strict=True):
        panel.set_xlabel(label)
        logarithmic(panel, "x")
    _spread_out(panels, together)
    return _finished(drawn, panels, title(together), path)


def _workers(apart: Sequence[Result], path: Path) -> Path:
    """Loss against the number of workers."""
    drawn, panels = figure(1)
    for method in dict.fromkeys(result.setting.method for result in apart):
        line = [result for result in apart if result.setting.method == method]
        line = sorted(_finite(line), key=lambda result: result.setting.workers)
        workers = [result.setting.workers for result in line]
        means = [result.mean for result in line]
        deviations = [result.as_json()["spread"] or 0.0 for result in line]
        band(panels[0], workers, means, deviations, method, mark="o")
    panels[0].set_xscale("log", base=2)
    numbers = sorted({result.setting.workers for result in apart})
    panels[0].set_xticks(numbers, [str(number) for number in numbers])
    panels[0].set_xlabel("workers")
    _spread_out(panels, apart)
    own = apart[0].setting
    heading = f"{own.scene}, batch {own.batch} each, {own.steps} steps"
    return _finished(drawn, panels, heading, path)


def _apart_from_workers(results: Sequence[Result]) -> list[list[Result]]:
    """Returns the results that differ in method and number of workers only."""
    found: dict[object, list[Result]] = {}
    for result in results:
        place = result.setting.replace(method="", lr=0.0, seed=0, workers=0)
        found.setdefault(place, []).append(result)
    return [group for group in found.values() if len({r.setting.workers for r in group}) > 1]


def _finite(found: Sequence[Result]) -> list[Result]:
    return [result for result in found if math.isfinite(result.mean)]


def _spread_out(panels: Any, results: Sequence[Result]) -> None:
    """Takes a logarithmic axis of losses where one method would flatten the others."""
    means = [result.mean for result in _finite(results)]
    if means and 0.0 < FLAT * min(means) < max(means):
        logarithmic(panels[0], "y")


def _finished(drawn: Any, panels: Any, heading: str, path: Path) -> Path:
    panels[0].set_ylabel("validation loss")
    low, high = panels[0].get_ylim()
    # One method that diverged must not flatten all others.
    panels[0].set_ylim(low, min(high, low + 4.0) if math.isfinite(high) else None)
    return save(drawn, panels, heading, path)
