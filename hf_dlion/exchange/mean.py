"""The mean of numbers over the ranks, with the same bits on all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.codec.lion import compute_dtype
from hf_dlion.exchange.batches import in_batches
from hf_dlion.exchange.wire import Wire

# Elements per all-reduce of `average_over_ranks`: 64 MiB of float32.
BATCH_NUMEL = 1 << 24


def mean_of(tensors: Sequence[Tensor], counts: Tensor | None = None) -> Tensor:
    """Returns the mean of the ranks' tensors as all ranks get it, whatever the device.

    They are added in float32 (float64 for float64) in the order of the ranks, divided, cut to the
    finite range of their dtype and rounded to nearest, ties to even.

    Args:
        tensors: One per rank, in rank order, of one shape, floating dtype and device; not changed.
        counts: By how many to divide each element, 1 or more, of the tensors' shape; None divides
            by the number of tensors.
    """
    dtype = tensors[0].dtype
    total = tensors[0].to(compute_dtype(dtype), copy=True)
    for tensor in tensors[1:]:
        total += tensor
    # A division of two tensors is rounded correctly everywhere; one by a scalar is not.
    total /= torch.full_like(total, len(tensors)) if counts is None else counts.to(total.dtype)
    # Finite numbers may add up to Inf, which would stay in a momentum for ever.
    limit = torch.finfo(dtype).max
    return total.clamp_(-limit, limit).to(dtype)


def average(flat: Tensor, wire: Wire, what: str, counts: Tensor | None = None) -> Tensor:
    """Returns the mean over the ranks of a flat tensor; its bits are `mean_of`'s on all of them.

        rank 0: a0 a1  ->  rank 0: a0 b0  ->  mean m0  ->  rank 0: m0 m1
        rank 1: b0 b1      rank 1: a1 b1  ->  mean m1      rank 1: m0 m1

    Every rank of the group must call this. Bytes per rank: those of `average_wire_bytes`.

    Args:
        flat: 1-D, of the same floating dtype and length on every rank; not changed.
        wire: The process group.
        what: What the other ranks send, for an error message.
        counts: As for `mean_of`, the same on every rank.

    Returns:
        A new tensor like `flat`.
    """
    numel, ranks = flat.numel(), wire.world_size
    size = -(-numel // ranks)
    send = torch.zeros((ranks, size), dtype=flat.dtype, device=wire.device_for(flat.device))
    send.view(-1)[:numel] = flat
    received = torch.empty_like(send)
    # As bytes, which every backend sends whatever they mean.
    wire.all_to_all(received.view(torch.uint8), send.view(torch.uint8), what).wait()
    if counts is not None:
        own = counts[wire.rank * size : (wire.rank + 1) * size].to(send.device)
        counts = torch.ones(size, dtype=own.dtype, device=own.device)
        counts[: own.numel()] = own
    mean = mean_of(received.unbind(), counts)
    wire.all_gather(send.view(torch.uint8), mean.view(torch.uint8), what).wait()
    return send.view(-1)[:numel].to(flat.device)


def average_wire_bytes(numel: int, world_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes that a rank sends for one `average`: 2 * (N - 1) * ceil(n / N) elements."""
    return 2 * (world_size - 1) * -(-numel // world_size) * dtype.itemsize


def average_over_ranks(tensors: Sequence[Tensor], wire: Wire) -> None:
    """Replaces each tensor by its mean over the ranks, in place; bitwise equal on all of them.

    Sums are float32 (float64 for float64) in the order that the backend's all-reduce takes, and the
    mean is rounded to nearest. Every rank of the group must call this with tensors of the same
    shapes in the same order. Bytes per rank, as a ring: 8 * (N - 1) / N per element (16 for
    float64).

    Args:
        tensors: Contiguous, of any floating dtypes and devices.
        wire: The process group.
    """

    def kind_of(tensor: Tensor) -> tuple[torch.device, bool]:
        return tensor.device, tensor.dtype == torch.float64

    for batch in in_batches(tensors, BATCH_NUMEL, lambda tensor: tensor, kind_of):
        place = wire.device_for(batch[0].device)
        dtype = torch.promote_types(batch[0].dtype, torch.float32)
        flat = torch.cat([tensor.view(-1).to(place, dtype) for tensor in batch])
        wire.all_reduce(flat, "momenta")
        flat /= wire.world_size
        means = torch.split(flat, [tensor.numel() for tensor in batch])
        for tensor, mean in zip(batch, means, strict=True):
            tensor.copy_(mean.view(tensor.shape))
