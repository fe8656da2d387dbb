"""The eight words that every rank sends first at a meeting."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import astuple, dataclass

WIRE_VERSION = 1


class Kind(enum.IntEnum):
    """Why ranks meet."""

    STEP = 1
    EXCHANGE = 2
    SAVE = 3
    LOAD = 4


DOING = {
    Kind.STEP: "step()",
    Kind.EXCHANGE: "exchange_now()",
    Kind.SAVE: "saving a checkpoint",
    Kind.LOAD: "loading a checkpoint",
}

FINITE, FAILED, ANEW = 1, 2, 4


@dataclass(frozen=True)
class Header:
    """One rank's words, int64 each.

    Attributes:
        version: Of the wire format.
        kind: Why the rank is here.
        optimizer: Which of the process group's optimizers it is, numbered at its first meeting.
        step: Number of the step to be taken.
        flags: FINITE: no NaN in its gradients. FAILED: something failed on it. ANEW: its layout is
            new, so names and values must be compared.
        settings: Hash of the options and of the groups' hyperparameters.
        layout: Hash of the trainable parameters.
        presence: Hash of which of them have a gradient.
    """

    version: int
    kind: int
    optimizer: int
    step: int
    flags: int
    settings: int
    layout: int
    presence: int

    def words(self) -> Sequence[int]:
        """Returns the words in the order in which they travel."""
        return astuple(self)
