"""Trainer and TRL on two ranks: replicas stay equal, votes travel, and the log says how many."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, set_seed

import hf_dlion
from hf_dlion.ddp import wrapper_in
from hf_dlion.trainer.registration import optimizer_cls_and_kwargs
from tests.support.spawn import on_ranks, run_script
from tests.support.tiny import (
    logged,
    outcome,
    tiny_args,
    tiny_data,
    tiny_llama,
    tiny_tokenizer,
    tiny_trainer,
    trained,
    weights_digest,
)
from tests.support.training import agree

CASES: list[dict[str, Any]] = [
    {"ddp_find_unused_parameters": True},
    {"gradient_accumulation_steps": 3},
    {"max_grad_norm": 0.0},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"bf16": True},
    {"ddp_static_graph": True},
    {"torch_compile": True, "torch_compile_backend": "eager"},
    {"optim_args": "exchange=two_phase,aggregation=average"},
    {"optim_args": "bits=2,ties=zero,momentum_dtype=bfloat16,full_precision=*norm*"},
    {"optim_args": "momentum_sync_every=2,momentum_sync=*mlp*"},
    {"neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1},
]


PLAIN = {"ddp_find_unused_parameters", "ddp_static_graph", "max_grad_norm"}
PLAIN |= {"gradient_checkpointing", "gradient_checkpointing_kwargs"}
PLAIN |= {"torch_compile", "torch_compile_backend"}

AT_THE_END = 64 + 16  # Bytes of a header and of hashes, with which Trainer checks replicas.


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_replicas_stay_equal_with_any_trainer_options(tmp_path: Path) -> None:
    digests = []
    for changes in CASES:
        digest, entries, wire = outcome(trained(tiny_args(tmp_path, **changes)))
        assert agree(digest), changes
        assert len(entries) == wire.exchanges == 4, changes
        digests.append(digest)
    # How DDP works, recomputation, compilation, and clipping above every norm change nothing.
    alike = [k for k, changes in enumerate(CASES) if PLAIN.issuperset(changes)]
    assert len({digests[k] for k in alike}) == 1
    assert len(set(digests)) == len(CASES) - len(alike) + 1


@pytest.mark.smoke
@on_ranks(2)
def test_the_log_shows_what_the_wire_counts(tmp_path: Path) -> None:
    digest, entries, wire = outcome(trained(tiny_args(tmp_path, logging_steps=2)))
    assert agree(digest)
    assert len(entries) == 2
    sent = sum(2 * entry["dlion/wire_mb_per_step"] for entry in entries)
    assert math.isclose(sent * 1e6 + AT_THE_END, wire.bytes_sent)
    for part in ("encode", "exchange", "apply"):
        spent = sum(2 * entry[f"dlion/{part}_ms"] for entry in entries)
        assert math.isclose(spent, 1e3 * getattr(wire, f"{part}_s"))
        assert spent > 0.0
    # One bit per parameter, activity of rows and a header, instead of 16 bits of bf16.
    parameters = sum(p.numel() for p in tiny_llama().parameters())
    assert parameters / 8 < wire.last_bytes_sent < parameters / 4
    assert {entry["dlion/abstained"] for entry in entries} == {0.0}


class PoisonRankOne(TrainerCallback):
    """Puts a NaN into the gradient of rank 1 in the third and fourth step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if dist.get_rank() == 1 and state.global_step in (2, 3):
            next(model.parameters()).grad.view(-1)[0] = math.nan


@on_ranks(2)
def test_tensorboard_has_every_entry_and_abstentions_are_counted(rank: int, tmp_path: Path) -> None:
    args = tiny_args(tmp_path, max_steps=6, logging_steps=2, report_to="tensorboard")
    with mock.patch.dict(os.environ, TENSORBOARD_LOGGING_DIR=f"{tmp_path}/board"):
        digest, entries, _ = outcome(trained(args, callbacks=[PoisonRankOne()]))
    assert agree(digest)
    if rank == 0:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        assert [entry["dlion/abstained"] for entry in entries] == [0.0, 2.0, 0.0]
        board = EventAccumulator(str(tmp_path / "board")).Reload()
        names = {f"dlion/{part}_ms" for part in ("encode", "exchange", "apply")}
        names |= {"dlion/wire_mb_per_step", "dlion/abstained", "dlion/agreement"}
        seen = {tag for tag in board.Tags()["scalars"] if "dlion" in tag}
        assert seen == {f"train/{name}" for name in names}
        for name in names:
            values = [event.value for event in board.Scalars(f"train/{name}")]
            assert values == pytest.approx([entry[name] for entry in entries])


@on_ranks(2)
def test_trainers_take_turns_on_one_model_and_adamw_averages_again(tmp_path: Path) -> None:
    ours = trained(tiny_args(tmp_path), callbacks=[PoisonRankOne()])
    before = ours.optimizer.optimizer.wire.bytes_sent
    trained(tiny_args(tmp_path, max_steps=2, optim="adamw_torch"), model=ours.model)
    averaged = weights_digest(ours.model)
    ours.train()  # Its wrapper is reused.
    voted, entries, wire = outcome(ours)
    assert agree(averaged)
    assert agree(voted)
    assert averaged != voted
    sent = sum(entry["dlion/wire_mb_per_step"] for entry in entries)
    assert math.isclose(wire.bytes_sent - before, sent * 1e6 + AT_THE_END)
    assert sent > 0
    # Those of the first training aren't counted again.
    assert [entry["dlion/abstained"] for entry in entries] == [0.0, 0.0, 1.0, 1.0]
    assert ours.model_wrapped.require_backward_grad_sync
    assert len(ours.model_wrapped._comm_hooks) == 1


@pytest.mark.parametrize(
    ("optim_args", "compiled"),
    [(None, False), ("local_group=2", False), ("local_group=2", True)],
)
@on_ranks(2)
def test_an_evaluation_before_training_makes_no_difference(
    rank: int, tmp_path: Path, optim_args: str | None, compiled: bool
) -> None:
    ends = []
    for first in (True, False):
        model = tiny_llama()
        if rank:  # As a new head is that is drawn from another seed; DDP sends rank 0's weights.
            torch.nn.init.constant_(model.lm_head.weight, 1.0)
        args = tiny_args(tmp_path, optim_args=optim_args)
        if compiled:  # As an argument it would be set in the environment, for the next tests.
            args.torch_compile, args.torch_compile_backend = True, "eager"
        trainer = tiny_trainer(args, model=model, eval_dataset=tiny_data(8))
        if first:
            trainer.evaluate()
        set_seed(0)  # The evaluation drew random numbers.
        trainer.train()
        assert wrapper_in(trainer.model_wrapped) is not None
        ends.append(weights_digest(trainer.model))
    assert agree(*ends)


class OutOfMemoryOnce(Trainer):
    """Fails in its fourth step as a GPU does that is too small for the batch."""

    failed = False

    def training_step(self, *args, **kwargs):
        if not self.failed and self.state.global_step == 3:
            self.failed = True
            raise RuntimeError("CUDA out of memory. Tried to allocate 8 GiB")
        return super().training_step(*args, **kwargs)


class OwnOptimizer(OutOfMemoryOnce):
    """Makes its optimizer without `super()`."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            named = self.model.named_parameters()
            self.optimizer = hf_dlion.DistributedLion(named, lr=2e-3, vote_every=2)
        return self.optimizer


@pytest.mark.parametrize(
    ("optim_args", "cls", "exchanges"),
    [(None, OutOfMemoryOnce, 7), ("vote_every=2", OutOfMemoryOnce, 3), (None, OwnOptimizer, 3)],
)
@on_ranks(2)
def test_a_smaller_batch_after_out_of_memory_continues_with_a_new_wrapper(
    tmp_path: Path, optim_args: str | None, cls: type[Trainer], exchanges: int
) -> None:
    trainer = trained(tiny_args(tmp_path, auto_find_batch_size=True, optim_args=optim_args), cls)
    digest, entries, wire = outcome(trainer)
    assert agree(digest)
    assert wire.exchanges == exchanges
    # The log of the new steps has bytes of each exchange, which local steps have after two steps.
    has_bytes = ["dlion/wire_mb_per_step" in entry for entry in entries]
    assert has_bytes == [exchanges == 7, True, exchanges == 7, True]
    assert trainer._train_batch_size < 4


RATES = 2e-3, 1e-3, 2e-3


@dataclasses.dataclass
class Trial:
    """A trial of optuna, and one with fixed values, which rank 0 sends to the others."""

    params: dict[str, float]
    number: int


class Study:
    """Tries the rates in turn."""

    best_trial = types.SimpleNamespace(number=0, value=0.0, params={})

    def optimize(self, objective: Any, n_trials: int, **_: Any) -> None:
        for number in range(n_trials):
            objective(Trial({"learning_rate": RATES[number]}, number))

    def _is_multi_objective(self) -> bool:
        return False


# What transformers takes from optuna, which the tests don't need.
OPTUNA = types.SimpleNamespace(
    __spec__=object(),
    Trial=Trial,
    trial=types.SimpleNamespace(BaseTrial=Trial, FixedTrial=Trial),
    create_study=lambda **_: Study(),
)


class Trials(TrainerCallback):
    """Notes the weights at both ends of each trial, and what its optimizer has done."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        lion = optimizer.optimizer
        self.begun.append((weights_digest(model), lion.steps, len(lion.state)))

    def on_train_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        lion = optimizer.optimizer
        self.ended.append((weights_digest(model), lion.wire.exchanges, lion.local.period.steps))


# An objective is the last evaluation of a training, or one after it.
@pytest.mark.parametrize("eval_every", [None, 3])
@pytest.mark.parametrize(("optim_args", "exchanges"), [(None, 6), ("vote_every=4", 2)])
@on_ranks(2)
def test_trials_of_a_hyperparameter_search_begin_anew_and_end_equal(
    tmp_path: Path, optim_args: str | None, exchanges: int, eval_every: int | None
) -> None:
    trials = Trials()
    args = tiny_args(tmp_path, optim_args=optim_args, max_steps=6, eval_every=eval_every)
    trainer = tiny_trainer(
        args, model=None, model_init=lambda _=None: tiny_llama(), eval_dataset=tiny_data(8),
        callbacks=[trials],
    )  # fmt: skip
    objectives: list[float] = []

    def objective(metrics: dict[str, float]) -> float:
        objectives.append(metrics["eval_loss"])
        return objectives[-1]

    with mock.patch.dict(sys.modules, optuna=OPTUNA):
        trainer.hyperparameter_search(
            lambda trial: trial.params,
            objective,
            n_trials=3,
            direction="minimize",
            backend="optuna",
        )
    assert agree(*trials.begun)
    assert trials.begun[0][1:] == (0, 0)
    assert agree(trials.ended)
    assert agree(objectives)
    first, second, third = trials.ended
    assert first == third != second
    assert first[1:] == (exchanges, 0)
    count = 2 if eval_every else 1
    assert len(objectives) == 3 * count
    assert objectives[:count] == objectives[-count:] != objectives[count:-count]


@on_ranks(2)
def test_nodes_vote_as_one_and_a_single_node_is_warned(rank: int, tmp_path: Path) -> None:
    with logged() as messages:
        trainer = trained(tiny_args(tmp_path, optim_args="local_group=node"))
    digest, entries, _ = outcome(trainer)
    assert agree(digest)
    if rank == 0:
        assert "dlion/node_mb_per_step" in entries[0]
        assert "puts all 2 ranks into one node" in messages[0]
    else:
        assert messages == []


class StopOnPlateau(EarlyStoppingCallback):
    """No gain is enough."""

    def __init__(self) -> None:
        super().__init__(early_stopping_patience=2, early_stopping_threshold=100.0)


# With four local steps, evaluations end periods early.
@pytest.mark.oldest
@pytest.mark.parametrize("optim_args", [None, "vote_every=4"])
@on_ranks(2)
def test_training_stops_early_and_ends_with_the_best_model(
    tmp_path: Path, optim_args: str | None
) -> None:
    args = tiny_args(
        tmp_path, learning_rate=0.3, max_steps=12, eval_every=2, optim_args=optim_args,
        save_every=2, load_best_model_at_end=True, save_total_limit=2,
        greater_is_better=True, metric_for_best_model="loss",
    )  # fmt: skip
    trainer = trained(args, eval_dataset=tiny_data(8), callbacks=[StopOnPlateau()])
    losses = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    end, best = trainer.evaluate()["eval_loss"], trainer.state.best_model_checkpoint
    assert agree((weights_digest(trainer.model), losses, end, best))
    assert trainer.state.global_step == 6
    assert losses[0] == max(losses) != losses[-1]  # The best by this measure, not the last.
    assert math.isclose(end, losses[0], rel_tol=1e-6)
    assert Path(best, "dlion_momentum_1_of_2.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"ties": "zero"}, torch.float32),
        ({"vote_every": 3}, torch.float32),
        ({"vote_every": 3}, torch.bfloat16),
    ],
    ids=["votes", "local", "local, bf16"],
)
@on_ranks(2)
def test_a_peft_model_by_the_class_route_resumes(
    tmp_path: Path, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """TRL trains adapters of 16 bits, which PEFT loads in float32."""
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    ends = []
    # Recomputation of either kind changes nothing.
    for resume, reentrant in ((None, True), (f"{tmp_path}/checkpoint-2", False)):
        args = tiny_args(
            tmp_path, optim="adamw_torch", save_every=2, label_names=["labels"],
            gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )  # fmt: skip
        trainer = trained(
            args,
            model=get_peft_model(tiny_llama(), config).to(dtype),
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, **options),
            resume=resume,
        )
        ends.append(outcome(trainer))
    (uninterrupted, entries, wire), (resumed, _, _) = ends
    assert agree(uninterrupted, resumed)
    assert "dlion/abstained" in entries[0]
    # Only votes of the adapter travel, two bits of each with a majority that may be zero.
    assert (wire.last_bytes_sent > 0) == ("ties" in options)  # None within a period.
    assert wire.last_bytes_sent < 300
    assert 300 < wire.bytes_sent < 2000


@on_ranks(2)
def test_adapters_of_16_bits_stay_the_optimizers_after_the_best_is_loaded(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = tiny_args(
        tmp_path, eval_every=2, save_every=2, load_best_model_at_end=True, label_names=["labels"]
    )
    model = get_peft_model(tiny_llama(), config).to(torch.bfloat16)
    trainer = trained(args, model=model, eval_dataset=tiny_data(8))
    adapters = [param for param in model.parameters() if param.requires_grad]
    assert {param.dtype for param in adapters} == {torch.bfloat16}
    owned = [param for group in trainer.optimizer.param_groups for param in group["params"]]
    assert set(owned) == set(adapters)
    before = weights_digest(model)
    trainer.train()
    assert weights_digest(model) != before
    assert agree(weights_digest(model))


def write_model_and_data(folder: Path) -> None:
    tiny_tokenizer(model_max_length=32).save_pretrained(folder / "model")
    tiny_llama(attention_dropout=0.0).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    lines = [" ".join(f"w{(i * 7 + k) % 60}" for k in range(10)) for i in range(48)]
    text = "".join(f'{{"text": "{line}"}}\n' for line in lines)
    (folder / "data" / "train.jsonl").write_text(text)


# Runs TRL's script once for each list of its arguments, as the command would.
TRLS_SCRIPT = """
import json, runpy, sys
import torch.distributed as dist

# A second group in one store may find addresses of the first.
destroy, dist.destroy_process_group = dist.destroy_process_group, lambda *_: None
for words in json.loads(sys.argv.pop()):
    sys.argv[1:] = words
    runpy.run_module("trl.scripts.sft", run_name="__main__", alter_sys=True)
destroy()
"""


@pytest.mark.multiproc
@pytest.mark.slow
def test_trls_own_script_trains_saves_and_resumes(tmp_path: Path) -> None:
    write_model_and_data(tmp_path)
    (driver := tmp_path / "driver.py").write_text(TRLS_SCRIPT)

    def run(resume: bool) -> str:
        words = [arguments_of_trl(tmp_path, kind, resume) for kind in KINDS_OF_TRL]
        command = ["-m", "hf_dlion.launch", driver, json.dumps(words)]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        return run_script(2, command, env=offline, timeout=240).stdout

    ends, saved = [tmp_path / kind / f"checkpoint-{k}" for kind, (_, k) in KINDS_OF_TRL.items()], []
    # In each step, and with local steps after each exchange.
    assert run(resume=False).count("dlion/wire_mb_per_step") == 4 + 4 + 2
    for end in ends:
        assert (end / "dlion_momentum_1_of_2.safetensors").exists()
        (end / "trainer_state.json").unlink()
        saved.append(weights_in(end))
    assert run(resume=True).count("dlion/wire_mb_per_step") == 2 + 2 + 1
    assert all((end / "trainer_state.json").exists() for end in ends)
    assert [weights_in(end) for end in ends] == saved


# Arguments of each kind of training, and its number of steps.
KINDS_OF_TRL = {
    "full": ({"optim_args": "bits=2"}, 4),
    "lora": ({"optim_args": "bits=2", "use_peft": True, "lora_r": 4}, 4),
    "local": ({"optim_args": "vote_every=16"}, 20),
}


def arguments_of_trl(folder: Path, kind: str, resume: bool) -> list[str]:
    own, steps = KINDS_OF_TRL[kind]
    flags = {
        "model_name_or_path": folder / "model", "dataset_name": folder / "data",
        "output_dir": folder / kind, "optim": "dlion", "learning_rate": 1e-2, "max_steps": steps,
        "logging_steps": 1, "save_strategy": "steps", "save_steps": steps // 2, "max_length": 16,
        "per_device_train_batch_size": 4, "report_to": "none", "bf16": False, "use_cpu": True,
        "gradient_checkpointing": False, **own,
    }  # fmt: skip
    if resume:
        flags["resume_from_checkpoint"] = folder / kind / f"checkpoint-{steps // 2}"
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def weights_in(folder: Path) -> bytes:
    (path,) = [*folder.glob("*model.safetensors")]
    return path.read_bytes()
