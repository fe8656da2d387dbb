"""Trainer with local steps: evaluations, saves, resumed runs, and results have common weights."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import hf_dlion.trainer.callback as callback
from hf_dlion.exchange.wire import Pending
from hf_dlion.vote.local_steps import vote_every_for
from tests.support.spawn import RankPools, on_ranks
from tests.support.tiny import (
    StopAt,
    logged,
    tiny_args,
    tiny_data,
    tiny_llama,
    tiny_trainer,
    weights_digest,
)

pytestmark = pytest.mark.multiproc


def file_digest(folder: Path) -> str:
    """Returns the hash of the weights in a folder, as of a model that has them."""
    model = tiny_llama()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return weights_digest(model)


class Watch(TrainerCallback):
    """Notes what the model holds; resets a weight, and saves the model on one rank alone."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder, self.trainer = folder, None
        self.own: dict[int, str] = {}
        self.seen: dict[int, str] = {}
        self.evaluated: dict[int, str] = {}
        self.sent: dict[int, int] = {}

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.own[state.global_step + 1] = weights_digest(model)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step == 1:
            model.model.norm.weight.data.fill_(2.0)
        if self.folder is not None and state.global_step == 5 and state.is_world_process_zero:
            self.trainer.save_model(self.folder)
        self.seen[state.global_step] = weights_digest(model)
        self.sent[state.global_step] = optimizer.optimizer.wire.bytes_sent

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self.end = weights_digest(model)

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        self.evaluated[state.global_step] = weights_digest(model)


def watched(folder: str, watch: Watch, **changes: Any) -> Trainer:
    changes = {
        **{"optim_args": "vote_every=4", "max_steps": 11, "gradient_accumulation_steps": 2},
        **{"logging_steps": 3, "eval_strategy": "steps", "eval_steps": 6, **changes},
    }
    trainer = tiny_trainer(
        tiny_args(folder, **changes),
        model=tiny_llama(attention_dropout=0.0),  # An evaluation draws random numbers.
        **{"eval_dataset": tiny_data(8), "callbacks": [watch]},
    )
    watch.trainer = trainer
    trainer.train()
    return trainer


def evaluate_and_save(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    watch, every = Watch(f"{folder}/alone"), {"save_strategy": "steps", "save_steps": 3}
    with logged() as messages:
        trainer = watched(folder, watch, save_total_limit=3, **every)
        plain = watched(folder, Watch(), average_tokens_across_devices=False)
    trainer.save_model(f"{folder}/end")
    return {
        **{"own": watch.own, "seen": watch.seen, "evaluated": watch.evaluated, "sent": watch.sent},
        "messages": messages,
        "end": weights_digest(trainer.model),
        "reset": trainer.model.model.norm.weight.tolist(),
        "exchanges": trainer.optimizer.optimizer.wire.exchanges,
        "losses": [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e],
        "logged": [e for e in trainer.state.log_history if "loss" in e],
        # The token count changes the loss, so a run that differs in saves alone is a third one.
        "plain": weights_digest(plain.model),
    }


def train_without_saves(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    """Also returns what a callback sees that uploads the model when training ends."""
    watch = Watch()
    trainer = watched(folder, watch)
    return watch.end, weights_digest(trainer.model)


@pytest.mark.smoke
def test_evaluations_have_all_steps_and_saves_have_common_weights_and_change_nothing(
    pools: RankPools, tmp_path: Path
) -> None:
    left, right = pools(2).run(evaluate_and_save, str(tmp_path))
    own = [step for step in left["own"] if left["own"][step] != right["own"][step]]
    assert own == list(range(1, 12))  # What an exchange leaves out stays in a rank's weights.
    assert left["seen"] == right["seen"]  # TRL's callbacks copy the model, for example.
    for name in ("evaluated", "losses", "end", "plain"):
        assert left[name] == right[name], name
    # There are exchanges after step 4, in the evaluation of step 6, and after steps 10 and 11.
    seen, evaluated = left["seen"], left["evaluated"]
    assert left["exchanges"] == 4
    assert list(evaluated) == [6, 11]
    stretches = [{seen[step] for step in steps} for steps in ((1, 2, 3), (4, 5, 6), (7, 8, 9))]
    assert [len(stretch) for stretch in stretches] == [1, 1, 1]
    assert len({*seen.values()}) == 5
    assert seen[7] == evaluated[6]
    assert seen[11] == evaluated[11] == left["end"]
    assert file_digest(tmp_path / "alone") == seen[5]
    assert file_digest(tmp_path / "checkpoint-6") == evaluated[6]
    assert file_digest(tmp_path / "checkpoint-9") == evaluated[6]  # A save alone lags.
    assert file_digest(tmp_path / "checkpoint-11") == left["end"]
    assert left["reset"] == pytest.approx([2.0] * len(left["reset"]), abs=0.1)
    assert file_digest(tmp_path / "end") == left["end"]
    silent = pools(2).run(train_without_saves, str(tmp_path / "silent"))
    assert silent == [(left["end"], left["end"])] * 2

    # A period that isn't over is in no entry. The second one has two steps.
    for key in ("wire_mb_per_step", "agreement", "remainder"):
        assert [f"dlion/{key}" in entry for entry in left["logged"]] == [False, True, True], key
    _, first, second = (entry.get("dlion/wire_mb_per_step") for entry in left["logged"])
    assert (4 * first + 2 * second) * 1e6 == pytest.approx(left["sent"][8])
    assert len(left["messages"]) == 1
    assert "set average_tokens_across_devices=False" in left["messages"][0]
    assert right["messages"] == []


def steer(rank: int, world_size: int, folder: str) -> tuple[list[float], bool]:
    watch = Watch()
    args = tiny_args(
        folder, optim_args="vote_every=32", max_steps=50, eval_strategy="steps", eval_steps=10,
        save_strategy="steps", save_steps=10, load_best_model_at_end=True, logging_steps=10,
        metric_for_best_model="eval_loss", lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0},
    )  # fmt: skip
    callbacks = [EarlyStoppingCallback(early_stopping_patience=1), watch]
    trainer = tiny_trainer(args, eval_dataset=tiny_data(), callbacks=callbacks)
    trainer.train()
    log = trainer.state.log_history
    assert {entry["learning_rate"] for entry in log if "loss" in entry} == {args.learning_rate}
    # A step's entry comes before the exchange in its evaluation, but after that of the last step.
    megabytes = [entry.get("dlion/wire_mb_per_step", 0.0) for entry in log if "loss" in entry]
    covered = sum(map(operator.mul, (0, 10, 10, 10, 20), megabytes))
    assert covered * 1e6 == pytest.approx(watch.sent[50])
    is_best = weights_digest(trainer.model) == watch.evaluated[trainer.state.best_global_step]
    return [entry["eval_loss"] for entry in log if "eval_loss" in entry], is_best


def test_evaluations_within_a_period_steer_a_run_by_all_its_steps(
    pools: RankPools, tmp_path: Path
) -> None:
    """Stops early, reduces the rate, and loads the best model by evaluations in one period."""
    (losses, is_best), other = pools(2).run(steer, str(tmp_path))
    assert (losses, is_best) == other
    assert len(set(losses)) == 5
    assert losses == sorted(losses, reverse=True)
    assert is_best


class Own(Trainer):
    """A Trainer that saves and loads in ways of its own, without those of Trainer."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        self.state.best_model_checkpoint = str(folder)
        if self.args.should_save:
            self.model.save_pretrained(folder)

    def _load_best_model(self) -> None:
        folder = Path(self.args.output_dir, "checkpoint-4")
        self.model.load_state_dict(load_file(folder / "model.safetensors"))


@on_ranks(2)
def test_a_subclass_that_saves_and_loads_by_itself_gets_common_weights(tmp_path: Path) -> None:
    evaluated = Watch()
    every = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    args = tiny_args(
        tmp_path, max_steps=7, optim_args="vote_every=3", load_best_model_at_end=True,
        metric_for_best_model="eval_loss", **every,
    )  # fmt: skip
    trainer = tiny_trainer(args, cls=Own, eval_dataset=tiny_data(8), callbacks=[evaluated])
    trainer.train()
    evaluated = evaluated.evaluated[4]
    assert file_digest(tmp_path / "checkpoint-4") == evaluated
    assert weights_digest(trainer.model) == evaluated


def streams(rank: int, world_size: int, folder: str, dispatches: bool) -> list[str]:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(tiny_data())

    args = tiny_args(
        folder, optim_args="vote_every=4", average_tokens_across_devices=False, max_steps=1,
        accelerator_config={} if dispatches else {"dispatch_batches": False},
        include_num_input_tokens_seen="all" if dispatches else "no",
    )  # fmt: skip
    with logged() as messages:
        tiny_trainer(args, train_dataset=Stream()).train()
    return messages


def test_waits_in_local_steps_are_warned_of(pools: RankPools, tmp_path: Path) -> None:
    left, right = pools(2).run(streams, str(tmp_path), True)
    assert [text.partition("set ")[2] for text in left] == [
        "accelerator_config={'dispatch_batches': False}",
        "include_num_input_tokens_seen='no'",
    ]
    assert right == []
    assert pools(2).run(streams, str(tmp_path), False) == [[], []]


def end_within_a_period(rank: int, world_size: int, folder: str) -> Any:
    class Failing(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step == 5:
                self.own = weights_digest(model)
                raise KeyError("of the user's callback")

    args, failing = tiny_args(folder, max_steps=8, optim_args="vote_every=4"), Failing()
    trainer = tiny_trainer(args, callbacks=[failing])
    with pytest.raises(KeyError, match="of the user's callback"):
        trainer.train()
    failed = weights_digest(trainer.model)
    averages = bool(trainer.model_wrapped.require_backward_grad_sync)  # Pickles as True.
    trainer = tiny_trainer(args, callbacks=[StopAt(6)])
    trainer.train()
    exchanges = trainer.optimizer.optimizer.wire.exchanges
    return failing.own, failed, weights_digest(trainer.model), exchanges, averages


def test_a_training_that_fails_or_stops_within_a_period_leaves_common_weights_and_ddp_averages(
    pools: RankPools, tmp_path: Path
) -> None:
    left, right = pools(2).run(end_within_a_period, str(tmp_path))
    assert left[0] != right[0]
    assert left[1:] == right[1:]
    assert left[1] != left[2]  # Who stops early keeps the last two steps.
    assert left[3:] == (2, True)


class Begins(TrainerCallback):
    """Notes what the model holds when a training begins, as TRL's BEMACallback copies it."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.seen = [weights_digest(model)]

    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        self.seen.append(weights_digest(model))


def resume(rank: int, world_size: int, folder: str, dtype: torch.dtype) -> list[Any]:
    args = tiny_args(
        folder, max_steps=8, optim_args="vote_every=3", save_strategy="steps", save_steps=4,
        max_grad_norm=0.0,
    )  # fmt: skip

    def outcome(trainer: Trainer) -> Any:
        lion = trainer.optimizer.optimizer
        momenta = [s["exp_avg"].clone() for s in lion.state.values()]
        return weights_digest(trainer.model), momenta, lion.steps, begins.seen

    def made() -> Trainer:
        changes = {"eval_dataset": tiny_data(4), "callbacks": [begins]}
        return tiny_trainer(args, model=tiny_llama().to(dtype), **changes)

    begins = Begins()
    trainer = made()
    trainer.train()
    ends = [outcome(trainer)]
    trainer.evaluate()
    for again in (trainer, made()):
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        ends.append(outcome(again))
    return ends


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_run_resumed_within_a_period_equals_the_run_that_saved(
    pools: RankPools, tmp_path: Path, dtype: torch.dtype
) -> None:
    left, right = pools(2).run(resume, str(tmp_path), dtype)
    for ends in (left, right):
        for digest, momenta, steps, _ in ends:
            assert digest == left[0][0]
            assert steps == 8
            assert all(map(torch.equal, momenta, ends[0][1]))
    assert not all(map(torch.equal, left[0][1], right[0][1]))
    begun = [[seen for *_, seen in ends] for ends in (left, right)]
    assert begun[0] == begun[1]
    for train, epoch, second_epoch in begun[0]:  # Which begins after step 6.
        assert train == epoch != second_epoch == begun[0][0][2]


class OwnLoop(Trainer):
    """Evaluates and takes gradients itself, as trainers that generate do."""

    seen: list[str]

    def evaluate(self, *args, **kwargs):
        self.model.eval()
        self.seen.append(weights_digest(self.model))
        metrics = {"eval_loss": float(len(self.seen))}
        self.log(metrics)
        return metrics

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class Evaluates(TrainerCallback):
    """Evaluates after step 3, in a way that leaves the common weights in the model."""

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step == 3:
            optimizer.eval()


def own_loop(rank: int, world_size: int, folder: str, evaluates: bool) -> tuple[list[str], str]:
    args = tiny_args(
        folder, optim_args="vote_every=4", max_steps=6, average_tokens_across_devices=False,
        eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    trainer = tiny_trainer(
        args,
        OwnLoop,
        model=tiny_llama(attention_dropout=0.0),
        eval_dataset=tiny_data(8),
        callbacks=[Evaluates()] if evaluates else [],
    )
    trainer.seen = []
    trainer.train()
    return trainer.seen, weights_digest(trainer.model)


def test_a_subclass_that_evaluates_and_steps_itself_has_common_weights_in_evaluations(
    pools: RankPools, tmp_path: Path
) -> None:
    (seen, end), other = pools(2).run(own_loop, str(tmp_path), True)
    assert (seen, end) == other
    assert len(set(seen)) == 3  # At steps 2, 4, and 6.
    assert pools(2).run(own_loop, str(tmp_path), False) == [(seen, end)] * 2


def logs_a_hint(rank: int, world_size: int, folder: str) -> list[str]:
    wait = Pending.wait

    def slow(pending: Pending) -> None:
        wait(pending)
        callback.time.sleep(0.01)

    with logged() as messages, mock.patch.object(Pending, "wait", slow):
        for steps in (52, 49):
            tiny_trainer(tiny_args(folder, max_steps=steps, logging_steps=100)).train()
    return [text for text in messages if "vote_every" in text]


def test_a_slow_exchange_is_logged_once_with_what_would_hide_it(
    pools: RankPools, tmp_path: Path
) -> None:
    logged, silent = pools(2).run(logs_a_hint, str(tmp_path))
    assert len(logged) == 1
    assert "medians of 50 steps" in logged[0]
    assert silent == []
    # 10 ms of exchange are 10% of a step of 100 ms; more need more steps.
    pairs = [(0.1, 0.01), (0.1, 0.011), (0.1, 0.021), (0.1, 0.1), (1.0, 1.0), (0.1, 0.0)]
    assert [vote_every_for(*pair) for pair in pairs] == [1, 2, 4, 16, 16, 1]
    assert vote_every_for(0.1, 10.0) == 64
