"""What the study trains: models, batches and validation losses, by name."""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.convergence.setting import Setting


class UnknownNameError(ValueError):
    """There is no such scene or method; the text lists those that there are."""


class Scene(ABC):
    """A task. Everything that it returns follows from the setting and the arguments alone.

    Attributes:
        setting: Sizes and folder; scenes read neither its method nor its learning rate.
        grids: Learning rates to choose from, by `Recipe.family`.
        judged_long: Whether validation takes so long that it may have all cores; sums of matrix
            products, and so the last bits of a loss, depend on their number.
    """

    grids: ClassVar[dict[str, tuple[float, ...]]] = {
        "adamw": (1e-3, 3e-3, 1e-2),
        "lion": (3e-4, 1e-3, 3e-3),
        "sgd": (3e-2, 1e-1, 3e-1),
    }

    judged_long: ClassVar[bool] = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def prepare(self, folder: Path) -> None:  # noqa: B027 (most scenes need none)
        """Makes in a folder what all runs share, once, before the first of them."""

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Returns the model at the start; equal seeds give equal bits."""

    @abstractmethod
    def batch(self, worker: int, step: int, seed: int) -> Any:
        """Returns a worker's batch of a step."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Returns the mean training loss, which can be differentiated."""

    @abstractmethod
    def validation(self, model: nn.Module) -> float:
        """Returns the mean loss on held-out data."""

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Returns what else is worth telling of a trained model."""
        return {}


# Where each scene's class is; importing it may take optional packages.
SCENES = {
    "pretrain": "benchmarks.convergence.text:Pretraining",
    "finetune": "benchmarks.convergence.text:FineTuning",
    "lora": "benchmarks.convergence.text:LowRank",
    "smollm2": "benchmarks.convergence.chat:Chat",
    "smollm2-lora": "benchmarks.convergence.chat:ChatLoRA",
    "vision": "benchmarks.convergence.vision:Digits",
    "cifar10": "benchmarks.convergence.vision:Cifar10",
}
# Those whose batches are images, of no sequence.
OF_IMAGES = ("vision", "cifar10")


def scene_class(name: str) -> type[Scene]:
    """Returns the class of a scene."""
    if name not in SCENES:
        raise UnknownNameError(f"unknown scene {name!r}: there are {', '.join(SCENES)}")
    module, _, member = SCENES[name].partition(":")
    return cast(type[Scene], getattr(importlib.import_module(module), member))


def generator(seed: int, *words: int) -> np.random.Generator:
    """Returns random numbers that follow from a run's seed and the words, as worker and step."""
    return np.random.default_rng((seed, *words))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's numbers on the CPU, and lets them go on afterwards as if nothing had been."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches a model to evaluation, without gradients, and back to what it was."""
    training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(training)


def with_lora(model: nn.Module, seed: int) -> nn.Module:
    """Returns a model of which only LoRA's new factors of all linear layers are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with seeded(seed):
        return get_peft_model(model, config)
