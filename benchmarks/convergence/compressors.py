"""Gradient compressors that are baselines of the Distributed Lion paper.

All workers are in this process. A message is kept as the dense gradient that it encodes, and its
bytes are counted: every worker sends its message to every other worker.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.methods import ring_bytes

# Share of elements that GradDrop and DGC send in the Distributed Lion paper.
DENSITY = 0.04


class Compressor(ABC):
    """Compresses the gradients of all workers of a run.

    Args:
        sizes: Number of elements of each layer.
        workers: Number of workers N.
        seed: Seed of random numbers.
        steps: Number of steps of the run.

    Attributes:
        bytes_sent: Bytes that a worker has sent so far.
    """

    def __init__(self, sizes: Sequence[int], workers: int, seed: int = 0, steps: int = 1) -> None:
        self.sizes, self.workers, self.steps, self.taken = list(sizes), workers, steps, 0
        self.random = torch.Generator().manual_seed(seed)
        self.bytes_sent = 0

    @abstractmethod
    def messages(self, gradients: Tensor) -> Tensor:
        """Returns the gradients that the workers' messages encode, and counts their bytes.

        Args:
            gradients: Gradients of one step, float32, shape (N, elements of all layers).
        """

    def mean(self, gradients: Tensor) -> Tensor:
        """Returns the mean of the messages, shape (elements,)."""
        messages = self.messages(gradients)
        self.taken += 1
        return messages.mean(dim=0)


class TernGrad(Compressor):
    """Sends -s, 0, or s per element, without bias (TernGrad, Wen et al. 2017, arXiv 1705.07878).

    Layer by layer, g is clipped to 2.5 standard deviations, s is the largest |g| of all workers
    (scaler sharing), and an element is s·sign(g) with probability |g| / s, else 0. An element takes
    two bits, as in the paper, and s takes one ring all-reduce.
    """

    deviations = 2.5

    def messages(self, gradients: Tensor) -> Tensor:
        found = []
        for layer in gradients.split(self.sizes, dim=1):
            if layer.shape[1] > 1:  # A single element has no deviation.
                bound = self.deviations * layer.std(dim=1, correction=0, keepdim=True)
                layer = layer.clamp(-bound, bound)
            scale = layer.abs().amax()
            kept = torch.rand(layer.shape, generator=self.random) * scale < layer.abs()
            found.append(layer.sign() * kept * scale)
        message = -(-sum(self.sizes) // 4)
        self.bytes_sent += (self.workers - 1) * message
        self.bytes_sent += ring_bytes(len(self.sizes), ranks=self.workers)
        return torch.cat(found, dim=1)


class Sparse(Compressor):
    """Sends some elements as float32 values and int32 positions, and keeps the rest for later.

    Attributes:
        residual: Sum of what has not been sent yet, float32, shape (N, elements).
    """

    density = DENSITY

    def __init__(self, sizes: Sequence[int], workers: int, seed: int = 0, steps: int = 1) -> None:
        super().__init__(sizes, workers, seed, steps)
        self.residual = torch.zeros(workers, sum(sizes))

    def send(self, chosen: Tensor) -> Tensor:
        """Returns the chosen elements of the residual, zeros elsewhere, and sets them to 0."""
        message = self.residual * chosen
        self.residual[chosen] = 0.0
        self.bytes_sent += 8 * (self.workers - 1) * int(chosen[0].sum())
        return message


def largest(values: Tensor, density: float) -> Tensor:
    """Returns a bool mask of the share of each row with the largest magnitudes."""
    count = min(values.shape[1], max(1, round(density * values.shape[1])))
    places = values.abs().topk(count, dim=1, sorted=False).indices
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, places, True)


class GradDrop(Sparse):
    """Sends the largest elements of gradient and residual (Aji and Heafield, arXiv 1704.05021).

    All parameters have one threshold, which the paper prefers for models with layer normalization.
    The threshold is exact here, and estimated from a sample in the paper.
    """

    def messages(self, gradients: Tensor) -> Tensor:
        self.residual += gradients
        return self.send(largest(self.residual, self.density))


class DGC(Sparse):
    """Deep gradient compression (Lin et al. 2018, arXiv 1712.01887, Algorithm 4).

    With a worker's gradient g, its `velocity` u and its `residual` v, layer by layer:

        g = g * min(1, clip * sqrt(N) / |g|)     local clipping, all layers together
        u = momentum * u + g,  v = v + u         momentum correction
        send v, and v = u = 0                    where |v| is largest: momentum factor masking

    So the optimizer is SGD without momentum. The paper clips g / N, which it sums, to clip /
    sqrt(N). During the first 4% of the run (the paper's four epochs of about ninety), the density
    decreases by factors of four: 1/4, 1/16, ...
    """

    momentum, clip, warmup, epochs = 0.9, 1.0, 0.04, 4

    def __init__(self, sizes: Sequence[int], workers: int, seed: int = 0, steps: int = 1) -> None:
        super().__init__(sizes, workers, seed, steps)
        self.velocity = torch.zeros_like(self.residual)

    def density_at(self, step: int) -> float:
        """Returns the share of elements that a step (from 0) sends."""
        epoch = self.warmup * self.steps / self.epochs
        if step >= self.epochs * epoch:
            return self.density
        return max(self.density, 0.25 ** (math.floor(step / epoch) + 1))

    def messages(self, gradients: Tensor) -> Tensor:
        norms = gradients.norm(dim=1, keepdim=True).clamp_min(1e-30)
        gradients = gradients * (self.clip * math.sqrt(self.workers) / norms).clamp_max(1.0)
        self.velocity.mul_(self.momentum).add_(gradients)
        self.residual += self.velocity
        density = self.density_at(self.taken)
        layers = self.residual.split(self.sizes, dim=1)
        chosen = torch.cat([largest(layer, density) for layer in layers], dim=1)
        self.velocity[chosen] = 0.0
        return self.send(chosen)
