"""N workers and what makes one step of their gradients, all in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.convergence.compressors import Compressor
from benchmarks.convergence.scenes import Scene
from benchmarks.convergence.setting import Setting
from hf_dlion.exchange.mean import average_wire_bytes
from hf_dlion.exchange.memory import Hub
from hf_dlion.optimizer import DistributedLion

Make = Callable[[nn.Module, Setting], Optimizer]
Options = Callable[[Setting, int], dict[str, Any]]


class Method(ABC):
    """N workers, or one of N, and what makes one step of their gradients.

    Attributes:
        places: Pairs of worker and model: whose gradients this process computes, and on what;
            models may be one and the same.
        bytes_sent: Bytes that a rank has sent so far.
        rounds: Messages that waited for one another so far.
        judges: Whether this process takes validation losses and metrics.
        judging_threads: torch's threads while it does; None leaves them as they are.
    """

    places: Sequence[tuple[int, nn.Module]]
    bytes_sent: float = 0.0
    rounds: int = 0
    judges: bool = True
    judging_threads: int | None = None

    def total(self, loss: float) -> float:
        """Returns the sum of all workers' losses, of that of this process's workers."""
        return loss

    def collect(self, model: nn.Module) -> None:  # noqa: B027 (most have nothing to do)
        """Takes over the gradients that a worker's backward has just left in `model`."""

    @abstractmethod
    def step(self, lr: float) -> None:
        """Moves the parameters and drops the gradients."""

    @property
    def voters(self) -> Sequence[DistributedLion]:
        """The optimizers with a momentum per worker, all of them; empty where there are none."""
        return ()

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Ends what the method started."""


class Averaged(Method):
    """One optimizer on the mean gradient, or on what a compressor makes of the workers' gradients.

    The last two arguments are as in `Recipe`.
    """

    def __init__(
        self, scene: Scene, setting: Setting, make: Make, compressor: Compressor | None
    ) -> None:
        """Makes one model: the workers' would never differ."""
        model = scene.model(setting.seed)
        self.places = [(worker, model) for worker in range(setting.workers)]
        self._params = trainable(model)
        self._optimizer = make(model, setting)
        self._compressor = compressor
        self._gradients: list[list[Tensor]] = []
        if compressor is not None:
            compressor.start(setting.workers, self._params, setting.seed, setting.steps)

    def collect(self, model: nn.Module) -> None:
        """Keeps the gradients apart; without a compressor autograd adds them up by itself."""
        if self._compressor is not None:
            self._gradients.append([_gradient(param) for param in self._params])
            self._optimizer.zero_grad()

    def step(self, lr: float) -> None:
        """Takes a step on the mean."""
        workers = len(self.places)
        # The workers' gradients have been added up in one model, or kept apart.
        if self._compressor is None:
            for param in self._params:
                if param.grad is not None:
                    param.grad /= workers
            numel = sum(param.numel() for param in self._params)
            self.bytes_sent += average_wire_bytes(numel, workers, torch.float32)
            self.rounds += 2 * (workers - 1)
        else:
            means = self._compressor.compress(self._gradients)
            for param, mean in zip(self._params, means, strict=True):
                param.grad = mean
            self._gradients = []
            self.bytes_sent += self._compressor.bits_per_iteration / 8
            self.rounds += self._compressor.rounds_per_iteration
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Voting(Method):
    """N `DistributedLion` in N threads, each with a replica of its own; options as in `Recipe`."""

    def __init__(self, scene: Scene, setting: Setting, options: Options) -> None:
        """Makes the replicas."""
        self._hub = Hub(setting.workers)
        self.places = [(rank, scene.model(setting.seed)) for rank in range(setting.workers)]
        numel = sum(param.numel() for param in trainable(self.places[0][1]))
        every = lion_options(setting) | options(setting, numel)
        self._optimizers = [
            DistributedLion(groups_of(model, setting), process_group=group, **every)
            for (_, model), group in zip(self.places, self._hub.groups, strict=True)
        ]

    @property
    def voters(self) -> Sequence[DistributedLion]:
        """All of them."""
        return self._optimizers

    def step(self, lr: float) -> None:
        """Exchanges votes."""
        for optimizer in self._optimizers:
            set_lr(optimizer, lr)
        self._hub.run([optimizer.step for optimizer in self._optimizers])
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self.bytes_sent = float(self._optimizers[0].wire.bytes_sent)
        self.rounds = self._optimizers[0].wire.rounds

    def close(self) -> None:
        """Ends the threads."""
        self._hub.close()


def lion_options(setting: Setting) -> dict[str, Any]:
    """Returns the options that all Lions of a run share."""
    return {key: getattr(setting, key) for key in ("lr", "betas", "weight_decay", "seed")}


def groups_of(model: nn.Module, setting: Setting) -> list[dict[str, Any]]:
    """Returns what is trained, with names, in a parameter group for each factor of `lr_factors`.

    Raises:
        ValueError: If a pattern matches no name.
    """
    pairs = named(model)
    for pattern, _ in setting.lr_factors:
        if not any(fnmatchcase(name, pattern) for name, _ in pairs):
            raise ValueError(f"--lr-factors: no parameter has a name like {pattern}")
    found: dict[float, list[tuple[str, Tensor]]] = {}
    for name, param in pairs:
        found.setdefault(setting.lr_factor(name), []).append((name, param))
    return [{"params": group, "lr_factor": factor} for factor, group in found.items()]


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns names and parameters of what is trained."""
    return [pair for pair in model.named_parameters() if pair[1].requires_grad]


def trainable(model: nn.Module) -> list[Tensor]:
    """Returns the parameters that are trained."""
    return [param for _, param in named(model)]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups, times their factors."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


def _gradient(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad
