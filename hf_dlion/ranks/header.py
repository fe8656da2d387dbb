"""The header of a step: what one rank says of itself before any vote is sent (rule S12)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dlion.codec.bits import pack_bits, unpack_bits
from hf_dlion.codec.layout import WORD_BYTES, words_for

# Of what is sent, hashed and rounded. The first header has one size in every version.
WIRE_VERSION = 3

_FINITE, _FAILED, _STALE, _ORDERED, _UNAVERAGED, _DISPLACED = 1, 2, 4, 8, 16, 32
_UNSHARED = 64
# The status word has room for two counts above its flags.
_PASSES_AT, _DROPPED_AT, _MOST = 16, 40, (1 << 22) - 1
_FIXED_WORDS = 6


@dataclass(frozen=True, kw_only=True)
class Header:
    """What one rank says of itself before a step.

    Attributes:
        finite: Whether all its gradients are finite.
        failed: Whether something failed on it; then all ranks raise.
        step: Number of the last step that it took.
        layout: Hash of all that decides which collectives of what size a step makes; on its way to
            other ranks, of that and of whose step it is.
        options: Hash of the options.
        groups: Hash of every group's lr, betas, weight decay and number of parameters.
        present: bool, shape (P,): the parameters for which autograd saw a gradient.
        stale: Whether votes that left during backward do not hold any more.
        ordered: Whether its messages follow an agreed order of gradients.
        unaveraged: Whether it has gradients that are yet to be averaged with those of its node.
        displaced: Whether it lacks a part of the momentum that it must hold for its node.
        unshared: Whether it cannot tell that all ranks have one momentum of the parameters whose
            gradients are averaged.
        passes: Backward passes since the step before, 0 if no gradients are left of them.
        dropped: How often their gradients were dropped and another pass followed.
    """

    finite: bool
    failed: bool
    step: int
    layout: int
    options: int
    groups: int
    present: Tensor
    stale: bool = False
    ordered: bool = False
    unaveraged: bool = False
    displaced: bool = False
    unshared: bool = False
    passes: int = 0
    dropped: int = 0

    @staticmethod
    def of_failure(step: int) -> Header:
        """Returns the header of a rank on which something failed before it knew the rest."""
        nothing = torch.zeros(0, dtype=torch.bool)
        return Header(
            finite=False, failed=True, step=step, layout=0, options=0, groups=0, present=nothing
        )

    def packed(self, parameters: int) -> Tensor:
        """Returns the header as int64 words, with room for `parameters` presence bits."""
        status = _FINITE * self.finite | _FAILED * self.failed
        status |= _STALE * self.stale | _ORDERED * self.ordered
        status |= _UNAVERAGED * self.unaveraged | _DISPLACED * self.displaced
        status |= _UNSHARED * self.unshared
        status |= min(self.passes, _MOST) << _PASSES_AT | min(self.dropped, _MOST) << _DROPPED_AT
        fixed = (WIRE_VERSION, status, self.step, self.layout, self.options, self.groups)
        words = torch.zeros(_FIXED_WORDS + words_for(parameters), dtype=torch.int64, device="cpu")
        words[:_FIXED_WORDS] = torch.tensor(fixed, dtype=torch.int64)
        # A rank whose layout is new may have fewer parameters than were agreed: the size holds.
        bits = pack_bits(self.present[:parameters])
        words[_FIXED_WORDS : _FIXED_WORDS + bits.numel()] = bits
        return words

    @staticmethod
    def unpacked(words: Tensor, parameters: int) -> Header:
        """Returns the header that `packed` wrote."""
        _, status, step, layout, options, groups = words[:_FIXED_WORDS].tolist()
        return Header(
            finite=bool(status & _FINITE),
            failed=bool(status & _FAILED),
            step=step,
            layout=layout,
            options=options,
            groups=groups,
            present=unpack_bits(words[_FIXED_WORDS:], parameters),
            stale=bool(status & _STALE),
            ordered=bool(status & _ORDERED),
            unaveraged=bool(status & _UNAVERAGED),
            displaced=bool(status & _DISPLACED),
            unshared=bool(status & _UNSHARED),
            passes=status >> _PASSES_AT & _MOST,
            dropped=status >> _DROPPED_AT & _MOST,
        )


def one_per_voter(headers: Sequence[Header], members: Sequence[Sequence[int]]) -> list[Header]:
    """Returns one header for each voter whose ranks vote as one.

    Such a voter is finite, and its messages ordered, if all its ranks are; it has a parameter, or
    votes that do not hold any more, if any of them has.

    Args:
        headers: Of all ranks.
        members: The ranks of each voter.
    """
    merged = []
    for ranks in members:
        own = [headers[rank] for rank in ranks]
        merged.append(
            dataclasses.replace(
                own[0],
                finite=all(header.finite for header in own),
                present=torch.stack([header.present for header in own]).any(dim=0),
                stale=any(header.stale for header in own),
                ordered=all(header.ordered for header in own),
                unaveraged=any(header.unaveraged for header in own),
                displaced=any(header.displaced for header in own),
                unshared=any(header.unshared for header in own),
            )
        )
    return merged


def voters_on(headers: Sequence[Header]) -> Tensor:
    """Returns int64, shape (P,): how many ranks vote on each parameter; P is 0 if none is finite.

    Args:
        headers: Of all ranks; one that is not finite abstains.
    """
    heard = [header.present for header in headers if header.finite]
    return torch.stack(heard).sum(dim=0) if heard else torch.zeros(0, dtype=torch.int64)


def header_wire_bytes(parameters: int, world_size: int) -> int:
    """Returns the bytes of one header that a rank sends, for `parameters` trainable ones."""
    return WORD_BYTES * (world_size - 1) * (_FIXED_WORDS + words_for(parameters))
