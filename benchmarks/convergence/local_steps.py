"""What less than one bit per parameter and step costs: trials, in this study only.

Workers that share their weights take k steps of plain Lion by themselves, then agree on new common
weights. A worker's *delta* is the sum of its k signs, an integer from -k to k for each element. For
common weights x, a learning rate that stays the same for k steps, and weight decay for all of them
at once:

    x <- x (1 - k lr wd) - lr move

`Mean`, `DeltaVote` and `OuterVote` are three ways from deltas to a move. `SignMuon` exchanges in
every step, a vote on another direction than Lion's.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.convergence.methods import Method, lion_options, named, set_lr, trainable
from benchmarks.convergence.scenes import Scene
from benchmarks.convergence.setting import Setting
from hf_dlion.optimizer import DistributedLion

# The quintic of Muon, five times: https://kellerjordan.github.io/posts/muon.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Replicas(Method):
    """N workers with a model each, which gather what they send from one another.

    `bytes_sent` counts N - 1 messages of `bits` bits per element, and rows of zeros as any others.
    """

    bits = 1.0

    def __init__(self, scene: Scene, setting: Setting) -> None:
        """Makes the models."""
        self.places = [(rank, scene.model(setting.seed)) for rank in range(setting.workers)]
        self._params = [trainable(model) for _, model in self.places]
        self._numel = sum(param.numel() for param in self._params[0])
        self._taken, self._setting = 0, setting

    def agree(self, number: int, value: Tensor) -> None:
        """Gives a parameter one value on all workers."""
        for params in self._params:
            params[number].data.copy_(value)

    def count(self) -> None:
        """Counts an exchange."""
        others = len(self.places) - 1
        self.bytes_sent += others * self.bits * self._numel / 8
        self.rounds += others


class LocalSteps(Replicas):
    """Lion on each worker's own gradients, with an exchange every k steps and at the end."""

    def __init__(self, scene: Scene, setting: Setting, every: int) -> None:
        """Makes the workers; `every` is k."""
        super().__init__(scene, setting)
        options = lion_options(setting) | {"weight_decay": 0.0}
        self._lions = [DistributedLion(named(model), **options) for _, model in self.places]
        self._common = [param.detach().clone() for param in self._params[0]]
        self._every, self._lr = every, setting.lr

    def step(self, lr: float) -> None:
        """Takes a step on each worker, and exchanges where a period ends."""
        if self._taken % self._every == 0:
            self._lr = lr
        for lion in self._lions:
            set_lr(lion, self._lr)
            lion.step()
            lion.zero_grad()
        self._taken += 1
        if self._taken % self._every == 0 or self._taken == self._setting.steps:
            self._exchange((self._taken - 1) % self._every + 1)

    def _exchange(self, steps: int) -> None:
        for number, common in enumerate(self._common):
            ends = torch.stack([params[number].detach() for params in self._params])
            deltas = ((common - ends) / self._lr).round_().clamp_(-steps, steps)
            move = self.move(number, deltas, steps)
            common *= 1.0 - steps * self._lr * self._setting.weight_decay
            common -= self._lr * move
            self.agree(number, common)
        self.count()

    @abstractmethod
    def move(self, number: int, deltas: Tensor, steps: int) -> Tensor:
        """Returns by how many learning rates a parameter moves, its shape.

        Args:
            number: Of the parameter.
            deltas: Whole numbers from -steps to steps, shape (N, *shape).
            steps: Since the last exchange.
        """


class Mean(LocalSteps):
    """The mean of the deltas, whole numbers of log2(2k + 1) bits as in FedLion (arXiv 2402.09941).

    FedLion's server also averages the workers' momenta; here each keeps its own.
    """

    def __init__(self, scene: Scene, setting: Setting, every: int) -> None:
        """Makes the workers; `every` is k."""
        super().__init__(scene, setting, every)
        self.bits = math.log2(2 * every + 1)

    def move(self, number: int, deltas: Tensor, steps: int) -> Tensor:
        """See `LocalSteps.move`."""
        return deltas.mean(dim=0)


class DeltaVote(LocalSteps):
    """A vote on the deltas' signs, as long as their mean magnitude; what a sign leaves is kept.

    With e what worker i has kept of a tensor so far, c = delta + e and s = mean |c|, its vote is
    sign(c), the move is the majority times the mean of s over the workers, and e becomes
    c - s sign(c), as in EF-signSGD (arXiv 1901.09847).
    """

    def __init__(self, scene: Scene, setting: Setting, every: int) -> None:
        """Makes the workers; `every` is k."""
        super().__init__(scene, setting, every)
        workers = len(self.places)
        self._kept = [p.new_zeros((workers, *p.shape)) for p in self._common]

    def move(self, number: int, deltas: Tensor, steps: int) -> Tensor:
        """See `LocalSteps.move`."""
        wanted = deltas + self._kept[number]
        sizes = wanted.abs().mean(dim=tuple(range(1, wanted.dim())), keepdim=True)
        self._kept[number] = wanted - sizes * wanted.sign()
        return majority(wanted, self._taken // self._every) * sizes.mean()


class OuterVote(LocalSteps):
    """A vote of Distributed Lion with the deltas for gradients, and a momentum for that; k long."""

    def __init__(self, scene: Scene, setting: Setting, every: int) -> None:
        """Makes the workers; `every` is k."""
        super().__init__(scene, setting, every)
        workers = len(self.places)
        self._momenta = [p.new_zeros((workers, *p.shape)) for p in self._common]

    def move(self, number: int, deltas: Tensor, steps: int) -> Tensor:
        """See `LocalSteps.move`."""
        beta1, beta2 = self._setting.betas
        momentum = self._momenta[number]
        direction = torch.lerp(deltas, momentum, beta1)
        momentum.lerp_(deltas, 1.0 - beta2)
        return steps * majority(direction, self._taken // self._every)


class SignMuon(Replicas):
    """A vote in every step on the sign of Lion's direction, orthogonalised (arXiv 2605.16311).

    Only of matrices, and whole ones, an embedding among them; of other parameters as it is.
    """

    def __init__(self, scene: Scene, setting: Setting) -> None:
        """Makes the workers."""
        super().__init__(scene, setting)
        workers = len(self.places)
        self._momenta = [p.detach().new_zeros((workers, *p.shape)) for p in self._params[0]]

    def step(self, lr: float) -> None:
        """Votes."""
        beta1, beta2 = self._setting.betas
        self._taken += 1
        for number, momentum in enumerate(self._momenta):
            own = [params[number] for params in self._params]
            if all(param.grad is None for param in own):
                continue
            zeros = torch.zeros_like(own[0])
            grads = torch.stack([zeros if param.grad is None else param.grad for param in own])
            directions = torch.lerp(grads, momentum, beta1)
            momentum.lerp_(grads, 1.0 - beta2)
            if own[0].dim() == 2:
                directions = torch.stack([orthogonal(direction) for direction in directions])
            move = majority(directions, self._taken)
            value = own[0].detach() * (1.0 - lr * self._setting.weight_decay) - lr * move
            self.agree(number, value)
            for param in own:
                param.grad = None
        self.count()


def majority(wanted: Tensor, turn: int) -> Tensor:
    """Returns the majority of the signs of the workers, +1 or -1, 0 where all are zero.

    A tie goes one way and the other by turns, and by neighbouring elements.

    Args:
        wanted: Shape (N, *shape).
        turn: Number of the exchange.
    """
    signs = wanted.sign()
    total = signs.sum(dim=0).sign()
    place = torch.arange(total.numel(), device=total.device).view(total.shape)
    tied = (total == 0) & (signs != 0).any(dim=0)
    return torch.where(tied, 1.0 - 2.0 * ((place + turn) % 2), total)


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns a matrix's nearest semi-orthogonal one, roughly, by Muon's iteration in bfloat16."""
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = ((matrix.T if tall else matrix) / (matrix.norm() + 1e-7)).bfloat16()
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).to(matrix.dtype)


LOCAL: Sequence[tuple[str, type[LocalSteps]]] = (
    ("deltas", Mean),
    ("delta-vote", DeltaVote),
    ("outer-vote", OuterVote),
)
EVERY = (4, 8, 16)
