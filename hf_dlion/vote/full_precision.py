"""Plain Lion on mean gradients, for parameters that `full_precision` selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_dlion.exchange.codec import divided
from hf_dlion.exchange.wire import Wire, digest
from hf_dlion.ranks.agreement import Agreed
from hf_dlion.ranks.fingerprint import fingerprints
from hf_dlion.vote.context import StepContext
from hf_dlion.vote.idle_rows import AGE, survey
from hf_dlion.vote.layout import Layout, Slot
from hf_dlion.vote.momentum_sync import average_whole
from hf_dlion.vote.step import plain_lion


def step_in_full(
    layout: Layout, agreed: Agreed, wire: Wire, context: StepContext, *, equal: bool
) -> None:
    """Takes plain Lion's step on mean gradients; every voter must call this.

    The mean is over the voters that have a finite gradient, and a gradient of None counts as zeros.
    All slots have a momentum. `equal`, the same on every voter, says whether the voters' momenta
    are known to be equal. Each rank sends 2 (N - 1) ceil(n / N) elements for the n elements of one
    message and dtype, as in a ring.
    """
    slots = [slot for slot in layout.slots if slot.full]
    if not equal:
        _equalize(slots, context.state, wire)
    set_means(layout, "grad", agreed.counts, wire)
    for slot in slots:
        slot.grad = slot.mean
        if slot.grad is None:
            slot.momentum = None
    # Rows of the mean and one random stream, so momenta stay equal on all voters.
    survey(slots)
    context = replace(context, voter=0)
    context.age_rows(slots)
    plain_lion(layout.full, context, exact=True)
    for slot in slots:
        slot.mean = None


def set_means(layout: Layout, name: str, counts: Sequence[int], wire: Wire) -> None:
    """Sets the slots' means: the sum of their tensors `name` over the voters, divided by `counts`.

    Every voter must call this. A tensor of None counts as zeros. Means are flat, float64 for
    float64 parameters, else float32. They are None for slots that don't move.
    """
    for slot in layout.slots:
        if slot.full:
            slot.mean = None
            if slot.target is not None:
                wide = torch.promote_types(slot.dtype, torch.float32)
                slot.mean = torch.zeros_like(slot.target, dtype=wide)
                if (tensor := getattr(slot, name)) is not None:
                    slot.mean.copy_(tensor)
    for message in layout.full:
        stretches: dict[torch.dtype, list[Tensor]] = {}
        for slot, start, stop, _ in (part for piece in message.pieces for part in piece.parts):
            if slot.mean is not None:
                stretches.setdefault(slot.mean.dtype, []).append(slot.mean[start:stop])
        for parts in stretches.values():
            flat = torch.cat(parts)
            sent = flat.to(wire.device_for(flat.device))
            wire.all_reduce(sent, "tensors in full precision").wait()
            flat.copy_(sent)
            torch._foreach_copy_(parts, list(torch.split(flat, [part.numel() for part in parts])))
    for slot, count in zip(layout.slots, counts, strict=True):
        if slot.full and slot.mean is not None:
            divided(slot.mean, count)


def _equalize(slots: Sequence[Slot], state: Mapping[Tensor, dict[str, Any]], wire: Wire) -> None:
    """Averages momenta over the voters if they differ, for example after a load."""
    momenta = [slot.momentum for slot in slots if slot.momentum is not None]
    ages = [age for slot in slots if (age := state[slot.param].get(AGE)) is not None]
    words = [digest(fingerprints([*momenta, *ages]))]
    hashes = wire.gather_words(words, "hashes of momenta")
    if len(set(hashes.view(-1).tolist())) > 1:
        average_whole(momenta, wire)
        for slot in slots:
            state[slot.param].pop(AGE, None)
