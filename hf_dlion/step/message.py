"""A message: parameters whose votes travel together, their buffers, and a step's exchange."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dlion.codec import AdvanceJob, ApplyJob, Codec, EncodeJob, Preview
from hf_dlion.codec.layout import MessageLayout, Slot
from hf_dlion.codec.rule import StepRule, TensorRule, Verdict
from hf_dlion.exchange import Exchange


class Buffers(NamedTuple):
    """Where one message's votes are made, and its verdict may lie.

    Attributes:
        words: int64, shape (bits * words of the votes,).
        active: bool, shape (rows of the votes,).
        free: int64, shape (words of the verdict,); may be the same memory as `words`.
    """

    words: Tensor
    active: Tensor
    free: Tensor


class Room:
    """Memory for votes and verdicts, which the messages of a device take in turns.

    Votes are copied as they leave, so the next message's may follow, and verdicts are applied one
    after another.
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

    def buffers(self, layout: MessageLayout, bits: int) -> Buffers:
        """Returns those of a message whose votes take `bits` bits."""
        words, active = self.words(bits * layout.words), self.active(layout.rows)
        return Buffers(words, active, self.words(layout.words))


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
        buffers: Buffers,
        bits: int = 1,
    ) -> None:
        """Takes its parts.

        Args:
            params: Pairs of parameter index and parameter, all on one device.
            layout: Their places.
            exchange: Carries the votes.
            codec: Makes the votes and applies the verdict.
            buffers: Hold the votes until they leave, and the verdict.
            bits: Of a vote.
        """
        self.device = params[0][1].device
        self._params = list(zip(layout.slots, (param for _, param in params), strict=True))
        self._layout, self._exchange, self._codec = layout, exchange, codec
        self._bits = bits
        self._words, self._active, self._free = buffers
        self._kinds = {id(param): (param.shape, param.device) for _, param in params}

    @property
    def params(self) -> list[tuple[int, Tensor]]:
        """Pairs of parameter index and parameter."""
        return [(slot.index, param) for slot, param in self._params]

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends for the message."""
        return self._exchange.bytes_per_rank

    @property
    def rounds(self) -> int:
        """Number of collectives that the exchange makes, one after another."""
        return self._exchange.rounds

    def fits(self, param: Tensor) -> bool:
        """Returns whether one of the parameters still is what its place was made for."""
        return self._kinds[id(param)] == (param.shape, param.device)

    def encode(self, voting: Mapping[int, Tensor], rules: Mapping[int, TensorRule]) -> None:
        """Packs this rank's votes and advances its momenta; a parameter not voting abstains.

        Args:
            voting: `exp_avg` of every parameter, by index, on which this rank votes.
            rules: The step's constants by parameter index.
        """
        self.make_votes(voting, rules)

    def preview(
        self,
        voting: Mapping[int, Tensor],
        rules: Mapping[int, TensorRule],
        scale: float,
        grads: Mapping[int, Tensor],
    ) -> tuple[list[Tensor], Preview]:
        """Packs this rank's votes for gradients times `scale`, and leaves its momenta alone.

        Args:
            voting: As for `encode`.
            rules: As for `encode`.
            scale: Factor of the gradients.
            grads: The gradient of every parameter, by index, on which this rank votes.

        Returns:
            The parameters that vote, and what became known of their gradients.
        """
        found = self._jobs(voting, rules, grads)
        preview = self._codec.preview_all([job for _, job in found], scale)
        return [param for param, _ in found], preview

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

    def send(self) -> None:
        """Starts the exchange of the packed votes."""
        self._exchange.start(self._words, self._active)

    def count(self, rule: StepRule) -> None:
        """Waits for the other ranks' votes and counts them."""
        self._exchange.count(rule)

    def verdict(self) -> Verdict:
        """Waits for the verdict and returns it; it holds until another message's is asked for."""
        return self._exchange.verdict(self._free)

    def apply(self, verdict: Verdict, rules: Mapping[int, TensorRule]) -> None:
        """Moves the parameters that have a rule by the verdict; the others stay untouched.

        Args:
            verdict: Of the whole message.
            rules: The step's constants by parameter index.
        """
        jobs = []
        for slot, param in self._params:
            if slot.index in rules:
                part = Verdict(
                    verdict.planes[:, slot.word : slot.word + slot.words],
                    verdict.counts[slot.row : slot.row + slot.rows],
                )
                jobs.append(ApplyJob(param, part, rules[slot.index]))
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
            self.make_votes(voting, rules)
            self.apply(self._exchange.rehearse(self._words, self._active, rule), rules)

        self._codec.rehearse(work)

    def make_votes(self, voting: Mapping[int, Tensor], rules: Mapping[int, TensorRule]) -> None:
        """Does the part of `encode` that takes no other rank."""
        found = self._jobs(voting, rules, self._gradients(voting))
        self._codec.encode_all([job for _, job in found])

    def _gradients(self, voting: Container[int]) -> dict[int, Tensor]:
        """Returns the gradients of the parameters that vote, by index."""
        grads = {}
        for slot, param in self._params:
            if slot.index in voting:
                assert param.grad is not None, "a parameter that votes has a gradient"
                grads[slot.index] = param.grad
        return grads

    def _jobs(
        self,
        voting: Mapping[int, Tensor],
        rules: Mapping[int, TensorRule],
        grads: Mapping[int, Tensor],
    ) -> list[tuple[Tensor, EncodeJob]]:
        """Returns the parameters that vote and their jobs; the others' votes become 0."""
        if any(slot.index not in voting for slot, _ in self._params):
            self._words.zero_()
            self._active.zero_()
        found = []
        for slot, param in self._params:
            if slot.index in voting:
                momentum, rule = voting[slot.index], rules[slot.index]
                job = EncodeJob(grads[slot.index], momentum, *self._views(slot), rule)
                found.append((param, job))
        return found

    def _views(self, slot: Slot) -> tuple[Tensor, Tensor]:
        return (
            self._words[self._bits * slot.word : self._bits * (slot.word + slot.words)],
            self._active[slot.row : slot.row + slot.rows],
        )
