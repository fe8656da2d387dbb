"""Methods whose N workers share this process, without a network.

They have the bits of real ranks if no gradient is Inf or NaN on all workers at once, except that
gloo adds the numbers of three and more ranks in another order (`adamw`, `lion`, and LocalSGD).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.convergence.setting import Setting
from benchmarks.convergence.tasks import Task
from benchmarks.convergence.workers import Workers
from benchmarks.methods import Hyper, adamw, distributed_lion, ring_bytes, set_lr
from hf_dlion.core.context import StepContext
from hf_dlion.core.flat import flat_gradient
from hf_dlion.core.idle_rows import survey
from hf_dlion.core.layout import Layout, Message, Scratch
from hf_dlion.core.lion import apply_verdict, direction, encode, set_mean_magnitudes
from hf_dlion.core.quantized_mean import Mean, Scale
from hf_dlion.core.rule import Average, Rule, rule_of, verdict_planes
from hf_dlion.core.slot import Slot
from hf_dlion.core.votes import Verdict, Votes
from hf_dlion.gpu import form
from hf_dlion.ranks.agreement import Period
from hf_dlion.ranks.header import HEADER_BYTES
from hf_dlion.ranks.routes import wire_bytes
from hf_dlion.steps import local, momentum_sync
from hf_dlion.steps.displacement import SCALES, displacement


def all_reduced(tensors: Sequence[Tensor], ranks: int) -> int:
    """Returns the bytes that a rank sends to average tensors of one dtype."""
    return ring_bytes(sum(map(Tensor.numel, tensors)), tensors[0].itemsize, ranks)


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
                param.grad /= self.setting.workers
        self.clip()
        self.bytes_sent += all_reduced(self.params, self.setting.workers)
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad()


class SimulatedLocalSGD(Workers):
    """Workers with an AdamW and weights of their own, which are averaged every few steps."""

    def __init__(self, task: Task, setting: Setting, every: int) -> None:
        super().__init__(task, setting)
        self.separate()
        self._every, self._taken = every, 0
        self._optimizers = [adamw(self.model, setting) for _ in self.numbers]

    def collect(self, worker: int, lr: float) -> None:
        self.clip()
        set_lr(self._optimizers[worker], lr)
        self._optimizers[worker].step()
        self.model.zero_grad()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self._taken += 1
        if self._taken % self._every and self._taken != self.setting.steps:
            return
        ranks = self.setting.workers
        for of_param in zip(*self.weights, strict=True):
            mean = sum([own / ranks for own in of_param[1:]], of_param[0] / ranks)
            for own in of_param:
                own.copy_(mean)
        self.bytes_sent += all_reduced(self.params, ranks)

    def evaluated(self, validation: Callable[[nn.Module], Any]) -> Any:
        self.show(0)
        return validation(self.model)


class SimulatedLion(Workers):
    """Workers of DistributedLion, each with momenta of its own, by the package's functions.

    Attributes:
        optimizer: Keeps the parameter groups, and has checked the options.
        taken: Number of steps.
        momenta: Momenta by worker, flat, one after the other.
    """

    def __init__(self, task: Task, setting: Setting, **options: Any) -> None:
        super().__init__(task, setting)
        self.optimizer = distributed_lion(self.model, setting, **options)
        self.taken = 0
        self._sizes = [param.numel() for param in self.params]
        dtype = self.optimizer.options.momentum_dtype or self.params[0].dtype
        self.momenta = [torch.zeros(sum(self._sizes), dtype=dtype) for _ in self.numbers]
        self._ages = [dict[Tensor, Tensor]() for _ in self.numbers]
        self._scratch = Scratch()

    def layout_of(self, weights: Iterable[Tensor]) -> Layout:
        """Returns the layout of the parameters, with a worker's weights."""
        groups = self.optimizer.param_groups
        numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
        return Layout(slots=list(map(Slot.of, self.params, numbers, weights)))

    def context(self, worker: int, number: int) -> StepContext:
        """Returns a worker's context of a step, or of an exchange."""
        return StepContext(
            number=number, voter=worker, voters=self.setting.workers,
            options=self.optimizer.options, groups=self.optimizer.param_groups,
            scratch=self._scratch, ages=self._ages[worker],
        )  # fmt: skip

    def momenta_of(self, worker: int) -> list[Tensor]:
        """Returns a worker's momenta by parameter, flat."""
        return list(torch.split(self.momenta[worker], self._sizes))

    def fill(self, layout: Layout, worker: int, grads: Iterable[Tensor | None]) -> None:
        """Gives slots what a worker has; it abstains if a gradient isn't finite."""
        for slot, grad, momentum in zip(layout.slots, grads, self.momenta_of(worker), strict=True):
            slot.grad = None if grad is None else flat_gradient("", grad, slot.param)
            slot.momentum = None if grad is None else momentum
        if not survey(layout.slots):
            layout.drop_gradients(False, [False] * len(layout.slots))

    def count_votes(self, message: Message, votes: list[Votes], rule: Rule, phase: int) -> Verdict:
        """Returns the verdict of all workers' votes on a message, and counts their bytes."""
        ranks, bits = self.setting.workers, len(votes[0].planes)
        voters = torch.stack([vote.active for vote in votes]).sum(dim=0)
        planes, by_word = [list(vote.planes) for vote in votes], message.rows.by_word(voters)
        sizes = {"ranks": ranks, "words": message.words, "rows": len(message.rows)}
        sizes |= {"bits": bits, "planes": rule.plane_count}
        self.bytes_sent += min(wire_bytes(name, **sizes) for name in ("gather", "two_phase"))
        return Verdict(verdict_planes(planes, by_word, rule, phase), voters)


class SimulatedVotes(SimulatedLion):
    """Workers that vote in every step."""

    def __init__(self, task: Task, setting: Setting, **options: Any) -> None:
        super().__init__(task, setting, **options)
        self._layout = self.layout_of([param.detach() for param in self.params])
        self._votes: list[list[Votes]] = []

    @torch.no_grad()
    def collect(self, worker: int, lr: float) -> None:
        self.clip()
        layout, context = self._layout, self.context(worker, self.taken + 1)
        self.fill(layout, worker, [param.grad for param in self.params])
        context.age_rows(layout.slots)
        set_mean_magnitudes(layout, context)
        source = partial(direction, context=context)
        self._votes.append([
            encode(message, context, source, bits=context.bits) for message in layout.messages
        ])  # fmt: skip
        # One worker's gradients at a time.
        self.model.zero_grad()
        for slot in layout.slots:
            slot.moves |= slot.grad is not None
            slot.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.taken += 1
        set_lr(self.optimizer, lr)
        options, layout, ranks = self.optimizer.options, self._layout, self.setting.workers
        rule, context = rule_of(options, ranks), self.context(0, self.taken)
        for message, *votes in zip(layout.messages, *self._votes, strict=True):
            verdict = self.count_votes(message, votes, rule, context.phase)
            apply_verdict(message, verdict, rule, context)
        self.bytes_sent += HEADER_BYTES * (ranks - 1)
        if options.momentum_sync_every:
            self._average_momenta(options.momentum_sync_every)
        self._votes = []
        for slot in layout.slots:
            slot.moves = False

    def _average_momenta(self, every: int) -> None:
        """Averages momenta the way `hf_dlion.steps.momentum_sync` does between ranks."""
        start, stop = momentum_sync.slice_of(sum(self._sizes), every, self.taken)
        parts = [momentum[start:stop] for momentum in self.momenta]
        rounded = torch.stack([part.bfloat16() for part in parts]).float()
        mean = rounded.mean(dim=0).bfloat16().float()
        for part, old in zip(parts, rounded, strict=True):
            part.copy_(mean + (part - old))
        self.bytes_sent += ring_bytes(stop - start, 2, len(parts))


class SimulatedLocalSteps(SimulatedLion):
    """Workers that take local steps (`vote_every`), with weights of their own in a period."""

    def __init__(self, task: Task, setting: Setting, **options: Any) -> None:
        super().__init__(task, setting, **options)
        self.separate()
        every = self.optimizer.options.vote_every
        self._layouts = [self.layout_of(weights) for weights in self.weights]
        self._periods = [local.LocalSteps(every) for _ in self.numbers]

    @torch.no_grad()
    def collect(self, worker: int, lr: float) -> None:
        self.clip()
        set_lr(self.optimizer, lr)
        layout, period = self._layouts[worker], self._periods[worker]
        self.fill(layout, worker, [param.grad for param in self.params])
        period.step(layout, self.context(worker, self.taken + 1), Period())
        self.model.zero_grad()
        for slot, first in zip(layout.slots, self._layouts[0].slots, strict=True):
            slot.grad = None
            if slot.local is not None and first.local is not None:
                slot.local.anchor = first.local.anchor  # Equal, so all share its memory.

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.taken += 1
        options, ranks = self.optimizer.options, self.setting.workers
        if self.taken % options.vote_every and self.taken != self.setting.steps:
            return
        number = self._periods[0].exchanges + 1
        for slots in zip(*(layout.slots for layout in self._layouts), strict=True):
            used = any(slot.local is not None and slot.local.used for slot in slots)
            for slot in slots:
                slot.moves = used
        self._average(SCALES[options.bits or 1], displacement, form.end_period, number)
        for period, layout in zip(self._periods, self._layouts, strict=True):
            period.reset(number)
            for slot in layout.slots:
                slot.local = None
        every = options.momentum_sync_every
        if every and number % every == 0:
            for worker, layout in enumerate(self._layouts):
                for slot, momentum in zip(layout.slots, self.momenta_of(worker), strict=True):
                    slot.momentum = momentum
            read, apply = momentum_sync.read_momentum, momentum_sync.apply_mean
            self._average(momentum_sync.SCALE, read, apply, number)
        # A header, and a hash of the anchors.
        self.bytes_sent += (HEADER_BYTES + 8) * (ranks - 1)

    def _average(
        self,
        scale: Scale,
        source: Callable[..., Tensor],
        move: Callable[[Message, Mean], None],
        number: int,
    ) -> None:
        """Averages what `source` returns of each worker, as `steps.means.average_message` does."""
        contexts = [self.context(worker, number) for worker in self.numbers]
        sources = [partial(source, context=context) for context in contexts]
        rule, ranks = Average(self.setting.workers, scale.bits), self.setting.workers
        amounts = [
            scale.amounts(layout.slots, layout.messages, own, context)
            for layout, own, context in zip(self._layouts, sources, contexts, strict=True)
        ]
        self.bytes_sent += 8 * (ranks - 1) * len(self.params)
        for layout in self._layouts:
            scale.set_magnitudes(layout.slots, amounts)
        for messages in zip(*(layout.messages for layout in self._layouts), strict=True):
            votes = [
                encode(message, context, own, bits=scale.bits, by_tensor=True)
                for message, own, context in zip(messages, sources, contexts, strict=True)
            ]
            verdict = self.count_votes(messages[0], votes, rule, contexts[0].phase)
            for message, context, vote in zip(messages, contexts, votes, strict=True):
                move(message, Mean(vote, verdict, rule, scale, context))

    def evaluated(self, validation: Callable[[nn.Module], Any]) -> Any:
        self.show(0)
        period, layout = self._periods[0], self._layouts[0]
        period.show(layout)  # What all ranks have in common, as in `common_weights`.
        found = validation(self.model)
        period.hide(layout)
        return found
