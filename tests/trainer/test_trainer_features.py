"""What people switch on in Trainer goes on working on two ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer

import hf_dlion
from hf_dlion import DistributedLion
from tests.support.spawn import RankPools, run_script
from tests.support.tiny import tiny_args, tiny_data, tiny_llama, tiny_trainer, weights_digest

pytestmark = pytest.mark.multiproc


def outcome(trainer):
    """Returns the weights, the number of steps, the optimizer's wire."""
    wire = trainer.optimizer.optimizer.wire
    return weights_digest(trainer.model), trainer.state.global_step, wire


def train(rank, world_size, folder, changes, length):
    hf_dlion.register()
    args, data = tiny_args(folder, **changes), tiny_data(length)
    if args.train_sampling_strategy == "group_by_length":
        data = [{k: v[: 4 + i % 9] for k, v in sample.items()} for i, sample in enumerate(data)]
        trainer = tiny_trainer(args, train_dataset=data, data_collator=padded)
    else:
        trainer = tiny_trainer(args, train_dataset=data)
    trainer.train()
    return outcome(trainer)


def padded(samples):
    fill = {"input_ids": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence([s[name] for s in samples], True, value)
        for name, value in fill.items()
    }


@pytest.mark.parametrize(
    ("changes", "length", "steps"),
    [
        # 45 samples: the last batches are uneven, and 6 of a rank do not divide by 4.
        ({"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 4}, 45, 4),
        ({"max_steps": -1, "num_train_epochs": 1, "dataloader_drop_last": True}, 45, 5),
        ({"train_sampling_strategy": "group_by_length"}, 48, 4),
        ({"label_smoothing_factor": 0.1}, 48, 4),
        ({"neftune_noise_alpha": 5.0}, 48, 4),
        ({"average_tokens_across_devices": False}, 48, 4),
    ],
    ids=["uneven", "drop_last", "group_by_length", "label_smoothing", "neftune", "tokens"],
)
def test_replicas_stay_equal(ranks: RankPools, tmp_path, changes, length, steps):
    results = ranks(2).run(train, str(tmp_path), changes, length)
    for digest, taken, wire in results:
        assert digest == results[0][0]
        assert taken == steps
        assert wire.exchanges >= steps


def best_of(rank, world_size, folder):
    hf_dlion.register()
    args = tiny_args(
        folder, learning_rate=0.3, max_steps=12, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True, save_total_limit=2,
    )  # fmt: skip
    # No gain is enough, so that it stops at the third evaluation.
    stop = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=100.0)
    trainer = tiny_trainer(args, eval_dataset=tiny_data(8), callbacks=[stop])
    trainer.train()
    losses = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    end = trainer.evaluate()["eval_loss"]
    return *outcome(trainer), losses, end, trainer.state.best_model_checkpoint


def test_training_stops_early_and_ends_with_the_best_model_on_every_rank(ranks, tmp_path):
    results = ranks(2).run(best_of, str(tmp_path))
    for digest, steps, _, losses, end, best in results:
        assert (digest, losses, end) == (results[0][0], results[0][3], results[0][4])
        assert steps == 6
        assert len(losses) == 3
        assert losses[-1] > min(losses)
        assert math.isclose(end, min(losses), rel_tol=1e-6)
        assert Path(best, "dlion_momentum_1_of_2.pt").exists()


def set_later(rank, world_size, folder):
    hf_dlion.register()
    args = tiny_args(folder, optim="adamw_torch")
    args = args.set_optimizer(name="dlion", learning_rate=1e-3, args="ties=zero,beta2=0.9")
    trainer = tiny_trainer(args.set_training(learning_rate=1e-3, batch_size=4, max_steps=4))
    trainer.train()
    lion = trainer.optimizer.optimizer
    return outcome(trainer), lion.options.ties, lion.param_groups[0]["betas"]


def test_set_optimizer_chooses_it(ranks, tmp_path):
    results = ranks(2).run(set_later, str(tmp_path))
    for (digest, _, wire), ties, betas in results:
        assert digest == results[0][0][0]
        assert wire.exchanges > 0
        assert (ties, tuple(betas)) == ("zero", (0.9, 0.9))


class OwnOptimizer(Trainer):
    """Makes its optimizer itself, with a learning rate per layer."""

    def create_optimizer(self, model=None):
        named = list(self.model.named_parameters())
        groups = [{"params": [pair], "lr": 1e-3 / (1 + k)} for k, pair in enumerate(named)]
        self.optimizer = DistributedLion(groups)
        return self.optimizer


def own_optimizer(rank, world_size, folder, how):
    args = tiny_args(folder, optim="adamw_torch")
    if how == "subclass":
        trainer = tiny_trainer(args, OwnOptimizer)
    else:
        model = tiny_llama()
        lion = DistributedLion(model.named_parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(lion, 1e-2, total_steps=5)
        trainer = tiny_trainer(args, model=model, optimizers=(lion, schedule))
    trainer.train()
    return outcome(trainer)


@pytest.mark.parametrize("how", ["subclass", "optimizers"])
def test_an_optimizer_of_the_user_s_own_making_is_taken(ranks, tmp_path, how):
    results = ranks(2).run(own_optimizer, str(tmp_path), how)
    for digest, steps, wire in results:
        assert digest == results[0][0]
        assert steps == 4
        assert wire.exchanges >= 4


ORDERED = r"""
import os, sys, torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

class Numbers(torch.utils.data.Dataset):
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __getitem__(self, index): return {"x": float(index), "labels": float(index)}

class Identity(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
    def forward(self, x, labels=None):
        out = x * self.scale
        return ((out - labels) / 100).square().mean() + self.scale * 0, out

def in_order(prediction):
    expected = list(range(len(prediction.label_ids)))
    right = prediction.predictions.tolist() == prediction.label_ids.tolist() == expected
    return {"right": right, "length": len(expected)}

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
seen = []
for length in (101, 40, 7, 1):
    for steps in (None, 2):
        args.eval_accumulation_steps = steps
        trainer = Trainer(
            model=Identity(), args=args, train_dataset=Numbers(16), compute_metrics=in_order
        )
        for metrics in (
            trainer.evaluate(Numbers(length)), trainer.predict(Numbers(length)).metrics
        ):
            prefix = "eval" if "eval_right" in metrics else "test"
            seen.append(metrics[f"{prefix}_right"] and metrics[f"{prefix}_length"] == length)
trainer.train()
wire = trainer.optimizer.optimizer.wire
sys.stdout.write(f"rank {os.environ['RANK']}: {sum(seen)} of {len(seen)}, {wire.exchanges > 0}\n")
"""


@pytest.mark.slow
def test_evaluate_and_predict_gather_every_sample_once_and_in_order(tmp_path):
    (tmp_path / "ordered.py").write_text(ORDERED)
    options = ["--optim", "dlion", "--use_cpu", "--per_device_eval_batch_size", "4"]
    options += ["--max_steps", "2", "--save_strategy", "no", "--report_to", "none"]
    script = [str(tmp_path / "ordered.py"), "--output_dir", str(tmp_path / "out"), *options]
    done = run_script(2, ["-m", "hf_dlion.launch", *script])
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == ["rank 0: 16 of 16, True", "rank 1: 16 of 16, True"]
