"""Packed votes of all ranks in, verdict out: one file per strategy.

`wire` is the only place that calls a collective; `count` counts votes on packed words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hf_dlion.codec.layout import MessageLayout
from hf_dlion.codec.levels import check_world_size
from hf_dlion.codec.rule import StepRule, Verdict, verdict_planes
from hf_dlion.exchange.gather import Gather
from hf_dlion.exchange.pending import LostRank, Pending
from hf_dlion.exchange.two_phase import TwoPhase
from hf_dlion.exchange.wire import Wire, WireStats
from hf_dlion.options import Options

__all__ = [
    "Exchange",
    "LostRank",
    "Pending",
    "Wire",
    "WireStats",
    "choose_exchange",
    "make_exchange",
    "message_wire_bytes",
]


class Exchange(Protocol):
    """One message's way over the wire, once per step; the methods are called in this order.

    Attributes:
        rounds: Number of collectives, one after another; with two, `count` starts the second.
        bytes_per_rank: Bytes that a rank sends for the message, and receives.
    """

    rounds: int
    bytes_per_rank: int

    def start(self, words: Tensor, active: Tensor) -> None:
        """Sends the votes; both are copied, and `words` is then free to hold the verdict."""

    def count(self, rule: StepRule) -> None:
        """Waits for votes, counts them, and sends what other ranks need of the result."""

    def verdict(self) -> Verdict:
        """Waits for the verdict and returns it."""


def message_wire_bytes(
    layouts: Sequence[MessageLayout], world_size: int, options: Options, exchange: str
) -> int:
    """Returns the bytes that a rank sends for all messages of a step, without the header.

    Args:
        layouts: The messages.
        world_size: Number of ranks.
        options: Gives aggregation, ties and bits.
        exchange: "gather" or "two_phase".
    """
    planes = verdict_planes(options.aggregation, options.ties, world_size)
    strategy = Gather if exchange == "gather" else TwoPhase
    return sum(strategy.wire_bytes(layout, world_size, planes, options.bits) for layout in layouts)


def choose_exchange(layouts: Sequence[MessageLayout], world_size: int, options: Options) -> str:
    """Returns the exchange that the options ask for; "auto" takes the cheaper total.

    On a tie "auto" takes gather, which needs one round.
    """
    if options.exchange != "auto":
        return options.exchange
    gather = message_wire_bytes(layouts, world_size, options, "gather")
    two_phase = message_wire_bytes(layouts, world_size, options, "two_phase")
    return "gather" if gather <= two_phase else "two_phase"


def make_exchange(
    name: str,
    layout: MessageLayout,
    wire: Wire,
    device: torch.device,
    options: Options,
    down: Wire | None = None,
) -> Exchange:
    """Returns a message's exchange.

    Args:
        name: Of the strategy.
        layout: The message.
        wire: The process group.
        device: Where the votes are made and the verdict is wanted.
        options: Give what a vote and a verdict hold.
        down: Another process group of the same ranks for a second round, None for `wire`.

    Raises:
        ValueError: If there are more ranks than can be counted.
    """
    check_world_size(wire.world_size, options.bits)
    if name == "gather":
        return Gather(layout, wire, device, options.bits)
    planes = verdict_planes(options.aggregation, options.ties, wire.world_size)
    return TwoPhase(layout, wire, device, planes, down, options.bits)
