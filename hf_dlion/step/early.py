"""Votes that leave before the step, as a step sees them; here: none do.

`hf_dlion.backward.overlap.Overlap` is the other kind. A step asks the same of both, so it has no
branch for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from hf_dlion.exchange import Wire
from hf_dlion.momentum.store import MomentumStore
from hf_dlion.ranks.header import Header
from hf_dlion.step.delivery import Delivery, InStep
from hf_dlion.step.plan import Plan


class Sent(NamedTuple):
    """What is known once every message that was to leave early has left.

    Attributes:
        header: What this rank says before the step, with what it says of its early votes.
        failure: What failed on this rank so far.
        delivery: Carries the step's votes: those that left, or the plan's own.
        bytes_before: `WireStats.bytes_sent` before the first of them left.
    """

    header: Header
    failure: Exception | None
    delivery: Delivery
    bytes_before: int


class EarlyVotes(Protocol):
    """What a step and the hooks ask of votes that leave during backward."""

    def reset(self) -> None:
        """Forgets what was agreed: the process group is another one."""

    def note_forward(self, sync: bool) -> None:
        """Takes note of a wrapper's forward pass; `sync` is False under no_sync()."""

    def note_gradient(self, param: Tensor) -> None:
        """Takes note that a parameter's gradient is ready; called during backward."""

    def disturb(self) -> None:
        """Takes note that momenta changed: votes that left do not hold any more."""

    def unknown(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Returns those of the parameters whose gradients are not known to be finite."""

    def complete(
        self,
        header: Header,
        failure: Exception | None,
        plan: Plan | None,
        momenta: MomentumStore,
        bytes_before: int,
    ) -> Sent:
        """Sends what backward did not; every rank calls this, and before its header leaves.

        Args:
            header: What this rank says of itself otherwise.
            failure: What failed on it so far.
            plan: Of this step, None if making it failed.
            momenta: Of this rank, with the parameter groups.
            bytes_before: `WireStats.bytes_sent` when the step began.
        """

    def prepare(
        self,
        headers: Sequence[Header],
        plan: Plan,
        params: Sequence[tuple[int, Tensor]],
        wire: Wire,
    ) -> Plan:
        """Returns the plan of the next step; every rank calls this with the same headers.

        Args:
            headers: Of this step.
            plan: Of this step.
            params: Pairs of parameter index and parameter, those with requires_grad.
            wire: All ranks.
        """


class NoEarlyVotes:
    """Votes leave in the step: nothing to send before it, to remember or to prepare."""

    def reset(self) -> None:
        """Does nothing."""

    def note_forward(self, sync: bool) -> None:
        """Does nothing."""

    def note_gradient(self, param: Tensor) -> None:
        """Does nothing."""

    def disturb(self) -> None:
        """Does nothing."""

    def unknown(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Returns all of the parameters."""
        return list(params)

    def complete(
        self,
        header: Header,
        failure: Exception | None,
        plan: Plan | None,
        momenta: MomentumStore,
        bytes_before: int,
    ) -> Sent:
        """Returns the plan's own delivery."""
        return Sent(header, failure, delivery_of(plan), bytes_before)

    def prepare(
        self,
        headers: Sequence[Header],
        plan: Plan,
        params: Sequence[tuple[int, Tensor]],
        wire: Wire,
    ) -> Plan:
        """Returns the same plan."""
        return plan


def delivery_of(plan: Plan | None) -> Delivery:
    """Returns a plan's delivery; one of nothing on a rank where making the plan failed."""
    return InStep(()) if plan is None else plan.delivery
