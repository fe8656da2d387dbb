"""Refuses a Trainer that doesn't work with DistributedLion, and attaches the optimizer."""

from __future__ import annotations

import datetime
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.utils import logging

import hf_dlion.ddp as ddp
import hf_dlion.fsdp as fsdp
from hf_dlion.accelerate import ignored_timeout, refuse_unsupported, replicas_of
from hf_dlion.optimizer import DistributedLion
from hf_dlion.trainer.optim_args import OPTIM_NAME

logger = logging.get_logger(__name__)


def refuse(trainer: Trainer) -> None:
    """Refuses a Trainer with which DistributedLion would train wrongly, on every rank.

    Raises:
        NotImplementedError: If the ranks have no gradients of their own.
        RuntimeError: If there are more ranks than the arguments know of.
    """
    args, model = trainer.args, trainer.model
    ways = {
        "tensor parallelism": (getattr(model, "tp_size", None) or 1) > 1,
        "a model that is sharded while it is loaded": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        ),
        f"one process that drives {args.n_gpu} GPUs (nn.DataParallel)": args.n_gpu > 1,
    }
    if replicas_of(trainer.accelerator) is None:
        ways["FSDP"] = bool(trainer.is_fsdp_enabled or args.fsdp)
    refuse_unsupported(trainer.accelerator, *(way for way, used in ways.items() if used))


def warn_about_timeout(args: TrainingArguments) -> None:
    """Warns on rank 0 if the process group has another timeout than the arguments ask for.

    With `use_cpu`, transformers ignores `ddp_timeout`, and it can't change a group that already
    exists.
    """
    default = type(args).__dataclass_fields__["ddp_timeout"].default
    if args.world_size == 1 or args.process_index or args.ddp_timeout == default:
        return
    asked = datetime.timedelta(seconds=args.ddp_timeout)
    if text := ignored_timeout(asked, "ddp_timeout", "TrainingArguments"):
        logger.warning_once(text)


def warn_about_other_optimizer(trainer: Trainer, optimizer: Any) -> None:
    """Warns on rank 0 if the arguments ask for this optimizer, and another one trains."""
    if trainer.args.optim == OPTIM_NAME and trainer.is_world_process_zero():
        inner = getattr(optimizer, "optimizer", optimizer)
        logger.warning_once(
            f"optim={OPTIM_NAME!r} isn't used: {type(inner).__name__} trains, and DDP averages "
            f"gradients. It was passed to Trainer(optimizers=...), or an option such as "
            f"LLaMA-Factory's use_muon or ms-swift's --optimizer made it. Leave that option out"
        )


def attach(lion: DistributedLion, trainer: Trainer) -> None:
    """Names the optimizer's parameters and attaches it. Warns if it has no votes to exchange.

    Raises what `refuse` and `DistributedLion.attach` raise.
    """
    refuse(trainer)
    warn_about_timeout(trainer.args)
    model: Any = trainer.model
    lion.params.name_as(model)  # One process has no wrapper to attach.
    wrapped = trainer.model_wrapped
    if ddp.wrapper_in(wrapped) is not None or fsdp.sharded_model(wrapped) is not None:
        lion.attach(wrapped)
    world_size, ranks = trainer.args.world_size, lion.peers.ranks
    alone = "DistributedLion exchanges nothing between nodes and is plain Lion, because"
    if world_size == 1:
        logger.warning_once(
            f"{alone} one process trains alone. Start several processes with torchrun or "
            f"accelerate launch --multi_gpu (without GPUs, also set ACCELERATE_USE_CPU=true)"
        )
    elif ranks is not None and ranks.voters.world_size == 1 and trainer.is_world_process_zero():
        logger.warning_once(
            f"{alone} local_group={lion.options.local_group!r} puts all {world_size} ranks into "
            f"one node. Start ranks on several nodes, or leave out local_group"
        )
