"""The header: eight int64 words that every rank sends before any rank moves."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Version of all that is sent, hashed, and rounded.
WIRE_VERSION = 3

# Bits of the word of flags, and its place in the header.
FINITE, FAILED = 1, 2
FLAGS_AT = 4


class Kind(enum.IntEnum):
    """What the ranks do together. The values are part of the wire format."""

    STEP = 1
    SAVE = 2
    LOAD = 3
    REPLICATE = 4
    WEIGHTS = 5
    EXCHANGE = 6


@dataclass(frozen=True, kw_only=True)
class Header:
    """One rank's header, one int64 word per attribute, after the version; flags share a word.

    Attributes:
        kind: The `Kind` of meeting.
        optimizer: Number of the optimizer among those of the process group; 0 before its first
            meeting.
        step: Number of the last step that the rank took.
        finite: Whether its gradients are finite.
        failed: Whether something failed on the rank.
        options: Hash of the options and of every group's lr, betas, weight decay, and length.
        layout: Hash of the trainable parameters' names, shapes, dtypes, and strides.
        presence: Hash of which parameters have a gradient.
    """

    kind: int
    optimizer: int
    step: int
    finite: bool
    failed: bool
    options: int = 0
    layout: int = 0
    presence: int = 0

    def packed(self) -> list[int]:
        """Returns the header's words."""
        flags = FINITE * self.finite | FAILED * self.failed
        hashes = (self.options, self.layout, self.presence)
        return [WIRE_VERSION, self.kind, self.optimizer, self.step, flags, *hashes]

    @staticmethod
    def unpacked(words: Sequence[int]) -> Header:
        """Returns the header that `packed` wrote."""
        _, kind, optimizer, step, flags, options, layout, presence = words
        return Header(
            kind=kind,
            optimizer=optimizer,
            step=step,
            finite=bool(flags & FINITE),
            failed=bool(flags & FAILED),
            options=options,
            layout=layout,
            presence=presence,
        )


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
