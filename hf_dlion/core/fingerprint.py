"""64-bit hashes of tensors' bits, computed on the tensors' devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_dlion.core.flat import numbers

# Words per row: a row of weights and a row of products stay in a core's cache.
ROW_WORDS = 1 << 15
WORD_BYTES = 4
# Rows hashed at once: 16 MiB of products keep a GPU busy, and one row stays in a core's cache.
_ROWS_AT_ONCE = {"cpu": 1}
_ROWS_ELSEWHERE = 64

_ELEMENTS, _ROWS = 1, 2


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Returns a 64-bit hash of every tensor's elements, in row-major order, as int64.

    The bytes are read as signed 32-bit words, the last one padded with zeros, in rows of 2**15:

        hash = sum over rows r of b[r] * (sum over k of a[k] * word[r, k])   modulo 2**64

    with pseudo-random odd a and b. Equal elements have equal hashes on every device and for any
    strides. A change inside one word is always found, because a and b are odd. Other changes are
    missed with a probability of 2**-64 if they include the lowest bit of a word, and of up to
    2**-33 if they only touch higher bits. Shape and dtype don't count.

    Only the hashes are copied to the host. Memory: a few rows, and a copy of one tensor at a time
    if it isn't contiguous.
    """
    return numbers([_hash(tensor.detach()) for tensor in tensors])


def _hash(tensor: Tensor) -> Tensor:
    """Returns a tensor's hash, int64 and 0-D, on the tensor's device."""
    # Not view(-1): a single element passes for contiguous with any stride, and keeps it.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    rows_at_once = _ROWS_AT_ONCE.get(flat.device.type, _ROWS_ELSEWHERE)
    weights = _weights(ROW_WORDS, _ELEMENTS, flat.device)
    per_row = ROW_WORDS * WORD_BYTES // flat.element_size()
    in_rows = flat.numel() - flat.numel() % per_row
    sums = []
    for start in range(0, in_rows, per_row * rows_at_once):
        words = _words(flat[start : min(start + per_row * rows_at_once, in_rows)])
        sums.append((words.view(-1, ROW_WORDS) * weights).sum(dim=1))
    words = _words(flat[in_rows:])
    sums.append((words * weights[: words.numel()]).sum().view(1))
    rows = torch.cat(sums)
    # A power of two, so few tables are created.
    row_weights = _weights(1 << rows.numel().bit_length(), _ROWS, flat.device)
    return (rows * row_weights[: rows.numel()]).sum()


def _words(part: Tensor) -> Tensor:
    """Returns contiguous elements as int32, copied if they don't begin and end at words."""
    per_word = max(1, WORD_BYTES // part.element_size())
    if part.numel() % per_word or part.storage_offset() % per_word:
        padded = part.new_zeros(-(-part.numel() // per_word) * per_word)
        padded[: part.numel()] = part
        part = padded
    return part.view(torch.int32)


@functools.lru_cache(maxsize=64)
def _weights(count: int, stream: int, device: torch.device) -> Tensor:
    """Returns `count` odd pseudo-random numbers, int64, of a stream (splitmix64)."""
    golden = 0x9E3779B97F4A7C15
    z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 32)) * np.uint64(golden)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)
