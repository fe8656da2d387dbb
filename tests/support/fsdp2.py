"""Trainer and Accelerate that shard by FSDP2 on CPUs, which they do on GPUs only.

    torchrun --nproc_per_node 4 -m tests.support.fsdp2 FOLDER

trains, saves and resumes, on the GPUs if there are any, and prints a hash of each rank's parameters
both times.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from transformers import Trainer, TrainingArguments

import hf_dlion
from accelerate import Accelerator, DistributedType, PartialState
from hf_dlion.accelerate import parallelism_config
from tests.support.oracle import bits_of
from tests.support.sharded_training import DECAY, LR, full_params
from tests.support.spawn import LASTING
from tests.support.tiny import tiny_args, tiny_data, tiny_llama, tiny_trainer


@contextmanager
def as_if_on_gpus() -> Iterator[None]:
    """Has Accelerate take these gloo ranks for those of several GPUs: the one thing that is false.

    All else is its own, and the devices remain CPUs.
    """
    original = PartialState.__init__

    def made(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        original(self, True, **kwargs)
        if self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    try:
        # TrainingArguments tell Accelerate of FSDP by variables.
        with mock.patch.object(PartialState, "__init__", made), mock.patch.dict(os.environ):
            yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


class WithDecay(Trainer):
    """Has one group, as the oracle has."""

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters()]


def two_by_two() -> ParallelismConfig:
    return parallelism_config(dp_replicate_size=2, dp_shard_size=2)


def sharding_args(
    folder: str | Path, config: ParallelismConfig | None = None, **changes: Any
) -> TrainingArguments:
    """Returns arguments for FSDP2 in two replicas of two ranks; they say how parts are saved."""
    state_dict_type = changes.pop("state_dict_type", "SHARDED_STATE_DICT")
    fsdp_config = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": state_dict_type,
    }
    sharding = {"fsdp": True, "fsdp_config": fsdp_config}
    schedule = {"learning_rate": LR, "weight_decay": DECAY, "lr_scheduler_type": "constant"}
    own = {"use_cpu": not torch.cuda.is_available(), "per_device_train_batch_size": 2}
    config = config or two_by_two()
    options = {**sharding, **schedule, **own, **changes}
    return tiny_args(folder, parallelism_config=config, **options)


class Recorder:
    """What a sharding Trainer's steps had and made, whole; all ranks must take the same steps."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.params: list[list[Tensor]] = []
        self.grads: list[list[Tensor]] = []
        original = trainer.create_optimizer

        def create_optimizer(*args: Any) -> Any:
            optimizer = original(*args)
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)
            return optimizer

        trainer.create_optimizer = create_optimizer  # type: ignore[method-assign]

    def _before(self, *_: Any) -> None:
        model = self.trainer.model
        assert model is not None
        if not self.params:
            self.params.append(full_params(model))
        grads = [param.grad for param in model.parameters()]
        self.grads.append([grad.full_tensor() for grad in grads])  # type: ignore[union-attr, operator]

    def _after(self, *_: Any) -> None:
        assert self.trainer.model is not None
        self.params.append(full_params(self.trainer.model))


def keep_groups(accelerator: Accelerator) -> None:
    """Keeps the groups of an accelerator's mesh: torch takes equal meshes for one and the same."""
    mesh = accelerator.torch_device_mesh
    for own in (mesh, mesh["dp_shard_cp"]):
        LASTING.update(own.get_all_groups())


def sharding_trainer(args: TrainingArguments) -> Trainer:
    model = tiny_llama(attention_dropout=0.0)
    trainer = tiny_trainer(args, WithDecay, model=model, eval_dataset=tiny_data(12))
    keep_groups(trainer.accelerator)
    return trainer


def register() -> None:
    torch.set_num_threads(1)
    hf_dlion.register()


def main(folder: str) -> None:
    register()
    there = torch.cuda.is_available()
    for resume in (None, f"{folder}/checkpoint-2"):
        with contextlib.nullcontext() if there else as_if_on_gpus():
            args = sharding_args(folder, max_steps=4, save_strategy="steps", save_steps=2)
            trainer = sharding_trainer(args)
            trainer.train(resume_from_checkpoint=resume)
            assert trainer.model is not None
            bits = b"".join(map(bits_of, full_params(trainer.model)))
            digest = hashlib.sha256(bits).hexdigest()
            print(f"rank {args.process_index}: {digest}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
