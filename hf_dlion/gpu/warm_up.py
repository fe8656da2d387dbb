"""Compiles the kernels that steps of a layout launch, before other ranks wait for a step.

Triton compiles a kernel when it is first launched with some number of ranks, rule, and dtypes. If
that fails, because a cache is full or the compiler is gone, this rank takes the form of torch
operations, which has the same bits. So a new layout takes its steps on small tensors first, by the
same functions, and as if the other ranks sent what this rank sends.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import torch

from hf_dlion.core.codec import WORD
from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Layout, Message, Scratch
from hf_dlion.core.lion import set_mean_magnitudes
from hf_dlion.core.quantized_mean import Mean, Scale
from hf_dlion.core.rule import Average, rule_of
from hf_dlion.core.slot import LocalState, Slot
from hf_dlion.core.votes import Votes
from hf_dlion.gpu import form
from hf_dlion.options import Options


class _Types(NamedTuple):
    """What the kernels' variants depend on of a slot."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    full_precision: bool = False

    @classmethod
    def of(cls, slot: Slot) -> _Types:
        """Returns those of a slot, which may get its gradient in a later step."""
        grad_dtype = None if slot.grad is None else slot.grad.dtype
        if grad_dtype is None and slot.param.is_leaf:
            grad_dtype = getattr(slot.param, "grad_dtype", None)  # torch 2.10 or newer
        return cls(slot.dtype, grad_dtype or slot.dtype, slot.full_precision)


@torch.inference_mode(False)
@torch.no_grad()
def warm_up(layout: Layout, options: Options, voters: int) -> None:
    """Compiles and launches the kernels of a layout's steps, for a number of voters.

    If that fails on a device, no kernel runs there any more; see `form.try_out`.

    Raises:
        RuntimeError: If memory runs out.
    """
    messages = [m for m in layout.all_messages if not form.refusal(m.device)]
    # By message, because the kernels cover a message or don't.
    kinds = {(m.device, frozenset(_Types.of(span.slot) for span in m.spans)) for m in messages}
    for device, types in kinds:
        _try_out(device, types, options, voters)


def trial_refusal(device: torch.device) -> str:
    """Returns why the kernels don't run on a device, after a trial; empty if they do."""
    types = [_Types(dtype, dtype) for dtype in form.DTYPES]
    for options, voters in ((Options(), 1), (Options(), 2), (Options(vote_every=2), 2)):
        _try_out(device, types, options, voters)
    return form.refusal(device)


def _try_out(
    device: torch.device, types: Collection[_Types], options: Options, voters: int
) -> None:
    if not form.refusal(device):
        form.try_out(partial(_take_steps, device, types, options, voters), device)


def _take_steps(
    device: torch.device, types: Collection[_Types], options: Options, voters: int
) -> None:
    """Takes a step in which all ranks have the same gradients; with local steps ends a period.

    Raises:
        RuntimeError: If a weight isn't where it should be; or what compiling or launching raises.
    """
    layout = Layout(slots=[_small(of_slot, device, options) for of_slot in types])
    params = [slot.param for slot in layout.slots]
    group = {"params": params, "lr": 1.0, "betas": (0.5, 0.5), "weight_decay": 0.0}
    context = StepContext(
        number=1, voter=0, voters=voters, options=options, groups=[group], scratch=Scratch(),
    )  # fmt: skip
    if voters == 1:
        form.plain_lion(layout.all_messages, context)
        _check_sums(layout, -64.0)
    elif options.vote_every > 1:
        for slot in layout.slots:
            slot.local = LocalState.of(slot.part)
        form.local_step(layout.all_messages, context)
        _check_sums(layout, -64.0)
        for message in layout.messages:
            _end_period(message, context)
        _check_sums(layout, -64.0 * Average(voters, context.bits).top)
    else:
        rule = rule_of(options, voters)
        set_mean_magnitudes(layout, context)
        for message in layout.messages:
            step = form.vote_of(message, context)
            step.move(form.count_equal_votes(step.encode(), voters, rule, context.phase), rule)
        _check_sums(layout, -64.0)


def _end_period(message: Message, context: StepContext) -> None:
    """Ends a period in which all ranks moved all elements by the largest level, with unit 1."""
    rule, bits = Average(context.voters, context.bits), context.bits
    scale = Scale(bits, of_largest=True, factor=1.0)
    for slot in (span.slot for span in message.spans):
        slot.magnitude = 1.0
        slot.magnitude = 1 / scale.unit(slot)
    digits = [-(rule.top >> bit & 1) for bit in range(bits)]
    planes = torch.tensor(digits, dtype=torch.int64, device=message.device)
    planes = planes.view(-1, 1).expand(bits, message.words).contiguous()
    active = torch.ones(len(message.rows), dtype=torch.bool, device=message.device)
    votes = Votes(planes, active, message.rows)
    verdict = form.count_equal_votes(votes, context.voters, rule, context.phase)
    form.end_period(message, Mean(votes, verdict, rule, scale, context))


def _check_sums(layout: Layout, expected: float) -> None:
    sums = [float(slot.p.sum()) for slot in layout.slots if not slot.full_precision]
    if any([total != expected for total in sums]):
        raise RuntimeError(f"kernels moved {WORD} weights by {sums} in all instead of {expected}")


def _small(types: _Types, device: torch.device, options: Options) -> Slot:
    """Returns a slot of 64 weights of 0 with a gradient of ones."""
    param = torch.zeros(WORD, dtype=types.dtype, device=device, requires_grad=True)
    slot = Slot.of(param, 0)
    slot.full_precision = types.full_precision
    slot.moves, slot.grad = True, torch.ones_like(slot.p, dtype=types.grad_dtype)
    slot.momentum = torch.zeros_like(slot.p, dtype=options.momentum_dtype)
    return slot
