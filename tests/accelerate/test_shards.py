"""Accelerate's FSDP2 inside replicas; there are no GPUs, which Accelerate is told there are."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn

import hf_dlion
from hf_dlion import DistributedLion, last_whole_checkpoint
from hf_dlion.accelerate import parallelism_config
from hf_dlion.checkpoint.momentum_file import CheckpointError
from hf_dlion.checkpoint.whole import problems_in
from tests.support.fsdp2 import as_if_on_gpus, keep_groups, two_by_two
from tests.support.oracle import same_bits
from tests.support.sharded_training import (
    DECAY,
    LR,
    TinyModel,
    full_params,
    grid,
    new_model,
    optimizer_of,
    sharded,
    tokens_of,
)
from tests.support.spawn import RankPools

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "fsdp2.md"


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    made = RankPools()
    yield made
    made.close()


def all_used() -> TinyModel:
    """Torch's distributed checkpoints do not load the state of a parameter that was never used."""
    model = new_model()
    del model.unused
    return model


def begin(kind: str, **options: Any) -> tuple[Accelerator, Any, DistributedLion]:
    """What a user writes, but for the stub around it."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="NO_WRAP",
        cpu_ram_efficient_loading=False,
        state_dict_type=kind,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=two_by_two())
    keep_groups(accelerator)
    alone = all_used()
    replicate = accelerator.torch_device_mesh["dp_replicate"]
    options = {"lr": LR, "weight_decay": DECAY, "replicate": replicate, **options}
    lion = DistributedLion(alone.named_parameters(), **options)
    model, _ = accelerator.prepare(alone, lion)
    hf_dlion.accelerate.attach(accelerator)
    return accelerator, model, lion


def train(rank: int, model: nn.Module, lion: DistributedLion, steps: range) -> list[Tensor]:
    for step in steps:
        model(tokens_of(rank, step)).backward()
        lion.step()
        lion.zero_grad()
    return full_params(model)


def train_both_ways(rank: int, world_size: int, folder: str, kind: str) -> list[list[Tensor]]:
    by_hand = sharded(all_used(), grid(world_size))
    other = optimizer_of(by_hand, grid(world_size))
    with as_if_on_gpus():
        accelerator, model, lion = begin(kind)
        found = [train(rank, model, lion, range(2)), train(rank, by_hand, other, range(2))]
        accelerator.save_state(folder)
        found.append(train(rank, model, lion, range(2, 4)))
    with as_if_on_gpus(), warnings.catch_warnings():
        warnings.filterwarnings("error", module="hf_dlion")
        accelerator, resumed, fresh = begin(kind)
        accelerator.load_state(folder)
        found.append(train(rank, resumed, fresh, range(2, 4)))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.long)]
)
def test_accelerate_shards_inside_replicas_and_what_it_saved_resumes(
    pools: RankPools, tmp_path: Path, kind: str
) -> None:
    for prepared, by_hand, straight, resumed in pools(4).run(train_both_ways, str(tmp_path), kind):
        assert all(map(same_bits, prepared, by_hand))
        assert all(map(same_bits, straight, resumed))


def train_with_mean(rank: int, world_size: int, folder: str, kind: str) -> list[list[Tensor]]:
    with as_if_on_gpus():
        accelerator, model, lion = begin(kind, checkpoint="mean")
        train(rank, model, lion, range(2))
        accelerator.save_state(folder)
        found = [train(rank, model, lion, range(2, 4))]
    with as_if_on_gpus():
        accelerator, resumed, fresh = begin(kind, checkpoint="mean")
        accelerator.load_state(folder)
        found.append(train(rank, resumed, fresh, range(2, 4)))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.long)]
)
def test_a_mean_is_made_before_accelerate_writes_it(
    pools: RankPools, tmp_path: Path, kind: str
) -> None:
    for straight, resumed in pools(4).run(train_with_mean, str(tmp_path), kind):
        assert all(map(same_bits, straight, resumed))
    assert not list(tmp_path.glob("dlion_momentum*"))


def load_of_one_rank(rank: int, world_size: int, folder: str, kind: str) -> str:
    with as_if_on_gpus():
        accelerator, model, lion = begin(kind, checkpoint="mean")
        train(rank, model, lion, range(2))
        # As Accelerate alone would: what it writes is one rank's momentum of each part.
        lion.options = dataclasses.replace(lion.options, checkpoint="per_rank")
        accelerator.save_state(folder)
    if rank == 0:
        for path in Path(folder).glob("dlion_momentum*"):
            path.unlink()
    with as_if_on_gpus():
        accelerator, _, _ = begin(kind, checkpoint="mean")
        try:
            accelerator.load_state(folder)
        except CheckpointError as error:
            return str(error)
    return "nobody noticed"


@pytest.mark.full
def test_a_momentum_of_one_rank_is_not_taken_for_the_mean(pools: RankPools, tmp_path: Path) -> None:
    for said in pools(4).run(load_of_one_rank, str(tmp_path), "SHARDED_STATE_DICT"):
        assert "no momentum of any rank" in said


def saves_and_ends(
    rank: int, world_size: int, folder: str, dies: bool
) -> tuple[str | None, list[str]]:
    """Saves twice into one folder; the second save may end while Accelerate writes weights."""
    with as_if_on_gpus():
        accelerator, model, lion = begin("SHARDED_STATE_DICT")
        accelerator.save_state(f"{folder}/checkpoint_0")
        train(rank, model, lion, range(2))
        write = mock.patch("accelerate.accelerator.save_fsdp_optimizer", side_effect=SystemExit)
        with write if dies else contextlib.nullcontext(), contextlib.suppress(SystemExit):
            accelerator.save_state(f"{folder}/checkpoint_0")
        dist.barrier()
        found = problems_in(f"{folder}/checkpoint_0")
        return last_whole_checkpoint(folder) if not found else None, found


@pytest.mark.full
@pytest.mark.parametrize("dies", [False, True])
def test_a_save_that_ends_while_weights_are_written_is_not_taken_for_whole(
    pools: RankPools, tmp_path: Path, dies: bool
) -> None:
    for whole, problems in pools(4).run(saves_and_ends, str(tmp_path), dies):
        assert problems == (["its saving did not end"] if dies else [])
        assert whole == (None if dies else f"{tmp_path}/checkpoint_0")


def test_fsdp_takes_the_ranks_of_a_replica_alone() -> None:
    config = parallelism_config(dp_replicate_size=2, dp_shard_size=2)
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert config.dp_replicate_size == 2


def test_other_kinds_of_parallelism_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="tp_size=2"):
        parallelism_config(dp_replicate_size=2, dp_shard_size=2, tp_size=2)


@pytest.mark.parametrize("sizes", [{"dp_replicate_size": 2}, {"dp_shard_size": 2}])
def test_replicas_and_shards_are_two_at_least(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="votes between replicas need two of them"):
        parallelism_config(**sizes)


def test_accelerate_knows_what_the_file_of_the_guide_says(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "machine.yaml"
    file.write_text(text)
    config = load_config_from_file(str(file))  # It refuses keys of its own that it does not know.
    assert (config.distributed_type, config.num_processes) == (DistributedType.FSDP, 16)
    fields = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    assert {f"fsdp_{name.removeprefix('fsdp_')}" for name in fields} >= set(config.fsdp_config)
