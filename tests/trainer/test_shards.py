"""Trainer with FSDP2 inside replicas; there are no GPUs, which Accelerate is told there are."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from torch import Tensor

from hf_dlion import unwrap
from hf_dlion.checkpoint.momentum_file import CheckpointError
from tests.support.fsdp2 import (
    Recorder,
    as_if_on_gpus,
    register,
    sharding_args,
    sharding_trainer,
    two_by_two,
)
from tests.support.oracle import same_bits
from tests.support.sharded_training import ShardedOracle
from tests.support.spawn import RankPools
from tests.support.tiny import tiny_args, tiny_trainer

pytestmark = [pytest.mark.full]

STEPS, HALF = 4, 2


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    made = RankPools()
    yield made
    made.close()


def train(
    rank: int, world_size: int, folder: str, changes: dict[str, Any], resume: str | None = None
) -> tuple[list[list[Tensor]], list[list[Tensor]], dict[str, Any]]:
    register()
    with as_if_on_gpus():
        args = sharding_args(
            folder, max_steps=STEPS, save_strategy="steps", save_steps=HALF, **changes
        )
        trainer = sharding_trainer(args)
        seen = Recorder(trainer)
        trainer.train(resume_from_checkpoint=resume)
        lion = unwrap(trainer.optimizer)
        told = {
            "steps": lion.steps,
            "best": trainer.state.best_model_checkpoint,
            "world_size": lion.world_size,
            "names": lion.param_groups[0]["param_names"],
            "bytes": lion.wire.last_bytes_sent,
            "norms": [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log],
        }
        return seen.params, seen.grads, told


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"max_grad_norm": 0.5}, {}),
        ({"gradient_accumulation_steps": 2, "bf16": True}, {}),
        ({"optim_args": "overlap=true,bits=4"}, {"bits": 4}),
    ],
    ids=str,
)
def test_trainer_takes_the_steps_of_the_rule_on_the_parts_that_replicas_share(
    pools: RankPools, tmp_path: Path, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    trained = pools(4).run(train, str(tmp_path), changes)
    oracle = ShardedOracle(trained[0][0][0], replicas=2, shards=2, **options)
    for step in range(STEPS):
        oracle.step([grads[step] for _, grads, _ in trained])
        for params, _, _ in trained:
            assert all(map(same_bits, params[step + 1], oracle.params())), step
    first, last = trained[0][1][0], trained[-1][1][0]
    assert not all(map(torch.equal, first, last)), "replicas have gradients of their own"
    numel = sum(param.numel() for param in trained[0][0][0])
    for _, _, told in trained:
        assert told["world_size"] == 4
        assert "model.embed_tokens.weight" in told["names"]
        # A vote each way of the rank's own half, and headers.
        assert told["bytes"] < options.get("bits", 1) * numel / 8
        assert told["norms"] == trained[0][2]["norms"]


@pytest.mark.parametrize(
    "kind", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.long)]
)
def test_a_resumed_training_equals_the_uninterrupted_one(
    pools: RankPools, tmp_path: Path, kind: str
) -> None:
    changes = {"state_dict_type": kind}
    whole = pools(4).run(train, str(tmp_path), changes)
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    rest = pools(4).run(train, str(tmp_path), changes, True)
    for (straight, _, _), (resumed, _, told) in zip(whole, rest, strict=True):
        assert told["steps"] == STEPS
        assert not all(map(same_bits, resumed[0], resumed[-1]))
        assert all(map(same_bits, straight[-1], resumed[-1]))


def test_a_mean_momentum_is_saved_and_loaded_without_files_of_ranks(
    pools: RankPools, tmp_path: Path
) -> None:
    changes = {"optim_args": "checkpoint=mean"}
    whole = pools(4).run(train, str(tmp_path), changes)
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    assert not list(tmp_path.rglob("dlion_momentum*"))
    rest = pools(4).run(train, str(tmp_path), changes, True)
    assert all(map(same_bits, whole[0][0][-1], rest[0][0][-1]))


def test_the_best_model_is_kept_and_loaded_on_all_ranks(pools: RankPools, tmp_path: Path) -> None:
    changes = {
        "eval_strategy": "steps",
        "eval_steps": HALF,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    trained = pools(4).run(train, str(tmp_path), changes)
    # Every step learns, so the last is the best.
    best = tmp_path / f"checkpoint-{STEPS}"
    assert [told["best"] for _, _, told in trained] == [str(best)] * 4
    assert list(tmp_path.glob("checkpoint-*")) == [best]


def resume_from_what_is_damaged(rank: int, world_size: int, folder: str) -> str:
    try:
        train(rank, world_size, folder, {}, f"{folder}/checkpoint-{HALF}")
    except CheckpointError as error:
        return str(error)
    return "nobody noticed"


@pytest.mark.parametrize(
    ("parts", "pattern", "what"),
    [
        ("optimizer_0", ".metadata", "is not complete"),
        ("pytorch_model_fsdp_0", "*.distcp", "lacks {name}"),
    ],
)
def test_a_checkpoint_without_some_of_its_parts_is_refused_on_all_ranks(
    pools: RankPools, tmp_path: Path, parts: str, pattern: str, what: str
) -> None:
    pools(4).run(train, str(tmp_path), {})
    # torch chooses which of the ranks that hold a part writes it.
    path = max((tmp_path / f"checkpoint-{HALF}" / parts).glob(pattern))
    path.unlink()
    for said in pools(4).run(resume_from_what_is_damaged, str(tmp_path)):
        assert f"{parts} {what.format(name=path.name)}" in said


def refusals(rank: int, world_size: int, folder: str) -> list[str]:
    register()
    said = []
    own = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    for changes in ({"config": own}, {"optim": "adamw_torch"}, {"save_on_each_node": True}):
        with as_if_on_gpus():
            trainer = sharding_trainer(sharding_args(folder, **changes))
            try:
                trainer.train()
            except NotImplementedError as error:
                said.append(str(error))
    with as_if_on_gpus():
        try:
            tiny_trainer(tiny_args(folder, parallelism_config=two_by_two()))
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_what_would_let_replicas_drift_apart_is_refused(pools: RankPools, tmp_path: Path) -> None:
    for theirs, other, disks, unsharded in pools(4).run(refusals, str(tmp_path)):
        assert "ParallelismConfig with dp_shard_size > 1" in theirs
        assert "nobody averages gradients over the replicas: use DistributedLion" in other
        assert "save_on_each_node=True does not go with FSDP" in disks
        assert "shards the model by FSDP2, which is not switched on" in unsharded
