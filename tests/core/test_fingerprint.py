"""The hash of a tensor's bits is the documented one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_dlion.core.fingerprint import ROW_WORDS, fingerprints

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def by_definition(tensor: Tensor) -> int:
    """Returns the hash of the docstring's formula, in Python integers."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[k : k + 4], "little", signed=True) for k in range(0, len(data), 4)]
    total = 0
    for k, word in enumerate(words):
        total += weight(1, k % ROW_WORDS) * weight(2, k // ROW_WORDS) * word
    total %= 2**64
    return total - 2**64 * (total >> 63)


def weight(stream: int, index: int) -> int:
    z = ((index + 1 + (stream << 32)) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return (z ^ (z >> 31)) | 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 3, 63, ROW_WORDS - 1, ROW_WORDS + 1, 2 * ROW_WORDS + 1])
def test_the_hash_is_the_documented_one(length: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
    assert fingerprints([tensor, tensor.clone()]) == [by_definition(tensor)] * 2


def test_a_part_that_begins_inside_a_word_hashes_like_its_copy() -> None:
    whole = torch.randn(9).bfloat16()
    assert fingerprints([whole[1:5]]) == fingerprints([whole[1:5].clone()])
