"""TRL's DPOTrainer and GRPOTrainer on two ranks: votes travel, and replicas stay equal."""

from __future__ import annotations

import math
from typing import Any

import pytest
from datasets import Dataset
from transformers import Trainer

from hf_dlion.exchange.wire import WireStats
from tests.support.spawn import RankPools
from tests.support.tiny import WORDS, outcome, tiny_args, tiny_llama, tiny_tokenizer, weights_digest

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

SHORT = {"max_steps": 2, "bf16": False}
# Hashes of the weights before and after training, rank 0's log, and what was sent.
Outcome = tuple[str, tuple[str, list[dict[str, Any]], WireStats]]


def sentence(row: int, start: int, length: int) -> str:
    return " ".join(f"w{(7 * row + start + word) % WORDS}" for word in range(length))


def trained(trainer: Trainer) -> Outcome:
    before = weights_digest(trainer.model)
    trainer.train()
    return before, outcome(trainer)


def prefer(rank: int, world_size: int, folder: str, changes: dict[str, Any]) -> Outcome:
    from trl import DPOConfig, DPOTrainer

    rows = [
        {
            "prompt": sentence(row, 0, 4),
            "chosen": " " + sentence(row, 4, 5),
            "rejected": " " + sentence(row, 20, 5),
        }
        for row in range(32)
    ]
    trainer = DPOTrainer(
        model=tiny_llama(attention_dropout=0.0),
        ref_model=tiny_llama(attention_dropout=0.0),  # TRL would load it from the model's folder.
        args=tiny_args(folder, DPOConfig, **SHORT, **changes),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(padding_side="left"),
    )
    return trained(trainer)


def reward_of_even_words(completions: list[str], **_: Any) -> list[float]:
    return [
        sum(int(word[1:]) % 2 == 0 for word in text.split() if word[1:].isdigit()) / 8.0
        for text in completions
    ]


def reinforce(rank: int, world_size: int, folder: str, changes: dict[str, Any]) -> Outcome:
    from trl import GRPOConfig, GRPOTrainer

    more = {"num_generations": 4, "max_completion_length": 8, **changes}
    trainer = GRPOTrainer(
        model=tiny_llama(attention_dropout=0.0, max_position_embeddings=64),
        reward_funcs=reward_of_even_words,
        args=tiny_args(folder, GRPOConfig, **SHORT, **more),
        train_dataset=Dataset.from_list([{"prompt": sentence(row, 0, 4)} for row in range(32)]),
        processing_class=tiny_tokenizer(padding_side="left"),
    )
    return trained(trainer)


@pytest.mark.parametrize("train", [prefer, reinforce], ids=["dpo", "grpo"])
@pytest.mark.parametrize(
    ("changes", "exchanges"),
    [({}, 2), ({"optim_args": "vote_every=2"}, 1)],
    ids=["votes", "local"],
)
def test_trls_trainer_sends_votes_and_keeps_replicas_equal(
    pools: RankPools, tmp_path: Any, train: Any, changes: dict[str, Any], exchanges: int
) -> None:
    results = pools(2).run(train, str(tmp_path), changes, timeout=120)
    parameters = sum(p.numel() for p in tiny_llama().parameters())
    for before, (after, _, wire) in results:
        assert before == results[0][0]
        assert after == results[0][1][0] != before
        assert wire.exchanges == exchanges
        assert parameters / 8 * exchanges < wire.bytes_sent < parameters / 4 * exchanges
    entries = results[0][1][1]
    assert len(entries) == 2
    assert "dlion/wire_mb_per_step" in entries[-1]
    assert all(math.isfinite(entry["loss"]) for entry in entries)
    # Without different rewards within a group, GRPO's gradient would be zero.
    name = "rewards/margins" if train is prefer else "reward_std"
    assert entries[-1][name] != 0.0
    assert entries[-1]["grad_norm"] > 0.0
