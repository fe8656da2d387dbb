"""What an exchange of votes is, which strategies there are, and which one is taken.

The protocol of one message in one step, which every rank of the group follows with its messages in
the same order:

1. Make the votes in `votes`, from which they are sent; where that is None, anywhere else.
2. `start`: hand them over. Memory of one's own is free for the next message.
3. `leave`: send them. It may be called on another thread than `start`, one for all messages.
4. Do other work: encode and start the next messages.
5. `count`: where each rank counts a part, wait for the others' votes, count those that this rank
   counts, and send the verdict on them. It may be called on another thread than `leave`, if the
   exchange was given a wire `down`.
6. `verdict`: wait for what the others counted, or count their votes, and get the verdict on the
   whole message. It holds until the next step's votes are made.

After 6 the exchange is ready for the next step. An exchange is made once per layout and keeps its
buffers. A new strategy is a file with a class like `Strategy`, a line in `STRATEGIES`, and its name
among those of `hf_dlion.options.ExchangeName`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hf_dlion.codec.layout import MessageLayout
from hf_dlion.codec.levels import check_world_size
from hf_dlion.codec.rule import MessageVerdict, StepRule
from hf_dlion.exchange.gather import Gather
from hf_dlion.exchange.staged import Staged
from hf_dlion.exchange.two_phase import TwoPhase
from hf_dlion.exchange.wire import Wire
from hf_dlion.options import Options


class Exchange(Protocol):
    """One message's way over the wire, once per step; the methods are called in this order.

    Attributes:
        rounds: Number of collectives, one after another; with two, `count` starts the second.
        bytes_per_rank: Bytes that a rank sends for the message, and receives.
        votes: int64, shape (K, bits * S), a segment's words one after another: the votes on words
            S * j to S * (j + 1) of the message belong in segment j. None: they are copied.
        waits: Whether `leave` waits for the device.
    """

    rounds: int
    bytes_per_rank: int
    votes: Tensor | None
    waits: bool

    def start(self, words: Tensor | None, active: Tensor) -> None:
        """Takes the votes; nobody waits.

        Args:
            words: int64, shape (bits * W,), contiguous; None if they were made in `votes`.
            active: bool, shape (R,), the rows that vote.
        """

    def leave(self) -> None:
        """Sends the votes."""

    def count(self, rule: StepRule) -> None:
        """Counts votes where other ranks need the result, and sends it to them."""

    def verdict(self) -> MessageVerdict:
        """Waits for the verdict on the whole message; returns it on the message's device."""

    def rehearse(self, words: Tensor | None, active: Tensor, rule: StepRule) -> MessageVerdict:
        """Calls all that a step calls of the codec, and sends nothing: for `Codec.rehearse`."""


class Strategy(Exchange, Protocol):
    """An exchange that can be chosen by name."""

    def __init__(
        self,
        layout: MessageLayout,
        wire: Wire,
        device: torch.device,
        options: Options,
        down: Wire | None = None,
    ) -> None:
        """Makes the buffers, on a device that can send, and sends nothing; as `make_exchange`."""

    @staticmethod
    def wire_bytes(layout: MessageLayout, world_size: int, options: Options) -> tuple[int, int]:
        """Returns the bytes that a rank sends for one message: its votes, and its verdicts."""


# The order is that of "auto" among those that send equally much.
STRATEGIES: dict[str, type[Strategy]] = {"gather": Gather, "two_phase": TwoPhase}


def message_wire_bytes(
    layouts: Sequence[MessageLayout], world_size: int, options: Options, exchange: str
) -> int:
    """Returns the bytes that a rank sends for all messages of a step, without the header.

    Args:
        layouts: The messages.
        world_size: Number of ranks.
        options: Gives aggregation, ties and bits.
        exchange: Name of the strategy.
    """
    strategy = STRATEGIES[exchange]
    return sum(sum(strategy.wire_bytes(layout, world_size, options)) for layout in layouts)


def choose_exchange(layouts: Sequence[MessageLayout], world_size: int, options: Options) -> str:
    """Returns the exchange that the options ask for; "auto" takes the cheapest in total.

    Of equally cheap ones "auto" takes the first in the table: gather, which needs one round.
    """
    if options.exchange != "auto":
        return options.exchange
    return min(STRATEGIES, key=lambda name: message_wire_bytes(layouts, world_size, options, name))


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
        down: Another process group of the same ranks for a second round, None for `wire`: `count`
            may then be called on another thread than `leave`.

    Raises:
        ValueError: If there are more ranks than can be counted.
    """
    check_world_size(wire.world_size, options.bits)
    place = wire.device_for(device)
    found = STRATEGIES[name](layout, wire, place, options, down)
    if place == device:
        return found
    return Staged(found, layout, layout.words, options.bits, device)
