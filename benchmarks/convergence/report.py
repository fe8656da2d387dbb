"""The study's results as tables and pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_dlion.tools.pictures import LOOKS, Look, figure, logarithmic, look, save
from hf_dlion.tools.plan.cost import Link
from hf_dlion.tools.plan.link import DEFAULT_LATENCY_MS, given
from hf_dlion.tools.report import Output

from benchmarks.convergence.results import Result, cells, finite, mean_of, server_bits, spread
from benchmarks.convergence.setting import WARMUP

LOOKS |= {
    "adamw": Look("AdamW", "#6C757D"),
    "lion": Look("Lion on the mean gradient", "#E07A1F"),
    "majority": Look("DistributedLion", "#1D5F8A"),
    "average": Look('aggregation="average"', "#20A39E"),
    "sync16": Look("momentum_sync_every=16", "#2E8B57"),
    "terngrad": Look("TernGrad", "#B5651D"),
    "graddrop": Look("GradDrop", "#C2185B"),
    "dgc": Look("DGC", "#E48BB0"),
    "signmuon": Look("SignMuon", "#2F4B26"),
    "bf16": Look("AdamW, DDP bf16 hook", "#ADB5BD"),
    "powersgd": Look("AdamW, PowerSGD rank 4", "#D4A017"),
    "localsgd8": Look("LocalSGD, 8 steps of AdamW", "#B22222"),
    "localsgd32": Look("LocalSGD, 32 steps of AdamW", "#B22222", "--"),
    "diloco16": Look("DiLoCo, 16 steps of AdamW", "#F4A300"),
    "diloco50": Look("DiLoCo, 50 steps of AdamW", "#F4A300", "--"),
    "demo": Look("DeMo", "#5C4033"),
}
# Losses further apart than by this factor are drawn on a logarithmic axis.
FLAT = 4.0


def title(together: Sequence[Result]) -> str:
    """Returns what the results of a cell have in common."""
    own, size = together[0].setting, together[0].records[0]["parameters"]
    images = own.scene in ("vision", "cifar10")
    return (
        f"{own.scene}: {size:,} parameters, {own.workers} {'real ranks' if own.real else 'workers'}"
        f" x {f'{own.batch} images' if images else f'{own.batch} x {own.sequence}'}, "
        f"{own.steps} steps, {own.schedule}, betas {own.betas[0]:g} {own.betas[1]:g}, "
        f"weight decay {own.weight_decay:g}"
        + (f", clipped to {own.clip:g}" if own.clip else "")
        + (f", warm-up {own.warmup:g}" if own.warmup != WARMUP else "")
        + "".join(f", {pattern} x{factor:g}" for pattern, factor in own.lr_factors)
    )


def name(together: Sequence[Result]) -> str:
    """Returns a short name of a cell."""
    own = together[0].setting
    return f"{own.scene}-{own.workers}x{own.batch}"


@dataclass(frozen=True)
class Clock:
    """Computes step times: a worker's gradient, then the network; nothing overlaps.

    The optimizers' own work is left out.

    Attributes:
        links: The networks, by what users write, for example "1gbit".
        compute_s: Of a gradient; None: the median of the runs that are compared.
    """

    links: Mapping[str, Link]
    compute_s: float | None

    @classmethod
    def of(cls, names: Sequence[str], compute_s: float | None) -> Clock:
        """Returns the clock of links as users write them; raises a ValueError if one is none."""
        try:
            links = {name: given(name, DEFAULT_LATENCY_MS, nccl=False) for name in names}
        except ValueError as error:
            raise ValueError(f"--links: {error}") from None
        return cls(links, compute_s)

    def step_s(self, together: Sequence[Result], result: Result, name: str) -> float:
        """Returns the seconds of a step of one of the results of a cell."""
        own = [1e-3 * record["gradient_ms"] for one in together for record in one.records]
        # What meets in every k-th step has a k-th of its messages in each.
        rounds = round(result.average("rounds_per_step"))
        wire_s = self.links[name].seconds(result.average("bytes_per_step"), rounds)
        return (self.compute_s or statistics.median(own)) + wire_s


def print_tables(out: Output, found: Sequence[Result], clock: Clock) -> None:
    """Prints of each cell losses, gaps to global Lion, bytes, times, and the learning rates."""
    columns = {"method": "method", "lr": "best lr", "seeds": "seeds", "loss": "loss"}
    columns |= {"gap": "gap to lion", "bits": "bits/param/step", "bytes": "bytes/step"}
    for together in cells(found):
        out.line(f"\n{title(together)}")
        rows = [
            {
                "method": result.setting.method,
                "lr": f"{result.setting.lr:g}{' (edge)' if result.at_edge else ''}",
                "seeds": len(result.losses),
                "loss": with_spread(result.losses.values()),
                "gap": with_spread(result.gaps.values(), sign=True),
                "bits": result.bits_per_step,
                "bytes": round(result.average("bytes_per_step")),
                **{
                    link: f"{1e3 * clock.step_s(together, result, link):,.0f}"
                    for link in clock.links
                },
            }
            for result in together
        ]
        times = {link: f"ms at {link}, computed" for link in clock.links}
        out.table("validation loss", columns | times, rows)
        lrs = sorted({lr for result in together for lr in result.grid})
        grids = [
            {"method": result.setting.method}
            | {
                str(lr): f"{loss:.3f}{'*' if lr == result.setting.lr else ''}"
                for lr, loss in result.grid.items()
            }
            for result in together
        ]
        headings = {"method": "loss at lr"} | {str(lr): f"{lr:g}" for lr in lrs}
        out.table(f"learning rates: {name(together)}", headings, grids)


def with_spread(values: Iterable[float], *, sign: bool = False) -> str:
    """Returns a mean and its spread as text.

    >>> with_spread([2.3, 2.302]), with_spread([0.026], sign=True), with_spread([])
    ('2.301 ± 0.001', '+0.026', '-')
    """
    values = list(values)
    mean, deviation = mean_of(values), spread(values)
    if finite(mean) is None:
        return "-" if math.isnan(mean) else "diverged"
    text = f"{mean:+.3f}" if sign else f"{mean:.3f}"
    return text if finite(deviation) is None else f"{text} ± {deviation:.3f}"


def draw(found: Sequence[Result], folder: Path, clock: Clock) -> list[Path]:
    """Writes all pictures into a folder; returns their paths."""
    written, apart = [], {}
    for together in cells(found):
        written.append(_curves(together, clock, folder / f"curves-{name(together)}.png"))
        written.append(_bits(together, folder / f"bits-{name(together)}.png"))
    for result in found:
        place = result.setting.replace(method="", lr=0.0, seed=0, workers=0)
        apart.setdefault(place, []).append(result)
    for place, group in apart.items():
        if len({result.setting.workers for result in group}) > 1:
            written.append(_workers(group, folder / f"workers-{place.scene}-{place.batch}.png"))
    return written


def _curves(together: Sequence[Result], clock: Clock, path: Path) -> Path:
    """Loss against steps, bytes sent, and time over each link: the same losses in each panel."""
    axes: dict[str, Callable[[Result], float]] = {
        "steps": lambda result: 1.0,
        "MB sent by a rank": lambda result: 1e-6 * result.average("bytes_per_step"),
    }
    for link in clock.links:
        axes[f"s at {link} (computed)"] = partial(clock.step_s, together, name=link)
    drawn, panels = figure(len(axes))
    for panel, (label, per_step) in zip(panels, axes.items(), strict=True):
        for result in together:
            # The loss before training is much higher, and has no place on a logarithmic axis.
            columns = result.curve()
            first = columns[0][:1] == [0]
            steps, losses, deviations = (column[first:] for column in columns)
            places = [per_step(result) * step for step in steps]
            _band(panel, places, losses, deviations, result.setting.method)
        panel.set_xlabel(label)
        if label != "steps":
            logarithmic(panel, "x")
    return _finished(drawn, panels, title(together), path)


def _bits(together: Sequence[Result], path: Path) -> Path:
    """Loss against bits per parameter and step: as really sent, and by way of a server."""
    drawn, panels = figure(2)
    for result in _finite(together):
        own, how = result.setting, look(result.setting.method)
        of_server = server_bits(own.method, own.workers)
        for panel, bits in zip(panels, (result.bits_per_step, of_server), strict=True):
            # Drawn without a place where there is no count: all have their colors in common.
            place = [math.nan if bits is None else bits]
            panel.errorbar(
                place, [result.mean], [finite(result.spread) or 0.0], fmt="o", color=how.color,
                capsize=3, label=how.label, markerfacecolor=how.face,
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
        line = [result for result in _finite(apart) if result.setting.method == method]
        line = sorted(line, key=lambda result: result.setting.workers)
        workers, means = [r.setting.workers for r in line], [r.mean for r in line]
        _band(panels[0], workers, means, [finite(r.spread) or 0.0 for r in line], method, mark="o")
    panels[0].set_xscale("log", base=2)
    numbers = sorted({result.setting.workers for result in apart})
    panels[0].set_xticks(numbers, [str(number) for number in numbers])
    panels[0].set_xlabel("workers")
    _spread_out(panels, apart)
    own = apart[0].setting
    heading = f"{own.scene}, batch {own.batch} each, {own.steps} steps"
    return _finished(drawn, panels, heading, path)


def _band(
    panel: Any,
    places: Sequence[float],
    means: Sequence[float],
    deviations: Sequence[float],
    method: str,
    mark: str = "",
) -> None:
    """Draws a line, and a band as wide as its seeds differ."""
    own = look(method)
    panel.plot(places, means, own.dash, marker=mark, color=own.color, label=own.label)
    low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
    high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
    panel.fill_between(places, low, high, color=own.color, alpha=0.15, linewidth=0)


def _finite(found: Sequence[Result]) -> list[Result]:
    return [result for result in found if math.isfinite(result.mean)]


def _spread_out(panels: Any, found: Sequence[Result]) -> None:
    """Takes a logarithmic axis of losses where one method would flatten the others."""
    means = [result.mean for result in _finite(found)]
    if means and 0.0 < FLAT * min(means) < max(means):
        logarithmic(panels[0], "y")


def _finished(drawn: Any, panels: Any, heading: str, path: Path) -> Path:
    panels[0].set_ylabel("validation loss")
    low, high = panels[0].get_ylim()
    # One method that diverged must not flatten all others.
    panels[0].set_ylim(low, min(high, low + 4.0) if math.isfinite(high) else None)
    return save(drawn, panels, heading, path)
