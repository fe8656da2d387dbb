"""Makes a DistributedLion from a Trainer's arguments: `optim="dlion"`, or class and options."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from hf_dlion.optimizer import DistributedLion
from hf_dlion.options import BETAS
from hf_dlion.trainer.arguments import add_name, internal, missing
from hf_dlion.trainer.optim_args import check_known, parse_optim_args
from hf_dlion.trainer.patches import install

logger = logging.get_logger(__name__)

# Defaults of TrainingArguments, which are AdamW's. A run that has them didn't choose them.
ADAM_BETAS = (0.9, 0.999)
# Trainer runs unattended, and one comparison of replicas in 100 steps costs little.
COMPARED_STEPS = 100


def register() -> None:
    """Makes `TrainingArguments(optim="dlion")` train with a `DistributedLion`.

    Call it in every process before arguments are made or parsed, and before the
    `training_args.bin` of such a run is loaded. A second call does nothing.

    Raises:
        RuntimeError: If this version of transformers has no table of optimizers to add to.
    """
    handlers: Any = internal("trainer_optimizer:_OPTIMIZER_HANDLERS")
    if not isinstance(handlers, dict):
        raise missing("a dict trainer_optimizer._OPTIMIZER_HANDLERS")
    handlers[add_name()] = _handle


def optimizer_cls_and_kwargs(
    args: TrainingArguments, **options: Any
) -> tuple[type[DistributedLion], dict[str, Any]]:
    """Returns the value for `Trainer(optimizer_cls_and_kwargs=...)`; needs no `register()`.

    Learning rate, weight decay, betas, and `optim_args` come from `args`, and Trainer makes groups
    with and without weight decay. AdamW's default betas count as unset. Replicas are compared every
    100 steps by default, and with `vote_every` about as often, at exchanges.

    Args:
        args: Arguments of the Trainer.
        options: `lr`, `betas`, and options of `DistributedLion`, which override `args`.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option is unknown or has a bad value.
        NotImplementedError: If options don't work together yet.

    Example:
        >>> from transformers import TrainingArguments
        >>> args = TrainingArguments(output_dir="out", learning_rate=1e-4, use_cpu=True)
        >>> cls, kwargs = optimizer_cls_and_kwargs(args, bits=2)
        >>> cls.__name__, kwargs["lr"], kwargs["betas"], kwargs["bits"]
        ('DistributedLion', 0.0001, (0.9, 0.98), 2)
    """
    for name in options:
        check_known(name, ("lr", "betas"), "optimizer_cls_and_kwargs")
    chosen = {name: value for name, value in options.items() if name not in ("lr", "betas")}
    parsed = parse_optim_args(args.optim_args, chosen)
    vote_every: int = {**parsed, **chosen}.get("vote_every", 1)
    kwargs = {"check_replicas_every": max(1, COMPARED_STEPS // vote_every), **parsed}
    betas = []
    for k, adam in enumerate((args.adam_beta1, args.adam_beta2)):
        beta = kwargs.pop(f"beta{k + 1}", None)
        if beta is None:
            beta = BETAS[k] if adam == ADAM_BETAS[k] else adam
            if beta != adam:
                logger.info(f"adam_beta{k + 1}={adam} is AdamW's default; dlion uses {beta}")
            elif beta != BETAS[k] and args.process_index == 0:
                logger.warning_once(
                    f"adam_beta{k + 1}={adam} is taken as Lion's beta{k + 1}, for which "
                    f"{BETAS[k]} is better in most runs: leave it out, or set "
                    f'optim_args="beta{k + 1}={adam}" if you mean it'
                )
        betas.append(beta)
    return DistributedLion, {"lr": args.learning_rate, "betas": tuple(betas), **kwargs, **options}


def _handle(context: Any) -> tuple[type[DistributedLion], dict[str, Any]]:
    """Returns class and options, which a subclass's own `create_optimizer` may also ask for."""
    return optimizer_cls_and_kwargs(context.args)


# Also without `register()`, for a Trainer that is given the class or an optimizer.
install()
