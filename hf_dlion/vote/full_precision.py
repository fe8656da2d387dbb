"""Plain Lion on mean gradients, for parameters that `full_precision` selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_dlion.exchange.codec import divided
from hf_dlion.exchange.wire import Wire
from hf_dlion.ranks.agreement import Agreed
from hf_dlion.ranks.fingerprint import digest, fingerprints
from hf_dlion.vote.idle_rows import AGE, old_rows
from hf_dlion.vote.message import Message
from hf_dlion.vote.momentum_sync import average_whole
from hf_dlion.vote.tensors import Plan, survey
from hf_dlion.vote.update import Flat, Turn, plain_lion


def step_in_full(
    plan: Plan,
    params: Flat,
    grads: Flat,
    momenta: Flat,
    states: Sequence[dict[str, Any]],
    agreed: Agreed,
    wire: Wire,
    turn: Turn,
) -> None:
    """Takes plain Lion's step on mean gradients; every voter must call this.

    The mean is over the voters that have a finite gradient, and a gradient of None counts as zeros.
    `momenta` also has those of selected parameters that don't move, and `states` the optimizer's
    state of each parameter. Each rank sends 2 (N - 1) ceil(n / N) elements for the n elements of
    one message and dtype, as in a ring.
    """
    if not plan.full_momenta_equal:
        _equalize(momenta, states, wire)
        plan.full_momenta_equal = True
    momenta = [None if p is None else m for p, m in zip(params, momenta, strict=True)]
    means = sum_over_voters(plan.full, params, grads, wire)
    for index, mean in enumerate(means):
        if mean is not None:
            divided(mean, sum(agreed.has_gradient(index)))
    # Rows of the mean and one random stream, so momenta stay equal on all voters.
    _, zero = survey(means, plan.shapes)
    betas2 = [turn.groups[shape.group]["betas"][1] for shape in plan.shapes]
    turn = replace(turn, voter=0, old_rows=old_rows(states, means, zero, betas2))
    for message in plan.full:
        plain_lion(message, params, means, momenta, turn, fused=False)


def sum_over_voters(
    messages: Sequence[Message], params: Flat, tensors: Flat, wire: Wire
) -> list[Tensor | None]:
    """Returns the sums of the messages' tensors over the voters, which must all call this.

    A tensor of None counts as zeros, and `params` has the sizes and dtypes. The sums are flat,
    float64 for float64 parameters, else float32. They are None for parameters that take no part.
    """
    sums: list[Tensor | None] = [None] * len(params)
    for index in {index for message in messages for index, *_ in message.spans}:
        if (p := params[index]) is not None:
            total = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            if (tensor := tensors[index]) is not None:
                total.copy_(tensor)
            sums[index] = total
    for message in messages:
        stretches: dict[torch.dtype, list[Tensor]] = {}
        for part in (part for piece in message.pieces for part in piece.parts):
            if (whole := sums[part.tensor]) is not None:
                stretches.setdefault(whole.dtype, []).append(whole[part.start : part.stop])
        for parts in stretches.values():
            flat = torch.cat(parts)
            sent = flat.to(wire.device_for(flat.device))
            wire.all_reduce(sent, "tensors in full precision").wait()
            flat.copy_(sent)
            torch._foreach_copy_(parts, list(torch.split(flat, [part.numel() for part in parts])))
    return sums


def _equalize(momenta: Flat, states: Sequence[dict[str, Any]], wire: Wire) -> None:
    """Averages momenta over the voters if they differ, for example after a load."""
    pairs = [(m, state) for m, state in zip(momenta, states, strict=True) if m is not None]
    ages = [state[AGE] for _, state in pairs if AGE in state]
    words = [digest(fingerprints([*(m for m, _ in pairs), *ages]))]
    hashes = wire.gather_words(words, "hashes of momenta")
    if len(set(hashes.view(-1).tolist())) > 1:
        average_whole([m for m, _ in pairs], wire)
        for _, state in pairs:
            state.pop(AGE, None)
