"""Where Trainer lets parameter names, log entries and a momentum per rank in.

`install_seams` wraps Trainer's methods, each one that every rank enters, whatever asked for it; the
wrappers act only where the optimizer is a DistributedLion. Those around training, its log and the
making of the optimizer are here, those around checkpoints in `hf_dlion.trainer.checkpoints`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Trainer

from hf_dlion.checkpoint.access import gather_numbers, lion_in, search_ddp
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options.naming import named_by
from hf_dlion.options.parallelism import (
    refuse_sharded,
    replicas_of,
    unsupported,
    voting_between,
)
from hf_dlion.options.warn_once import warn_once
from hf_dlion.ranks.launched import refuse_strangers
from hf_dlion.trainer import checkpoints
from hf_dlion.trainer.callback import DistributedLionCallback
from hf_dlion.trainer.checkpoints import Method
from hf_dlion.trainer.internals import check_names, check_trainer, internal_function
from hf_dlion.trainer.same_step import save_at_the_same_step

_INSTALLED = "_hf_dlion_seams"


def install_seams() -> None:
    """Wraps Trainer's methods, once per process.

    Raises:
        RuntimeError: If transformers lacks one of them, or anything else that the wrappers use of
            it; nothing is wrapped then.
    """
    if _INSTALLED in vars(Trainer):
        return
    check_names()
    internal_function("trainer:Trainer._get_output_dir", ("trial",))
    for name, (_, parameters) in _SEAMS.items():
        internal_function(f"trainer:Trainer.{name}", parameters)
    checkpoints.wrap_rotation()
    for name, (around, _) in _SEAMS.items():
        _wrap(name, around)
    setattr(Trainer, _INSTALLED, True)


def _wrap(name: str, around: Method) -> None:
    original = vars(Trainer)[name]

    @functools.wraps(original)
    def wrapper(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(original, self), *args, **kwargs)

    setattr(Trainer, name, wrapper)


def _around_train(
    trainer: Trainer,
    original: Method,
    resume_from_checkpoint: str | bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if _trains_with_lion(trainer):
        check_trainer(trainer)
        _refuse_unsupported(trainer)
        _check_ranks(trainer)
        save_at_the_same_step(trainer)
        # Here too, for a subclass that creates the optimizer all by itself.
        _put_callback_first(trainer.callback_handler)
        resume_from_checkpoint = checkpoints.whole_checkpoint_for(trainer, resume_from_checkpoint)
    return original(resume_from_checkpoint, *args, **kwargs)


def _trains_with_lion(trainer: Trainer) -> bool:
    if trainer.optimizer is not None:
        return lion_in(trainer.optimizer) is not None
    chosen = getattr(trainer, "optimizer_cls_and_kwargs", None)
    if chosen is not None:
        cls = chosen[0]
        return isinstance(cls, type) and issubclass(cls, DistributedLion)
    return bool(trainer.args.optim == "dlion")


def _around_create_optimizer(trainer: Trainer, original: Method, *args: Any, **kwargs: Any) -> Any:
    named = [] if trainer.model is None else list(trainer.model.named_parameters())
    # Trainer makes groups without names, and options may select by name.
    with named_by(named), voting_between(replicas_of(trainer.accelerator)):
        optimizer = original(*args, **kwargs)
    lion = lion_in(optimizer)
    if lion is not None:
        _name_parameters(lion, named)
        _put_callback_first(trainer.callback_handler)
        if trainer.model_wrapped is trainer.model:
            # Trainer goes on to make a DDP wrapper, while an old one of another batch size or of an
            # earlier training may still be alive.
            search_ddp(lion)
    return optimizer


def _name_parameters(lion: DistributedLion, named: Sequence[tuple[str, Tensor]]) -> None:
    """Adds the names to an optimizer that was made before."""
    if any("param_names" in group for group in lion.param_groups):
        return
    names = {parameter: name for name, parameter in named}
    if all(p in names for group in lion.param_groups for p in group["params"]):
        for group in lion.param_groups:
            group["param_names"] = [names[p] for p in group["params"]]


def _around_log(
    trainer: Trainer,
    original: Method,
    tr_loss: Tensor,
    grad_norm: Tensor | float | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Has all ranks log one norm: callbacks stop a training by it, which no rank may do alone."""
    lion = lion_in(trainer.optimizer)
    # Then Trainer gathers the losses of all ranks next, so all of them come here.
    logs = (
        trainer.control.should_log and trainer.state.global_step > trainer._globalstep_last_logged
    )
    if lion is not None and grad_norm is not None and logs:
        norms = gather_numbers(lion, float(grad_norm))
        grad_norm = math.hypot(*norms) / math.sqrt(len(norms))
    original(tr_loss, grad_norm, *args, **kwargs)


def _put_callback_first(handler: Any) -> None:
    present = [cb for cb in handler.callbacks if isinstance(cb, DistributedLionCallback)]
    for callback in present:
        handler.callbacks.remove(callback)
    handler.callbacks.insert(0, present[0] if present else DistributedLionCallback())


def _refuse_unsupported(trainer: Trainer) -> None:
    """Refuses a Trainer that shards the model.

    Raises:
        NotImplementedError: Naming what the Trainer does, and what works instead.
    """
    refuse_sharded(trainer.accelerator)
    if trainer.is_deepspeed_enabled:
        raise unsupported("DeepSpeed")
    sharded = replicas_of(trainer.accelerator) is not None
    if (trainer.is_fsdp_enabled or trainer.args.fsdp) and not sharded:
        raise unsupported("FSDP")
    if sharded and trainer.args.save_on_each_node:
        raise NotImplementedError(
            "save_on_each_node=True does not go with FSDP, whose ranks write parts of one "
            "checkpoint: leave it out, and give all machines an output_dir that they share"
        )
    if trainer.args.parallel_mode.value == "sagemaker_model_parallel":
        raise unsupported("SageMaker model parallelism")
    if (getattr(trainer.model, "tp_size", None) or 1) > 1:
        raise unsupported("tensor parallelism")
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise unsupported("a model that is sharded when it is loaded (DistributedConfig)")


def _check_ranks(trainer: Trainer) -> None:
    """Refuses ranks that Trainer does not know of, and warns of GPUs that exchange nothing.

    Raises:
        RuntimeError: If there are more ranks than the arguments know of.
    """
    args = trainer.args
    remedy = "TrainingArguments(use_cpu=True), on a command line --use_cpu True"
    refuse_strangers(args.world_size, "TrainingArguments", remedy)
    if args.n_gpu > 1:
        warn_once(
            "alone",
            f"one process drives {args.n_gpu} GPUs: Trainer sums their gradients (nn.DataParallel) "
            f"and nothing is exchanged, DistributedLion is plain Lion. Start one process per GPU, "
            f"with torchrun or accelerate launch --multi_gpu",
        )


# The methods that are wrapped, by what, and the parameters that the wrappers rely on.
_SEAMS: dict[str, tuple[Method, tuple[str, ...]]] = {
    "train": (_around_train, ("resume_from_checkpoint",)),
    "create_optimizer": (_around_create_optimizer, ()),
    "_maybe_log_save_evaluate": (_around_log, ("tr_loss", "grad_norm")),
    **checkpoints.SEAMS,
}
