"""FSDP2: the local shards of DTensors, checks of their placement, and resharding.

A sharded model enters by `DistributedLion(replicate=)`, which makes a replica one voter
(`ranks.topology`), and by `attach`. The layout of the optimizer has local parts, so `core`, `gpu`,
and `steps` see plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import hf_dlion.ddp as ddp


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, or the tensor; waits if it is still on its way."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def with_local_part(param: Tensor, local: Tensor) -> Tensor:
    """Returns a tensor placed like `param`, with `local` as this rank's part (not copied)."""
    if not isinstance(param, DTensor):
        return local
    mesh, shape = param.device_mesh, param.shape
    return DTensor.from_local(
        local, mesh, param.placements, run_check=False, shape=shape, stride=param.stride()
    )


def check_placement(param: Tensor, momentum: Tensor | None) -> None:
    """Refuses a complete momentum of a sharded parameter, and the other way around.

    Raises:
        ValueError: If one of them is sharded and the other isn't.
    """
    if momentum is not None and is_sharded(momentum) != is_sharded(param):
        raise ValueError(
            f"the state dict has a {'sharded' if is_sharded(momentum) else 'complete'} momentum "
            f"for a parameter that is {'sharded' if is_sharded(param) else 'not sharded'}: get it "
            f"with get_optimizer_state_dict and set it with set_optimizer_state_dict, both of "
            f"torch.distributed.checkpoint.state_dict, with "
            f"options=StateDictOptions(full_state_dict=True)"
        )


def shard_index(tensor: Tensor) -> tuple[int, int] | None:
    """Returns the index of this rank's shard and the number of shards; None if not sharded."""
    if not isinstance(tensor, DTensor):
        return None
    return tensor.device_mesh.get_local_rank(), tensor.device_mesh.size()


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor."""
    return isinstance(tensor, DTensor)


def replicate_group(replicate: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the process group of the `replicate` option, given as a mesh or as the group itself.

    Raises:
        ValueError: If a mesh doesn't have exactly one dimension.
    """
    if isinstance(replicate, DeviceMesh):
        if replicate.ndim != 1:
            raise ValueError(
                f"replicate must be one dimension of the mesh, such as mesh['replicate'] (got "
                f"{replicate.ndim} dimensions)"
            )
        return replicate.get_group()
    return replicate


def check_sharding(
    named: Sequence[tuple[str, Tensor]], replicate: dist.ProcessGroup | None
) -> None:
    """Refuses parameters that the optimizer can't keep equal.

    Args:
        named: Names and trainable parameters.
        replicate: Ranks that hold the same shards, or None.

    Raises:
        NotImplementedError: If a parameter's mesh also replicates it or splits it for tensor
            parallelism, or if some parameters are sharded and others aren't.
        ValueError: If parameters are sharded without `replicate`, or the other way around, or over
            ranks of `replicate`.
    """
    sharded = [(name, p) for name, p in named if isinstance(p, DTensor)]
    if not sharded:
        if replicate is not None:
            raise ValueError(
                "replicate= needs a model sharded with FSDP2: call "
                "fully_shard(model, mesh=mesh['shard']) before you create the optimizer"
            )
        return
    plain = [name for name, p in named if not isinstance(p, DTensor)]
    if plain:
        raise NotImplementedError(
            f"{plain[0]!r} is a plain tensor, but other parameters are sharded: call fully_shard "
            f"on the root module too, or freeze {plain[0]!r}"
        )
    for name, param in sharded:
        if param.device_mesh.ndim != 1 or not all(place.is_shard() for place in param.placements):
            raise NotImplementedError(
                f"{name!r} is placed as {param.placements} on a mesh of {param.device_mesh.ndim} "
                f"dimensions: DistributedLion needs fully_shard(model, mesh=mesh['shard']), with "
                f"no replicate dimension and no tensor parallelism"
            )
    if replicate is None:
        raise ValueError(
            "the parameters are sharded: pass replicate=mesh['replicate'], the ranks that hold the "
            "same shards, to DistributedLion"
        )
    same = dist.get_process_group_ranks(replicate)
    for name, param in sharded:
        if len(both := set(param.device_mesh.mesh.tolist()).intersection(same)) > 1:
            raise ValueError(
                f"{name!r} is sharded over ranks {sorted(both)}, which replicate= gives as ranks "
                f"with the same shards: call fully_shard(model, mesh=mesh['shard']), and pass "
                f"replicate=mesh['replicate'] of the same mesh"
            )


def reshard(models: Sequence[nn.Module]) -> None:
    """Frees gathered parameters, so the next forward gathers the values that `step` wrote."""
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()


def sharded_model(model: nn.Module) -> nn.Module | None:
    """Returns the sharded model that `model` is, or the only one in it; None without one.

    Raises:
        ValueError: If there are several, none in another.
    """
    return ddp.only_one(model, cast("type[nn.Module]", FSDPModule))
