"""Trainer with FSDP2 inside replicas, on CPUs that Accelerate takes for GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from hf_dlion.accelerate import parallelism_config
from tests.support.gpus import as_if_on_gpus
from tests.support.spawn import LASTING, RankPools, on_ranks
from tests.support.tiny import tiny_args, tiny_data, tiny_llama, tiny_trainer

pytestmark = pytest.mark.multiproc


def train(
    rank: int, world_size: int, folder: str, changes: dict[str, Any], resume: bool
) -> tuple[list[torch.Tensor], dict[str, Any]]:
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
            **{"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2},
            **changes,
        )
        model = tiny_llama(attention_dropout=0.0)
        trainer = tiny_trainer(args, model=model, eval_dataset=tiny_data(12))
        mesh = trainer.accelerator.torch_device_mesh
        for own in (mesh, mesh["dp_shard_cp"]):  # torch reuses an equal mesh with its groups.
            LASTING.update(own.get_all_groups())
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
        assert trainer.optimizer_cls_and_kwargs is None  # The next training makes its own.
        lion = trainer.optimizer.optimizer
        params = [param for group in lion.param_groups for param in group["params"]]
        assert all(isinstance(param, DTensor) for param in params)
        found = {
            "bytes": lion.wire.last_bytes_sent,
            "sent": lion.wire.bytes_sent,
            "names": [line[0] for line in lion._layout.lines],
            "steps": lion.steps,
            "numel": sum(param.numel() for param in params),
        }
        return [param.detach().full_tensor().clone() for param in params], found


# With three local steps the checkpoint that is resumed from lies within a period.
@pytest.mark.slow
@pytest.mark.parametrize("local", ["", ",vote_every=3"], ids=["votes", "local"])
def test_replicas_vote_on_their_shards_and_resume_bit_for_bit(
    pools: RankPools, tmp_path: Path, local: str
) -> None:
    changes: dict[str, Any] = {
        "optim_args": f"bits=2,full_precision=*norm*{local}",
        "gradient_accumulation_steps": 2,
        **{"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True},
    }
    uninterrupted = pools(4).run(train, str(tmp_path), changes, False, timeout=120)
    for params, found in uninterrupted:
        assert all(map(torch.equal, params, uninterrupted[0][0]))
        assert "model.embed_tokens.weight" in found["names"]
        # Two bits of this rank's half of the parameters, one way each; none within a period.
        half = 2 * found["numel"] / 2 / 8
        assert (found["bytes"] > half) == (not local)
        assert found["bytes"] < 2 * half < 2 * found["sent"]
    rest = pools(4).run(train, str(tmp_path), changes, True, timeout=120)
    for (straight, _), (resumed, found) in zip(uninterrupted, rest, strict=True):
        assert found["steps"] == 4
        assert all(map(torch.equal, straight, resumed))


@on_ranks(4)
def test_another_optimizer_is_refused_because_replicas_would_drift_apart(
    rank: int, tmp_path: Path
) -> None:
    with pytest.raises(NotImplementedError, match="use DistributedLion"):
        train(rank, 4, tmp_path, {"optim": "adamw_torch"}, False)
