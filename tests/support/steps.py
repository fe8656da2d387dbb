"""Small models with their optimizers, steps of them, and what all ranks have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.fsdp import local_part
from hf_dlion.optimizer import DistributedLion
from tests.support.training import filled, model_of, replicas_of_shards


def plain(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, DistributedLion]:
    """Returns a model (default: the small one), and an optimizer that isn't attached."""
    model = model or model_of()
    return model, DistributedLion(model.named_parameters(), **{"lr": 0.01, **options})


def attached(
    model: nn.Module | None = None, **options: Any
) -> tuple[DistributedDataParallel, DistributedLion]:
    """Returns a model (default: the small one) under DDP, and an optimizer attached to it."""
    ddp, optimizer = plain(DistributedDataParallel(model or model_of()), **options)
    optimizer.attach(ddp)
    return ddp, optimizer


def single(
    value: float = 1.0, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Parameter, DistributedLion]:
    """Returns a parameter "w" of 128 equal weights with a gradient of one, and its optimizer."""
    param = filled(value, dtype)
    return param, DistributedLion([("w", param)], **{"lr": 0.01, **options})


def sharded(replicas: int, shards: int, **options: Any) -> tuple[nn.Sequential, DistributedLion]:
    """Returns the small model under FSDP2, and an optimizer that is attached to it.

    The first layer is sharded alone, and the root, which stays gathered after a forward, has the
    others.
    """
    mesh, model = replicas_of_shards(replicas, shards), model_of()
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    options = {"replicate": mesh["replicate"], **options}
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, **options)
    optimizer.attach(model)
    return model, optimizer


def parts(model: nn.Module) -> list[Tensor]:
    """Returns this rank's parts of a sharded model's parameters."""
    return [param.detach().to_local() for param in model.parameters()]


def backward(model: nn.Module, x: Tensor) -> None:
    """Gives the parameters the gradients of a batch."""
    model.zero_grad()
    model(x).square().sum().backward()


def take_step(optimizer: torch.optim.Optimizer, model: nn.Module, x: Tensor) -> None:
    """Takes a step on the gradients of a batch."""
    backward(model, x)
    optimizer.step()


def drawn(shape: Iterable[int], *seeds: int) -> Tensor:
    """Returns normal numbers, which only depend on the shape and the seeds."""
    seed = sum(1000**k * own for k, own in enumerate(seeds))
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def give_gradients(params: Iterable[nn.Parameter], *seeds: int) -> None:
    """Gives each trainable parameter a gradient of normal numbers, and none to frozen ones."""
    for k, p in enumerate(params):
        p.grad = drawn(p.shape, k, *seeds).to(p) if p.requires_grad else None


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def bits_of(tensor: Tensor) -> bytes:
    """Returns the memory of this rank's part of a tensor, which tells -0 from 0."""
    flat = local_part(tensor.detach()).cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()
