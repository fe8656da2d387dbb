"""A small model, its batches, and comparisons of tensors between ranks."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.spawn import LASTING


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10), nn.Linear(10, 3))


def filled(value: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Returns 128 equal weights with a gradient of one."""
    param = nn.Parameter(torch.full((128,), value, dtype=dtype))
    param.grad = torch.ones_like(param)
    return param


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def replicas_of_shards(replicas: int, shards: int, device: str = "cpu") -> DeviceMesh:
    """Returns a mesh for FSDP2, whose groups outlive the case: torch takes equal meshes for one."""
    mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    for part in (mesh, mesh["replicate"], mesh["shard"]):
        LASTING.update(part.get_all_groups())
    return mesh


def gradients_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the gradients of a batch, which the parameters don't get."""
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def everyones(tensor: Tensor) -> list[Tensor]:
    """Returns every rank's tensor."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.detach().contiguous())
    return found


def is_equal_everywhere(tensor: Tensor) -> bool:
    return all(torch.equal(tensor, own) for own in everyones(tensor))


def gathered(value: Any) -> list[Any]:
    """Returns every rank's value, which must be picklable."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def agree(*values: Any) -> bool:
    """Returns whether all values are equal, on all ranks."""
    found = [own for values in gathered(values) for own in values]
    return all(own == found[0] for own in found)


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Returns whether two sequences hold equal tensors; they may not be empty."""
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """Yields a list that gets the texts of all warnings in a `with` statement."""
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: texts.append(str(message))
        yield texts


def error_of(call: Callable[..., Any], *args: Any) -> str:
    """Returns what a call raises, as "Type: text", or "" if it raises nothing."""
    try:
        call(*args)
    except BaseException as error:  # KeyboardInterrupt is passed on to other ranks, for example.
        return f"{type(error).__name__}: {error}"
    return ""


def check_error(said: str, pattern: str, rank: int) -> None:
    """Verifies how an error of one of two ranks begins.

    If rank 1 alone has failed, `{named}` in the pattern is what rank 0 puts before its error.
    """
    named = r"Disagreement: \w+ failed on 1 of 2 ranks: rank 1: " if rank == 0 else ""
    assert re.match(pattern.format(named=named), said), said
