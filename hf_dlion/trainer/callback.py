"""The callback of a Trainer whose optimizer is a DistributedLion."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
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
from hf_dlion.vote.local_steps import LOCAL_SHARE, vote_every_for

logger = logging.get_logger(__name__)

MEGABYTE = 1e6
# Steps after which a training with vote_every=1 is told what its exchange costs.
MEASURED_STEPS = 50
# What TrainingArguments has if nobody sets it: a learning rate for AdamW.
_UNTOUCHED_LR = 5e-5
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
    - `dlion/abstained`: Ranks (with local steps: rank 0 alone) that abstained because their
      gradients held a NaN or an Inf, summed over the steps since the last entry.
    - `dlion/agreement`: Share of this rank's votes that the verdict followed, in a sample of the
      last step; with `bits=1` and a majority only.

    With `vote_every=k` above 1, megabytes and milliseconds are means over the periods of k steps
    that ended since the last entry, and those of the entry before if none did. The callback also
    exchanges where the training ends.
    """

    def __init__(self) -> None:
        """Communicates nothing."""
        self.trainer: Trainer | None = None  # `Trainer.train` sets it.
        self._steps = self._abstentions = 0
        # Number of steps, and what was sent, at the end of the last period and of the last one in
        # the log. Without local steps, every step is a period.
        self._period_end = self._logged = (0, WireStats())
        self._means: dict[str, float] = {}
        self._times: list[tuple[float, float]] = []
        self._step_end = 0.0, 0.0
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
        _warn_of_token_counts(lion, trainer)
        if trainer.args.learning_rate == _UNTOUCHED_LR and trainer.is_world_process_zero():
            logger.warning_once(
                "learning_rate=5e-5 is Trainer's default, which is meant for AdamW: with Lion, "
                "start with a third of your AdamW learning rate, and three times its weight_decay"
            )
        self._steps, self._abstentions = lion._local.period.steps, lion.wire.abstentions
        self._period_end = self._logged = (0, dataclasses.replace(lion.wire))
        self._means, self._times = {}, []
        self._step_end = time.perf_counter(), lion.wire.exchange_s
        # A signal reaches ranks at different steps. Each rank notes it, and all save together.
        callbacks = trainer.callback_handler.callbacks
        managers = [getattr(callback, "jit_manager", None) for callback in callbacks]
        self._jit_managers = [manager for manager in managers if manager is not None]
        self._asked = False
        for manager in self._jit_managers:
            manager._enable_checkpoint = self._ask

    def _ask(self) -> None:
        self._asked = True

    def on_step_end(
        self, args: Any, state: TrainerState, control: Any, optimizer: Any = None, **__: Any
    ) -> None:
        """Exchanges after the last step; lets all ranks save just in time after the same step."""
        lion = find_optimizer(optimizer)
        if lion is not None and state.global_step >= state.max_steps:
            exchange_rest(lion)  # Now, so the last evaluation and checkpoint have it.
        if self._jit_managers and self.trainer is not None:
            asked = torch.tensor([int(self._asked)], device=args.device)
            anyone = bool(self.trainer.accelerator.gather(asked).any())
            for manager in self._jit_managers:
                manager.is_checkpoint_requested = anyone

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: Any, optimizer: Any = None, **__: Any
    ) -> None:
        """Counts the step, and says once if a larger `vote_every` would save time."""
        if (lion := find_optimizer(optimizer)) is None:
            return
        self._steps += 1
        if not lion._local.period.steps:
            self._period_end = self._steps, dataclasses.replace(lion.wire)
        if lion.options.vote_every > 1 or len(self._times) == MEASURED_STEPS:
            return
        now = time.perf_counter(), lion.wire.exchange_s
        self._times.append((now[0] - self._step_end[0], now[1] - self._step_end[1]))
        self._step_end = now
        if len(self._times) == MEASURED_STEPS and state.is_world_process_zero:
            # Medians, because evaluations and saves lie between some steps.
            step_s, exchange_s = map(statistics.median, zip(*self._times, strict=True))
            if (hiding := vote_every_for(step_s - exchange_s, exchange_s)) > 1:
                logger.info(
                    f"a step takes {1e3 * step_s:.0f} ms, {1e3 * exchange_s:.0f} ms of them for "
                    f"the exchange (medians of {MEASURED_STEPS} steps); with vote_every={hiding} "
                    f"the exchange would take at most {LOCAL_SHARE:.0%} of the time"
                )

    def on_train_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Exchanges what an early end has left, and puts common weights into the model."""
        if (lion := find_optimizer(optimizer)) is not None:
            exchange_rest(lion)
            lion.eval()

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
        (first, before), (last, after) = self._logged, self._period_end
        if last > first:

            def per_step(name: str) -> float:
                return float(getattr(after, name) - getattr(before, name)) / (last - first)

            self._means = {"dlion/wire_mb_per_step": per_step("bytes_sent") / MEGABYTE}
            if lion.options.local_group is not None:
                self._means["dlion/node_mb_per_step"] = per_step("node_bytes_sent") / MEGABYTE
            for part in ("encode", "exchange", "apply"):
                self._means[f"dlion/{part}_ms"] = 1e3 * per_step(f"{part}_s")
            self._logged = self._period_end
        abstained = float(lion.wire.abstentions - self._abstentions)
        self._abstentions = lion.wire.abstentions
        entries = {**self._means, "dlion/abstained": abstained}
        if not math.isnan(agreement := lion.wire.agreement):
            entries["dlion/agreement"] = agreement
        logs.update(entries)
        # Trainer puts a copy of `logs` there before it calls callbacks.
        if state.log_history and state.log_history[-1].get("loss") is logs["loss"]:
            state.log_history[-1].update(entries)


def exchange_rest(lion: DistributedLion) -> None:
    """Ends a period; every rank must call this. Sends nothing if none has begun."""
    if lion._local.period.steps:
        lion.exchange_now()


def _warn_of_token_counts(lion: DistributedLion, trainer: Trainer) -> None:
    """Says on rank 0 that Trainer makes ranks wait for one another in each local step."""
    args = trainer.args
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if (
        lion.options.vote_every > 1
        and args.world_size > 1
        and args.average_tokens_across_devices
        and counts
        and trainer.is_world_process_zero()
    ):
        logger.warning_once(
            f"vote_every={lion.options.vote_every}, but Trainer adds up the ranks' numbers of "
            f"tokens, so all ranks wait for one another in every step: set "
            f"average_tokens_across_devices=False"
        )


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
