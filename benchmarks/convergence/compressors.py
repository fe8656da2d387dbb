"""Gradient compressors that the Distributed Lion paper compares with, as their papers define them.

A compressor has a worker per rank, which turns a gradient into the bytes that it sends, and the
messages of all into the mean. `Compressor.compress` runs all workers in one process; the comm hook
of `benchmarks.convergence.compressors_hook` runs one under DDP, with the same result bit for bit.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hf_dlion.exchange.mean import average_wire_bytes

# The share of elements that the Distributed Lion paper lets GradDrop and DGC send.
DENSITY = 0.04
# DGC's: 75 %, 93.75 %, 98.4 % and 99.6 % of the elements are kept back in them.
WARMUP_EPOCHS = 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a worker knows of the run.

    Attributes:
        rank: Its number.
        world_size: The number of workers.
        sizes: Elements of each parameter.
        seed: Of random numbers, which also depend on rank and step.
        steps: Length of the run.
    """

    rank: int
    world_size: int
    sizes: tuple[int, ...]
    seed: int
    steps: int


class Compressor(ABC):
    """What turns gradients into messages, made with its options alone.

    `worker` returns one rank's side of it for a run, which has the state. `start` and `compress`
    are all ranks' sides in one process.

    Attributes:
        run: What a worker knows of its run.
        bits_per_iteration: Bits that a rank sent in the last step: its message to each of the
            others, in a ring or not, and the scale's all-reduce.
        rounds_per_iteration: Messages that waited for one another for that.
    """

    run: Run
    bits_per_iteration = 0.0
    rounds_per_iteration = 0

    def worker(self, run: Run) -> Self:
        """Returns one rank's side, before its first step."""
        worker = copy.copy(self)
        worker.begin(run)
        return worker

    def begin(self, run: Run) -> None:
        """Makes this a worker: sets its state before the first step."""
        self.run = run

    def scale(self, gradient: Tensor) -> Tensor:
        """Returns numbers whose maximum over all workers `encode` and `decode` get.

        Args:
            gradient: All parameters' gradients in a row, float32; unchanged.
        """
        return gradient.new_empty(0)

    @abstractmethod
    def encode(self, gradient: Tensor, scale: Tensor) -> Tensor:
        """Returns the bytes to send, uint8, as many as every other worker; called once per step.

        Args:
            gradient: As for `scale`.
            scale: The maximum of what `scale` returned over all workers.
        """

    @abstractmethod
    def decode(self, message: Tensor, scale: Tensor) -> Tensor:
        """Returns a worker's contribution to the mean, float32, of the gradient's size.

        Args:
            message: What a worker's `encode` returned in this step.
            scale: As for `encode`.
        """

    def combine(self, messages: Sequence[Tensor], scale: Tensor) -> Tensor:
        """Returns the mean over the messages of all workers, in order of ranks."""
        total = self.decode(messages[0], scale)
        for message in messages[1:]:
            total += self.decode(message, scale)
        return total.div_(len(messages))

    def start(self, world_size: int, params: Sequence[Tensor], seed: int, steps: int) -> None:
        """Makes the workers anew.

        Args:
            world_size: How many.
            params: What is trained.
            seed: Of random numbers.
            steps: Length of the run.
        """
        sizes = tuple(param.numel() for param in params)
        self._workers = [
            self.worker(Run(rank=rank, world_size=world_size, sizes=sizes, seed=seed, steps=steps))
            for rank in range(world_size)
        ]

    def compress(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Returns the mean gradient after the exchange, new tensors of the gradients' shapes.

        Args:
            gradients: By worker and parameter; unchanged.
        """
        flat = [torch.cat([g.detach().float().cpu().flatten() for g in own]) for own in gradients]
        pairs = list(zip(self._workers, flat, strict=True))
        scale = torch.stack([worker.scale(own) for worker, own in pairs]).amax(0)
        messages = [worker.encode(own, scale) for worker, own in pairs]
        self.bits_per_iteration = 8 * sent_bytes(messages[0], scale, len(messages))
        self.rounds_per_iteration = sent_rounds(scale, len(messages))
        mean = self._workers[0].combine(messages, scale)
        parts = mean.split_with_sizes([one.numel() for one in gradients[0]])
        return [part.view_as(one).to(one) for part, one in zip(parts, gradients[0], strict=True)]


def sent_bytes(message: Tensor, scale: Tensor, world_size: int) -> int:
    """Returns the bytes that a rank sends to gather all messages and to agree on the scale."""
    return (world_size - 1) * message.numel() + average_wire_bytes(
        scale.numel(), world_size, torch.float32
    )


def sent_rounds(scale: Tensor, world_size: int) -> int:
    """Returns how many messages wait for one another then."""
    return (world_size - 1) * (3 if scale.numel() else 1)


def clipped(layer: Tensor, deviations: float) -> Tensor:
    """Returns a layer whose elements are within so many standard deviations.

    A layer of a single element has no deviation, and stays.
    """
    if layer.numel() < 2:
        return layer
    bound = float(deviations * layer.std(correction=0))
    return layer.clamp(-bound, bound)


@dataclass
class TernGrad(Compressor):
    """Each element one of -s, 0, s, right in expectation (Wen et al. 2017, arXiv 1705.07878).

    Layer by layer: g is clipped to 2.5 of its standard deviations, s is the largest |g| of all
    workers (scaler sharing), and an element is s·sign(g) with probability |g| / s, otherwise 0.
    Two bits each, where log2(3) = 1.58 would do, as the paper packs them; and 4 bytes per layer
    to agree on s.
    """

    deviations: float = 2.5

    def begin(self, run: Run) -> None:
        """Seeds the random numbers."""
        super().begin(run)
        # Any two ranks draw independently, or their errors would add up instead of averaging out.
        self._random = torch.Generator().manual_seed(run.seed * 65537 + run.rank)

    def scale(self, gradient: Tensor) -> Tensor:
        """Returns the largest magnitude of each clipped layer."""
        layers = self._clipped(gradient)
        return torch.stack([a.abs().amax() if a.numel() else a.sum() for a in layers])

    def encode(self, gradient: Tensor, scale: Tensor) -> Tensor:
        """Returns codes 0, 1 and 2 for -s, 0 and s, four to a byte."""
        clipped = torch.cat(self._clipped(gradient))
        draw = torch.rand(clipped.numel(), generator=self._random).to(clipped.device)
        kept = draw * self._spread(scale) < clipped.abs()
        codes = (clipped.sign() * kept + 1).to(torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, -codes.numel() % 4)).view(-1, 4)
        return codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6

    def decode(self, message: Tensor, scale: Tensor) -> Tensor:
        """Returns -s, 0 or s."""
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=message.device)
        codes = (message[:, None] >> shifts & 3).flatten()[: sum(self.run.sizes)]
        return (codes.float() - 1) * self._spread(scale)

    def _clipped(self, gradient: Tensor) -> list[Tensor]:
        layers = gradient.split_with_sizes(list(self.run.sizes))
        return [clipped(layer, self.deviations) for layer in layers]

    def _spread(self, scale: Tensor) -> Tensor:
        sizes = torch.tensor(self.run.sizes, device=scale.device)
        return scale.repeat_interleave(sizes)


class Sparse(Compressor):
    """Sends elements as float32 values and int32 positions, and keeps the others back.

    Attributes:
        residual: What a worker has not sent yet, float32.
    """

    residual: Tensor

    def begin(self, run: Run) -> None:
        """Starts with a residual of 0."""
        super().begin(run)
        self.residual = torch.zeros(sum(run.sizes))

    def take(self, positions: Tensor) -> Tensor:
        """Returns the message of some elements of the residual, which are 0 then."""
        values = self.residual[positions]
        self.residual[positions] = 0.0
        return torch.cat([values.view(torch.uint8), positions.to(torch.int32).view(torch.uint8)])

    def decode(self, message: Tensor, scale: Tensor) -> Tensor:
        """Returns the elements that were sent, and zeros."""
        values, positions = message.chunk(2)
        dense = torch.zeros_like(self.residual)
        dense[positions.view(torch.int32).long()] = values.view(torch.float32)
        return dense


def largest(values: Tensor, density: float) -> Tensor:
    """Returns the positions of the share of elements with the largest magnitudes, at least one."""
    count = min(values.numel(), max(1, round(density * values.numel())))
    return values.abs().topk(count, sorted=False).indices


@dataclass
class GradDrop(Sparse):
    """The largest elements of gradient and residual (Aji and Heafield 2017, arXiv 1704.05021).

    One threshold over all parameters, which the paper prefers for models with layer normalisation;
    it is exact here, estimated from a sample there. What is below it is added to the next gradient.

    Args:
        density: Share of the elements that are sent; the paper drops 0.99, Distributed Lion 0.96.
    """

    density: float = DENSITY

    def __post_init__(self) -> None:
        """Checks the density."""
        check_share("density", self.density)

    def encode(self, gradient: Tensor, scale: Tensor) -> Tensor:
        """Returns the largest elements of the residual."""
        self.residual += gradient
        return self.take(largest(self.residual, self.density))


@dataclass
class DGC(Sparse):
    """Deep gradient compression (Lin et al. 2018, arXiv 1712.01887, algorithm 4).

    With a worker's gradient g, its momentum u and what it owes v, layer by layer:

        g ← g · min(1, clip·√N / ‖g‖)    local gradient clipping (of all layers together)
        u ← m·u + g,  v ← v + u          momentum correction
        send v and set v = u = 0         where |v| is largest: momentum factor masking

    The momentum is in here: the optimizer is to be SGD without one. The paper clips g/N, of which
    it takes the sum, to clip/√N; here it is g, of which the mean is taken. Warm-up: 1/4 of the
    elements, 1/16, ... in the four epochs of the warm-up, down to the density.

    A worker's `residual` is the paper's v, its `velocity` the paper's u.

    Args:
        density: Share of each layer's elements that are sent after the warm-up.
        momentum: The paper's m.
        clip: Norm to which the sum of all workers' gradients would be clipped; None: not at all.
        warmup: Share of the run; the paper's four epochs are about this of ImageNet's ninety.
    """

    density: float = DENSITY
    momentum: float = 0.9
    clip: float | None = 1.0
    warmup: float = 0.04

    def __post_init__(self) -> None:
        """Checks the arguments."""
        check_share("density", self.density)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum={self.momentum} must be at least 0 and less than 1")
        if self.clip is not None and not self.clip > 0.0:
            raise ValueError(f"clip={self.clip} must be positive, or None")
        if not 0.0 <= self.warmup <= 1.0:
            raise ValueError(f"warmup={self.warmup} must be a share of the run, from 0 to 1")

    def density_at(self, step: int, steps: int) -> float:
        """Returns the share that is sent in a step, which is counted from 0, of so many."""
        epoch = self.warmup * steps / WARMUP_EPOCHS
        if step >= WARMUP_EPOCHS * epoch:
            return self.density
        return max(self.density, 0.25 ** (math.floor(step / epoch) + 1))

    def begin(self, run: Run) -> None:
        """Starts with momentum and residual of 0."""
        super().begin(run)
        self.velocity = torch.zeros_like(self.residual)
        self._step = 0

    def encode(self, gradient: Tensor, scale: Tensor) -> Tensor:
        """Returns the largest elements of each layer of the residual."""
        self.velocity.mul_(self.momentum).add_(self._clipped(gradient))
        self.residual += self.velocity
        density = self.density_at(self._step, self.run.steps)
        self._step += 1
        chosen, start = [], 0
        for layer in self.residual.split_with_sizes(list(self.run.sizes)):
            chosen.append(largest(layer, density) + start)
            start += layer.numel()
        positions = torch.cat(chosen)
        # A stale momentum would go on pushing elements that were held back for long.
        self.velocity[positions] = 0.0
        return self.take(positions)

    def _clipped(self, gradient: Tensor) -> Tensor:
        if self.clip is None:
            return gradient
        limit = self.clip * math.sqrt(self.run.world_size)
        return gradient * min(1.0, limit / max(float(gradient.norm()), 1e-30))


def check_share(name: str, value: float) -> None:
    """Checks a share of the elements.

    Raises:
        ValueError: If it is none.
    """
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name}={value} must be a share of the elements: more than 0, at most 1")
