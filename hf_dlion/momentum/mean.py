"""Averaging the ranks' momenta in a few large all-reduces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.exchange import Wire

# Elements per all-reduce: 64 MiB of float32.
BATCH_NUMEL = 1 << 24


def average_over_ranks(tensors: Sequence[Tensor], wire: Wire) -> None:
    """Replaces each tensor by its mean over the ranks, in place; bitwise equal on all of them.

    Sums are float32 (float64 for float64) and the mean is rounded to nearest. Every rank of the
    group must call this with tensors of the same shapes in the same order. Bytes per rank, as a
    ring: 8 * (N - 1) / N per element (16 for float64).

    Args:
        tensors: Contiguous, of any floating dtypes and devices.
        wire: The process group.
    """
    batch: list[Tensor] = []
    for tensor in tensors:
        full = sum(member.numel() for member in batch) + tensor.numel() > BATCH_NUMEL
        same = not batch or _kind(batch[0]) == _kind(tensor)
        if batch and (full or not same):
            _average(batch, wire)
            batch = []
        batch.append(tensor)
    if batch:
        _average(batch, wire)


def _kind(tensor: Tensor) -> tuple[torch.device, bool]:
    return tensor.device, tensor.dtype == torch.float64


def _average(batch: list[Tensor], wire: Wire) -> None:
    place = wire.device_for(batch[0].device)
    dtype = torch.promote_types(batch[0].dtype, torch.float32)
    flat = torch.cat([tensor.view(-1).to(place, dtype) for tensor in batch])
    wire.all_reduce(flat, "momenta")
    flat /= wire.world_size
    start = 0
    for tensor in batch:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
