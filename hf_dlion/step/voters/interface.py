"""What a step asks of those who vote as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from hf_dlion.codec.layout import MessageLayout
from hf_dlion.exchange import Wire
from hf_dlion.momentum.shares import Range
from hf_dlion.momentum.store import MomentumStore
from hf_dlion.options import Options
from hf_dlion.ranks.header import Header
from hf_dlion.step.delivery import Delivery
from hf_dlion.step.message import Message
from hf_dlion.step.presence import Presence

Params = Sequence[tuple[int, Tensor]]


@dataclass(frozen=True)
class Built:
    """How the votes of a plan travel.

    Attributes:
        messages: In the order in which they leave; none where nobody else votes.
        delivery: Carries them in the step.
        owners: For each rank that shares the vote, the stretch of every parameter whose momentum
            it keeps, by parameter index; empty where every rank keeps all of it.
        owned: The same of this rank.
    """

    messages: Sequence[Message]
    delivery: Delivery
    owners: Sequence[Mapping[int, Range]] = ()
    owned: Mapping[int, Range] = field(default_factory=lambda: MappingProxyType({}))


class Voters(ABC):
    """Who votes as one, from the point of view of one rank.

    Attributes:
        wire: All ranks: headers travel there. None where there is but one rank.
        ranks: Number of ranks that share a message, as voters or as parts of one.
        index: Number of this rank's vote, the r of the rule.
        count: Number of votes, the N of the rule.
        between: The ranks whose votes this rank exchanges, one of each voter.
        twins: The ranks that hold the same parameters, or the same part of each.
        members: The ranks of each voter; empty where each is one rank.
        near: The ranks that share this rank's vote, itself included, or none.
        alike: Groups of ranks that hold the same stretches of all momenta.
        layout_key: What besides the messages decides on collectives; part of the layout's hash.
        averages: Whether DDP must average gradients among the ranks that share a vote.
    """

    wire: Wire | None
    ranks: int
    index: int
    count: int
    between: Wire | None
    twins: Wire | None
    members: tuple[tuple[int, ...], ...]
    near: Collection[int]
    alike: Sequence[Sequence[int]]
    layout_key: tuple[object, ...]
    averages: bool

    @abstractmethod
    def choose_exchange(self, layouts: Sequence[MessageLayout], options: Options) -> str:
        """Returns the name of the strategy by which messages of these layouts travel."""

    @abstractmethod
    def build(
        self,
        params: Params,
        groups: Sequence[tuple[Params, MessageLayout]],
        name: str,
        options: Options,
        wires: tuple[Wire, Wire] | None,
    ) -> Built:
        """Returns a plan's messages and what carries them.

        Args:
            params: All trainable parameters, as pairs of index and parameter.
            groups: The parameters and the layout of each message.
            name: Of the strategy.
            options: Give what a vote and a verdict hold.
            wires: Process groups of their own for votes and for verdicts, or None.
        """

    @abstractmethod
    def heard(self, headers: Sequence[Header]) -> list[Header]:
        """Returns one header per voter from those of all ranks, which fit together."""

    @abstractmethod
    def settle(self, momenta: MomentumStore, owned: Mapping[int, Range]) -> bool:
        """Makes room for the momenta that this rank must hold, before anything is sent.

        Returns:
            Whether it lacks a part that only another rank has.
        """

    @abstractmethod
    def voting(
        self, presence: Presence, params: Sequence[Tensor], present: Sequence[bool]
    ) -> list[Tensor]:
        """Returns the parameters whose gradients on this rank make up a vote.

        Args:
            presence: Knows what autograd and wrappers did.
            params: The trainable parameters.
            present: Whether this rank has a gradient of each.
        """

    @abstractmethod
    def unaveraged(
        self, presence: Presence, params: Sequence[Tensor], present: Sequence[bool]
    ) -> list[bool]:
        """Returns, for each parameter, whether its gradient is yet to be averaged for the vote."""

    @abstractmethod
    def complete(
        self,
        momenta: MomentumStore,
        owners: Sequence[Mapping[int, Range]],
        params: Sequence[Tensor],
        unaveraged: Sequence[bool],
        mine: Header,
    ) -> None:
        """Gives this rank the momenta and gradients that its part of the vote takes.

        All ranks that share the vote call this, after the headers and before any vote leaves.

        Args:
            momenta: Of this rank.
            owners: The stretches that each rank that shares the vote must hold.
            params: The trainable parameters.
            unaveraged: From `unaveraged`, as it was when the header was made.
            mine: The voter's header, from `heard`.
        """

    @abstractmethod
    def start_average(self, gradient: Tensor) -> torch.futures.Future[Tensor]:
        """Starts the averaging of a gradient among the ranks that share a vote, in place."""

    @abstractmethod
    def average_momenta(self, momenta: MomentumStore) -> None:
        """Replaces every momentum by the mean over the voters, whole on every rank."""
