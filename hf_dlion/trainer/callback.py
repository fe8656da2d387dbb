"""The optimizer's figures in Trainer's logs."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback, TrainerState

from hf_dlion.checkpoint.access import claim_gradients, lion_in
from hf_dlion.exchange import Agreed
from hf_dlion.momentum.divergence import by_kind
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.abstention import Abstentions

MEGABYTE = 1e6
# Steps whose agreement is left on the device until it is read: a few bytes each.
KEPT = 64
# Of the seconds in `WireStats`.
_PARTS = ("encode", "exchange", "apply")
# More curves than that help nobody.
MOST_KINDS = 24


class DistributedLionCallback(TrainerCallback):
    """Adds figures to every entry that logs a training loss.

    - `dlion/wire_mb_per_step`: megabytes (10^6 bytes) that this rank handed to collectives for
      another rank, per optimizer step since the last entry.
    - `dlion/encode_ms`, `dlion/exchange_ms`, `dlion/apply_ms`: milliseconds of a step, mean over
      those since the last entry.
    - `dlion/agreement`: |sum of the ranks' signs| / ranks, averaged over the elements that a rank
      voted on and over the steps since the last entry: 1 when all ranks always agree. Left out
      where nothing was exchanged (a single rank).
    - `dlion/abstained`: how many times a rank abstained from a whole step, because its gradient
      held a NaN or an Inf, since the last entry.
    - `dlion/abstained_rank`: the rank that did so most often (of equally many the lowest; with
      `local_group` the node). Left out if none did.
    - `dlion/abstained_in_a_row`: from how many steps in a row, up to this entry, that rank has
      abstained; at `max_abstained_steps` all ranks raise. Left out if none did.
    - `dlion/momentum_divergence/mean`, `.../max` and, where there are few enough, one for each kind
      of parameter (`.../layers.*.mlp.up_proj.weight`, the mean over the layers): with
      `momentum_sync="auto"`, how far momenta differ between the ranks, from 0 to 1.

    Trainer gets one by itself where it trains with a DistributedLion after `hf_dlion.register()` or
    `optimizer_cls_and_kwargs`. It comes first among the callbacks, so TensorBoard and the
    others see what it adds; an instance in `Trainer(callbacks=[...])` is moved there.
    """

    def __init__(self) -> None:
        """Starts without figures; the first come with the first step."""
        self._steps = 0
        self._means: list[float] = []
        self._agreed: list[Agreed] = []
        self._bytes_before = 0
        self._seconds_before = dict.fromkeys(_PARTS, 0.0)
        self._abstentions_before = 0
        self._abstained_before: list[int] = []

    def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Starts counting: what the optimizer did before is not of this run."""
        lion = lion_in(optimizer)
        if lion is not None:
            claim_gradients(lion)
            self._start_interval(lion)

    def on_train_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Gives the gradients back to DDP: another Trainer may train the model on."""
        lion = lion_in(optimizer)
        if lion is not None:
            lion.detach()

    def on_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        """Counts the step and notes its agreement."""
        lion = lion_in(optimizer)
        if lion is None:
            return
        self._steps += 1
        # To read each here would wait for the device in every step.
        self._agreed.append(lion.wire.agreed)
        if len(self._agreed) == KEPT:
            self._read()

    def _read(self) -> None:
        """Reads how far the ranks agreed in the steps since it was read last."""
        self._means += [agreed.mean for agreed in self._agreed]
        self._agreed = []

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        logs: dict[str, Any] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Adds the figures to `logs`, for the callbacks after this one, and to the log history."""
        lion = lion_in(optimizer)
        if lion is None or not logs or "loss" not in logs or not self._steps:
            return
        wire = lion.wire
        sent = wire.bytes_sent - self._bytes_before
        figures = {"dlion/wire_mb_per_step": sent / self._steps / MEGABYTE}
        for part in _PARTS:
            seconds = getattr(wire, f"{part}_s") - self._seconds_before[part]
            figures[f"dlion/{part}_ms"] = 1e3 * seconds / self._steps
        self._read()
        means = [mean for mean in self._means if not math.isnan(mean)]
        if means:
            figures["dlion/agreement"] = sum(means) / len(means)
        figures["dlion/abstained"] = float(wire.abstentions - self._abstentions_before)
        figures.update(self._most_abstained(lion.abstentions))
        figures.update(_divergence_figures(lion.momentum_divergence))
        logs.update(figures)
        # Trainer has put a copy of `logs` there before it calls the callbacks.
        if state.log_history and state.log_history[-1].get("loss") is logs["loss"]:
            state.log_history[-1].update(figures)
        self._start_interval(lion)

    def _start_interval(self, lion: DistributedLion) -> None:
        self._steps = 0
        self._means, self._agreed = [], []
        self._bytes_before = lion.wire.bytes_sent
        self._seconds_before = {part: getattr(lion.wire, f"{part}_s") for part in _PARTS}
        self._abstentions_before = lion.wire.abstentions
        self._abstained_before = lion.abstentions.steps.copy()

    def _most_abstained(self, abstentions: Abstentions) -> dict[str, float]:
        """Returns the figures of the rank that abstained most often since the last entry."""
        # It may be only after the start that the optimizer learns how many ranks there are.
        before = [*self._abstained_before, *[0] * len(abstentions.steps)]
        since = [now - then for now, then in zip(abstentions.steps, before, strict=False)]
        most = max(since)
        if most <= 0:
            return {}
        rank = since.index(most)
        return {
            "dlion/abstained_rank": float(rank),
            "dlion/abstained_in_a_row": float(abstentions.in_a_row[rank]),
        }


def _divergence_figures(divergence: dict[str, float]) -> dict[str, float]:
    if not divergence:
        return {}
    values = divergence.values()
    figures = {"mean": sum(values) / len(values), "max": max(values)}
    kinds = by_kind(divergence)
    if len(kinds) <= MOST_KINDS:
        figures.update(kinds)
    return {f"dlion/momentum_divergence/{name}": value for name, value in figures.items()}
