"""The tasks of the study: models, batches, and validation losses."""

from __future__ import annotations

import contextlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.convergence.setting import Setting

# By name: the class, whose module may import optional packages, and a line for --help.
TASKS = {
    "pretrain": (
        "text:Pretraining",
        "Pretraining of a byte-level Llama on the standard library's source",
    ),
    "finetune": (
        "text:FineTuning",
        "Fine-tuning of a base trained on library code, on docstrings",
    ),
    "lora": ("text:LowRank", "The task finetune with LoRA"),
    "text": ("files:Files", "Training on text files, of which no piece is seen twice"),
    "smollm2-text": ("files:SmolLM2", "The task text with SmolLM2-135M-Instruct"),
    "smollm2": ("chat:Chat", "Fine-tuning of SmolLM2-135M-Instruct on descriptions of functions"),
    "smollm2-answers": (
        "answers:Answers",
        "Fine-tuning of SmolLM2-135M-Instruct on questions with one right answer",
    ),
    "smollm2-lora": ("chat:ChatLoRA", "The task smollm2 with LoRA"),
}


class Task(ABC):
    """A task, whose results depend only on the setting and the arguments.

    Attributes:
        setting: Sizes and folder. Tasks read neither its method nor its learning rate.
        grids: Learning rates to choose from for AdamW and Lion.
    """

    grids: ClassVar[dict[str, tuple[float, ...]]] = {
        "adamw": (1e-3, 3e-3, 1e-2),
        "lion": (3e-4, 1e-3, 3e-3),
    }

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def prepare(self) -> None:  # noqa: B027
        """Creates the files that all runs share, before the first run."""

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Returns the initial model, bit for bit the same for the same seed."""

    @abstractmethod
    def batch(self, worker: int, step: int, seed: int) -> Any:
        """Returns the batch of a rank in a step."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Returns the mean training loss, which is differentiable."""

    @abstractmethod
    def validation(self, model: nn.Module) -> float:
        """Returns the mean loss on held-out data."""

    def details(self, model: nn.Module) -> dict[str, Any]:
        """Returns what else a record has about the model at the end."""
        return {}


def task_class(name: str) -> type[Task]:
    """Returns the class of a task.

    Raises:
        ValueError: If there is no such task.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; use one of {', '.join(TASKS)}")
    return cast(type[Task], pkgutil.resolve_name(f"benchmarks.convergence.{TASKS[name][0]}"))


def generator(seed: int, *numbers: int) -> np.random.Generator:
    """Returns a generator seeded by a run's seed and other numbers, such as rank and step."""
    return np.random.default_rng((seed, *numbers))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's CPU generator, and restores its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode without gradients, and restores its mode afterwards."""
    training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(training)


def with_lora(model: nn.Module, seed: int) -> nn.Module:
    """Adds LoRA factors to all linear layers; only these factors are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with seeded(seed):
        return get_peft_model(model, config)
