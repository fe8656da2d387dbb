"""One step's messages, on their way while backward runs (docs/rule.md, "When it travels")."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from hf_dlion.backward.background import Background, InLine
from hf_dlion.backward.gradient_scale import GradientScale
from hf_dlion.backward.streams import Streams
from hf_dlion.codec import AdvanceJob, codec_for
from hf_dlion.codec.rule import StepRule, tensor_rules
from hf_dlion.exchange import WireStats
from hf_dlion.momentum.store import MomentumStore
from hf_dlion.options.groups import Groups, group_values
from hf_dlion.options.params import settle_gradient
from hf_dlion.step.delivery import Clock, Moving, apply_verdicts
from hf_dlion.step.message import Message, Preview
from hf_dlion.step.presence import mark


class Flight:
    """The messages of one step, some of which left during backward.

    Attributes:
        began: Whether messages may have left.
        messages: All of them, in the order in which they leave.
        stale: Whether the votes that left do not hold any more.
        failure: What failed during backward, to be raised on all ranks together.
        finite: id and version of gradients that were finite when their votes left, by the ids of
            their parameters.
        missing: ids of the parameters whose gradients backward did not deliver.
        bytes_before: `WireStats.bytes_sent` before the first of them left.
    """

    began = True

    def __init__(
        self,
        messages: Sequence[Message],
        momenta: MomentumStore,
        rule: StepRule,
        stats: WireStats,
        gradient_scale: GradientScale,
        sender: Background,
        counter: Background | InLine,
        streams: Streams,
    ) -> None:
        """Takes the constants of the step as they are when its first gradient is ready.

        Args:
            messages: Agreed by all ranks.
            momenta: Of this rank, with the parameter groups.
            rule: The step's constants.
            stats: Receives bytes and times.
            gradient_scale: Knows the factor of the gradients, and looks at those of votes that
                leave.
            sender: Sends votes where that waits for the device.
            counter: Waits for votes and counts them.
            streams: On which messages are encoded and counted.
        """
        self.messages = messages
        self.stale = False
        self.failure: Exception | None = None
        self.bytes_before = stats.bytes_sent
        self._momenta, self._rule, self._stats = momenta, rule, stats
        self._gradient_scale = gradient_scale
        self._betas = _betas(momenta.groups)
        indices = {index for message in messages for index, _ in message.params}
        self._rules = tensor_rules(momenta.groups, indices, rule)
        self._missing = [{id(param) for _, param in message.params} for message in messages]
        self._place = {key: place for place, keys in enumerate(self._missing) for key in keys}
        self.finite: dict[int, tuple[int, int]] = {}
        self.missing: set[int] = set()
        # ids of the parameters on which this rank has voted.
        self._voted: set[int] = set()
        self._sent = 0
        self._broken: BaseException | None = None
        # If one message waits, this thread sends all: in their order, which all ranks share.
        self._sender = sender if any(message.waits for message in messages) else None
        self._departures: list[Future[None]] = []
        self._counter = counter
        self._counts: list[Future[None]] = []
        self._streams = streams

    def note(self, param: Tensor) -> None:
        """Takes note that a gradient is ready, and sends what is complete."""
        key, place = id(param), self._place.get(id(param))
        if place is None:
            return
        self._streams.note_gradient(param.device)
        if key not in self._missing[place]:
            # Accumulated into once more, perhaps after its vote left.
            self.stale = True
        self._missing[place].discard(key)
        while self._sent < len(self.messages) and not self._missing[self._sent]:
            self._send(self._place.keys(), self._gradient_scale.scale, probe=True)

    def begun(self, begin: Callable[[], Flight]) -> Flight:
        """Returns this one."""
        return self

    def disturb(self) -> None:
        """Takes note that votes that left do not hold any more."""
        self.stale = True

    def unknown(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Returns those of the parameters whose gradients are not known to be finite.

        A gradient that was finite when its vote left need not be read once more, unless the loop
        has touched any since: an in-place change through `.data` leaves no other trace.
        """
        if self._gradient_scale.compare() != 1.0:
            return list(params)
        return [param for param in params if self.finite.get(id(param)) != mark(param)]

    def complete(
        self,
        present: Mapping[int, bool],
        rescaled_oddly: Container[int],
        momenta: MomentumStore,
        rule: StepRule,
    ) -> None:
        """Sends what backward did not: from gradients that the loop is done with.

        Args:
            present: By parameter index, whether this rank votes on it now.
            rescaled_oddly: ids of the parameters whose gradients the loop did not scale like
                the others.
            momenta: As they are now: a state may have been loaded meanwhile.
            rule: The constants of the step as they are now.
        """
        self._momenta = momenta
        for device in {message.device for message in self.messages}:
            self._streams.return_to_loop(device)
        self._stats.sent_in_backward = self._sent
        self.missing = set().union(*self._missing)
        for message in self.messages[: self._sent]:
            for index, param in message.params:
                # It may have been dropped since, or brought back.
                changed = present.get(index, False) != (id(param) in self._voted)
                if changed or id(param) in rescaled_oddly:
                    self.stale = True
        if _betas(momenta.groups) != self._betas or rule != self._rule:
            self.stale = True
        while self._sent < len(self.messages):
            message = self.messages[self._sent]
            own = {id(param) for index, param in message.params if present.get(index)}
            self._send(own, 1.0, probe=False)
        # What cannot leave must be known before this rank says that all is well.
        self._departed()

    def land(self, moving: Moving, stats: WireStats) -> None:
        """Advances the momenta and applies the verdicts; all ranks' votes hold."""
        clock = Clock()
        # All at once, while the last messages are still on the wire.
        jobs: dict[torch.device, list[AdvanceJob]] = {}
        for message in self.messages:
            own = message.advances(moving.voting, moving.rules)
            jobs.setdefault(message.device, []).extend(own)
        for device, of_device in jobs.items():
            codec_for(device).advance_all(of_device)
        stats.encode_s += clock.lap()
        self._counted(moving.rule)
        stats.exchange_s += clock.lap()
        apply_verdicts(self.messages, moving, stats)
        stats.overlapped += 1

    def discard(self) -> None:
        """Waits for everything that is on its way, and drops it; every rank must call this."""
        self._counted(self._rule)
        for message in self.messages:
            message.verdict()

    def _departed(self) -> None:
        """Waits until all votes have left."""
        for departure in self._departures:
            departure.result()

    def _counted(self, rule: StepRule) -> None:
        """Waits until all messages are counted."""
        self._departed()
        self._counter.finish()
        for count in self._counts:
            count.result()
        for message in self.messages:
            if message.rounds == 1:
                message.count(rule)
        for device in {message.device for message in self.messages}:
            self._streams.join(device)

    def _send(self, voting: Container[int], scale: float, *, probe: bool) -> None:
        """Sends the next message, with votes on the parameters of these ids.

        Args:
            voting: The ids.
            scale: Factor of their gradients.
            probe: Whether it is still to be seen by how much the loop will scale these.
        """
        lost = [gone.exception() for gone in self._departures if gone.done()]
        self._broken = self._broken or self._counter.failure or next(filter(None, lost), None)
        if self._broken is not None:
            raise self._broken
        message, stats, clock = self.messages[self._sent], self._stats, Clock()
        with torch.no_grad(), self._streams.sending(message.device):
            try:
                momenta, grads = self._voting(message, voting)
                preview = message.preview(momenta, self._rules, scale, grads, probe=probe)
                self._take_note(preview)
            except Exception as error:  # The other ranks wait for this message all the same.
                self.failure = error
                message.preview({}, self._rules, scale, {}, probe=False)
            stats.encode_s += clock.lap()
            try:
                message.start()
                if self._sender is None:
                    message.leave()
                else:
                    leave = functools.partial(_leave, message, self._departures[-1:])
                    self._departures.append(self._sender.submit(leave))
            except Exception as error:
                # It may have left: once more, it would be taken for the message after it.
                self._broken = error
                raise
        self._sent += 1
        if message.rounds > 1:
            count = functools.partial(self._count, message, self._departures[-1:])
            self._counts.append(self._counter.submit(count))
        stats.exchange_s += clock.lap()

    def _take_note(self, preview: Preview) -> None:
        for param, known in zip(preview.params, preview.finite, strict=True):
            if known:
                self.finite[id(param)] = mark(param)
        self._gradient_scale.before(preview.params, preview.magnitudes)

    def _voting(
        self, message: Message, voting: Container[int]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Returns momenta and gradients, by index, of the parameters on which this rank votes."""
        momenta: dict[int, Tensor] = {}
        grads: dict[int, Tensor] = {}
        for index, param in message.params:
            if self.failure is not None or id(param) not in voting:
                continue
            settle_gradient(param)
            if param.grad is not None:
                self._momenta.fit([(index, param)])
                momentum = self._momenta.of(param, index, {})
                if momentum.shape != param.shape or not message.fits(param):
                    # A loaded share, which the step makes whole, or a parameter of another shape,
                    # for which it plans anew: the vote must wait for that.
                    self.stale = True
                    continue
                momenta[index], grads[index] = momentum, param.grad
                self._voted.add(id(param))
        return momenta, grads

    def _count(self, message: Message, departed: Sequence[Future[None]]) -> None:
        """Counts a message's votes, which have departed, and sends the verdict.

        On gloo this waits for another rank's votes, which backward must not do: that rank may be
        waiting for this one's backward in a collective of the model's own. So it is on a thread.
        """
        for departure in departed:
            departure.result()
        with torch.no_grad(), self._streams.beside(message.device):
            message.count(self._rule)


def _leave(message: Message, before: Sequence[Future[None]]) -> None:
    """Sends a message's votes, unless those of the one before failed to leave."""
    for departure in before:
        departure.result()
    message.leave()


def _betas(groups: Groups) -> list[tuple[float, float]] | None:
    """Returns each group's betas, None if they are no numbers: the step's first phase says so."""
    try:
        return [values["betas"] for values in group_values(groups)]
    except (TypeError, ValueError):
        return None
