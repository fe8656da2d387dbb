"""Accelerate's FSDP2 inside replicas; Accelerate has none without GPUs, so a stub stands for it."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hf_dlion import DistributedLion, load_momentum, save_momentum
from hf_dlion.accelerate import parallelism_config
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
from tests.support.spawn import LASTING, RankPools

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "fsdp2.md"


def prepared(
    mesh: DeviceMesh, config: object, lion: DistributedLion, model: TinyModel
) -> TinyModel:
    """Shards a model, and gives the optimizer its parameters, as Accelerate does with GPUs."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False
    )
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(
            fsdp_plugin=plugin, dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO)
        ),
        torch_device_mesh=mesh,
        parallelism_config=config,
        mixed_precision="no",
        fp8_backend=None,
        _models=[],
        _prepare_one=lambda obj, first_pass=False: obj,
    )
    own = functools.partial(Accelerator._get_named_parameters, accelerator)
    accelerator._get_named_parameters = own
    trained, _ = Accelerator._prepare_fsdp2(accelerator, model, lion)
    return cast(TinyModel, trained)


def begin() -> tuple[TinyModel, DistributedLion]:
    config = parallelism_config(dp_replicate_size=2, dp_shard_size=2)
    mesh = config.build_device_mesh("cpu")
    LASTING.update(mesh.get_all_groups())
    alone = new_model()
    lion = DistributedLion(
        alone.named_parameters(), lr=LR, weight_decay=DECAY, replicate=mesh["dp_replicate"]
    )
    return prepared(mesh, config, lion, alone), lion


def train(rank: int, model: TinyModel, lion: DistributedLion, steps: range) -> list[Tensor]:
    for step in steps:
        model(tokens_of(rank, step)).backward()
        lion.step()
        lion.zero_grad()
    return full_params(model)


def train_both_ways(rank: int, world_size: int, folder: str) -> list[list[Tensor]]:
    by_hand = sharded(new_model(), grid(world_size))
    other = optimizer_of(by_hand, grid(world_size))
    model, lion = begin()
    found = [train(rank, model, lion, range(2)), train(rank, by_hand, other, range(2))]
    save_momentum(lion, folder)
    found.append(train(rank, model, lion, range(2, 4)))
    resumed, fresh = begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_momentum(fresh, folder)
    with torch.no_grad():
        for param, value in zip(resumed.parameters(), by_hand.parameters(), strict=True):
            param.to_local().copy_(value.to_local())
    found.append(train(rank, resumed, fresh, range(2, 4)))
    return found


@pytest.mark.full
def test_accelerate_shards_inside_replicas_and_what_it_prepared_resumes(tmp_path: Path) -> None:
    pools = RankPools()
    for prepared, by_hand, straight, resumed in pools(4).run(train_both_ways, str(tmp_path)):
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


def test_accelerate_knows_what_the_file_of_the_guide_says(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "machine.yaml"
    file.write_text(text)
    config = load_config_from_file(str(file))  # It refuses keys of its own that it does not know.
    assert (config.distributed_type, config.num_processes) == (DistributedType.FSDP, 16)
    fields = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    assert {f"fsdp_{name.removeprefix('fsdp_')}" for name in fields} >= set(config.fsdp_config)
