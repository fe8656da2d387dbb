"""The header: eight int64 words that every rank sends before any rank moves."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Version of all that is sent, hashed, and rounded.
WIRE_VERSION = 8

# Bits of the word of flags.
FINITE, FAILED = 1, 2


class Kind(enum.IntEnum):
    """What the ranks do together. The values are part of the wire format."""

    STEP = 1
    SAVE = 2
    LOAD = 3
    REPLICATE = 4
    WEIGHTS = 5
    EXCHANGE = 6
    LOCAL_STEP = 7
    NODES = 8


class Header(NamedTuple):
    """One rank's header, in the order of its int64 words.

    Attributes:
        version: `WIRE_VERSION`.
        kind: The `Kind` of meeting.
        optimizer: Number of the optimizer among those of the process group; 0 before its first
            meeting.
        step: Number of the last step that the rank took.
        flags: `FINITE` if the rank's gradients are finite, `FAILED` if something failed on it.
        options: Hash of the options and of every group's lr, betas, weight decay, and length.
        layout: Hash of the trainable parameters' names, shapes, dtypes, and strides.
        presence: Hash of which parameters have a gradient.
    """

    version: int
    kind: int
    optimizer: int
    step: int
    flags: int
    options: int = 0
    layout: int = 0
    presence: int = 0

    @property
    def finite(self) -> bool:
        """Whether the rank's gradients are finite."""
        return bool(self.flags & FINITE)

    @property
    def failed(self) -> bool:
        """Whether something failed on the rank."""
        return bool(self.flags & FAILED)


HEADER_BYTES = 8 * len(Header._fields)


def pack_bools(values: Sequence[bool]) -> list[int]:
    """Returns ceil(P/64) int64 words with one bit per value, the first in the lowest bit."""
    data = np.packbits(np.array(values, dtype=bool), bitorder="little").tobytes()
    padded = data + bytes(-len(data) % 8)
    words: list[int] = np.frombuffer(padded, dtype="<i8").tolist()
    return words


def unpack_bools(words: Sequence[int], count: int) -> list[bool]:
    """Returns the first `count` values that `pack_bools` packed."""
    data = np.array(words, dtype="<i8").view(np.uint8)
    values: list[bool] = np.unpackbits(data, count=count, bitorder="little").astype(bool).tolist()
    return values
