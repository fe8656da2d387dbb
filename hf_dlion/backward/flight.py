"""One step's messages, on their way while backward runs (design section 5)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_dlion.backward.background import Background
from hf_dlion.codec.rule import StepRule
from hf_dlion.exchange import WireStats
from hf_dlion.momentum.shares import Range
from hf_dlion.options import Options
from hf_dlion.options.params import check_gradient
from hf_dlion.ranks.groups import group_values, tensor_rules
from hf_dlion.ranks.node import Node
from hf_dlion.step.ballot import Ballot
from hf_dlion.step.message import Clock, Message, apply_all


class Owner(Protocol):
    """What the exchange needs of its optimizer."""

    param_groups: list[dict[str, Any]]
    options: Options
    wire: WireStats

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def node(self) -> Node | None:
        """Who votes together with this rank, as far as that is known."""

    def stretch_of(self, param: Tensor, index: int, wanted: Range) -> Tensor | None:
        """Returns a stretch of the parameter's momentum, or None if this rank does not hold it."""

    def step_rule(self) -> StepRule:
        """Returns the constants of the coming step."""


class Flight:
    """The messages of one step, some of which left during backward.

    Attributes:
        messages: All of them, in the order in which they leave.
        stale: Whether the votes that left do not hold any more.
        failure: What failed during backward, to be raised on all ranks together.
        finite: id and version of gradients that were finite when their votes left, by the ids of
            their parameters.
        missing: ids of the parameters whose gradients backward did not deliver.
        bytes_before: `WireStats.bytes_sent` before the first of them left.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        owner: Owner,
        scale: float,
        counter: Background,
        streams: dict[torch.device, torch.cuda.Stream],
    ) -> None:
        """Takes the constants of the step as they are when its first gradient is ready.

        Args:
            messages: Agreed by all ranks.
            owner: The optimizer.
            scale: Factor of the gradients, as far as it is known.
            counter: One thread, which waits for votes and counts them.
            streams: By device, on which it does so; kept, since the allocator has a pool for each.
        """
        self.messages = messages
        self.stale = False
        self.failure: Exception | None = None
        self.bytes_before = owner.wire.bytes_sent
        self._owner, self._scale = owner, scale
        self._rule = owner.step_rule()
        self._betas = _betas(owner)
        indices = {index for message in messages for index, _ in message.params}
        self._rules = tensor_rules(owner.param_groups, indices, self._rule)
        self._missing = [{id(param) for _, param in message.params} for message in messages]
        self._place = {key: place for place, keys in enumerate(self._missing) for key in keys}
        self.finite: dict[int, tuple[int, int]] = {}
        self.missing: set[int] = set()
        self._sent = 0
        self._broken: Exception | None = None
        # A node's gradient is there where a wrapper has averaged it, and nowhere else.
        self._in_buckets = owner.node is not None
        self._averaged: dict[int, Tensor] = {}
        self._counter = counter
        self._counts: list[Future[None]] = []
        self._streams = streams

    def note(self, param: Tensor) -> None:
        """Takes note that a gradient is ready, and sends what is complete."""
        key, place = id(param), self._place.get(id(param))
        if place is None:
            return
        if key not in self._missing[place]:
            # Accumulated into once more, perhaps after its vote left.
            self.stale = True
        self._missing[place].discard(key)
        while self._sent < len(self.messages) and not self._missing[self._sent]:
            self._send(self._place.keys(), self._scale)

    def note_bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Takes note that a wrapper has averaged some gradients in the node, and sends as `note`.

        Args:
            params: The parameters of a bucket of the wrapper's.
            grads: Their gradients, which are not in `.grad` yet.
        """
        for param, grad in zip(params, grads, strict=True):
            self._averaged[id(param)] = grad
            self.note(param)

    def known_finite(self, param: Tensor) -> bool:
        """Returns whether a gradient was finite when its vote left, and is still the same."""
        return self.finite.get(id(param)) == _mark(param)

    def complete(self, present: Mapping[int, bool], odd: Container[int]) -> None:
        """Sends what backward did not: from gradients that the loop is done with.

        Args:
            present: By parameter index, whether this rank votes on it now.
            odd: ids of the parameters whose gradients the loop did not scale like the others.
        """
        self._owner.wire.sent_in_backward = self._sent
        self.missing = set().union(*self._missing)
        for message in self.messages[: self._sent]:
            for index, param in message.params:
                if id(param) in odd or not present.get(index, False):
                    self.stale = True
        if _betas(self._owner) != self._betas or self._owner.step_rule() != self._rule:
            self.stale = True
        while self._sent < len(self.messages):
            message = self.messages[self._sent]
            if self._in_buckets:
                self.stale = True
                self._send((), 1.0)
                continue
            self._send({id(param) for index, param in message.params if present.get(index)}, 1.0)

    def land(self, ballot: Ballot) -> None:
        """Advances the momenta and applies the verdicts; all ranks' votes hold."""
        stats, clock = self._owner.wire, Clock()
        for message in self.messages:
            # The last messages are still on the wire.
            message.advance(ballot.voting, ballot.rules)
        stats.encode_s += clock.lap()
        self._counted(ballot.rule)
        stats.exchange_s += clock.lap()
        apply_all(self.messages, ballot, stats)
        stats.overlapped += 1

    def discard(self) -> None:
        """Waits for everything that is on its way, and drops it; every rank must call this."""
        self._counted(self._rule)
        for message in self.messages:
            message.verdict()

    def _counted(self, rule: StepRule) -> None:
        """Waits until all messages are counted."""
        for count in self._counts:
            count.result()
        for message in self.messages:
            if message.rounds == 1:
                message.count(rule)
        for device in {message.device for message in self.messages}:
            self._join_streams(device)

    def _send(self, voting: Container[int], scale: float) -> None:
        """Sends the next message, with votes on the parameters of these ids."""
        if self._broken is not None:
            raise self._broken
        message, stats, clock = self.messages[self._sent], self._owner.wire, Clock()
        # On the stream that backward is on: nothing may touch a gradient before it is read.
        with torch.no_grad():
            try:
                momenta, grads = self._ballot(message, voting)
                for param in message.preview(momenta, self._rules, scale, grads):
                    self.finite[id(param)] = _mark(param)
            except Exception as error:  # The other ranks wait for this message all the same.
                self.failure = error
                message.preview({}, self._rules, scale, {})
            stats.encode_s += clock.lap()
            try:
                message.send()
            except Exception as error:
                # It may have left: once more, it would be taken for the message after it.
                self._broken = error
                raise
        self._sent += 1
        if message.rounds > 1:
            self._counts.append(self._counter.submit(functools.partial(self._count, message)))
        stats.exchange_s += clock.lap()

    def _ballot(
        self, message: Message, voting: Container[int]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Returns momenta and gradients, by index, of the parameters on which this rank votes."""
        momenta: dict[int, Tensor] = {}
        grads: dict[int, Tensor] = {}
        stretches = message.stretches
        for index, param in message.params:
            if self.failure is not None or id(param) not in voting or index not in stretches:
                continue
            check_gradient(param)
            grad = self._averaged.get(id(param), param.grad)
            momentum = self._owner.stretch_of(param, index, stretches[index])
            if momentum is None:
                # Loaded, and yet to be shared out in the step.
                self.stale = True
            elif grad is not None:
                momenta[index], grads[index] = momentum, grad
        return momenta, grads

    def _count(self, message: Message) -> None:
        """Counts a message's votes and sends the verdict; on the counter's thread.

        Backward must not wait for another rank's votes: that rank may be waiting for this one's
        backward in a collective of the model's own.
        """
        with torch.no_grad(), self._beside(message.device):
            message.count(self._rule)

    @contextlib.contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """Runs on a stream of its own: waiting for votes must not hold up backward's."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._streams[device]):
            yield

    def _join_streams(self, device: torch.device) -> None:
        if device in self._streams:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])


def _mark(param: Tensor) -> tuple[int, int]:
    """Returns what changes when a gradient is replaced or written to."""
    grad = param.grad
    return (0, 0) if grad is None else (id(grad), grad._version)


def _betas(owner: Owner) -> list[tuple[float, float]]:
    return [values["betas"] for values in group_values(owner.param_groups)]
