"""Trainer with local steps: evaluations, saves, resumed runs, and results have common weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import hf_dlion.trainer.callback as callback
from hf_dlion.advice import vote_every_for
from hf_dlion.peers import Peers
from hf_dlion.ranks.wire import Pending
from hf_dlion.steps.local import LocalSteps
from tests.support.spawn import on_ranks
from tests.support.steps import single
from tests.support.tiny import (
    At,
    logged,
    tiny_args,
    tiny_data,
    tiny_llama,
    tiny_trainer,
    trained,
    weights_digest,
)
from tests.support.training import agree, error_of, gathered, is_equal_everywhere, same


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
        if self.folder is not None and state.global_step == 8 and state.is_world_process_zero:
            self.trainer.save_model(self.folder)
        self.seen[state.global_step] = weights_digest(model)
        self.sent[state.global_step] = optimizer.optimizer.wire.bytes_sent

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self.end = weights_digest(model)

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        self.evaluated[state.global_step] = weights_digest(model)


def watched(folder: str | Path, watch: Watch, **changes: Any) -> Trainer:
    changes = {
        **{"optim_args": "vote_every=4", "max_steps": 11, "gradient_accumulation_steps": 2},
        **{"logging_steps": 3, "eval_every": 6, **changes},
    }
    trainer = tiny_trainer(
        tiny_args(folder, **changes),
        model=tiny_llama(attention_dropout=0.0),  # An evaluation draws random numbers.
        **{"eval_dataset": tiny_data(8), "callbacks": [watch]},
    )
    watch.trainer = trainer
    trainer.train()
    return trainer


@pytest.mark.smoke
@on_ranks(2)
def test_what_is_evaluated_and_saved_has_all_steps(rank: int, tmp_path: Path) -> None:
    """Exchanges after steps 4, 5 (a save), 6 (an evaluation), 10, and 11 (the end)."""
    watch = Watch(f"{tmp_path}/alone")
    with logged() as messages:
        trainer = watched(tmp_path, watch, save_total_limit=3, save_every=5)
    trainer.save_model(f"{tmp_path}/end")
    log, end = trainer.state.log_history, weights_digest(trainer.model)
    seen, evaluated = watch.seen, watch.evaluated
    differing = [step for step in range(1, 12) if len(set(gathered(watch.own[step]))) == 2]
    assert differing == [1, 2, 3, 5, 6, 7, 8, 9, 11]
    assert agree(seen)  # TRL's callbacks copy the model, for example.
    assert agree(evaluated)
    assert agree([entry["eval_loss"] for entry in log if "eval_loss" in entry])
    assert trainer.optimizer.optimizer.wire.exchanges == 5
    assert list(evaluated) == [6, 11]
    stretches = [{seen[step] for step in steps} for steps in ((1, 2, 3), (6, 7, 8, 9))]
    assert [len(stretch) for stretch in stretches] == [1, 1]
    assert len({*seen.values()}) == 6
    assert agree(seen[6], evaluated[6])
    assert agree(seen[11], evaluated[11], end)
    assert file_digest(tmp_path / "alone") == seen[8] == seen[6]  # Within a period.
    for step in (5, 10, 11):
        assert file_digest(tmp_path / f"checkpoint-{step}") == seen[step]
    assert file_digest(tmp_path / "end") == watch.end == end
    reset = trainer.model.model.norm.weight.tolist()
    assert reset == pytest.approx([2.0] * len(reset), abs=0.1)

    # A period that isn't over is in no entry, and one that is over in one entry.
    entries = [entry for entry in log if "loss" in entry]
    last = {"wire_mb_per_step": False, "apply_ms": False, "agreement": True}
    for key, in_last in last.items():
        assert [f"dlion/{key}" in entry for entry in entries] == [False, True, in_last], key
    assert 6 * entries[1]["dlion/wire_mb_per_step"] * 1e6 == pytest.approx(watch.sent[6])
    advised = [text.partition("et ")[2] for text in messages]
    expected = ["average_tokens_across_devices=False", "vote_every=2 or less"]
    assert advised == (expected if rank == 0 else [])


class Looks(TrainerCallback):
    """Looks at the model's weights in every event."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        weights_digest(model)

    on_log = on_epoch_begin = on_epoch_end = on_step_end


@on_ranks(2)
def test_a_callback_that_looks_changes_nothing(tmp_path: Path) -> None:
    ends = []
    for callbacks in ([], [Looks()]):
        args = tiny_args(tmp_path, max_steps=7, optim_args="vote_every=4", logging_steps=1)
        ends.append(weights_digest(trained(args, callbacks=callbacks).model))
    assert agree(*ends)


class Logs(TrainerCallback):
    """Acts in one event only."""

    def on_log(self, args, state, control, **kwargs):
        pass


@pytest.mark.parametrize(("kind", "count"), [(Logs, 1), (Looks, 8)])
@on_ranks(2)
def test_weights_are_shown_only_for_events_in_which_a_callback_acts(
    tmp_path: Path, kind: type[TrainerCallback], count: int
) -> None:
    """At the log of step 6; also at the ends of steps 1 to 3, 5, and 6, and between two epochs."""
    args = tiny_args(tmp_path, max_steps=7, optim_args="vote_every=4", logging_steps=6)
    with mock.patch.object(LocalSteps, "show", autospec=True, side_effect=LocalSteps.show) as show:
        trained(args, callbacks=[kind()])
    assert show.call_count == count


class Clamps(TrainerCallback):
    """Clamps a weight on all ranks after every step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.model.norm.weight.data.clamp_(0.875, 1.0)

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        weight = model.model.norm.weight
        assert 0.875 <= float(weight.min()) <= float(weight.max()) <= 1.0


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@on_ranks(2)
def test_a_clamp_after_every_step_holds_for_what_is_evaluated_and_saved(
    tmp_path: Path, strategy: str
) -> None:
    changes: dict[str, Any] = {"eval_every": 3, "save_every": 4}
    if strategy == "epoch":
        changes = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    args = tiny_args(
        tmp_path, max_steps=12, optim_args="vote_every=32", learning_rate=0.03, **changes
    )
    trained(args, eval_dataset=tiny_data(8), callbacks=[Clamps()])
    folders = [*tmp_path.glob("checkpoint-*")]
    assert len(folders) >= 2
    for folder in folders:
        saved = load_file(folder / "model.safetensors")
        assert float(saved["model.norm.weight"].max()) <= 1.0


@on_ranks(2)
def test_evaluations_within_a_period_steer_a_run_by_all_its_steps(tmp_path: Path) -> None:
    """Stops early, reduces the rate, and loads the best model by evaluations in one period."""
    watch = Watch()
    args = tiny_args(
        tmp_path, optim_args="vote_every=32", max_steps=50, eval_every=10, save_every=10,
        load_best_model_at_end=True, logging_steps=10, metric_for_best_model="eval_loss",
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0},
    )  # fmt: skip
    callbacks = [EarlyStoppingCallback(early_stopping_patience=1), watch]
    trainer = trained(args, eval_dataset=tiny_data(), callbacks=callbacks)
    log = trainer.state.log_history
    assert {entry["learning_rate"] for entry in log if "loss" in entry} == {args.learning_rate}
    megabytes = [entry.get("dlion/wire_mb_per_step", 0.0) for entry in log if "loss" in entry]
    assert 10 * sum(megabytes) * 1e6 == pytest.approx(watch.sent[50])
    assert weights_digest(trainer.model) == watch.evaluated[trainer.state.best_global_step]
    losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    assert agree(losses)
    assert len(set(losses)) == 5
    assert losses == sorted(losses, reverse=True)


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
    watch = Watch()
    args = tiny_args(
        tmp_path, max_steps=7, optim_args="vote_every=3", load_best_model_at_end=True,
        metric_for_best_model="eval_loss", eval_every=2, save_every=2,
    )  # fmt: skip
    trainer = trained(args, Own, eval_dataset=tiny_data(8), callbacks=[watch])
    evaluated = watch.evaluated[4]
    assert file_digest(tmp_path / "checkpoint-4") == evaluated
    assert weights_digest(trainer.model) == evaluated


class Stream(IterableDataset[Any]):
    """Reads the data in each epoch, or in the first one only; a rank takes every other batch."""

    def __init__(self, length: int = 48, *, once: bool = False) -> None:
        self.length, self.once, self.epochs = length, once, 0

    def __iter__(self) -> Any:
        self.epochs += 1
        return iter([] if self.once and self.epochs > 1 else tiny_data(self.length))


WAITS = [
    "accelerator_config={'dispatch_batches': False, 'split_batches': True}, shuffle with a seed, "
    "and make per_device_train_batch_size the batch of all ranks",
    "include_num_input_tokens_seen='no'",
]
BUFFERS = "ddp_broadcast_buffers=False, unless training changes them, as in batch norm"
DISPATCHED = {"accelerator_config": {"dispatch_batches": False}}


@pytest.mark.parametrize(
    ("changes", "advised"),
    [
        ({"include_num_input_tokens_seen": "all"}, WAITS),
        (DISPATCHED, []),
        ({**DISPATCHED, "ddp_broadcast_buffers": True}, [BUFFERS]),
    ],
)
@on_ranks(2)
def test_waits_in_local_steps_are_warned_of(
    rank: int, tmp_path: Path, changes: dict[str, Any], advised: list[str]
) -> None:
    args = tiny_args(
        tmp_path, optim_args="vote_every=4", average_tokens_across_devices=False, max_steps=20,
        **changes,
    )  # fmt: skip
    model = tiny_llama()
    if "ddp_broadcast_buffers" in changes:
        model.register_buffer("fixed", torch.ones(1))
    with logged() as messages:
        trained(args, train_dataset=Stream(), model=model)
    assert [text.partition("set ")[2] for text in messages] == (advised if rank == 0 else [])


@pytest.mark.parametrize(("steps", "said"), [(19, ["Set vote_every=3 or less"]), (20, [])])
@on_ranks(2)
def test_few_periods_are_warned_of(rank: int, tmp_path: Path, steps: int, said: list[str]) -> None:
    options: dict[str, Any] = {"optim_args": "vote_every=4", "average_tokens_across_devices": False}
    with logged() as messages:
        trained(tiny_args(tmp_path, max_steps=steps, **options))
    assert [text[text.index("Set") :] for text in messages] == (said if rank == 0 else [])


STREAMS = {"accelerator_config": {"dispatch_batches": False}, "max_steps": 20}


@pytest.mark.parametrize("changes", [{}, {"eval_every": 2}, {"save_every": 2}], ids=str)
@pytest.mark.parametrize(
    "vote_every", [4, 5]
)  # The data end after an exchange; if only 5, in a period.
@on_ranks(2)
def test_all_ranks_raise_if_the_data_of_one_end_earlier(
    rank: int, tmp_path: Path, vote_every: int, changes: dict[str, Any]
) -> None:
    for batches in ((8, 10), (11, 8)):
        args = tiny_args(
            tmp_path, optim_args=f"vote_every={vote_every}", average_tokens_across_devices=False,
            logging_steps=100, lr_scheduler_type="constant", **STREAMS, **changes,
        )  # fmt: skip
        stream = Stream(8 * batches[rank], once=True)
        trainer = tiny_trainer(args, train_dataset=stream, eval_dataset=tiny_data(8))
        said = error_of(trainer.train)
        assert said.startswith("Disagreement: ranks are at different steps: rank 0: "), said


@on_ranks(2)
def test_all_ranks_raise_before_training_if_they_have_different_numbers_of_batches(
    tmp_path: Path,
) -> None:
    args = tiny_args(
        tmp_path, optim_args="vote_every=4", accelerator_config={"even_batches": False},
        max_steps=-1, num_train_epochs=1, lr_scheduler_type="constant", logging_steps=3,
        average_tokens_across_devices=False,
    )  # fmt: skip
    trainer = tiny_trainer(args, train_dataset=tiny_data(4 * 21))
    with pytest.raises(ValueError, match=r"differ in steps to take \(by rank: \[11, 10\]\)"):
        trainer.train()
    assert trainer.state.global_step == 0


@on_ranks(2)
@pytest.mark.parametrize("changed", ["logging_steps", "eval_steps", "save_steps"])
def test_all_ranks_raise_before_training_if_they_would_meet_after_different_steps(
    rank: int, tmp_path: Path, changed: str
) -> None:
    every = {"logging_steps": 4, "eval_steps": 4, "save_steps": 4, changed: 4 + 2 * rank}
    args = tiny_args(tmp_path, eval_strategy="steps", save_strategy="steps", **every)
    trainer = tiny_trainer(args, eval_dataset=tiny_data(8))
    with pytest.raises(ValueError, match=rf"differ in {changed} \(by rank: \[4, 6\]\)"):
        trainer.train()
    assert trainer.state.global_step == 0


@on_ranks(2)
def test_streams_of_different_lengths_are_read_again(rank: int, tmp_path: Path) -> None:
    args = tiny_args(
        tmp_path, optim_args="vote_every=4", average_tokens_across_devices=False, eval_every=6,
        save_every=7, **STREAMS,
    )  # fmt: skip
    stream = Stream(8 * (8, 11)[rank])
    trainer = trained(args, train_dataset=stream, eval_dataset=tiny_data(8))
    assert stream.epochs == (3, 2)[rank]
    assert trainer.state.global_step == 20
    assert agree(weights_digest(trainer.model))


class Short(Stream):
    """Has fewer sequences than its length says, so no step is planned to be the last."""

    def __len__(self) -> int:
        return self.length + 8


@on_ranks(2)
def test_a_training_whose_data_end_in_a_period_has_all_steps_or_the_best_model(
    tmp_path: Path,
) -> None:
    watch = Watch()
    changes = {**DISPATCHED, "optim_args": "vote_every=4", "lr_scheduler_type": "constant"}
    planned = trained(tiny_args(tmp_path, max_steps=6, **changes), train_dataset=Stream())
    changes |= {"max_steps": -1, "num_train_epochs": 1}
    short = trained(tiny_args(tmp_path, **changes), train_dataset=Short())
    assert short.state.global_step == 6
    assert agree(*(weights_digest(trainer.model) for trainer in (planned, short)))
    args = tiny_args(tmp_path, eval_every=5, save_every=5, load_best_model_at_end=True, **changes)
    best = trained(args, train_dataset=Short(), eval_dataset=tiny_data(8), callbacks=[watch])
    assert weights_digest(best.model) == watch.evaluated[5] != watch.own[6]


class Failing(TrainerCallback):
    """Raises within the second period."""

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 5:
            self.own = weights_digest(model)
            raise KeyError("of the user's callback")


@on_ranks(2)
def test_a_failed_or_stopped_training_leaves_common_weights_and_ddp(tmp_path: Path) -> None:
    args, failing = tiny_args(tmp_path, max_steps=8, optim_args="vote_every=4"), Failing()
    trainer = tiny_trainer(args, callbacks=[failing])
    with pytest.raises(KeyError, match="of the user's callback"):
        trainer.train()
    failed = weights_digest(trainer.model)
    assert trainer.model_wrapped.require_backward_grad_sync
    stop = At(6, lambda control, **_: setattr(control, "should_training_stop", True))
    trainer = trained(args, callbacks=[stop])
    stopped = weights_digest(trainer.model)
    assert not agree(failing.own)
    assert agree(failed)
    assert agree(stopped)
    assert failed != stopped  # Who stops early keeps the last two steps.
    assert trainer.optimizer.optimizer.wire.exchanges == 2


class Begins(TrainerCallback):
    """Notes what the model holds when a training begins, as TRL's BEMACallback copies it."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.seen = [weights_digest(model)]

    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        self.seen.append(weights_digest(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_a_resumed_run_equals_its_saver(tmp_path: Path, dtype: torch.dtype) -> None:
    """Resumes from both checkpoints, which lie within periods, that the saves end."""
    begins, options = Begins(), {"optim_args": "vote_every=4", "max_grad_norm": 0.0}
    args = tiny_args(tmp_path, max_steps=16, save_every=7, **options)

    def made() -> Trainer:
        changes = {"eval_dataset": tiny_data(4), "callbacks": [begins]}
        return tiny_trainer(args, model=tiny_llama().to(dtype), **changes)

    def end(trainer: Trainer, resume: str | None = None) -> Any:
        trainer.train(resume_from_checkpoint=resume)
        lion = trainer.optimizer.optimizer
        momenta = [state["exp_avg"].clone() for state in lion.state.values()]
        assert lion.steps == 16
        return weights_digest(trainer.model), momenta, begins.seen

    first = made()
    digest, momenta, (train, epoch, *_) = end(first)
    assert train == epoch
    assert not is_equal_everywhere(momenta[0])
    first.evaluate()
    for again, step in ((first, 7), (made(), 7), (made(), 14)):
        resumed, found, begun = end(again, f"{tmp_path}/checkpoint-{step}")
        assert agree(digest, resumed)
        assert same(momenta, found)
        assert agree(begun)


class Evaluates(TrainerCallback):
    """Evaluates in the middle of a period, in a step in which the model holds a rank's own weights.

    Attributes:
        trainer: The trainer, set later.
        seen: Losses, and digests of the weights that the model held in the evaluation.
    """

    trainer: Any = None

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step == 5:
            with optimizer.optimizer.common_weights():
                self.seen.append(weights_digest(model))
            self.seen.append(self.trainer.evaluate()["eval_loss"])
            self.seen.append(self.trainer.predict(tiny_data(8)).metrics["test_loss"])

    def on_prediction_step(self, args, state, control, model=None, **kwargs):
        self.seen.append(weights_digest(model))


@on_ranks(2)
def test_an_evaluation_of_the_users_own_uses_the_weights_of_the_last_exchange(
    tmp_path: Path,
) -> None:
    args = tiny_args(tmp_path, optim_args="vote_every=4", max_steps=7)
    callback = Evaluates()
    trainer = tiny_trainer(args, eval_dataset=tiny_data(8), callbacks=[callback])
    callback.trainer = trainer
    trainer.train()
    common, *rest = callback.seen
    digests = [value for value in rest if isinstance(value, str)]
    losses = [value for value in rest if not isinstance(value, str)]
    assert losses == [losses[0]] * 2
    assert len(digests) >= 2
    assert set(digests) == {common}


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


@on_ranks(2)
def test_a_subclass_that_evaluates_itself_sees_common_weights(tmp_path: Path) -> None:
    args = tiny_args(
        tmp_path, optim_args="vote_every=4", max_steps=6, average_tokens_across_devices=False,
        eval_every=2,
    )  # fmt: skip

    def look(optimizer: Any, **_: Any) -> None:
        with optimizer.optimizer.common_weights():
            pass

    ends = []
    # A look at common weights after step 3 changes nothing.
    for callbacks in ([At(3, look)], []):
        model = tiny_llama(attention_dropout=0.0)
        data = tiny_data(8)
        trainer = tiny_trainer(args, OwnLoop, model=model, eval_dataset=data, callbacks=callbacks)
        trainer.seen = []
        trainer.train()
        assert len(set(trainer.seen)) == 3  # At steps 2, 4, and 6.
        ends.append((trainer.seen, weights_digest(trainer.model)))
    assert agree(*ends)


@pytest.mark.parametrize("share", [0.1, 1.0])
@on_ranks(2)
def test_an_exchange_above_a_tenth_is_logged_once_with_what_would_hide_it(
    rank: int, tmp_path: Path, share: float
) -> None:
    wait = Pending.wait

    def slow(pending: Pending) -> None:
        wait(pending)
        callback.time.sleep(0.01)

    # A share of 1 stands for steps of which the exchange is a small part.
    limit = mock.patch.object(callback, "LOCAL_SHARE", share)
    with logged() as messages, limit, mock.patch.object(Pending, "wait", slow):
        for steps in (52, 49):
            trained(tiny_args(tmp_path, max_steps=steps, logging_steps=100))
    hints = [text for text in messages if "vote_every=" in text]
    assert ["medians of 50 steps" in text for text in hints] == [True] * (rank == 0 and share < 1)


@pytest.mark.parametrize(
    ("voters", "times", "momenta"), [(2, 4, ""), (8, 2 * 5.5, ",momentum_sync_every=1")]
)
def test_the_log_proposes_what_the_bytes_of_local_steps_need(
    voters: int, times: float, momenta: str
) -> None:
    # An exchange between two ranks sends 4 bits instead of 1; between eight 4 and a sum of 7 bits
    # instead of 1 and 1, and as much for momenta.
    _, lion = single()
    with mock.patch.object(Peers, "voter_count", voters):
        options, share = callback._vote_every(lion, 1.0, 0.1)
    assert options == f"vote_every={4 if voters == 2 else 16}{momenta}"
    ended_s, every = 0.1 * times, int(options.split("=")[1].split(",")[0])
    assert share == pytest.approx(ended_s / (ended_s + every))


def test_the_advised_period_makes_the_exchange_a_tenth_of_the_step() -> None:
    # 10 ms of exchange are 10% of a step of 100 ms; more need more steps.
    pairs = [(0.1, 0.01), (0.1, 0.011), (0.1, 0.021), (0.1, 0.1), (1.0, 1.0), (0.1, 0.0)]
    assert [vote_every_for(*pair) for pair in pairs] == [1, 2, 4, 16, 16, 1]
    assert vote_every_for(0.1, 10.0) == 32
