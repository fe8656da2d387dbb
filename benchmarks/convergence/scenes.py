"""The tasks of the study: models, batches and validation losses, by name."""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.convergence.setting import Setting

# Where a scene's class is, since its imports may need optional packages, and what it learns.
SCENES = {
    "pretrain": ("text:Pretraining", "a byte-level Llama, the standard library's source"),
    "finetune": ("text:FineTuning", "a base of library code, the prose of docstrings"),
    "lora": ("text:LowRank", "the same with LoRA"),
    "smollm2": ("chat:Chat", "SmolLM2-135M-Instruct, what library functions do"),
    "smollm2-lora": ("chat:ChatLoRA", "the same with LoRA"),
    "vision": (
        "vision:Digits",
        "the paper's vision transformer, smaller, on scikit-learn's digits",
    ),
    "cifar10": ("vision:Cifar10", "the paper's vision transformer on CIFAR-10"),
}


class Scene(ABC):
    """A task. What it returns follows from the setting and the arguments alone.

    Attributes:
        setting: Sizes and folder; scenes read neither its method nor its learning rate.
        grids: Learning rates to choose from: AdamW's, Lion's, SGD's.
    """

    grids: ClassVar[dict[str, tuple[float, ...]]] = {
        "adamw": (1e-3, 3e-3, 1e-2),
        "lion": (3e-4, 1e-3, 3e-3),
        "sgd": (3e-2, 1e-1, 3e-1),
    }

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def prepare(self) -> None:  # noqa: B027
        """Makes what all runs share in the folder, before the first of them."""

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Returns the model at the start; equal seeds give equal bits."""

    @abstractmethod
    def batch(self, worker: int, step: int, seed: int) -> Any:
        """Returns a rank's batch of a step."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Returns the mean training loss, differentiable."""

    @abstractmethod
    def validation(self, model: nn.Module) -> float:
        """Returns the mean loss on held-out data."""

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Returns other measures of a trained model."""
        return {}


def scene_class(name: str) -> type[Scene]:
    """Returns the class of a scene.

    Raises:
        ValueError: If there is no such scene.
    """
    if name not in SCENES:
        raise ValueError(f"unknown scene {name!r}: there are {', '.join(SCENES)}")
    module, _, member = SCENES[name][0].partition(":")
    found = importlib.import_module(f"benchmarks.convergence.{module}")
    return cast(type[Scene], getattr(found, member))


def generator(seed: int, *words: int) -> np.random.Generator:
    """Returns random numbers that follow from a run's seed and the words, as rank and step."""
    return np.random.default_rng((seed, *words))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's numbers on the CPU, and restores their state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches a model to evaluation without gradients, and back."""
    training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(training)


def with_lora(model: nn.Module, seed: int) -> nn.Module:
    """Returns a model that trains new LoRA factors of all linear layers only."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with seeded(seed):
        return get_peft_model(model, config)
