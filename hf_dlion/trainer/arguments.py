"""How a Trainer's arguments become a DistributedLion: `optim="dlion"`, or a class and its options.

`register` teaches transformers the name "dlion"; `optimizer_cls_and_kwargs` needs no registration.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from hf_dlion.optimizer import DistributedLion
from hf_dlion.options.optim_args import check_names, only_ours, parse_optim_args
from hf_dlion.options.warn_once import warn_once
from hf_dlion.trainer.internals import internal, internal_function, missing_seam
from hf_dlion.trainer.seams import install_seams

logger = logging.get_logger(__name__)

OPTIM_NAME = "dlion"
# TrainingArguments' defaults, which are AdamW's: a run that has them did not choose them.
ADAM_BETAS = (0.9, 0.999)
LION_BETAS = (0.9, 0.99)
# A Trainer runs unattended, and what a comparison costs is nothing among so many steps.
DEFAULTS = {"check_replicas_every": 100}


def optimizer_cls_and_kwargs(
    args: TrainingArguments, **options: Any
) -> tuple[type[DistributedLion], dict[str, Any]]:
    """Returns what `Trainer(optimizer_cls_and_kwargs=...)` takes; needs no registration.

    The learning rate, the weight decay and the betas come from `args`, as with `optim="dlion"`, and
    so does what `args.optim_args` says. Trainer builds its decay groups. Call it before the Trainer
    is made, because it prepares Trainer for the names, log entries and checkpoints of the
    optimizer.

    Args:
        args: The Trainer's arguments.
        options: Keyword options of `DistributedLion`; they win over `args`.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option is unknown or its value is not allowed.
        NotImplementedError: If options do not go together yet.
        RuntimeError: If this transformers lacks what the preparation needs.

    Examples:
        >>> from transformers import TrainingArguments
        >>> args = TrainingArguments(output_dir="out", learning_rate=1e-4, use_cpu=True)
        >>> cls, kwargs = optimizer_cls_and_kwargs(args, aggregation="average")
        >>> cls.__name__, kwargs["lr"], kwargs["betas"]
        ('DistributedLion', 0.0001, (0.9, 0.99))
        >>> kwargs["aggregation"], kwargs["check_replicas_every"]
        ('average', 100)
    """
    install_seams()
    check_names(list(options))
    return DistributedLion, lion_kwargs(args, **options)


def lion_kwargs(args: TrainingArguments, **chosen: Any) -> dict[str, Any]:
    """Returns the keyword arguments of `DistributedLion` that `args` and `chosen` ask for.

    `chosen` wins over `optim_args`, which wins over `adam_beta1` and `adam_beta2`; AdamW's default
    betas count as unset. Replicas are compared every 100 steps unless one of them says otherwise.

    Raises:
        TypeError: If a value in `optim_args` has the wrong type.
        ValueError: If `optim_args` is malformed, or a value is not allowed.
        NotImplementedError: If options do not go together yet.
    """
    own = {name: value for name, value in chosen.items() if name not in ("lr", "betas")}
    options = DEFAULTS | parse_optim_args(args.optim_args, DEFAULTS, own)
    betas = []
    adam = (args.adam_beta1, args.adam_beta2)
    for name, given, default, lion in zip(
        ("beta1", "beta2"), adam, ADAM_BETAS, LION_BETAS, strict=True
    ):
        beta = options.pop(name, None)
        if beta is None:
            beta = lion if given == default else given
            if beta != given:
                logger.info(f"adam_{name}={given} is AdamW's default; dlion uses {name}={lion}")
        betas.append(beta)
    return {"lr": args.learning_rate, "betas": tuple(betas), **options, **chosen}


def register() -> None:
    """Makes `TrainingArguments(optim="dlion")` train with a `DistributedLion`.

    Call it before the arguments are made or parsed, in every process; a second call does nothing.
    A saved `training_args.bin` of such a run can only be loaded after it, too.

    It adds a name to transformers' enum of optimizers and a handler to its table, has
    TrainingArguments and Trainer check `optim_args` when they are made, and wraps the methods in
    which Trainer creates the optimizer, and saves and loads its state; these act only where a
    DistributedLion trains.

    Raises:
        RuntimeError: If this transformers has no such table or methods.
    """
    handlers = _handlers()
    internal_function("training_args:TrainingArguments.__post_init__", ())
    internal_function("trainer:Trainer.__init__", ("model", "args"))
    install_seams()
    if OPTIM_NAME in handlers:
        return
    name = _add_name()
    _check_optim_args_early()
    handlers[name] = _handle


def _handlers() -> dict[Any, Any]:
    handlers = internal("trainer_optimizer:_OPTIMIZER_HANDLERS")
    if not isinstance(handlers, dict):
        raise missing_seam("a dict transformers.trainer_optimizer._OPTIMIZER_HANDLERS")
    return handlers


def _add_name() -> Any:
    """Returns the new member of the enum, which Python has no public way to add."""
    names = internal("training_args:OptimizerNames")
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


def _check_optim_args_early() -> None:
    """Has bad `optim_args` refused where arguments are made, before data is loaded for nothing.

    So is a misspelt "dlion". Trainer warns of DistributedLion's options for another optimizer.

    Arguments may be changed after that, or come from a file, so a Trainer checks its own again,
    before the parser of transformers ends in "not enough values to unpack".
    """
    make_arguments: Any = TrainingArguments.__post_init__  # It has no annotations.
    make_trainer = Trainer.__init__

    @functools.wraps(make_arguments)
    def checked_arguments(self: TrainingArguments) -> None:
        _check_optim_args(self)
        make_arguments(self)

    @functools.wraps(make_trainer)
    def checked_trainer(
        self: Trainer, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any
    ) -> None:
        _check_optim_args(args)
        given = inspect.signature(make_trainer).bind_partial(self, model, args, *rest, **kwargs)
        optimizer, _ = given.arguments.get("optimizers", (None, None))
        made = optimizer or given.arguments.get("optimizer_cls_and_kwargs")
        if args is not None and made is None:
            _warn_of_ignored(args)
        make_trainer(self, model, args, *rest, **kwargs)

    setattr(TrainingArguments, "__post_init__", checked_arguments)  # noqa: B010 (mypy)
    setattr(Trainer, "__init__", checked_trainer)  # noqa: B010 (mypy)


def _check_optim_args(args: TrainingArguments | None) -> None:
    if args is None:
        return
    if args.optim == OPTIM_NAME:
        parse_optim_args(args.optim_args, DEFAULTS)
        return
    known = [str(name.value) for name in internal("training_args:OptimizerNames")]
    # The error of transformers names all of its optimizers; it has several of Lion.
    others = any(args.optim in name for name in known)
    if not others and difflib.get_close_matches(args.optim, known, n=1) == [OPTIM_NAME]:
        raise ValueError(f"optim={args.optim!r} is unknown, did you mean {OPTIM_NAME!r}?")


def _warn_of_ignored(args: TrainingArguments) -> None:
    """Warns of options of DistributedLion where another optimizer trains by its name."""
    ignored = only_ours(args.optim_args)
    if ignored and args.optim != OPTIM_NAME:
        name = getattr(args.optim, "value", args.optim)
        chosen = f"optim={name!r} with optim_args={args.optim_args!r}"
        warn_once(
            f"optim_args of another optimizer: {chosen}",
            f"{chosen}: only DistributedLion has {', '.join(ignored)}, so this changes nothing; to "
            f"train with it set optim={OPTIM_NAME!r}",
        )


def _handle(context: Any) -> tuple[type[DistributedLion], dict[str, Any]]:
    # The class, not a factory: a Trainer with a create_optimizer of its own calls it on its groups.
    return DistributedLion, lion_kwargs(context.args)
