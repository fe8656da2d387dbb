"""One rank alone: plain Lion, nothing is sent (rule S9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_dlion.codec.layout import MessageLayout
from hf_dlion.exchange import Wire
from hf_dlion.exchange.wire import default_group
from hf_dlion.momentum.shares import Range
from hf_dlion.momentum.store import MomentumStore
from hf_dlion.options import Options
from hf_dlion.ranks.header import Header
from hf_dlion.ranks.launched import warn_if_alone
from hf_dlion.step.delivery import LionAlone
from hf_dlion.step.presence import Presence
from hf_dlion.step.voters.interface import Built, Params, Voters


class OneRank(Voters):
    """The only voter."""

    wire: Wire | None = None
    between: Wire | None = None
    twins: Wire | None = None
    ranks = 1
    index = 0
    count = 1
    members: tuple[tuple[int, ...], ...] = ()
    near: Sequence[int] = ()
    alike: Sequence[Sequence[int]] = ((0,),)
    layout_key: tuple[object, ...] = ()
    averages = False

    def choose_exchange(self, layouts: Sequence[MessageLayout], options: Options) -> str:
        """Returns a name that stands for none."""
        return "none"

    def build(
        self,
        params: Params,
        groups: Sequence[tuple[Params, MessageLayout]],
        name: str,
        options: Options,
        wires: tuple[Wire, Wire] | None,
    ) -> Built:
        """Returns plain Lion, without messages."""
        if default_group() is None:
            warn_if_alone()
        return Built((), LionAlone(params))

    def heard(self, headers: Sequence[Header]) -> list[Header]:
        """Returns the headers: every rank is a voter."""
        return list(headers)

    def settle(self, momenta: MomentumStore, owned: Mapping[int, Range]) -> bool:
        """Makes loaded shares whole, with zeros for what other ranks held; nothing is sent."""
        momenta.fill_up()
        return False

    def voting(
        self, presence: Presence, params: Sequence[Tensor], present: Sequence[bool]
    ) -> list[Tensor]:
        """Returns the parameters of which this rank has a gradient."""
        return [param for param, has in zip(params, present, strict=True) if has]

    def unaveraged(
        self, presence: Presence, params: Sequence[Tensor], present: Sequence[bool]
    ) -> list[bool]:
        """Returns False for each: a rank's own gradient is its vote's."""
        return [False] * len(params)

    def complete(
        self,
        momenta: MomentumStore,
        owners: Sequence[Mapping[int, Range]],
        params: Sequence[Tensor],
        unaveraged: Sequence[bool],
        mine: Header,
    ) -> None:
        """Does nothing: a rank has all that its vote takes."""

    def start_average(self, gradient: Tensor) -> torch.futures.Future[Tensor]:
        """Is never called: `averages` is False."""
        raise AssertionError("gradients stay local where every rank votes for itself")

    def average_momenta(self, momenta: MomentumStore) -> None:
        """Does nothing: one momentum is its own mean."""


ONE_RANK = OneRank()
