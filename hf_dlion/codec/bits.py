"""Booleans to 64-bit words and back, on any device.

Bit k of word w is element 64 * w + k (rule S2). Words are int64 because torch's bitwise
operations know no uint64; the sign bit is just bit 63.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hf_dlion.codec.layout import WORD_BITS, Run, words_for


def pack_bits(flags: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the words that hold `flags`; bits past the end are 0.

    Args:
        flags: bool, shape (n,).
        out: int64, shape (ceil(n / 64),), receives the result if given.
    """
    words = words_for(flags.numel())
    if out is None:
        out = torch.empty(words, dtype=torch.int64, device=flags.device)
    if flags.device.type == "cpu":
        packed = np.packbits(flags.contiguous().numpy(), bitorder="little")
        as_bytes = out.numpy().view(np.uint8)
        as_bytes[: packed.size] = packed
        as_bytes[packed.size :] = 0
        return out
    return _pack_anywhere(flags, out)


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """Returns the first `count` bits of `words` as bool, shape (count,).

    Args:
        words: int64, shape (at least ceil(count / 64),).
        count: Number of bits.
    """
    if words.device.type == "cpu":
        as_bytes = words.contiguous().numpy().view(np.uint8)
        return torch.from_numpy(np.unpackbits(as_bytes, count=count, bitorder="little").view(bool))
    return _unpack_anywhere(words, count)


def popcount(words: Tensor) -> int:
    """Returns the number of ones in `words`, int64 of any shape."""
    if words.device.type == "cpu":
        return int(np.bitwise_count(words.numpy().view(np.uint64)).sum(dtype=np.int64))
    return int(_popcount_anywhere(words).sum())


def expand_rows(flags: Tensor, run: Run, out: Tensor) -> None:
    """Repeats one flag per row over the elements of a stretch, as words; pad bits are 0.

    Args:
        flags: bool, shape (run.rows,).
        run: The stretch.
        out: int64, shape (run.words,), overwritten.
    """
    count = run.numel
    if run.row_numel % WORD_BITS == 0:
        words_per_row = run.row_numel // WORD_BITS
        word = torch.arange(run.words, device=out.device) + run.start // WORD_BITS
        out.copy_(-flags[word // words_per_row - run.first_row].to(torch.int64))
    else:
        lengths = run.row_numels().to(flags.device)
        pack_bits(flags.repeat_interleave(lengths, output_size=count), out)
    tail = count % WORD_BITS
    if tail:
        out[-1] &= (1 << tail) - 1


def _pack_anywhere(flags: Tensor, out: Tensor) -> Tensor:
    """Packs with torch operations that every device has."""
    padded = torch.nn.functional.pad(flags, (0, out.numel() * WORD_BITS - flags.numel()))
    bits = padded.view(out.numel(), WORD_BITS).to(torch.int64)
    # The bits are disjoint, so their sum is their union (bit 63 included, modulo 2**64).
    return out.copy_((bits << _places(flags.device)).sum(dim=1))


def _unpack_anywhere(words: Tensor, count: int) -> Tensor:
    """Unpacks with torch operations that every device has."""
    bits = (words[: words_for(count), None] >> _places(words.device)) & 1
    return bits.view(-1)[:count].to(torch.bool)


def _popcount_anywhere(words: Tensor) -> Tensor:
    """Returns the ones per word, with torch operations that every device has."""
    # Shifts of int64 copy the sign bit; each mask drops those copies.
    counts = words - ((words >> 1) & 0x5555555555555555)
    counts = (counts & 0x3333333333333333) + ((counts >> 2) & 0x3333333333333333)
    counts = (counts + (counts >> 4)) & 0x0F0F0F0F0F0F0F0F
    # The product's highest byte is the sum of all bytes.
    return ((counts * 0x0101010101010101) >> 56) & 0xFF


def _places(device: torch.device) -> Tensor:
    return torch.arange(WORD_BITS, dtype=torch.int64, device=device)
