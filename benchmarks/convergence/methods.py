"""The methods of the study: N workers in this process, or one real rank of N."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.convergence.setting import Setting
from benchmarks.convergence.tasks import Task
from benchmarks.methods import (
    METHODS,
    Hyper,
    adamw,
    distributed_lion,
    method_of,
    ring_bytes,
    set_lr,
    trainable,
)
from hf_dlion import DistributedLion
from hf_dlion.core.context import StepContext
from hf_dlion.core.flat import flat_gradient
from hf_dlion.core.idle_rows import survey
from hf_dlion.core.layout import Layout, Scratch
from hf_dlion.core.lion import apply_verdict, direction, encode
from hf_dlion.core.rule import rule_of, verdict_planes
from hf_dlion.core.slot import Slot
from hf_dlion.core.votes import Verdict
from hf_dlion.core.votes import Votes as Sent
from hf_dlion.ranks.header import HEADER_BYTES
from hf_dlion.ranks.routes import wire_bytes
from hf_dlion.steps.momentum_sync import slice_of


class Workers(ABC):
    """All workers of a run, which share one model because their models are equal; or one rank.

    Attributes:
        workers: Workers whose gradients this process computes.
        model: Model of these workers.
        bytes_sent: Bytes that a rank has sent so far.
    """

    workers: Sequence[int]
    bytes_sent: float = 0.0

    def __init__(self, task: Task, setting: Setting) -> None:
        self.setting, self.workers = setting, range(setting.workers)
        self.model = task.model(setting.seed)
        if setting.bf16:  # As Accelerate does it.
            self.model.forward = torch.autocast("cpu", torch.bfloat16)(self.model.forward)
        self.params = trainable(self.model)

    def total(self, loss: float) -> float:
        """Returns the sum of all workers' losses."""
        return loss

    def collect(self) -> None:  # noqa: B027
        """Collects the gradients in the model after a worker's backward."""

    @abstractmethod
    def step(self, lr: float) -> None:
        """Updates the parameters and drops the gradients."""

    def evaluated(self, validation: Callable[[nn.Module], Any]) -> Any:
        """Returns what `validation` finds; NaN on ranks whose record isn't kept."""
        return validation(self.model)

    def divergences(self) -> dict[str, float]:
        """Returns how far ranks' momenta differ by parameter, if the method measures it."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Stops what the method started."""

    def clip(self) -> None:
        """Clips the gradients in the model."""
        if self.setting.clip:
            nn.utils.clip_grad_norm_(self.params, self.setting.clip)


class Averaged(Workers):
    """One optimizer on the mean gradient."""

    def __init__(
        self, task: Task, setting: Setting, make: Callable[[nn.Module, Hyper], Optimizer]
    ) -> None:
        super().__init__(task, setting)
        self._optimizer = make(self.model, setting)

    def step(self, lr: float) -> None:
        # autograd has added the workers' gradients.
        for param in self.params:
            if param.grad is not None:
                param.grad /= len(self.workers)
        self.clip()
        self.bytes_sent += ring_bytes(sum(map(Tensor.numel, self.params)), ranks=len(self.workers))
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Votes(Workers):
    """The step of DistributedLion with the package's functions, without a network.

    Real ranks have the same parameters bit for bit, which a test verifies. Each worker's gradients
    are clipped by themselves.
    """

    def __init__(self, task: Task, setting: Setting, **options: Any) -> None:
        super().__init__(task, setting)
        # Keeps the parameter groups, and checks the options.
        self._optimizer = distributed_lion(self.model, setting, **options)
        groups = self._optimizer.param_groups
        self.params = [param for group in groups for param in group["params"]]
        numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
        slots = [Slot.of(*pair) for pair in zip(self.params, numbers, strict=True)]
        self._layout, self._scratch, self._step = Layout(slots=slots), Scratch(), 0
        self._momenta = [[torch.zeros_like(slot.p) for slot in slots] for _ in self.workers]
        self._states = [defaultdict[Tensor, dict[str, Any]](dict) for _ in self.workers]
        self._grads: list[list[Tensor | None]] = []

    def collect(self) -> None:
        self.clip()
        self._grads.append([param.grad for param in self.params])
        self.model.zero_grad()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self._step += 1
        set_lr(self._optimizer, lr)
        options, ranks = self._optimizer.options, len(self.workers)
        rule = rule_of(options, ranks)
        votes = [self._encoded(*worker) for worker in enumerate(self._grads)]
        for slot, *grads in zip(self._layout.slots, *self._grads, strict=True):
            slot.moves = any(grad is not None for grad in grads)
        for message, *everyone in zip(self._layout.messages, *votes, strict=True):
            voters = torch.stack([vote.active for vote in everyone]).sum(dim=0)
            planes, by_word = [list(vote.planes) for vote in everyone], message.rows.by_word(voters)
            context = self._context(0)
            verdict = Verdict(verdict_planes(planes, by_word, rule, context.phase), voters)
            apply_verdict(message, verdict, rule, context)
            sizes = {"ranks": ranks, "words": message.words, "rows": len(message.rows)}
            sizes |= {"bits": options.bits, "planes": rule.plane_count}
            self.bytes_sent += min(wire_bytes(name, **sizes) for name in ("gather", "two_phase"))
        self.bytes_sent += HEADER_BYTES * (ranks - 1)
        if options.momentum_sync_every:
            self._average_momenta(options.momentum_sync_every)
        self._grads = []

    def _encoded(self, rank: int, grads: list[Tensor | None]) -> list[Sent]:
        """Returns a rank's votes of all messages; it abstains if a gradient isn't finite."""
        context, slots = self._context(rank), self._layout.slots
        for slot, grad, momentum in zip(slots, grads, self._momenta[rank], strict=True):
            slot.grad = None if grad is None else flat_gradient("", grad, slot.param)
            slot.momentum = None if grad is None else momentum
        if not survey(slots):
            grads[:] = [None] * len(grads)
            self._layout.abstain(False, grads)
        context.age_rows(slots)
        source = partial(direction, context=context)
        return [
            encode(message, context, source, bits=context.bits) for message in self._layout.messages
        ]

    def _context(self, rank: int) -> StepContext:
        return StepContext(
            step=self._step, voter=rank, voters=len(self.workers),
            options=self._optimizer.options, groups=self._optimizer.param_groups,
            state=self._states[rank], scratch=self._scratch,
        )  # fmt: skip

    def _average_momenta(self, every: int) -> None:
        """Averages momenta the way `hf_dlion.steps.momentum_sync` does between ranks."""
        flat = [torch.cat(held) for held in self._momenta]
        start, stop = slice_of(flat[0].numel(), every, self._step)
        parts = [momentum[start:stop] for momentum in flat]
        rounded = torch.stack([part.bfloat16() for part in parts]).float()
        mean = rounded.mean(dim=0).bfloat16().float()
        for part, old in zip(parts, rounded, strict=True):
            part.copy_(mean + (part - old))
        sizes = [slot.size for slot in self._layout.slots]
        self._momenta = [list(momentum.split(sizes)) for momentum in flat]
        self.bytes_sent += ring_bytes(stop - start, 2, len(parts))


class RealRank(Workers):
    """One real rank of an existing process group."""

    def __init__(self, task: Task, setting: Setting) -> None:
        super().__init__(task, setting)
        self.workers = [dist.get_rank()]
        self._rank = method_of(setting.method).make(self.model, setting)
        self.model = self._rank.model

    def total(self, loss: float) -> float:
        found = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(found)
        return float(found)

    def step(self, lr: float) -> None:
        self.clip()
        set_lr(self._rank.optimizer, lr)
        self._rank.step()
        self.bytes_sent = self._rank.bytes_sent

    def evaluated(self, validation: Callable[[nn.Module], Any]) -> Any:
        if dist.get_rank():
            return math.nan
        optimizer = self._rank.optimizer
        if not isinstance(optimizer, DistributedLion):
            return self._alone(validation)
        with optimizer.common_weights():
            return self._alone(validation)

    def divergences(self) -> dict[str, float]:
        model, state = getattr(self.model, "module", self.model), self._rank.optimizer.state
        pairs = [(name, state.get(param, {})) for name, param in model.named_parameters()]
        return {name: own["divergence"] for name, own in pairs if "divergence" in own}

    def _alone(self, validation: Callable[[nn.Module], Any]) -> Any:
        """Validates on one thread per rank, since the other ranks wait."""
        threads = torch.get_num_threads()
        torch.set_num_threads(min(dist.get_world_size(), os.cpu_count() or 1))
        found = validation(getattr(self.model, "module", self.model))
        torch.set_num_threads(threads)
        return found

    def close(self) -> None:
        self._rank.close()


# Methods that run in this process.
IN_PROCESS: dict[str, Callable[[Task, Setting], Workers]] = {
    "adamw": partial(Averaged, make=adamw),
    "lion": partial(Averaged, make=distributed_lion),  # One rank alone takes plain Lion.
    **{
        name: partial(Votes, **(METHODS[name].options or {}))
        for name in ("majority", "average", "bits2", "bits4", "sync16")
    },
}
# Options of DistributedLion that `Votes` follows.
_SIMULATED = {"bits", "aggregation", "ties", "level_scale", "momentum_sync_every"}
# Methods of step_time.py whose ranks don't train a common model, or that need several nodes.
NOT_TRAINED = ("none", "alone", "adamw-alone", "ddp-lion", "node")


def in_process(name: str) -> Callable[[Task, Setting], Workers] | None:
    """Returns what makes a method's workers in this process, or None if it needs real ranks."""
    if name in IN_PROCESS:
        return IN_PROCESS[name]
    options = method_of(name).options or {}
    votes = ":" in name and options.keys() <= _SIMULATED
    return partial(Votes, **options) if votes else None


def check_method(setting: Setting) -> None:
    """Checks that a method supports a setting, before any work starts.

    Raises:
        ValueError: If it doesn't.
    """
    name = setting.method
    method_of(name)
    if name in NOT_TRAINED:
        raise ValueError(f"{name!r} trains no common model; use it in benchmarks/step_time.py")
    if not setting.real and in_process(name) is None:
        raise ValueError(f"{name!r} runs on real ranks only; add --real")
    if setting.lr_factors and name == "demo":
        raise ValueError(
            f"--lr-factors doesn't work with {name}; remove --lr-factors, or the method"
        )
