"""A message: parameters whose votes travel together, where they lie, and a step's exchange."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dlion.codec import AdvanceJob, ApplyJob, Codec, EncodeJob
from hf_dlion.codec.codec import Magnitudes
from hf_dlion.codec.layout import MessageLayout, Run, shards_of
from hf_dlion.codec.rule import MessageVerdict, StepRule, TensorRule, Verdict
from hf_dlion.exchange import Exchange


class Room:
    """Memory for votes, which the messages of a device take in turns.

    Rows, and votes that are not made where they are sent from, are copied as they are handed over,
    so the next message's may follow.
    """

    def __init__(self, words: int, rows: int, device: torch.device) -> None:
        """Makes room for the largest."""
        self._words = torch.empty(words, dtype=torch.int64, device=device)
        self._active = torch.empty(rows, dtype=torch.bool, device=device)

    def words(self, count: int) -> Tensor:
        """Returns int64, shape (count,)."""
        return self._words[:count]

    def active(self, rows: int) -> Tensor:
        """Returns bool, shape (rows,)."""
        return self._active[:rows]


class Stretch(NamedTuple):
    """A stretch of a parameter, and its place in a message that lies in segments.

    Attributes:
        at: Index of the parameter.
        param: The parameter.
        run: The stretch.
        segment: Number of the segment.
        words: Where its words lie in the segment.
        rows: Where its rows lie among all of the message's.
    """

    at: int
    param: Tensor
    run: Run
    segment: int
    words: slice
    rows: slice

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the stretch of a contiguous tensor of the parameter, or one that is just it."""
        if tensor.numel() == self.run.numel:
            return tensor
        return tensor.view(-1)[self.run.start : self.run.stop]


def stretches_of(
    layout: MessageLayout, segments: int, params: Sequence[tuple[int, Tensor]]
) -> Iterator[Stretch]:
    """Yields the stretches of parameters in a message that lies in segments, all equally long."""
    by_index = dict(params)
    for number, shard in enumerate(shards_of(layout, segments)):
        for slot in layout.part(shard).slots:
            row = shard.first_row + slot.row
            yield Stretch(
                slot.index, by_index[slot.index], slot.run(), number,
                slice(slot.word, slot.word + slot.words), slice(row, row + slot.rows),
            )  # fmt: skip


class Preview(NamedTuple):
    """What becomes known of gradients while votes on them leave before the step.

    Attributes:
        params: The parameters, with elements, on which this rank votes.
        finite: For each, whether its scaled gradient is known to be finite.
        magnitudes: `Codec.magnitudes` of the gradients, in the order of `params`, if asked for.
    """

    params: list[Tensor]
    finite: list[bool]
    magnitudes: Magnitudes


class Message:
    """Some parameters of one device, their packed votes, and the exchange that carries them.

    Attributes:
        device: Of the parameters.
    """

    def __init__(
        self,
        params: Sequence[tuple[int, Tensor]],
        layout: MessageLayout,
        exchange: Exchange,
        codec: Codec,
        words: Tensor,
        active: Tensor,
        bits: int = 1,
        own: MessageLayout | None = None,
        beside: Callable[[StepRule], None] | None = None,
    ) -> None:
        """Takes its parts.

        Args:
            params: Pairs of parameter index and parameter, all on one device.
            layout: Their places.
            exchange: Carries the votes.
            codec: Makes the votes and applies the verdict.
            words: int64, shape (K, bits * S): where the votes are made, in K segments; those of the
                exchange, if it has any.
            active: bool, shape (rows of the votes,): where it is marked which rows vote.
            bits: Of a vote.
            own: What this rank votes on, if that is but a part of the message.
            beside: Rehearses what else is done when this message leaves.
        """
        self.device = params[0][1].device
        self.params = list(params)
        self._layout, self._exchange, self._codec = layout, exchange, codec
        self._words, self._active, self._bits = words, active, bits
        self._beside = beside
        self._voted = list(stretches_of(own or layout, len(words), params))
        self._cut = any(one.run.numel < one.param.numel() for one in self._voted)
        self._moved: list[Stretch] = []
        self._kinds = {id(param): (param.shape, param.device) for _, param in params}

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends for the message."""
        return self._exchange.bytes_per_rank

    @property
    def rounds(self) -> int:
        """Number of collectives that the exchange makes, one after another."""
        return self._exchange.rounds

    @property
    def waits(self) -> bool:
        """Whether `leave` waits for the device."""
        return self._exchange.waits

    def fits(self, param: Tensor) -> bool:
        """Returns whether one of the parameters still is what its place was made for."""
        return self._kinds[id(param)] == (param.shape, param.device)

    def encode(self, voting: Mapping[int, Tensor], rules: Mapping[int, TensorRule]) -> None:
        """Packs this rank's votes and advances its momenta; a parameter not voting abstains.

        Args:
            voting: `exp_avg`, or this rank's share of it, of every parameter, by index, on which
                this rank votes.
            rules: The step's constants by parameter index.
        """
        grads = self._dense(self._gradients(voting))
        self._codec.encode_all(self._jobs(voting, rules, grads))

    def preview(
        self,
        voting: Mapping[int, Tensor],
        rules: Mapping[int, TensorRule],
        scale: float,
        grads: Mapping[int, Tensor],
        *,
        probe: bool,
    ) -> Preview:
        """Packs this rank's votes for gradients times `scale`, and leaves its momenta alone.

        Args:
            voting: As for `encode`.
            rules: As for `encode`.
            scale: Factor of the gradients.
            grads: The gradient of every parameter, by index, on which this rank votes.
            probe: Whether the magnitudes are asked for.
        """
        dense = self._dense(grads)
        finite: dict[int, bool] = {}
        jobs = self._jobs(voting, rules, dense)
        for job, known in zip(jobs, self._codec.preview_all(jobs, scale), strict=True):
            finite[job.rule.index] = finite.get(job.rule.index, True) and known
        seen = [dense[index] for index in finite] if probe else []
        by_index = dict(self.params)
        return Preview(
            [by_index[index] for index in finite],
            list(finite.values()),
            self._codec.magnitudes(seen) if seen else [],
        )

    def advances(
        self, voting: Mapping[int, Tensor], rules: Mapping[int, TensorRule]
    ) -> list[AdvanceJob]:
        """Returns what advances the momenta of the parameters on which this rank votes.

        Args:
            voting: As for `encode`.
            rules: As for `encode`.
        """
        grads = self._gradients(voting)
        return [AdvanceJob(grads[index], voting[index], rules[index]) for index in grads]

    def start(self) -> None:
        """Hands the packed votes over as they are; nobody waits."""
        self._exchange.start(self._copied, self._active)

    def leave(self) -> None:
        """Sends the votes; it may be called on another thread, one for all messages."""
        self._exchange.leave()

    def count(self, rule: StepRule) -> None:
        """Waits for the other ranks' votes and counts them."""
        self._exchange.count(rule)

    def verdict(self) -> MessageVerdict:
        """Waits for the verdict and returns it; it holds until the next step's votes are made."""
        return self._exchange.verdict()

    def apply(self, verdict: MessageVerdict, rules: Mapping[int, TensorRule]) -> None:
        """Moves the parameters that have a rule by the verdict; the others stay untouched.

        Args:
            verdict: Of the whole message.
            rules: The step's constants by parameter index.
        """
        if not self._moved:
            segments = verdict.planes.shape[1]
            self._moved = list(stretches_of(self._layout, segments, self.params))
        jobs = []
        for one in self._moved:
            if one.at in rules:
                part = Verdict(verdict.planes[:, one.segment, one.words], verdict.counts[one.rows])
                jobs.append(ApplyJob(one.param, part, rules[one.at], one.run))
        self._codec.apply_all(jobs)

    def rehearse(
        self, voting: Mapping[int, Tensor], rules: Mapping[int, TensorRule], rule: StepRule
    ) -> None:
        """Compiles what a step needs, where that is still to be done, and changes nothing.

        Args:
            voting: As for `encode`.
            rules: As for `encode`.
            rule: The step's constants.
        """

        def work() -> None:
            self.encode(voting, rules)
            self.apply(self._exchange.rehearse(self._copied, self._active, rule), rules)
            if self._beside is not None:
                self._beside(rule)

        self._codec.rehearse(work)

    @property
    def _copied(self) -> Tensor | None:
        """The votes, if they are not made where they are sent from."""
        return self._words[0] if self._exchange.votes is None else None

    def _gradients(self, voting: Container[int]) -> dict[int, Tensor]:
        """Returns the gradients of the parameters that vote, by index."""
        grads = {}
        for index, param in self.params:
            if index in voting:
                assert param.grad is not None, "a parameter that votes has a gradient"
                grads[index] = param.grad
        return grads

    def _dense(self, grads: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """Returns gradients of which stretches can be taken."""
        if not self._cut:
            return grads
        return {index: grad.contiguous() for index, grad in grads.items()}

    def _jobs(
        self,
        voting: Mapping[int, Tensor],
        rules: Mapping[int, TensorRule],
        grads: Mapping[int, Tensor],
    ) -> list[EncodeJob]:
        """Returns the jobs of the parameters that vote; the others' votes become 0.

        Args:
            voting: As for `encode`.
            rules: As for `encode`.
            grads: Of the parameters that vote, contiguous where they are cut.
        """
        if any(one.at not in voting for one in self._voted):
            self._words.zero_()
            self._active.zero_()
        jobs = []
        for one in self._voted:
            if one.at in voting:
                own = one.of(grads[one.at]), one.of(voting[one.at])
                words = slice(self._bits * one.words.start, self._bits * one.words.stop)
                places = self._words[one.segment, words], self._active[one.rows]
                jobs.append(EncodeJob(*own, *places, rules[one.at], one.run))
        return jobs
