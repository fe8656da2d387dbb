"""A small model, its batches, and comparisons of tensors between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10), nn.Linear(10, 3))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def everyones(tensor: Tensor) -> list[Tensor]:
    """Returns every rank's tensor."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.detach().contiguous())
    return found


def is_equal_everywhere(tensor: Tensor) -> bool:
    return all(torch.equal(tensor, own) for own in everyones(tensor))


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Returns whether two sequences hold equal tensors; they may not be empty."""
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))


def error_of(call: Callable[..., Any], *args: Any) -> str:
    """Returns what a call raises as "Type: text", or "" if it raises nothing."""
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
