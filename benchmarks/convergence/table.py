"""The study's results as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.convergence.clock import Clock, ClockOf
from benchmarks.convergence.result import Result, cell, finite, mean_of, spread
from benchmarks.convergence.scenes import OF_IMAGES
from benchmarks.convergence.setting import WARMUP
from hf_dlion.tools.report import Output


def cells(results: Sequence[Result]) -> list[list[Result]]:
    """Returns the results that are compared with one another, together."""
    found: dict[object, list[Result]] = {}
    for result in results:
        found.setdefault(cell(result.setting), []).append(result)
    return list(found.values())


def title(results: Sequence[Result]) -> str:
    """Returns what the results of a cell have in common."""
    own = results[0].setting
    size = results[0].records[0]["parameters"]
    ranks = "real ranks" if own.real else "workers"
    batch = f"{own.batch} images" if own.scene in OF_IMAGES else f"{own.batch} x {own.sequence}"
    return (
        f"{own.scene}: {size:,} parameters, {own.workers} {ranks} x {batch}, "
        f"{own.steps} steps, {own.schedule}, betas {own.betas[0]:g} {own.betas[1]:g}, "
        f"weight decay {own.weight_decay:g}"
        + (f", clipped to {own.clip:g}" if own.clip else "")
        + (f", warm-up {own.warmup:g}" if own.warmup != WARMUP else "")
        + "".join(f", {pattern} x{factor:g}" for pattern, factor in own.lr_factors)
    )


def name(results: Sequence[Result]) -> str:
    """Returns a short name of a cell."""
    own = results[0].setting
    return f"{own.scene}-{own.workers}x{own.batch}"


def print_losses(out: Output, results: Sequence[Result], clock_of: ClockOf) -> None:
    """Prints a table for each cell: losses, gaps to global Lion, bytes, times of a step."""
    columns = {"method": "method", "lr": "best lr", "seeds": "seeds", "loss": "loss"}
    columns |= {"gap": "gap to lion", "bits": "bits/param/step", "bytes": "bytes/step"}
    for together in cells(results):
        out.line(f"\n{title(together)}")
        clock = clock_of(together)
        times = {name: f"ms at {name}" for name in clock.links}
        rows = [
            {
                "method": result.setting.method,
                "lr": f"{result.choice.lr:g}{' (edge)' if result.choice.at_edge else ''}",
                "seeds": len(result.losses),
                "loss": with_spread(result.mean, spread(result.losses.values())),
                "gap": with_spread(
                    mean_of(result.gaps.values()), spread(result.gaps.values()), sign=True
                ),
                "bits": result.bits_per_step,
                "bytes": round(result.average("bytes_per_step")),
                **{name: _ms(clock, result, name) for name in clock.links},
            }
            for result in together
        ]
        out.table("validation loss", columns | times, rows)
        if clock.measured:
            out.line("~ computed from what was measured on another link, or of another method")


def print_grids(out: Output, results: Sequence[Result]) -> None:
    """Prints the loss at every learning rate of each method's grid."""
    for together in cells(results):
        lrs = sorted({lr for result in together for lr in result.choice.losses})
        columns = {"method": "loss at lr"} | {str(lr): f"{lr:g}" for lr in lrs}
        rows = [
            {"method": result.setting.method}
            | {
                str(lr): f"{loss:.3f}{'*' if lr == result.choice.lr else ''}"
                for lr, loss in result.choice.losses.items()
            }
            for result in together
        ]
        out.table(f"learning rates: {name(together)}", columns, rows)


def print_sign_agreement(out: Output, results: Sequence[Result]) -> None:
    """Prints how many verdicts have the sign of Lion's direction, by kind of parameter."""
    for together in cells(results):
        shares = {r.setting.method: r.sign_agreement() for r in together}
        shares = {method: found for method, found in shares.items() if found}
        if not shares:
            continue
        kinds = list(next(iter(shares.values())))
        columns = {"kind": "agrees with Lion's sign"} | {name: name for name in shares}
        rows = [
            {"kind": kind}
            | {name: f"{found[kind]:.3f}" for name, found in shares.items() if kind in found}
            for kind in kinds
        ]
        out.table(f"signs: {name(together)}", columns, rows)


def _ms(clock: Clock, result: Result, name: str) -> str:
    time = clock.step(result, name)
    mark = "~" if clock.measured and not time.measured else ""
    return f"{mark}{1e3 * time.seconds:,.0f}"


def with_spread(mean: float, deviation: float, *, sign: bool = False) -> str:
    """Returns a mean and its spread as text.

    >>> with_spread(2.3014, 0.0042), with_spread(0.026, 0.001, sign=True)
    ('2.301 ± 0.004', '+0.026 ± 0.001')
    """
    if finite(mean) is None:
        return "-" if math.isnan(mean) else "diverged"
    text = f"{mean:+.3f}" if sign else f"{mean:.3f}"
    return text if finite(deviation) is None else f"{text} ± {deviation:.3f}"
