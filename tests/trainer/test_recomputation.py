"""Gradient checkpointing of both kinds, under DDP on two ranks, changes no bit of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.llama.modeling_llama import LlamaMLP

import hf_dlion
from tests.support.spawn import RankPools
from tests.support.tiny import tiny_args, tiny_llama, tiny_trainer, weights_digest

pytestmark = pytest.mark.multiproc

KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
}


def train_each(rank: int, world_size: int, folder: str, lora: bool, optim_args: str) -> Any:
    hf_dlion.register()
    ends = {}
    for kind, kwargs in KINDS.items():
        model: Any = tiny_llama(num_hidden_layers=2)
        if lora:
            config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            model = get_peft_model(model, config)
        args = tiny_args(
            folder,
            optim_args=optim_args,
            gradient_checkpointing=bool(kwargs),
            gradient_checkpointing_kwargs=kwargs or None,
            label_names=["labels"],
        )
        calls, trainer = count_forwards(model), tiny_trainer(args, model=model)
        trainer.train()
        exchanges = trainer.optimizer.optimizer.wire.exchanges
        ends[kind] = weights_digest(model), exchanges, sum(calls), len(calls)
    return ends


def count_forwards(model: torch.nn.Module) -> list[bool]:
    """Returns a list that gets an entry for each forward of an MLP: whether it keeps a graph."""
    calls: list[bool] = []

    def note(*_: Any) -> None:
        calls.append(torch.is_grad_enabled())

    for module in model.modules():
        if isinstance(module, LlamaMLP):
            module.register_forward_pre_hook(note)
    return calls


@pytest.mark.parametrize("optim_args", ["bits=1", "vote_every=2"], ids=["votes", "local"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_training_with_recomputation_equals_one_without(
    pools: RankPools, tmp_path: Path, lora: bool, optim_args: str
) -> None:
    left, right = pools(2).run(train_each, str(tmp_path), lora, optim_args)
    assert left == right
    assert len({digest for digest, *_ in left.values()}) == 1
    assert {sent for _, sent, *_ in left.values()} == {4 if optim_args == "bits=1" else 2}
    # Four steps of two MLPs: forwards that keep a graph, and all.
    counts = {kind: tuple(numbers) for kind, (_, _, *numbers) in left.items()}
    assert counts == {"none": (8, 8), "reentrant": (8, 16), "not reentrant": (16, 16)}
