"""A 64-bit hash of a tensor's bits, computed where the tensor lies."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_CHUNK = 1 << 20


def fingerprint(tensor: Tensor) -> int:
    """Returns the sum of bits[i] * (odd number of i), modulo 2**64, as int64.

    The factors are odd, hence invertible: a change of any one element changes the hash.

    Args:
        tensor: Any floating dtype and shape; not changed.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = 0
    for start in range(0, bits.numel(), _CHUNK):
        # A copy even where the bits are int64 already: what follows works in place.
        part = bits[start : start + _CHUNK].to(torch.int64, copy=True)
        place = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
        total += int(part.add_(1).mul_(place.mul_(_GOLDEN).bitwise_or_(1)).sum())
    total &= (1 << 64) - 1
    return total - (1 << 64) if total >> 63 else total
