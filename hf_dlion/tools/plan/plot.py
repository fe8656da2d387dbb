"""A picture of the table: step time over the number of nodes, one panel per link."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from hf_dlion.tools.bench.report import MissingPackageError
from hf_dlion.tools.plan.methods import NONE, PUBLIC
from hf_dlion.tools.plan.table import Point


def require_matplotlib() -> None:
    """Checks, before anything is measured, that a plot can be drawn.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError(
            "--plot draws with matplotlib, which is not installed: pip install 'hf-dlion[plot]' "
            "(or matplotlib)"
        )


def draw(found: Sequence[Point], title: str, path: Path) -> None:
    """Writes the picture.

    Args:
        found: From `table.points`.
        title: Above all panels.
        path: The file; its ending decides on the format.
    """
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(point.link for point in found))
    names = [p.name for p in found[0].predictions if p.name not in (NONE, PUBLIC)]
    figure = Figure(figsize=(3.2 * len(links), 4.2), layout="constrained")
    panels = figure.subplots(1, len(links), sharey=True, squeeze=False)[0]
    for panel, link in zip(panels, links, strict=True):
        here = [point for point in found if point.link == link]
        nodes = [point.nodes for point in here]
        for name in names:
            style = "--" if "bound" in name else "-"
            panel.plot(nodes, [point.ratio(name) for point in here], style, label=name)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(link)
        panel.set_xlabel("nodes")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("predicted step time / no communication")
    figure.suptitle(title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
