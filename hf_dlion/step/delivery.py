"""How votes leave and verdicts come back: a delivery carries what moves in a step.

    in the step       `InStep`: each message leaves once it is encoded, verdicts are applied as
                      they arrive
    during backward   `hf_dlion.backward.flight.Flight`: the votes have left already
    nobody to ask     `LionAlone`: plain Lion on this rank, nothing is sent

A step calls exactly one of `land` and `discard`, on every rank the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from hf_dlion.codec import AloneJob, codec_for
from hf_dlion.codec.rule import StepRule, TensorRule
from hf_dlion.exchange import Agreed, WireStats
from hf_dlion.step.message import Message


@dataclass(frozen=True)
class Moving:
    """The parameters that move in a step, and by which constants.

    Whatever exchanges and applies takes from it the parameters that are its own.

    Attributes:
        voting: `exp_avg`, or this rank's share of it, of every parameter, by index, on which this
            rank, or its node, votes.
        rules: The step's constants of every parameter on which any rank votes, by index.
        rule: The step's constants.
        full: `exp_avg`, and the number of ranks that have a gradient, of every parameter, by index,
            that moves by the mean gradient.
    """

    voting: Mapping[int, Tensor]
    rules: Mapping[int, TensorRule]
    rule: StepRule
    full: Mapping[int, tuple[Tensor, int]] = field(default_factory=dict)


class Delivery(Protocol):
    """Carries a step's votes to the other ranks and their verdict back to the parameters."""

    def land(self, moving: Moving, stats: WireStats) -> None:
        """Advances momenta and moves parameters by the verdict; every rank must call this.

        Args:
            moving: What moves; the same `rules` on every rank.
            stats: Receives times and agreement.
        """

    def discard(self) -> None:
        """Drops what has left, so nothing of it moves; every rank must call this."""


class Wave(NamedTuple):
    """Messages that leave together, once all of them are encoded.

    Attributes:
        messages: In the order in which they leave.
        complete: What other ranks must know of their votes before that.
    """

    messages: Sequence[Message]
    complete: Callable[[StepRule], None] | None = None


class InStep:
    """Votes leave in the step: one wave of messages travels while the next one is encoded.

    The collectives' order is that of the messages, by construction, on every rank. Where leaving
    waits for a GPU, a wave leaves once the next one's work has been queued there.
    """

    def __init__(self, waves: Sequence[Wave]) -> None:
        """Takes the plan's messages, in the order in which they leave."""
        self._waves = waves
        self._messages = [message for wave in waves for message in wave.messages]
        self._late = any(message.waits for message in self._messages)

    def land(self, moving: Moving, stats: WireStats) -> None:
        """Exchanges votes and applies the verdict; see `Delivery.land`."""
        if not self._messages:
            return
        clock = Clock()
        held: Sequence[Message] = ()
        for wave in self._waves:
            for message in wave.messages:
                message.encode(moving.voting, moving.rules)
            stats.encode_s += clock.lap()
            if wave.complete is not None:
                wave.complete(moving.rule)
            for message in wave.messages:
                message.start()
            due, held = (held, wave.messages) if self._late else (wave.messages, ())
            for message in due:
                message.leave()
            stats.exchange_s += clock.lap()
        for message in held:
            message.leave()
        for message in self._messages:
            message.count(moving.rule)
        stats.exchange_s += clock.lap()
        apply_verdicts(self._messages, moving, stats)

    def discard(self) -> None:
        """Does nothing: nothing has left."""


class LionAlone:
    """Plain Lion on this rank alone (rule S9); nothing is encoded or sent."""

    def __init__(self, params: Sequence[tuple[int, Tensor]]) -> None:
        """Takes pairs of parameter index and parameter."""
        self._params = params

    def land(self, moving: Moving, stats: WireStats) -> None:
        """Moves the parameters; see `Delivery.land`."""
        start = time.perf_counter()
        jobs: dict[torch.device, list[AloneJob]] = {}
        for index, param in self._params:
            if index in moving.voting:
                momentum, rule = moving.voting[index], moving.rules[index]
                job = AloneJob(param, cast(Tensor, param.grad), momentum, rule)
                jobs.setdefault(param.device, []).append(job)
        for device, of_device in jobs.items():
            codec_for(device).step_alone_all(of_device)
        stats.apply_s += time.perf_counter() - start

    def discard(self) -> None:
        """Does nothing: nothing has left."""


def apply_verdicts(messages: Sequence[Message], moving: Moving, stats: WireStats) -> None:
    """Applies each verdict as it arrives, and measures how far the ranks agreed.

    Args:
        messages: Counted, in the order in which they were sent.
        moving: What moves.
        stats: Receives times and agreement.
    """
    clock = Clock()
    sums: list[Tensor] = []
    for message in messages:
        verdict = message.verdict()
        sums.append(verdict.sums)
        stats.exchange_s += clock.lap()
        message.apply(verdict, moving.rules)
        stats.apply_s += clock.lap()
    stats.exchanges += 1
    stats.agreed = Agreed(sums)


class Clock:
    """A stop watch."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since the last call."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last
