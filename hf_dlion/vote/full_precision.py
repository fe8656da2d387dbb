"""Parameters whose gradients are averaged over the voters instead of a vote."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.exchange.wire import Wire
from hf_dlion.ranks.agreement import Agreed
from hf_dlion.vote.message import Message
from hf_dlion.vote.update import Flat, Turn, plain_lion


def step_in_full(
    messages: Sequence[Message],
    params: Flat,
    grads: Flat,
    momenta: Flat,
    agreed: Agreed,
    wire: Wire,
    turn: Turn,
) -> None:
    """Takes plain Lion's step on mean gradients; every voter must call this.

    The mean is over the voters that have a finite gradient. Bytes per rank, for n elements of one
    message and dtype: 2 (N - 1) ceil(n / N) elements, as a ring.

    Args:
        messages: Of the selected tensors.
        params: Flat parameters, changed in place; None stays.
        grads: Flat gradients; None counts as zeros.
        momenta: Flat momenta of all selected tensors, equal on all voters, changed in place.
        agreed: Who has which gradient.
        wire: The voters.
        turn: The step; momenta below float32 are rounded alike on all voters.
    """
    for message in messages:
        means: list[Tensor | None] = [None] * len(params)
        for dtype in dict.fromkeys(piece.dtype for piece in message.pieces):
            indices = [
                index
                for index, *_ in message.spans
                if params[index] is not None and _computed_in(params[index]) == dtype
            ]
            sizes = [_size(params[index]) for index in indices]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=message.device)
            parts = torch.split(flat, sizes)
            for index, part in zip(indices, parts, strict=True):
                grad = grads[index]
                if grad is not None:
                    part.copy_(grad)
            sent = flat.to(wire.device_for(flat.device))
            wire.all_reduce(sent, "gradients").wait()
            flat.copy_(sent)
            for index, part in zip(indices, parts, strict=True):
                means[index] = part.div_(sum(agreed.votes(index)))
        plain_lion(message, params, means, momenta, turn)


def _computed_in(param: Tensor | None) -> torch.dtype:
    assert param is not None
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _size(param: Tensor | None) -> int:
    assert param is not None
    return param.numel()
