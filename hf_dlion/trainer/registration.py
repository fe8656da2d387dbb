"""`optim="dlion"` in `TrainingArguments`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from transformers import Trainer, training_args

from hf_dlion.optimizer import DistributedLion
from hf_dlion.trainer.arguments import lion_kwargs
from hf_dlion.trainer.seams import install_seams, missing_seam

if TYPE_CHECKING:
    from transformers import TrainingArguments

OPTIM_NAME = "dlion"


def register() -> None:
    """Makes `TrainingArguments(optim="dlion")` train with a `DistributedLion`.

    Call it before the arguments are made or parsed, in every process; a second call does nothing.
    A saved `training_args.bin` of such a run can only be loaded after it, too.

    It adds a name to transformers' enum of optimizers and a handler to its table, has Trainer check
    `optim_args` before it splits them, and wraps the methods in which Trainer creates the
    optimizer, and saves and loads its state; these act only on a Trainer that trains with a
    DistributedLion.

    Raises:
        RuntimeError: If this transformers has no such table or methods.
    """
    handlers = _handlers()
    if not callable(getattr(Trainer, "get_optimizer_cls_and_kwargs", None)):
        raise missing_seam("Trainer.get_optimizer_cls_and_kwargs")
    install_seams()
    if OPTIM_NAME in handlers:
        return
    name = _add_name()
    _check_optim_args_first()
    handlers[name] = _handle


def _handlers() -> dict[Any, Any]:
    try:
        from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
    except ImportError as error:
        raise missing_seam("transformers.trainer_optimizer._OPTIMIZER_HANDLERS") from error
    if not isinstance(_OPTIMIZER_HANDLERS, dict):
        raise missing_seam("a dict transformers.trainer_optimizer._OPTIMIZER_HANDLERS")
    return _OPTIMIZER_HANDLERS


def _add_name() -> Any:
    """Returns the new member of the enum, which Python has no public way to add."""
    names: Any = training_args.OptimizerNames
    key = OPTIM_NAME.upper()
    member = str.__new__(names, OPTIM_NAME)
    member._name_ = key
    member._value_ = OPTIM_NAME
    try:
        member._sort_order_ = len(names._member_names_)
        setattr(names, key, member)
        names._member_names_.append(key)
        names._member_map_[key] = member
        names._value2member_map_[OPTIM_NAME] = member
    except (AttributeError, TypeError) as error:
        raise missing_seam("an OptimizerNames enum that can be added to") from error
    if names(OPTIM_NAME) is not member or member not in list(names):
        raise missing_seam("an OptimizerNames enum that can be added to")
    return member


def _check_optim_args_first() -> None:
    """Wraps the static method whose own parser ends in "not enough values to unpack"."""
    original = Trainer.get_optimizer_cls_and_kwargs

    @functools.wraps(original)
    def checked(args: TrainingArguments, *rest: Any, **kwargs: Any) -> Any:
        if args.optim == OPTIM_NAME:
            lion_kwargs(args)
        return original(args, *rest, **kwargs)

    setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(checked))  # noqa: B010 (mypy)


def _handle(context: Any) -> tuple[type[DistributedLion], dict[str, Any]]:
    # The class, not a factory: a Trainer with a create_optimizer of its own calls it on its groups.
    return DistributedLion, lion_kwargs(context.args)
