"""What a tie becomes, and what an exact zero votes: the one place that decides (rule S3, S4).

Backends know neither the option nor the step. They take a word of 64 bits, which says for the
elements 64 w + k of every word w what becomes -1, and whether a verdict has a second plane:

    negative |= tied & word            every backend, whatever the option
    nonzero = ~tied                    in the second plane, if `TieRule.to_zero`

The NumPy definition has its own formulas, and every backend is compared with it.
"""

from __future__ import annotations

from typing import NamedTuple

from hf_dlion.options import Ties


class TieRule(NamedTuple):
    """What becomes of a tie in one step.

    Attributes:
        word: As int64; bit k is 1 where a tie at element 64 w + k becomes -1.
        to_zero: Whether ties become 0; the verdict's second plane says where it is not 0.
    """

    word: int
    to_zero: bool


def tie_rule(ties: Ties, step: int) -> TieRule:
    """Returns what ties become in a step: 0, or +1 where k + `step` is even and -1 elsewhere."""
    if ties == "zero":
        return TieRule(0, True)
    return TieRule(alternating_word(step), False)


def zero_phase(step: int, rank: int, world_size: int) -> int:
    """Returns 0 or 1: an exact zero in a row that votes is sent as +1 where k + this is even."""
    return (step // 2 + (rank + step) % world_size) % 2


def zero_word(step: int, rank: int, world_size: int) -> int:
    """Returns the same as a word, as int64: bit k is 1 where a zero is sent as -1."""
    return alternating_word(zero_phase(step, rank, world_size))


def alternating_word(phase: int) -> int:
    """Returns the word, as int64, that votes +1 where k + `phase` is even and -1 elsewhere."""
    return 0x5555555555555555 if phase % 2 else -0x5555555555555556
