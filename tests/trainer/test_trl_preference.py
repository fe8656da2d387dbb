"""TRL's DPOTrainer and GRPOTrainer on two ranks: votes travel, and replicas stay equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback

from tests.support.spawn import on_ranks
from tests.support.tiny import WORDS, outcome, tiny_args, tiny_llama, tiny_tokenizer, weights_digest
from tests.support.training import agree, same

pytestmark = pytest.mark.slow

SHORT = {"max_steps": 2, "bf16": False}


def sentence(row: int, start: int, length: int) -> str:
    return " ".join(f"w{(7 * row + start + word) % WORDS}" for word in range(length))


def prefers(
    folder: Path, optim_args: str | None, callbacks: Sequence[Any] = (), **changes: Any
) -> Trainer:
    from trl import DPOConfig, DPOTrainer

    rows = [
        {
            "prompt": sentence(row, 0, 4),
            "chosen": " " + sentence(row, 4, 5),
            "rejected": " " + sentence(row, 20, 5),
        }
        for row in range(32)
    ]
    return DPOTrainer(
        model=tiny_llama(attention_dropout=0.0),
        ref_model=tiny_llama(attention_dropout=0.0),  # TRL would load it from the model's folder.
        args=tiny_args(folder, DPOConfig, optim_args=optim_args, **{**SHORT, **changes}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(padding_side="left"),
        callbacks=[*callbacks],
    )


def reward_of_even_words(completions: list[str], **_: Any) -> list[float]:
    return [
        sum(int(word[1:]) % 2 == 0 for word in text.split() if word[1:].isdigit()) / 8.0
        for text in completions
    ]


def reinforces(folder: Path, optim_args: str | None) -> Trainer:
    from trl import GRPOConfig, GRPOTrainer

    more = {"num_generations": 4, "max_completion_length": 8, "optim_args": optim_args}
    return GRPOTrainer(
        model=tiny_llama(attention_dropout=0.0, max_position_embeddings=64),
        reward_funcs=reward_of_even_words,
        args=tiny_args(folder, GRPOConfig, **SHORT, **more),
        train_dataset=Dataset.from_list([{"prompt": sentence(row, 0, 4)} for row in range(32)]),
        processing_class=tiny_tokenizer(padding_side="left"),
    )


# Without different rewards within a group, GRPO's gradient would be zero.
@pytest.mark.parametrize(
    ("make", "shows"),
    [(prefers, "rewards/margins"), (reinforces, "reward_std")],
    ids=["dpo", "grpo"],
)
@pytest.mark.parametrize(
    ("optim_args", "exchanges"), [(None, 2), ("vote_every=2", 1)], ids=["votes", "local"]
)
@on_ranks(2, timeout=120)
def test_trls_trainer_sends_votes_and_keeps_replicas_equal(
    rank: int, tmp_path: Path, make: Any, shows: str, optim_args: str | None, exchanges: int
) -> None:
    trainer = make(tmp_path, optim_args)
    before = weights_digest(trainer.model)
    trainer.train()
    after, entries, wire = outcome(trainer)
    assert agree(before)
    assert agree(after)
    assert before != after
    assert wire.exchanges == exchanges
    bits = trainer.optimizer.optimizer.options.bits
    sent = wire.bytes_sent / sum(p.numel() for p in tiny_llama().parameters()) / exchanges
    assert bits / 8 < sent < bits / 4
    if rank == 0:
        assert len(entries) == 2
        assert "dlion/wire_mb_per_step" in entries[-1]
        assert all(math.isfinite(entry["loss"]) for entry in entries)
        assert entries[-1][shows] != 0.0
        assert entries[-1]["grad_norm"] > 0.0


class Exchanged(TrainerCallback):
    """Notes the weights after each exchange, which are those that all ranks have."""

    def __init__(self) -> None:
        self.weights: dict[int, list[torch.Tensor]] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.weights[0] = copied(model)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        if not optimizer.optimizer.local.period.steps:
            self.weights[state.global_step] = copied(model)


def copied(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@on_ranks(2, timeout=120)
def test_the_reference_model_follows_the_weights_of_the_last_exchange(tmp_path: Path) -> None:
    """TR-DPO updates it after steps 2, 4, 6, and 8, of which 2 and 6 lie within periods."""
    noted = Exchanged()
    trainer = prefers(
        tmp_path, "vote_every=4", [noted], max_steps=9, learning_rate=1e-2,
        sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5,
    )  # fmt: skip
    trainer.train()
    assert [*noted.weights] == [0, 4, 8, 9]
    expected = noted.weights[0]
    for step in (0, 4, 4, 8):
        pairs = zip(expected, noted.weights[step], strict=True)
        expected = [old.mul(0.5).add(new, alpha=0.5) for old, new in pairs]
    reference = trainer.accelerator.unwrap_model(trainer.ref_model)
    assert same(copied(reference), expected)
    assert agree(weights_digest(reference))
    assert not same(noted.weights[4], noted.weights[8])
