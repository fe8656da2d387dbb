"""Accelerate's FSDP2 inside replicas; there are no GPUs, which Accelerate is told there are."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator, DistributedType
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn

import hf_dlion
from hf_dlion import DistributedLion
from hf_dlion.accelerate import parallelism_config
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


def all_used() -> TinyModel:
    """Torch's distributed checkpoints do not load the state of a parameter that was never used."""
    model = new_model()
    del model.unused
    return model


def begin(kind: str) -> tuple[Accelerator, Any, DistributedLion]:
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
    lion = DistributedLion(alone.named_parameters(), lr=LR, weight_decay=DECAY, replicate=replicate)
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
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_accelerate_shards_inside_replicas_and_what_it_saved_resumes(
    tmp_path: Path, kind: str
) -> None:
    pools = RankPools()
    for prepared, by_hand, straight, resumed in pools(4).run(train_both_ways, str(tmp_path), kind):
        assert all(map(same_bits, prepared, by_hand))
        assert all(map(same_bits, straight, resumed))
    pools.close()


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
