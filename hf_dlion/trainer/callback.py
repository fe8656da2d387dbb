"""The callback of a Trainer whose optimizer is a DistributedLion."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.utils import logging

import hf_dlion.ddp as ddp
from hf_dlion.advice import FEWEST_PERIODS, LOCAL_SHARE, MOMENTA_FROM, vote_every_for
from hf_dlion.checkpoint import find_lion
from hf_dlion.core.rule import Average, rule_of
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options import LOCAL_BITS
from hf_dlion.ranks.header import Disagreement
from hf_dlion.ranks.routes import bytes_per_word
from hf_dlion.ranks.stats import WireStats
from hf_dlion.trainer.attach import attach, warn_about_other_optimizer

logger = logging.get_logger(__name__)

MEGABYTE = 1e6
# Steps with vote_every=1 after which a line in the log says what the exchange costs.
MEASURED_STEPS = 50
# Arguments that decide when Trainer logs, evaluates, and saves. Ranks communicate then.
_WHEN = (
    *("logging_strategy", "logging_steps", "logging_first_step", "eval_strategy", "eval_steps"),
    *("eval_on_start", "eval_delay", "save_strategy", "save_steps", "load_best_model_at_end"),
)
# Default of TrainingArguments, meant for AdamW.
_DEFAULT_LR = 5e-5


class DistributedLionCallback(TrainerCallback):
    """Attaches the optimizer to the DDP wrapper, and adds what it sends to the log.

    A Trainer has it while it trains. docs/guides/logging.md describes the entries.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._steps = self._abstentions = 0
        # Number of steps and counters, at the end of the last period and of the last logged one.
        # Without local steps, every step is a period.
        self._period_end = self._logged = (0, WireStats())
        self._times: list[tuple[float, float]] = []
        self._step_end = 0.0, 0.0
        self._jit_managers: list[Any] = []
        self._save_requested = False

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        *_: Any,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **__: Any,
    ) -> None:
        """Attaches the optimizer.

        Raises:
            NotImplementedError: If the ranks have no gradients of their own.
            RuntimeError: If there are more ranks than the arguments know of, or `attach` raises it.
            ValueError: On every rank, if ranks would take different numbers of steps, or log,
                evaluate, or save after different ones.
        """
        lion, trainer = find_lion(optimizer), self._trainer
        if lion is None:
            warn_about_other_optimizer(trainer, optimizer)
            return
        attach(lion, trainer)
        # Otherwise the ranks' collectives would differ, for example in an exchange and a log.
        plan = {"steps to take": state.max_steps} | {name: getattr(args, name) for name in _WHEN}
        plans: list[dict[str, Any]] = gather_object([plan])
        for name in plan:
            if len(set(values := [plan[name] for plan in plans])) > 1:
                raise ValueError(
                    f"ranks differ in {name} (by rank: {values}): give every rank the same "
                    f"TrainingArguments, and equally many batches"
                )
        _warn_about_waits(lion, trainer, train_dataloader)
        _warn_about_few_periods(lion, trainer, state.max_steps)
        if lion.defaults["lr"] == _DEFAULT_LR and trainer.is_world_process_zero():
            logger.warning_once(
                "learning_rate=5e-5 is Trainer's default, which is meant for AdamW. With Lion, "
                "start with a third of your AdamW learning rate, and three times its weight_decay"
            )
        self._steps, self._abstentions = 0, lion.wire.abstentions
        self._period_end = self._logged = (0, dataclasses.replace(lion.wire))
        self._times = []
        self._step_end = time.perf_counter(), lion.wire.exchange_s
        # A signal reaches ranks at different steps. Each rank notes it, and all ranks save in the
        # same `on_step_end`.
        callbacks = trainer.callback_handler.callbacks
        managers = [getattr(callback, "jit_manager", None) for callback in callbacks]
        self._jit_managers = [manager for manager in managers if manager is not None]
        for manager in self._jit_managers:
            manager._enable_checkpoint = self._request_save

    def _request_save(self) -> None:
        self._save_requested = True

    def on_step_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Notes the end of a period."""
        if (lion := find_lion(optimizer)) is not None:
            self._note_period_end(lion)

    def _note_period_end(self, lion: DistributedLion) -> None:
        """Notes the counters if a period has ended, in a step or by an exchange after it."""
        if not lion.local.period.steps:
            self._period_end = self._steps, dataclasses.replace(lion.wire)

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        """Makes all ranks save just in time together."""
        if self._jit_managers:
            requested = torch.tensor([int(self._save_requested)], device=args.device)
            by_any_rank = bool(self._trainer.accelerator.gather(requested).any())
            for manager in self._jit_managers:
                manager.is_checkpoint_requested = by_any_rank

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: Any, optimizer: Any = None, **__: Any
    ) -> None:
        """Counts the step, and logs once if a larger `vote_every` would save time."""
        if (lion := find_lion(optimizer)) is None:
            return
        self._steps += 1
        if lion.options.vote_every > 1 or len(self._times) == MEASURED_STEPS:
            return
        now = time.perf_counter(), lion.wire.exchange_s
        self._times.append((now[0] - self._step_end[0], now[1] - self._step_end[1]))
        self._step_end = now
        if len(self._times) == MEASURED_STEPS and state.is_world_process_zero:
            # Medians, because evaluations and saves lie between some steps.
            step_s, exchange_s = map(statistics.median, zip(*self._times, strict=True))
            if exchange_s > LOCAL_SHARE * step_s:
                options, share = _vote_every(lion, step_s - exchange_s, exchange_s)
                logger.warning_once(
                    f"a step takes {1e3 * step_s:.0f} ms, {1e3 * exchange_s:.0f} ms of them for "
                    f"the exchange (medians of {MEASURED_STEPS} steps). With optim_args="
                    f"{options!r}, exchanges would take about {share:.0%} of the time"
                )

    def on_train_end(
        self, args: Any, state: TrainerState, *_: Any, optimizer: Any = None, **__: Any
    ) -> None:
        """Exchanges the steps before an early end, and compares replicas, also in short runs."""
        if (lion := find_lion(optimizer)) is None:
            return
        lion.exchange_now()
        if lion.options.check_replicas_every:
            try:
                lion.check_replicas()
            except Disagreement as error:  # Not raised, so the script can still save the model.
                if state.is_world_process_zero:
                    logger.warning(f"at the end of training: {error}")

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
        lion = find_lion(optimizer)
        if lion is None or not logs or "loss" not in logs or not self._steps:
            return
        self._note_period_end(lion)
        (first, before), (last, after) = self._logged, self._period_end
        entries: dict[str, float] = {}
        if last > first and args.world_size > 1:

            def per_step(name: str) -> float:
                return float(getattr(after, name) - getattr(before, name)) / (last - first)

            entries = {"dlion/wire_mb_per_step": per_step("bytes_sent") / MEGABYTE}
            if lion.options.local_group is not None:
                entries["dlion/node_mb_per_step"] = per_step("node_bytes_sent") / MEGABYTE
            for part in ("encode", "exchange", "apply"):
                entries[f"dlion/{part}_ms"] = 1e3 * per_step(f"{part}_s")
            self._logged = self._period_end
        abstained = float(lion.wire.abstentions - self._abstentions)
        self._abstentions = lion.wire.abstentions
        entries["dlion/abstained"] = abstained
        if not math.isnan(agreement := lion.wire.agreement):
            entries["dlion/agreement"] = agreement
        logs.update(entries)
        # Trainer appends a copy of `logs` to the history before it calls callbacks.
        if state.log_history and state.log_history[-1].get("loss") is logs["loss"]:
            state.log_history[-1].update(entries)


def _vote_every(lion: DistributedLion, work_s: float, exchange_s: float) -> tuple[str, float]:
    """Returns the options that would save time, and the share of it that exchanges then take.

    `work_s` and `exchange_s` are seconds of a step's own work, and of its exchange of votes.
    """
    voters, bits = lion.peers.voter_count, lion.options.bits or 1
    local = bytes_per_word(Average(voters, LOCAL_BITS), LOCAL_BITS, voters)
    exchange_s *= local / bytes_per_word(rule_of(lion.options, voters), bits, voters)
    momenta = ""
    if voters >= MOMENTA_FROM:  # As many bits again.
        exchange_s, momenta = 2 * exchange_s, ",momentum_sync_every=1"
    vote_every = max(vote_every_for(work_s, exchange_s), 2)
    share = exchange_s / (exchange_s + vote_every * work_s)
    return f"vote_every={vote_every}{momenta}", share


def _warn_about_few_periods(lion: DistributedLion, trainer: Trainer, steps: int) -> None:
    """Warns on rank 0 if fewer periods of local steps fit into a run than they should."""
    ranks, every = lion.peers.ranks, lion.options.vote_every
    votes = trainer.args.world_size > 1 and (ranks is None or ranks.voters.world_size > 1)
    periods, longest = steps // every, steps // FEWEST_PERIODS
    if every > 1 and votes and periods < FEWEST_PERIODS and trainer.is_world_process_zero():
        remedy = f"Set vote_every={longest} or less" if longest > 1 else "Leave vote_every out"
        logger.warning_once(
            f"vote_every={every} is large for {steps} steps, in which {periods} complete periods "
            f"fit. Use at least {FEWEST_PERIODS}: with three, an LLM answered fewer questions. "
            f"{remedy}"
        )


def _warn_about_waits(lion: DistributedLion, trainer: Trainer, dataloader: Any) -> None:
    """Warns on rank 0 if Trainer makes ranks wait for one another in every local step."""
    args = trainer.args
    if lion.options.vote_every == 1 or args.world_size == 1 or not trainer.is_world_process_zero():
        return
    wrapper = ddp.wrapper_in(trainer.model_wrapped)
    counts_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    waits = {
        "adds up the ranks' numbers of tokens": (
            counts_tokens and args.average_tokens_across_devices,
            "average_tokens_across_devices=False",
        ),
        "reads every batch on rank 0 and sends it to the others": (
            isinstance(dataloader, DataLoaderDispatcher),
            "accelerator_config={'dispatch_batches': False, 'split_batches': True}, shuffle with a "
            "seed, and make per_device_train_batch_size the batch of all ranks",
        ),
        "lets DDP send the model's buffers in every forward": (
            wrapper is not None and ddp.broadcasts_state(wrapper),
            "ddp_broadcast_buffers=False, unless training changes them, as in batch norm",
        ),
        "counts the input tokens that all ranks have seen": (
            args.include_num_input_tokens_seen != "no",
            "include_num_input_tokens_seen='no'",
        ),
        "counts the tokens that all ranks train on": (
            getattr(args, "include_tkps", False),  # axolotl's
            "include_tkps: false",
        ),
        "asks all ranks whether to save just in time": (
            args.enable_jit_checkpoint,
            "enable_jit_checkpoint=False",
        ),
    }
    for why, (waits_so, remedy) in waits.items():
        if waits_so:
            logger.warning_once(
                f"vote_every={lion.options.vote_every}, but Trainer {why}, so all ranks wait for "
                f"one another in every step. To avoid that, set {remedy}"
            )
