"""Makes "dlion" a name that TrainingArguments accept, before Trainer is loaded."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping
from types import NoneType
from typing import Any

import transformers

from hf_dlion.trainer.optim_args import OPTIM_NAME, as_text, parse_optim_args


def missing(what: str) -> RuntimeError:
    """Returns the error for a version of transformers that lacks `what`."""
    return RuntimeError(
        f"hf_dlion needs {what}, which transformers {transformers.__version__} doesn't have. Use "
        f"transformers 5.2 to 5.24, or DistributedLion in an Accelerate or torch loop"
    )


def internal(path: str) -> Any:
    """Returns the object at "module:name" in transformers, or raises RuntimeError."""
    try:
        return pkgutil.resolve_name(f"transformers.{path}")
    except (ImportError, AttributeError) as error:
        raise missing(path.replace(":", ".")) from error


def add_name() -> Any:
    """Returns the member "dlion" of transformers' enum of optimizers, which the first call adds.

    From then on, TrainingArguments check `optim_args` when they are made.

    Raises:
        RuntimeError: If this version of transformers has no such enum.
    """
    names: Any = internal("training_args:OptimizerNames")
    if OPTIM_NAME in names._value2member_map_:
        return names(OPTIM_NAME)
    # Python has no public way to add a member.
    key = OPTIM_NAME.upper()
    member = str.__new__(names, OPTIM_NAME)
    member._name_, member._value_ = key, OPTIM_NAME
    try:
        member._sort_order_ = len(names._member_names_)
        setattr(names, key, member)
        names._member_names_.append(key)
        names._member_map_[key] = names._value2member_map_[OPTIM_NAME] = member
    except (AttributeError, TypeError) as error:
        raise missing("an OptimizerNames enum that can be added to") from error
    _check_when_made(internal("training_args:TrainingArguments"))
    return member


def check_optim_args(args: Any) -> None:
    """Refuses wrong options in TrainingArguments; turns options in a dict into text.

    Raises what `parse_optim_args` raises.
    """
    if args.optim != OPTIM_NAME:
        return
    if isinstance(args.optim_args, Mapping):
        args.optim_args = as_text(args.optim_args)
    if not isinstance(args.optim_args, (str, NoneType)):
        raise TypeError(
            f"optim_args must be text such as 'bits=2,ties=zero', or a dict (got "
            f"{args.optim_args!r})"
        )
    parse_optim_args(args.optim_args)


def _check_when_made(arguments: Any) -> None:
    original = arguments.__post_init__

    @functools.wraps(original)
    def check(args: Any) -> None:
        check_optim_args(args)
        original(args)

    arguments.__post_init__ = check
