"""A step's messages: which parameters travel together, and their buffers."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from hf_dlion.codec import AdvanceJob, ApplyJob, Codec, EncodeJob, codec_for
from hf_dlion.exchange import Exchange, Wire, WireStats, choose_exchange, make_exchange
from hf_dlion.header import digest
from hf_dlion.layout import MessageLayout, Slot
from hf_dlion.options import Options
from hf_dlion.shards import Range
from hf_dlion.state import check_trainable
from hf_dlion.verdict import StepRule, TensorRule, Verdict

# A step has about so many messages: enough of them that one travels while the next is encoded, and
# few enough that calls and latency do not count ...
MESSAGES = 32
# ... none of fewer elements than that, and than so many for each rank. At 100 Mbit/s messages of
# 2**20 elements reached 1.03 of the bound, of 2**22 1.11 (29.5 million parameters, two hosts).
FEWEST_NUMEL, FEWEST_NUMEL_PER_RANK = 1 << 20, 1 << 17
# Elements per message whatever the model: for benchmarks and tests.
MESSAGE_NUMEL: int | None = None


def message_numel(params: Sequence[tuple[int, Tensor]], world_size: int) -> int:
    """Returns how many elements a message should have at most.

    Args:
        params: Pairs of parameter index and parameter.
        world_size: Number of ranks that exchange votes.
    """
    if MESSAGE_NUMEL is not None:
        return MESSAGE_NUMEL
    total = sum(param.numel() for _, param in params)
    return max(FEWEST_NUMEL, FEWEST_NUMEL_PER_RANK * world_size, -(-total // MESSAGES))


def split_into_messages(
    params: Sequence[tuple[int, Tensor]], world_size: int
) -> list[list[tuple[int, Tensor]]]:
    """Returns runs of parameters of one device with at most `message_numel` elements each.

    A larger parameter is a message of its own; a parameter without elements is left out.

    Args:
        params: Pairs of parameter index and parameter.
        world_size: Number of ranks that exchange votes.
    """
    return _runs(params, message_numel(params, world_size))


def _runs(params: Sequence[tuple[int, Tensor]], limit: int) -> list[list[tuple[int, Tensor]]]:
    messages: list[list[tuple[int, Tensor]]] = []
    room, device = 0, None
    for index, param in params:
        if param.numel() == 0:
            continue
        if not messages or param.numel() > room or param.device != device:
            messages.append([])
            room, device = limit, param.device
        messages[-1].append((index, param))
        room -= param.numel()
    return messages


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
    ) -> None:
        """Makes the buffers of the votes.

        Args:
            params: Pairs of parameter index and parameter, all on one device.
            layout: Their places.
            exchange: Carries the votes.
            codec: Makes the votes and applies the verdict.
        """
        self.device = device = params[0][1].device
        self._params = list(zip(layout.slots, (param for _, param in params), strict=True))
        self._layout, self._exchange, self._codec = layout, exchange, codec
        self._words = torch.empty(layout.words, dtype=torch.int64, device=device)
        self._active = torch.empty(layout.rows, dtype=torch.bool, device=device)
        self._row_numels = layout.shard(0, layout.words).row_numels(device)

    @property
    def params(self) -> list[tuple[int, Tensor]]:
        """Pairs of parameter index and parameter."""
        return [(slot.index, param) for slot, param in self._params]

    @property
    def stretches(self) -> dict[int, Range]:
        """Start and stop of what this rank votes on of each parameter, by index."""
        return {slot.index: (0, slot.numel) for slot, _ in self._params}

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends for the message."""
        return self._exchange.bytes_per_rank

    @property
    def rounds(self) -> int:
        """Number of collectives that the exchange makes, one after another."""
        return self._exchange.rounds

    def encode(self, voting: Mapping[int, Tensor], rules: Mapping[int, TensorRule]) -> None:
        """Packs this rank's votes and advances its momenta; a parameter not voting abstains.

        Args:
            voting: `exp_avg` of every parameter, by index, on which this rank votes.
            rules: The step's constants by parameter index.
        """
        found = self._jobs(voting, rules, self._gradients(voting))
        self._codec.encode_all([job for _, job in found])

    def preview(
        self,
        voting: Mapping[int, Tensor],
        rules: Mapping[int, TensorRule],
        scale: float,
        grads: Mapping[int, Tensor],
    ) -> list[Tensor]:
        """Packs this rank's votes for gradients times `scale`, and leaves its momenta alone.

        Args:
            voting: As for `encode`.
            rules: As for `encode`.
            scale: Factor of the gradients.
            grads: The gradient of every parameter, by index, on which this rank votes.

        Returns:
            Those of the parameters whose gradients are known to be finite.
        """
        found = self._jobs(voting, rules, grads)
        finite = self._codec.preview_all([job for _, job in found], scale)
        return [param for (param, _), known in zip(found, finite, strict=True) if known]

    def advance(self, voting: Mapping[int, Tensor], rules: Mapping[int, TensorRule]) -> None:
        """Advances the momenta of the parameters on which this rank votes.

        Args:
            voting: As for `encode`.
            rules: As for `encode`.
        """
        grads = self._gradients(voting)
        jobs = [AdvanceJob(grads[index], voting[index], rules[index]) for index in grads]
        self._codec.advance_all(jobs)

    def send(self) -> None:
        """Starts the exchange of the packed votes."""
        self._exchange.start(self._words, self._active)

    def count(self, rule: StepRule) -> None:
        """Waits for the other ranks' votes and counts them."""
        self._exchange.count(rule)

    def verdict(self) -> Verdict:
        """Waits for the verdict and returns it."""
        return self._exchange.verdict()

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

    def voted_elements(self, verdict: Verdict) -> int:
        """Returns the number of elements in rows on which any rank voted."""
        return int(self._row_numels[verdict.counts > 0].sum())

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
            self._words[slot.word : slot.word + slot.words],
            self._active[slot.row : slot.row + slot.rows],
        )


@dataclass(frozen=True)
class ReadyOrder:
    """How gradients become ready in backward, on all ranks alike.

    Attributes:
        indices: Of parameters, the first one ready first.
        late: Of parameters that some rank's backward often does not deliver: they come last, and
            share no message with others.
        wires: A process group of their own for votes that leave during backward, and one for the
            verdicts on them: so that neither needs an order among the other's collectives.
        inside: Where a node votes as one, a process group of its ranks for what they tell one
            another before a vote leaves.
    """

    indices: Sequence[int]
    late: Sequence[int]
    wires: tuple[Wire, Wire]
    inside: Wire | None = None


class Plan:
    """The messages of a set of trainable parameters, kept until that set changes.

    Attributes:
        messages: With buffers for one step; none for one rank.
        layout: Hash of everything that decides which collectives of what size a step makes.
        ordered: Whether the messages follow an order in which gradients become ready.
        owners: For each rank of this rank's node, the stretch of every parameter whose momentum it
            keeps; empty where every rank keeps all of it.
        owned: The same of this rank.
    """

    owners: Sequence[Mapping[int, Range]] = ()
    owned: Mapping[int, Range] = MappingProxyType({})

    def __init__(
        self,
        params: Sequence[tuple[int, Tensor]],
        wire: Wire | None,
        options: Options,
        order: ReadyOrder | None = None,
    ) -> None:
        """Checks the parameters and makes the messages.

        Args:
            params: Pairs of parameter index and parameter, those with requires_grad.
            wire: The process group, or None for one rank.
            options: Give the exchange and what it carries.
            order: How the messages of an exchange during backward are cut, and where they travel.

        Raises:
            NotImplementedError: If a parameter is sharded.
            TypeError: If one is not dense or not floating.
        """
        self._take_params(params, wire)
        self.ordered = order is not None
        world_size = 1 if wire is None else wire.world_size
        groups = split_into_messages(params, world_size)
        up, down = wire, wire
        if order is not None:
            up, down = order.wires
            groups = split_in_order(params, order, world_size)
        layouts = [MessageLayout.of([(i, p.shape) for i, p in group]) for group in groups]
        name = choose_exchange(layouts, world_size, options)
        split = [[index for index, _ in group] for group in groups]
        kinds = [(index, tuple(p.shape), str(p.dtype)) for index, p in params]
        self.layout = digest((kinds, split, name))
        self.messages: list[Message] = []
        if up is None or world_size == 1:
            return
        for group, layout in zip(groups, layouts, strict=True):
            device = group[0][1].device
            exchange = make_exchange(name, layout, up, device, options, down)
            self.messages.append(Message(group, layout, exchange, codec_for(device)))

    def _take_params(self, params: Sequence[tuple[int, Tensor]], wire: Wire | None) -> None:
        for _, param in params:
            check_trainable(param)
        self._wire, self._key = wire, _key_of(params)

    def fits(self, params: Sequence[tuple[int, Tensor]], wire: Wire | None) -> bool:
        """Returns whether these are the parameters and the wire of the plan."""
        return self._wire is wire and self._key == _key_of(params)


def split_in_order(
    params: Sequence[tuple[int, Tensor]], order: ReadyOrder, world_size: int
) -> list[list[tuple[int, Tensor]]]:
    """Returns messages as `split_into_messages`, in the order in which gradients become ready.

    Args:
        params: Pairs of parameter index and parameter.
        order: That of the gradients.
        world_size: Number of ranks that exchange votes.
    """
    place = {index: number for number, index in enumerate(order.indices)}
    # Where autograd was not seen, the last parameter's gradient is taken to be first.
    sequence = sorted(params, key=lambda pair: (place.get(pair[0], len(place)), -pair[0]))
    late = set(order.late)
    in_time = [pair for pair in sequence if pair[0] not in late]
    rest = [pair for pair in sequence if pair[0] in late]
    limit = message_numel(params, world_size)
    return [*_runs(in_time, limit), *_runs(rest, limit)]


def _key_of(params: Sequence[tuple[int, Tensor]]) -> list[tuple[object, ...]]:
    return [(index, id(p), p.shape, p.dtype, p.device) for index, p in params]


def exchange_all(
    messages: Sequence[Message],
    voting: Mapping[int, Tensor],
    rules: Mapping[int, TensorRule],
    rule: StepRule,
    stats: WireStats,
) -> None:
    """Sends each message as soon as it is encoded, and applies each verdict as it arrives.

    Every rank of the group calls this with the same messages; the collectives' order is that of
    the messages, by construction.

    Args:
        messages: Of all trainable parameters.
        voting: `exp_avg` of every parameter, by index, on which this rank votes.
        rules: The step's constants of every parameter on which any rank votes.
        rule: The step's constants.
        stats: Receives times and agreement.
    """
    clock = Clock()
    for message in messages:
        message.encode(voting, rules)
        stats.encode_s += clock.lap()
        message.send()
        stats.exchange_s += clock.lap()
    for message in messages:
        message.count(rule)
    stats.exchange_s += clock.lap()
    apply_all(messages, rules, rule, stats)


def apply_all(
    messages: Sequence[Message],
    rules: Mapping[int, TensorRule],
    rule: StepRule,
    stats: WireStats,
) -> None:
    """Applies each verdict as it arrives.

    Args:
        messages: Counted, in the order in which they were sent.
        rules: The step's constants of every parameter on which any rank votes.
        rule: The step's constants.
        stats: Receives times and agreement.
    """
    clock = Clock()
    agreement = voted = 0
    for message in messages:
        verdict = message.verdict()
        agreement += verdict.agreement
        voted += message.voted_elements(verdict)
        stats.exchange_s += clock.lap()
        message.apply(verdict, rules)
        stats.apply_s += clock.lap()
    stats.exchanges += 1
    stats.agreement = agreement / (rule.world_size * voted) if voted else math.nan


class Clock:
    """A stop watch."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since the last call."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last
