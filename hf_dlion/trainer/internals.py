"""What is used of transformers that it does not document, and the error where it is missing."""

from __future__ import annotations

import inspect
import operator
import pkgutil
from collections.abc import Sequence
from typing import Any

import transformers
from transformers import Trainer

from hf_dlion.checkpoint.whole import TRAINER_STATE, TRAINERS_OPTIMIZERS

PREFIX = "checkpoint"

# `hf_dlion.checkpoint` knows a checkpoint by these.
_NAMES = {
    "trainer_utils:PREFIX_CHECKPOINT_DIR": PREFIX,
    "trainer:TRAINER_STATE_NAME": TRAINER_STATE,
    "trainer:OPTIMIZER_NAME": TRAINERS_OPTIMIZERS[0],
}
_ATTRIBUTES = (
    *("accelerator", "callback_handler.callbacks", "is_deepspeed_enabled", "is_fsdp_enabled"),
    *("model_wrapped", "optimizer_cls_and_kwargs"),
)


def missing_seam(what: str) -> RuntimeError:
    """Returns the error for a transformers that lacks `what`."""
    return RuntimeError(
        f"hf_dlion needs {what}, which transformers {transformers.__version__} does not have; "
        "it works with transformers 5.2 to 5.23. Without Trainer, use DistributedLion in a loop of "
        "your own or with Accelerate"
    )


def internal(path: str) -> Any:
    """Returns what `path` ("module:name") stands for in transformers.

    Raises:
        RuntimeError: If this transformers does not have it.
    """
    try:
        return pkgutil.resolve_name(f"transformers.{path}")
    except (ImportError, AttributeError) as error:
        raise missing_seam(f"transformers.{path.replace(':', '.')}") from error


def internal_function(path: str, parameters: Sequence[str]) -> Any:
    """Returns a function or method of transformers whose first parameters are `parameters`.

    Raises:
        RuntimeError: If this transformers does not have it, or with other parameters.
    """
    function = internal(path)
    shown = f"{path.rpartition(':')[2]}({', '.join(parameters)})"
    if not inspect.isfunction(function):
        raise missing_seam(shown)
    own = [name for name in inspect.signature(function).parameters if name != "self"]
    if own[: len(parameters)] != list(parameters):
        raise missing_seam(shown)
    return function


def check_names() -> None:
    """Checks that transformers names what it saves as `hf_dlion.checkpoint` knows it.

    Raises:
        RuntimeError: If it does not.
    """
    for path, name in _NAMES.items():
        if internal(path) != name:
            raise missing_seam(f"transformers.{path.replace(':', '.')} = {name!r}")


def check_trainer(trainer: Trainer) -> None:
    """Checks that a Trainer has the attributes that are used of it.

    Raises:
        RuntimeError: If it lacks one.
    """
    for path in _ATTRIBUTES:
        try:
            operator.attrgetter(path)(trainer)
        except AttributeError as error:
            raise missing_seam(f"Trainer().{path}") from error
