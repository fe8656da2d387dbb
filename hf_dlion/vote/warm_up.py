"""Compiles the kernels that steps of a layout launch, before other ranks wait for a step.

Triton compiles a kernel when it is first launched with some number of ranks, rule, and dtypes. If
that fails, because a cache is full or the compiler is gone, this rank takes the form of torch
operations, which has the same bits. So a new layout takes its steps on small tensors first, by the
same functions, and with other ranks that send what this rank sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_dlion.exchange import launches
from hf_dlion.exchange.wire import Pending, Wire, WireStats
from hf_dlion.options import Options
from hf_dlion.ranks.topology import Topology
from hf_dlion.vote.context import StepContext
from hf_dlion.vote.layout import Layout, Scratch, Slot
from hf_dlion.vote.local_steps import LocalSteps
from hf_dlion.vote.step import plain_lion, vote


class _Types(NamedTuple):
    """What the kernels' variants depend on of a slot."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    full: bool = False

    @classmethod
    def of(cls, slot: Slot) -> _Types:
        """Returns those of a slot, which may get its gradient in a later step."""
        grad_dtype = None if slot.grad is None else slot.grad.dtype
        if grad_dtype is None and slot.param.is_leaf:
            grad_dtype = getattr(slot.param, "grad_dtype", None)  # torch 2.10 or newer
        return cls(slot.dtype, grad_dtype or slot.dtype, slot.full)


@torch.inference_mode(False)
@torch.no_grad()
def warm_up(layout: Layout, options: Options, voters: int) -> None:
    """Compiles and launches the kernels of a layout's steps, for a number of voters.

    If that fails on a device, no kernel runs there any more; see `launches.try_out`.

    Raises:
        RuntimeError: If memory runs out.
    """
    messages = [m for m in (*layout.messages, *layout.full) if not launches.refusal(m.device)]
    # By message, because the kernels cover a message or don't.
    found = {(m.device, frozenset(_Types.of(span.slot) for span in m.spans)) for m in messages}
    for device, types in found:
        _warm_up(device, types, options, voters)


def trial_refusal(device: torch.device) -> str:
    """Returns why the kernels don't run on a device, after a trial; empty if they do."""
    types = [_Types(dtype, dtype) for dtype in launches.DTYPES]
    for options, voters in ((Options(), 1), (Options(), 2), (Options(vote_every=2), 2)):
        _warm_up(device, types, options, voters)
    return launches.refusal(device)


def _warm_up(
    device: torch.device, types: Collection[_Types], options: Options, voters: int
) -> None:
    if not launches.refusal(device):
        launches.try_out(partial(_take_steps, device, types, options, voters), device)


def _take_steps(
    device: torch.device, types: Collection[_Types], options: Options, voters: int
) -> None:
    """Takes a step in which all ranks have the same gradients; with local steps also an exchange.

    Raises:
        RuntimeError: If a weight isn't where it should be; or what compiling or launching raises.
    """
    layout = Layout(slots=[_small(own, device, options) for own in types])
    params = [slot.param for slot in layout.slots]
    group = {"params": params, "lr": 1.0, "betas": (0.5, 0.5), "weight_decay": 0.0}
    context = StepContext(
        step=1, voter=0, voters=voters, options=options, groups=[group],
        state=defaultdict(dict), scratch=Scratch(),
    )  # fmt: skip
    if voters == 1:
        plain_lion([*layout.messages, *layout.full], context)
    elif options.vote_every > 1:
        local = LocalSteps(options.vote_every)
        local.begin(layout, context.groups)
        local.step(layout, context)
        _check_sums(layout, 64.0, 64.0)
        local.exchange(layout, [voters] * len(layout.slots), context, _Echoed(voters))
    else:
        vote(layout, context, _Echoed(voters))
    # A displacement of 1 is between two levels of 2 or 4 bits.
    tolerance = 32.0 if options.vote_every > 1 else 0.0
    _check_sums(layout, 64.0 - tolerance, 64.0 + tolerance)


def _check_sums(layout: Layout, least: float, most: float) -> None:
    sums = [float(slot.p.sum()) for slot in layout.slots if not slot.full]
    if not all([-most <= total <= -least for total in sums]):
        raise RuntimeError(f"kernels moved 64 weights by {sums} in all instead of -64")


def _small(types: _Types, device: torch.device, options: Options) -> Slot:
    """Returns a slot of 64 weights of 0 with a gradient of ones."""
    param = torch.zeros(64, dtype=types.dtype, device=device, requires_grad=True)
    slot = Slot.of(param, 0)
    slot.full, slot.param, slot.part = types.full, param, param.detach()
    slot.p = slot.part
    slot.target, slot.grad = slot.p, torch.ones_like(slot.p, dtype=types.grad_dtype)
    slot.momentum = torch.zeros_like(slot.p, dtype=options.momentum_dtype)
    return slot


class _Echo(Wire):
    """A wire whose other ranks send what this rank sends."""

    def __init__(self, world_size: int) -> None:
        self.stats, self.rank, self.world_size = WireStats(), 0, world_size
        self.ranks, self.neighbors = list(range(world_size)), 0

    def device_for(self, device: torch.device) -> torch.device:
        return device

    @property
    def control_device(self) -> torch.device:
        return torch.device("cpu")

    def _start(self, what: str, collective: Callable[..., Any], *tensors: Tensor) -> Pending:
        out, sent = tensors[0], tensors[-1]
        if out is sent:
            out.mul_(self.world_size)  # A sum.
        else:
            ranks = out.view(self.world_size, -1)
            ranks.copy_(sent[: ranks.shape[1]])  # The whole tensor, or the segment for this rank.
        return _Arrived()


class _Arrived(Pending):
    def __init__(self) -> None:
        pass

    def wait(self) -> None:
        pass


class _Echoed(Topology):
    """Ranks that all vote, of which this is the first."""

    def __init__(self, world_size: int) -> None:
        self.everyone = self.voters = _Echo(world_size)
        self.node = self.same_parts = None
        self.voter, self.voter_of_rank = 0, list(range(world_size))
