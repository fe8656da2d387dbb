"""Accelerate's FSDP2 inside replicas; Accelerate has none without GPUs, so a stub stands for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hf_dlion import DistributedLion
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


def prepared(mesh: DeviceMesh, config: object) -> TinyModel:
    """Shards a model as Accelerate does with GPUs."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=config,
        mixed_precision="no",
    )
    model: TinyModel = fsdp2_prepare_model(accelerator, new_model())
    return model


def step_both_ways(rank: int, world_size: int) -> list[list[Tensor]]:
    config = parallelism_config(dp_replicate_size=2, dp_shard_size=2)
    mesh = config.build_device_mesh("cpu")
    LASTING.update(mesh.get_all_groups())
    alone = new_model()
    lion = DistributedLion(
        alone.named_parameters(), lr=LR, weight_decay=DECAY, replicate=mesh["dp_replicate"]
    )
    model = prepared(mesh, config)
    # Accelerate swaps the parameters of the optimizer, which was made before.
    lion.param_groups[0]["params"] = list(model.parameters())
    by_hand = sharded(new_model(), grid(world_size))
    other = optimizer_of(by_hand, grid(world_size))
    for trained, optimizer in ((model, lion), (by_hand, other)):
        trained(tokens_of(rank, 0)).backward()
        optimizer.step()
    return [full_params(model), full_params(by_hand)]


@pytest.mark.full
def test_accelerate_shards_inside_replicas_and_replicas_vote() -> None:
    pools = RankPools()
    for accelerated, by_hand in pools(4).run(step_both_ways):
        assert all(map(same_bits, accelerated, by_hand))
    pools.close()


def test_fsdp_takes_the_ranks_of_a_replica_alone() -> None:
    config = parallelism_config(dp_replicate_size=2, dp_shard_size=2)
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert config.dp_replicate_size == 2


def test_other_kinds_of_parallelism_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="tp_size=2"):
        parallelism_config(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
