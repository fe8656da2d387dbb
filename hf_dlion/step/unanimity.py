"""Votes that never differ: then ranks have equal gradients, and voting is for nothing."""

from __future__ import annotations

from hf_dlion.exchange import WireStats
from hf_dlion.options.warn_once import warn_once

# The only exchange after which to look, because a look waits for the device.
LOOKED_AT = 5

# Of fewer elements all votes may be alike by chance.
FEW = 1024


def warn_if_unanimous(stats: WireStats, elements: int) -> None:
    """Warns, once per process, if all ranks voted alike on every element.

    Says nothing where a row has exact zeros beside other numbers: ranks vote differently on those
    (rule S3).

    Args:
        stats: Of the step just taken, in which every rank voted.
        elements: On how many elements they voted at most.
    """
    if elements < FEW or stats.agreement != 1.0:
        return
    warn_once(
        "unanimity",
        f"all ranks voted alike on every one of {elements} elements, so they have equal gradients. "
        f"Either each gets the same data (no sampler shares it out), or gradients are averaged "
        f"before they are voted on, and cross the network in full: a DDP wrapper whose forward() "
        f"is called instead of the wrapper, parameters that are copies of the wrapped ones, or an "
        f"all-reduce of the loop's own",
    )
