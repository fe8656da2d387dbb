"""Gradient compressors that the Distributed Lion paper compares with, as their papers define them.

All workers are in this process. A message is kept as the dense gradient that it stands for, and its
bytes are counted: every worker sends its own to each of the others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hf_dlion.exchange.mean import average_wire_bytes
from torch import Tensor

# The share of elements that the Distributed Lion paper lets GradDrop and DGC send.
DENSITY = 0.04
# DGC's: 75 %, 93.75 %, 98.4 % and 99.6 % of the elements are kept back in them.
WARMUP_EPOCHS = 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a worker knows of the run; sizes are the elements of each parameter."""

    rank: int
    world_size: int
    sizes: tuple[int, ...]
    seed: int
    steps: int


class Compressor(ABC):
    """One worker, with what it keeps between steps.

    Attributes:
        message_bytes: Of its last message.
    """

    message_bytes = 0

    def __init__(self, run: Run) -> None:
        self.run = run

    def scale(self, gradient: Tensor) -> Tensor:
        """Returns numbers whose maximum over all workers `send` gets."""
        return gradient.new_empty(0)

    @abstractmethod
    def send(self, gradient: Tensor, scale: Tensor) -> Tensor:
        """Returns what the message adds to the sum, float32; called once per step."""


class Workers:
    """All workers of a run.

    Attributes:
        bytes_sent: Bytes that a rank has sent so far.
        rounds: Messages that waited for one another so far.
    """

    def __init__(
        self,
        make: Callable[[Run], Compressor],
        world_size: int,
        sizes: Sequence[int],
        seed: int,
        steps: int,
    ) -> None:
        shared = {"world_size": world_size, "sizes": tuple(sizes), "seed": seed, "steps": steps}
        self._all = [make(Run(rank=rank, **shared)) for rank in range(world_size)]
        self.bytes_sent = self.rounds = 0

    def mean(self, gradients: Sequence[Tensor]) -> Tensor:
        """Returns the mean of the messages, of gradients in a row by worker."""
        pairs = list(zip(self._all, gradients, strict=True))
        scale = torch.stack([worker.scale(own) for worker, own in pairs]).amax(0)
        total = sum(worker.send(own, scale) for worker, own in pairs)
        others = len(pairs) - 1
        self.bytes_sent += others * self._all[0].message_bytes
        self.bytes_sent += average_wire_bytes(scale.numel(), len(pairs), torch.float32)
        # A gathering, and a ring in which the scale becomes common.
        self.rounds += others * (3 if scale.numel() else 1)
        return total / len(pairs)


class TernGrad(Compressor):
    """Each element one of -s, 0, s, right in expectation (Wen et al. 2017, arXiv 1705.07878).

    Layer by layer: g is clipped to 2.5 of its standard deviations, s is the largest |g| of all
    workers (scaler sharing), and an element is s·sign(g) with probability |g| / s, otherwise 0.
    Two bits each, where log2(3) = 1.58 would do, as the paper packs them; and 4 bytes per layer
    to agree on s.
    """

    deviations = 2.5

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        # Any two ranks draw independently, or their errors would add up instead of averaging out.
        self._random = torch.Generator().manual_seed(run.seed * 65537 + run.rank)
        self.message_bytes = -(-sum(run.sizes) // 4)

    def scale(self, gradient: Tensor) -> Tensor:
        """Returns the largest magnitude of each clipped layer."""
        return torch.stack([layer.abs().amax() for layer in self._clipped(gradient)])

    def send(self, gradient: Tensor, scale: Tensor) -> Tensor:
        """Returns -s, 0 or s."""
        clipped = torch.cat(self._clipped(gradient))
        spread = scale.repeat_interleave(torch.tensor(self.run.sizes))
        kept = torch.rand(clipped.numel(), generator=self._random) * spread < clipped.abs()
        return clipped.sign() * kept * spread

    def _clipped(self, gradient: Tensor) -> list[Tensor]:
        found = []
        for layer in gradient.split_with_sizes(list(self.run.sizes)):
            # A single element has no deviation to be clipped to.
            bound = float(self.deviations * layer.std(correction=0)) if len(layer) > 1 else math.inf
            found.append(layer.clamp(-bound, bound))
        return found


class Sparse(Compressor):
    """Sends elements as float32 values and int32 positions, and keeps the others back.

    Attributes:
        residual: What has not been sent yet, float32.
    """

    def __init__(self, run: Run, density: float = DENSITY) -> None:
        super().__init__(run)
        if not 0.0 < density <= 1.0:
            raise ValueError(f"density={density} must be a share: more than 0, at most 1")
        self.density, self.residual = density, torch.zeros(sum(run.sizes))

    def take(self, positions: Tensor) -> Tensor:
        """Returns these elements of the residual, which are 0 then, and zeros."""
        dense = torch.zeros_like(self.residual)
        dense[positions] = self.residual[positions]
        self.residual[positions] = 0.0
        self.message_bytes = 8 * positions.numel()
        return dense


def largest(values: Tensor, density: float) -> Tensor:
    """Returns the positions of the share of elements with the largest magnitudes, at least one."""
    count = min(values.numel(), max(1, round(density * values.numel())))
    return values.abs().topk(count, sorted=False).indices


class GradDrop(Sparse):
    """The largest elements of gradient and residual (Aji and Heafield 2017, arXiv 1704.05021).

    One threshold over all parameters, which the paper prefers for models with layer normalisation;
    it is exact here, estimated from a sample there. What is below it is added to the next gradient.
    """

    def send(self, gradient: Tensor, scale: Tensor) -> Tensor:
        """Returns the largest elements of the residual."""
        self.residual += gradient
        return self.take(largest(self.residual, self.density))


class DGC(Sparse):
    """Deep gradient compression (Lin et al. 2018, arXiv 1712.01887, algorithm 4).

    With a worker's gradient g, its momentum u and what it owes v, layer by layer:

        g ← g · min(1, clip·√N / ‖g‖)    local gradient clipping (of all layers together)
        u ← m·u + g,  v ← v + u          momentum correction
        send v and set v = u = 0         where |v| is largest: momentum factor masking

    The momentum is in here: the optimizer is to be SGD without one. The paper clips g/N, of which
    it takes the sum, to clip/√N; here it is g, of which the mean is taken. Warm-up: 1/4 of the
    elements, 1/16, ... in the four epochs of the warm-up, down to the density. The warm-up is a
    share of the run; the paper's four epochs are about this of ImageNet's ninety.

    A worker's `residual` is the paper's v, its `velocity` the paper's u.
    """

    def __init__(
        self,
        run: Run,
        density: float = DENSITY,
        momentum: float = 0.9,
        clip: float | None = 1.0,
        warmup: float = 0.04,
    ) -> None:
        super().__init__(run, density)
        self.momentum, self.clip, self.warmup = momentum, clip, warmup
        self.velocity, self._step = torch.zeros_like(self.residual), 0

    def density_at(self, step: int) -> float:
        """Returns the share that is sent in a step, which is counted from 0."""
        epoch = self.warmup * self.run.steps / WARMUP_EPOCHS
        if step >= WARMUP_EPOCHS * epoch:
            return self.density
        return max(self.density, 0.25 ** (math.floor(step / epoch) + 1))

    def send(self, gradient: Tensor, scale: Tensor) -> Tensor:
        """Returns the largest elements of each layer of the residual."""
        if self.clip is not None:
            limit = self.clip * math.sqrt(self.run.world_size)
            gradient = gradient * min(1.0, limit / max(float(gradient.norm()), 1e-30))
        self.velocity.mul_(self.momentum).add_(gradient)
        self.residual += self.velocity
        density, chosen, start = self.density_at(self._step), [], 0
        self._step += 1
        for layer in self.residual.split_with_sizes(list(self.run.sizes)):
            chosen.append(largest(layer, density) + start)
            start += layer.numel()
        positions = torch.cat(chosen)
        # A stale momentum would go on pushing elements that were held back for long.
        self.velocity[positions] = 0.0
        return self.take(positions)
