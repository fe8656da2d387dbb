"""What Trainer's arguments ask for, and what a layer below or above makes of it: rank 0 warns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_dlion
from hf_dlion.trainer import patches
from tests.support.spawn import on_ranks
from tests.support.tiny import At, logged, tiny_args, tiny_data, tiny_llama, trained


class MuonTrainer(Trainer):
    """Makes an optimizer of its own, as LLaMA-Factory with `use_muon`."""

    def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


@on_ranks(2)
def test_an_optimizer_that_was_asked_for_and_is_not_used_is_named(
    rank: int, tmp_path: Path
) -> None:
    hf_dlion.register()
    found = {}
    for optim in ("dlion", "adamw_torch"):
        args = tiny_args(tmp_path, optim=optim, max_steps=1)
        with logged() as texts:
            MuonTrainer(model=tiny_llama(), args=args, train_dataset=tiny_data()).train()
        found[optim] = [text for text in texts if "isn't used" in text]
    assert len(found["dlion"]) == (rank == 0)
    assert not found["adamw_torch"]
    assert all(text.startswith("optim='dlion' isn't used: SGD trains") for text in found["dlion"])


@pytest.mark.parametrize("optim_args", ["", "vote_every=4", "check_replicas_every=0"])
@on_ranks(2)
def test_replicas_that_differ_at_the_end_are_named(
    rank: int, tmp_path: Path, optim_args: str
) -> None:
    def change(model: Any, **_: Any) -> None:
        model.lm_head.weight.data[0, 0] += rank

    args = tiny_args(tmp_path, max_steps=3, optim_args=optim_args)
    for callbacks in ([], [At(3, change)]):
        with logged() as texts:
            trained(args, callbacks=callbacks)
        found = [text for text in texts if "replicas differ" in text]
        assert len(found) == (bool(callbacks) and rank == 0 and "=0" not in optim_args)
        for text in found:
            assert text.startswith("at the end of training: replicas differ after step 3 in 1 of ")
            assert "first in 'lm_head.weight': rank 1 from rank" in text


@on_ranks(2)
def test_a_timeout_that_the_group_does_not_have_is_named(rank: int, tmp_path: Path) -> None:
    for seconds, warns in ((15, True), (180, False), (1800, False)):  # 1800 is the default
        with logged() as texts:
            trained(tiny_args(tmp_path, ddp_timeout=seconds, max_steps=1))
        texts = [text for text in texts if "ddp_timeout" in text]
        assert len(texts) == (warns and rank == 0)
        for text in texts:
            assert text.startswith(f"ddp_timeout={seconds} has no effect: the process group has a")
            assert "init_process_group('gloo', timeout=datetime.timedelta(seconds=15))" in text


@dataclasses.dataclass
class AxolotlArguments(TrainingArguments):
    """Arguments with one of axolotl's fields."""

    include_tkps: bool = True


@on_ranks(2)
def test_waits_for_axolotls_count_of_tokens_are_announced(rank: int, tmp_path: Path) -> None:
    for changes in ({}, {"include_tkps": False}):
        args = tiny_args(
            tmp_path, AxolotlArguments, max_steps=1, optim_args="vote_every=4", **changes
        )
        with logged() as texts:
            trained(args)
        assert any("include_tkps: false" in text for text in texts) == (rank == 0 and not changes)


@pytest.mark.parametrize(
    ("module", "name", "looks"),
    [
        ("llamafactory.train.callbacks", "LogCallback", False),
        ("swift.trainers.patcher", "ProgressCallbackNew", False),
        ("axolotl.utils.callbacks", "GCCallback", False),
        ("axolotl.utils.callbacks.qat", "QATCallback", True),
        ("axolotl.utils.callbacks.generation", "SFTGenerationCallback", True),
        ("swift.rlhf_trainers.rollout_mixin", "SyncRefModelCallback", True),
        ("trl.trainer.callbacks", "SyncRefModelCallback", True),
        ("somebody", "LogCallback", True),
    ],
)
def test_callbacks_of_frameworks_that_never_look_at_weights_are_known(
    module: str, name: str, looks: bool
) -> None:
    acts = {"__module__": module, "on_step_end": lambda *_, **__: None}
    kind = type(name, (TrainerCallback,), acts)
    assert patches._may_look(kind(), "on_step_end") == looks
    assert not patches._may_look(kind(), "on_log")
