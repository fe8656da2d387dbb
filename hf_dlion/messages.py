"""A step's messages: which parameters travel together, and their buffers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_dlion.codec import Codec, codec_for
from hf_dlion.exchange import Exchange, Wire, WireStats, choose_exchange, make_exchange
from hf_dlion.header import digest
from hf_dlion.layout import MessageLayout, Slot
from hf_dlion.options import Options
from hf_dlion.state import check_trainable
from hf_dlion.verdict import StepRule, TensorRule, Verdict

# Parameters per message: few enough messages that latency does not count, and enough of them that
# one travels while the next is encoded. 2**25 signs are 4 MiB.
MESSAGE_NUMEL = 1 << 25


def split_into_messages(
    params: Sequence[tuple[int, Tensor]], limit: int = MESSAGE_NUMEL
) -> list[list[tuple[int, Tensor]]]:
    """Returns runs of parameters of one device with at most `limit` elements each.

    A larger parameter is a message of its own; a parameter without elements is left out.

    Args:
        params: Pairs of parameter index and parameter.
        limit: Elements per message.
    """
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
    """Some parameters of one device, their packed votes, and the exchange that carries them."""

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
        device = params[0][1].device
        self._params = list(zip(layout.slots, (param for _, param in params), strict=True))
        self._layout, self._exchange, self._codec = layout, exchange, codec
        self._words = torch.empty(layout.words, dtype=torch.int64, device=device)
        self._active = torch.empty(layout.rows, dtype=torch.bool, device=device)
        self._row_numels = layout.shard(0, layout.words).row_numels(device)

    def encode(self, voting: Mapping[int, Tensor], rules: Mapping[int, TensorRule]) -> None:
        """Packs this rank's votes and advances its momenta; a parameter not voting abstains.

        Args:
            voting: `exp_avg` of every parameter, by index, on which this rank votes.
            rules: The step's constants by parameter index.
        """
        for slot, param in self._params:
            words, active = self._views(slot)
            if slot.index in voting:
                assert param.grad is not None, "a parameter that votes has a gradient"
                momentum = voting[slot.index]
                self._codec.encode(param.grad, momentum, words, active, rules[slot.index])
            else:
                words.zero_()
                active.zero_()

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
        for slot, param in self._params:
            if slot.index in rules:
                part = Verdict(
                    verdict.planes[:, slot.word : slot.word + slot.words],
                    verdict.counts[slot.row : slot.row + slot.rows],
                )
                self._codec.apply(param, part, rules[slot.index])

    def voted_elements(self, verdict: Verdict) -> int:
        """Returns the number of elements in rows on which any rank voted."""
        return int(self._row_numels[verdict.counts > 0].sum())

    def _views(self, slot: Slot) -> tuple[Tensor, Tensor]:
        return (
            self._words[slot.word : slot.word + slot.words],
            self._active[slot.row : slot.row + slot.rows],
        )


class Plan:
    """The messages of a set of trainable parameters, kept until that set changes.

    Attributes:
        messages: With buffers for one step; none for one rank.
        layout: Hash of everything that decides which collectives of what size a step makes.
    """

    def __init__(
        self, params: Sequence[tuple[int, Tensor]], wire: Wire | None, options: Options
    ) -> None:
        """Checks the parameters and makes the messages.

        Args:
            params: Pairs of parameter index and parameter, those with requires_grad.
            wire: The process group, or None for one rank.
            options: Give the exchange and what it carries.

        Raises:
            NotImplementedError: If a parameter is sharded.
            TypeError: If one is not dense or not floating.
        """
        for _, param in params:
            check_trainable(param)
        self._wire, self._key = wire, _key_of(params)
        groups = split_into_messages(params)
        layouts = [MessageLayout.of([(i, p.shape) for i, p in group]) for group in groups]
        world_size = 1 if wire is None else wire.world_size
        name = choose_exchange(layouts, world_size, options)
        split = [[index for index, _ in group] for group in groups]
        kinds = [(index, tuple(p.shape), str(p.dtype)) for index, p in params]
        self.layout = digest((kinds, split, name))
        self.messages: list[Message] = []
        if wire is None or world_size == 1:
            return
        for group, layout in zip(groups, layouts, strict=True):
            device = group[0][1].device
            exchange = make_exchange(name, layout, wire, device, options)
            self.messages.append(Message(group, layout, exchange, codec_for(device)))

    def fits(self, params: Sequence[tuple[int, Tensor]], wire: Wire | None) -> bool:
        """Returns whether these are the parameters and the wire of the plan."""
        return self._wire is wire and self._key == _key_of(params)


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
    clock = _Clock()
    for message in messages:
        message.encode(voting, rules)
        stats.encode_s += clock.lap()
        message.send()
        stats.exchange_s += clock.lap()
    for message in messages:
        message.count(rule)
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


class _Clock:
    """A stop watch."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since the last call."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last
