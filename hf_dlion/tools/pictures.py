"""How all pictures look: a method has one name and one colour, whoever draws it."""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dlion.tools.names import ALONE, BF16, DLION, FP32, NONE, POWER


@dataclass(frozen=True)
class Look:
    """How a method is drawn.

    Attributes:
        label: Its name, as users write it.
        color: Of its lines and points.
        dash: Of its lines.
    """

    label: str
    color: str
    dash: str = "-"

    @property
    def face(self) -> str:
        """Colour inside of its points: those of a dashed line are hollow."""
        return self.color if self.dash == "-" else "white"


# Greys are all-reduces, blues this package, from the fewest bits to the most, and the rest others'.
LOOKS = {
    NONE: Look("no communication", "#000000", ":"),
    ALONE: Look("one host alone, Lion", "#6C757D"),
    FP32: Look("AdamW, DDP fp32", "#6C757D"),
    BF16: Look("AdamW, DDP bf16 hook", "#ADB5BD"),
    "DDP bf16 gradients, AdamW": Look("AdamW, DDP bf16 gradients", "#ADB5BD"),
    "DDP fp32, Lion": Look("Lion, DDP fp32", "#E07A1F"),
    POWER: Look("AdamW, PowerSGD rank 4", "#D4A017"),
    DLION: Look("DistributedLion", "#1D5F8A"),
    "bits2": Look("bits=2", "#4FA3D1"),
    "bits4": Look("bits=4", "#7B5EA7"),
    "bits8": Look("bits=8", "#3D2C6B"),
}


def look(name: str) -> Look:
    """Returns how a method is drawn; DistributedLion's options are in its name.

    Args:
        name: A row of `benchmarks/step_time.py` or `hf-dlion plan`, or a key of `LOOKS`.
    """
    for key, own in LOOKS.items():
        if name in (key, own.label):
            return own
    if not name.startswith(DLION):
        return Look(name, "#9C6644")
    bits = re.search(r"(\d) bits", name)
    color = LOOKS[f"bits{bits[1]}" if bits else DLION].color
    label = re.sub(r"(\d) bits", r"bits=\1", name).replace("overlap", "overlap=True")
    label = label.replace("a vote per node", 'local_group="node"')
    dash = "--" if "overlap" in name else ":" if "per node" in name else "-"
    return Look(label, color, dash)


def check_path(path: Path) -> None:
    """Checks the format of a picture before anything is measured for it.

    Raises:
        ValueError: If the ending of the path is none.
    """
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise ValueError(f"{path} has no ending of a picture: give one in .png, .svg or .pdf")


def figure(count: int, height: float = 4.6, width: float = 3.4) -> tuple[Any, Any]:
    """Returns a figure and its panels, side by side with one vertical axis; in inches."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(max(width * count, 6.4), height), layout="constrained")
    return made, made.subplots(1, count, sharey=True, squeeze=False)[0]


def logarithmic(panel: Any, which: str) -> None:
    """Makes an axis logarithmic, with ticks that are plain numbers: 0.5, 20, 1,000.

    Args:
        panel: With all that is drawn on it.
        which: "x" or "y".
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    getattr(panel, f"set_{which}scale")("log")
    low, high = getattr(panel, f"get_{which}lim")()
    axis = getattr(panel, f"{which}axis")
    # As many ticks as have room, and two at least.
    decades = math.log10(high / low)
    steps = {0.6: (1, 1.5, 2, 3, 4, 6, 8), 1.3 if which == "x" else 2.1: (1, 2, 5), 3.0: (1, 3)}
    subs = next((found for limit, found in steps.items() if decades < limit), (1,))
    axis.set_major_locator(LogLocator(subs=subs, numticks=99))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def save(figure: Any, panels: Any, title: str, path: Path, *, legend: bool = True) -> Path:
    """Adds title and legend, and writes the picture; returns its path, whose folder is made.

    Args:
        figure: From `figure`.
        panels: Its panels, which have the same methods.
        title: Above them all.
        path: Its ending decides on the format.
        legend: Whether the methods are named below.
    """
    inches = figure.get_size_inches()[0]
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(textwrap.fill(title, int(15 * inches)), fontsize="small")
    if legend:
        found = panels[0].get_legend_handles_labels()
        columns = max(1, int(inches / 2.6))
        figure.legend(*found, loc="outside lower center", ncols=columns, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
