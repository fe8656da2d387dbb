"""Averaging inside a node the gradients that no DDP wrapper has averaged there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from hf_dlion.codec.bits import pack_bits, unpack_bits
from hf_dlion.exchange import Wire
from hf_dlion.exchange.batches import in_batches
from hf_dlion.options.params import gradient_dtype, no_gradient
from hf_dlion.ranks.node import Node

# Elements per all-reduce.
BATCH_NUMEL = 1 << 24


def average_gradients(params: Sequence[Tensor], unaveraged: Tensor, node: Node) -> None:
    """Replaces gradients by their mean over the node's ranks, in place.

    Every rank of the node must call this, if one of them has such gradients. A rank without a
    gradient that another one has contributes zeros and gets one, as in DDP. Bytes inside the node,
    per rank: 8 * (L - 1) * ceil(P / 64) to tell which, and those of `Node.start_average`.

    Args:
        params: The trainable parameters.
        unaveraged: bool, shape (P,), those whose gradient on this rank is yet to be averaged.
        node: The ranks.
    """
    averaged: list[Tensor] = []
    for position in _on_any_rank(unaveraged, node.local):
        param = params[position]
        if param.numel() == 0:
            continue
        if param.grad is None:
            param.grad = no_gradient(param)
        if 0 in param.grad.stride():
            # Expanded: its elements share memory, so no mean can be written there.
            param.grad = param.grad.clone()
        averaged.append(param)
    for batch in in_batches(averaged, BATCH_NUMEL, lambda param: param, _kind_of):
        _average(batch, node)


def _kind_of(param: Tensor) -> tuple[torch.device, torch.dtype]:
    # What a rank's own gradient has for a dtype need not be that of another rank's.
    return param.device, gradient_dtype(param)


def _on_any_rank(flags: Tensor, wire: Wire) -> list[int]:
    """Returns the positions at which any rank of the node has a flag."""
    everyone = wire.gather_words(pack_bits(flags), "word of its gradients")
    anywhere = torch.stack([unpack_bits(row, flags.numel()) for row in everyone]).any(dim=0)
    return [position for position, flag in enumerate(anywhere.tolist()) if flag]


def _average(batch: list[Tensor], node: Node) -> None:
    device, dtype = _kind_of(batch[0])
    place, grads = node.local.device_for(device), [cast(Tensor, param.grad) for param in batch]
    flat = torch.cat([grad.reshape(-1).to(place, dtype) for grad in grads])
    limit = torch.finfo(flat.dtype).max
    # Dividing first may round up, so the largest numbers add up to more than the largest.
    mean = node.start_average(flat).wait().clamp_(-limit, limit)
    start = 0
    for grad in grads:
        grad.copy_(mean[start : start + grad.numel()].view(grad.shape))
        start += grad.numel()
