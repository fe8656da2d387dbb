"""The callback of a Trainer whose optimizer is a DistributedLion."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.utils import logging

import hf_dlion.fsdp as fsdp
from hf_dlion.accelerate import refuse_unsupported, replicas_of
from hf_dlion.checkpoint import find_optimizer
from hf_dlion.exchange.wire import WireStats
from hf_dlion.optimizer import DistributedLion

logger = logging.get_logger(__name__)

MEGABYTE = 1e6
_ALONE = (
    "DistributedLion exchanges nothing between nodes and is plain Lion, because {}. Start several "
    "processes with torchrun or accelerate launch --multi_gpu"
)


class DistributedLionCallback(TrainerCallback):
    """Attaches the optimizer to the DDP wrapper, and adds what it sends to the log.

    Trainer has one with `optim="dlion"` and `optimizer_cls_and_kwargs`. If you make the optimizer
    yourself, pass one: `Trainer(optimizers=(optimizer, None), callbacks=[...])`. It moves to the
    first place, so the callbacks that report to TensorBoard and others see its entries:

    - `dlion/wire_mb_per_step`: Megabytes (10^6 bytes) that this rank sent to other nodes per step,
      mean since the last entry. Without `local_group`, every rank is a node.
    - `dlion/node_mb_per_step`: Megabytes that it sent inside its node; with `local_group` only.
    - `dlion/encode_ms`, `dlion/exchange_ms`, `dlion/apply_ms`: Milliseconds per step for encoding
      votes, for waiting and counting, and for moving parameters, means since the last entry.
    - `dlion/abstained`: Ranks that abstained because their gradients held a NaN or an Inf, summed
      over the steps since the last entry.
    - `dlion/agreement`: Share of this rank's votes that the verdict followed, in a sample of the
      last step; with `bits=1` and a majority only.
    """

    def __init__(self) -> None:
        """Communicates nothing."""
        self.trainer: Trainer | None = None  # `Trainer.train` sets it.
        self._steps = 0
        self._before = WireStats()
        self._jit_managers: list[Any] = []
        self._asked = False

    def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Attaches the optimizer.

        Raises:
            NotImplementedError: If the Trainer trains in a way that doesn't work.
            RuntimeError: If there are ranks that the arguments don't know of, or `local_group` has
                no DDP wrapper.
        """
        lion, trainer = find_optimizer(optimizer), self.trainer
        if lion is None or trainer is None:
            return
        prepare(lion, trainer)
        self._start_interval(lion)
        # A signal reaches ranks at different steps. Each rank notes it, and all save together.
        callbacks = trainer.callback_handler.callbacks
        managers = [getattr(callback, "jit_manager", None) for callback in callbacks]
        self._jit_managers = [manager for manager in managers if manager is not None]
        self._asked = False
        for manager in self._jit_managers:
            manager._enable_checkpoint = self._ask

    def _ask(self) -> None:
        self._asked = True

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        """Lets all ranks save a just-in-time checkpoint after the same step."""
        if self._jit_managers and self.trainer is not None:
            asked = torch.tensor([int(self._asked)], device=args.device)
            anyone = bool(self.trainer.accelerator.gather(asked).any())
            for manager in self._jit_managers:
                manager.is_checkpoint_requested = anyone

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Counts the step."""
        self._steps += 1

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **__: Any,
    ) -> None:
        """Adds the entries to `logs` and to the log history."""
        lion = find_optimizer(optimizer)
        if lion is None or not logs or "loss" not in logs or not self._steps:
            return

        def since(name: str) -> float:
            return float(getattr(lion.wire, name) - getattr(self._before, name))

        entries = {"dlion/wire_mb_per_step": since("bytes_sent") / self._steps / MEGABYTE}
        if lion.options.local_group is not None:
            sent = since("node_bytes_sent")
            entries["dlion/node_mb_per_step"] = sent / self._steps / MEGABYTE
        for part in ("encode", "exchange", "apply"):
            entries[f"dlion/{part}_ms"] = 1e3 * since(f"{part}_s") / self._steps
        entries["dlion/abstained"] = since("abstentions")
        if not math.isnan(agreement := lion.wire.agreement):
            entries["dlion/agreement"] = agreement
        logs.update(entries)
        # Trainer puts a copy of `logs` there before it calls callbacks.
        if state.log_history and state.log_history[-1].get("loss") is logs["loss"]:
            state.log_history[-1].update(entries)
        self._start_interval(lion)

    def _start_interval(self, lion: DistributedLion) -> None:
        self._steps, self._before = 0, dataclasses.replace(lion.wire)


def put_first(trainer: Trainer) -> None:
    """Gives a Trainer its callback, the user's own if there is one, before all others."""
    callbacks = trainer.callback_handler.callbacks
    own = [callback for callback in callbacks if isinstance(callback, DistributedLionCallback)]
    for callback in own:
        callbacks.remove(callback)
    callbacks.insert(0, own[0] if own else DistributedLionCallback())
    callbacks[0].trainer = trainer


def prepare(lion: DistributedLion, trainer: Trainer) -> None:
    """Names the optimizer's parameters and attaches it; says if nothing is exchanged.

    Raises:
        NotImplementedError: As `refuse`.
        RuntimeError: As `refuse`, or if nodes vote as one and there is no DDP wrapper.
    """
    refuse(trainer)
    _name_parameters(lion, trainer)
    model = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
    ranks, local_group = trainer.args.world_size, lion.options.local_group
    if isinstance(model, DistributedDataParallel) or fsdp.is_fsdp(model):
        lion.attach(model)
    elif ranks > 1 and local_group not in (None, 1):
        raise RuntimeError(
            f"local_group={local_group!r} needs a model that Trainer wraps in "
            f"DistributedDataParallel, and evaluate() or predict() before train() leaves it "
            f"unwrapped: call train() first, or evaluate with another Trainer"
        )
    node = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if local_group == "node" else local_group
    if ranks == 1:
        logger.warning_once(_ALONE.format("one process trains alone"))
    elif node is not None and node >= ranks and trainer.is_world_process_zero():
        logger.warning_once(
            _ALONE.format(f"local_group={local_group!r} puts all {ranks} ranks into one node")
        )


def _name_parameters(lion: DistributedLion, trainer: Trainer) -> None:
    """Gives the optimizer's groups the names that the model has, unless they have names.

    Trainer makes groups without names, and options select parameters by name.
    """
    model: Any = trainer.model
    names = {param: name for name, param in model.named_parameters()}
    groups = lion.param_groups
    if all("param_names" not in group for group in groups) and all(
        param in names for group in groups for param in group["params"]
    ):
        for group in groups:
            group["param_names"] = [names[param] for param in group["params"]]


def refuse(trainer: Trainer) -> None:
    """Refuses a Trainer with which DistributedLion would train wrongly; all ranks find the same.

    Raises:
        NotImplementedError: Naming what the Trainer does, and what works instead.
        RuntimeError: If there are ranks that the arguments don't know of.
    """
    args, model = trainer.args, trainer.model
    ways = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "tensor parallelism": (getattr(model, "tp_size", None) or 1) > 1,
        "a model that is sharded while it is loaded": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        ),
        f"one process that drives {args.n_gpu} GPUs (nn.DataParallel)": args.n_gpu > 1,
    }
    if replicas_of(trainer.accelerator) is None:
        ways["FSDP"] = bool(trainer.is_fsdp_enabled or args.fsdp)
    for way, used in ways.items():
        if used:
            raise NotImplementedError(
                f"DistributedLion doesn't work with {way}: every rank needs gradients of its own. "
                f"Start one process per GPU with torchrun or accelerate launch --multi_gpu, with "
                f"plain DDP, or with FSDP2 inside each replica and "
                f"hf_dlion.accelerate.parallelism_config"
            )
    refuse_unsupported(trainer.accelerator)
    launched, told = 1, ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        launched = torch.distributed.get_world_size()
        told = f"torch.distributed has {launched} ranks"
    elif os.environ.get("WORLD_SIZE", "").isdigit():
        launched = int(os.environ["WORLD_SIZE"])
        told = f"WORLD_SIZE={launched}"
    if launched > args.world_size:
        raise RuntimeError(
            f"{told}, but TrainingArguments knows of {args.world_size} and gives every process all "
            f"of the data. Without GPUs, set TrainingArguments(use_cpu=True) or --use_cpu True. To "
            f"train alone, unset WORLD_SIZE"
        )
