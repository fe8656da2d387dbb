"""`TrainingArguments` -> the optimizer class and the keyword arguments that Trainer asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from hf_dlion.optimizer import DistributedLion
from hf_dlion.options.optim_args import check_names, parse_optim_args
from hf_dlion.trainer.seams import install_seams

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.get_logger(__name__)

# TrainingArguments' defaults, which are AdamW's: a run that has them did not choose them.
ADAM_BETAS = (0.9, 0.999)
LION_BETAS = (0.9, 0.99)
# A Trainer runs unattended, and what a comparison costs is nothing among so many steps.
CHECK_REPLICAS_EVERY = 100


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

    Example:
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
    defaults = {"check_replicas_every": CHECK_REPLICAS_EVERY}
    options = defaults | parse_optim_args(args.optim_args, defaults, own)
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
