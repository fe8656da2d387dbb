"""What trains in a run of the study: N workers in this process, or one real rank of N."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.convergence.setting import Setting
from benchmarks.convergence.tasks import Task
from benchmarks.methods import groups_of, method_of, set_lr
from hf_dlion import DistributedLion


class Workers(ABC):
    """All workers of a run, in one process, or the one of a real rank.

    Attributes:
        numbers: Numbers of the workers whose gradients this process computes.
        model: Model that computes their gradients, one after the other.
        params: Its trainable parameters, in the order of the parameter groups.
        weights: Weights of each worker, if workers have their own: tensors like `params`.
        bytes_sent: Bytes that a rank has sent so far.
    """

    numbers: Sequence[int]
    weights: Sequence[Sequence[Tensor]] = ()
    bytes_sent: float = 0.0

    def __init__(self, task: Task, setting: Setting) -> None:
        self.setting, self.numbers = setting, range(setting.workers)
        self.model = task.model(setting.seed)
        if setting.bf16_weights:
            self.model.to(torch.bfloat16)
        if setting.bf16:  # As Accelerate does it.
            self.model.forward = torch.autocast("cpu", torch.bfloat16)(self.model.forward)
        groups = groups_of(self.model, setting)
        self.params = [param for group in groups for _, param in group["params"]]

    def total(self, loss: float) -> float:
        """Returns the sum of all workers' losses, given that of the workers in this process."""
        return loss

    def separate(self) -> None:
        """Gives each worker weights of its own."""
        self.weights = [[param.detach().clone() for param in self.params] for _ in self.numbers]

    def show(self, worker: int) -> None:
        """Puts a worker's weights into the model, if workers have their own."""
        if self.weights:
            for param, own in zip(self.params, self.weights[worker], strict=True):
                param.data = own

    def collect(self, worker: int, lr: float) -> None:  # noqa: B027
        """Takes a worker's gradients from the model, or leaves them there to add those of others.

        A worker with weights of its own takes its step.
        """

    @abstractmethod
    def step(self, lr: float) -> None:
        """Ends a step of all workers: moves the common weights, or averages their own if due."""

    def evaluated(self, validation: Callable[[nn.Module], Any]) -> Any:
        """Returns what `validation` finds; NaN on ranks whose record isn't kept."""
        return validation(self.model)

    def close(self) -> None:  # noqa: B027
        """Stops what the method started."""

    def clip(self) -> None:
        """Clips the gradients in the model."""
        if self.setting.clip:
            nn.utils.clip_grad_norm_(self.params, self.setting.clip)


class RealRank(Workers):
    """One real rank of an existing process group."""

    def __init__(self, task: Task, setting: Setting) -> None:
        super().__init__(task, setting)
        self.numbers = [dist.get_rank()]
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

    def _alone(self, validation: Callable[[nn.Module], Any]) -> Any:
        """Validates on one thread per rank, since the other ranks wait."""
        threads = torch.get_num_threads()
        torch.set_num_threads(min(dist.get_world_size(), os.cpu_count() or 1))
        found = validation(getattr(self.model, "module", self.model))
        torch.set_num_threads(threads)
        return found

    def close(self) -> None:
        self._rank.close()
