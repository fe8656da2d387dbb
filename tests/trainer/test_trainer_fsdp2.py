"""Trainer with FSDP2 inside replicas, on CPUs that Accelerate takes for GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor
from transformers import Trainer

from hf_dlion.accelerate import parallelism_config
from tests.support.gpus import as_if_on_gpus
from tests.support.spawn import LASTING, on_ranks
from tests.support.tiny import tiny_args, tiny_data, tiny_llama, tiny_trainer
from tests.support.training import is_equal_everywhere, same


def trained_on_shards(folder: Path, resume: str | None = None, **changes: Any) -> Trainer:
    with as_if_on_gpus():
        args = tiny_args(
            folder,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "state_dict_type": "SHARDED_STATE_DICT",
            },
            parallelism_config=parallelism_config(dp_replicate_size=2, dp_shard_size=2),
            **{"per_device_train_batch_size": 2, "save_every": 2, **changes},
        )
        model = tiny_llama(attention_dropout=0.0)
        trainer = tiny_trainer(args, model=model, eval_dataset=tiny_data(12))
        mesh = trainer.accelerator.torch_device_mesh
        for own in (mesh, mesh["dp_shard_cp"]):  # torch reuses an equal mesh with its groups.
            LASTING.update(own.get_all_groups())
        trainer.train(resume_from_checkpoint=resume)
        return trainer


# With three local steps the checkpoint that is resumed from lies within a period.
@pytest.mark.slow
@pytest.mark.parametrize("local", ["", ",vote_every=3"], ids=["votes", "local"])
@on_ranks(4, timeout=120)
def test_replicas_vote_on_their_shards_and_resume_bit_for_bit(tmp_path: Path, local: str) -> None:
    changes: dict[str, Any] = {
        "optim_args": f"bits=2,full_precision=*norm*{local}",
        "gradient_accumulation_steps": 2,
        **{"eval_every": 2, "load_best_model_at_end": True},
    }
    ends = []
    for resume in (None, f"{tmp_path}/checkpoint-2"):
        trainer = trained_on_shards(tmp_path, resume, **changes)
        assert trainer.optimizer_cls_and_kwargs is None  # The next training makes its own.
        lion = trainer.optimizer.optimizer
        params = [param for group in lion.param_groups for param in group["params"]]
        assert all(isinstance(param, DTensor) for param in params)
        assert lion.steps == 4
        ends.append([param.detach().full_tensor().clone() for param in params])
        if resume is None:
            assert "model.embed_tokens.weight" in [s.name for s in lion.params.fresh_layout().slots]
            # Two bits of this rank's half of the parameters, one way each; none within a period.
            half = 2 * sum(param.numel() for param in params) / 2 / 8
            assert (lion.wire.last_bytes_sent > half) == (not local)
            assert lion.wire.last_bytes_sent < 2 * half < 2 * lion.wire.bytes_sent
    assert same(*ends)
    assert all(map(is_equal_everywhere, ends[0]))


@on_ranks(4)
def test_another_optimizer_is_refused_because_replicas_would_drift_apart(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="use DistributedLion"):
        trained_on_shards(tmp_path, optim="adamw_torch")
