"""Tensors that travel together: how a list of them is cut into batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def device_of(tensor: Tensor) -> torch.device:
    """Returns the tensor's device, the least that a batch has in common."""
    return tensor.device


def in_batches(
    items: Iterable[T],
    limit: int,
    tensor_of: Callable[[T], Tensor],
    kind_of: Callable[[Tensor], Hashable] = device_of,
) -> list[list[T]]:
    """Returns runs of neighbours of one kind, in order, with at most `limit` elements each.

    All ranks must cut alike, so this depends on nothing but its arguments. A larger tensor is a
    batch of its own; a tensor without elements is left out.

    Args:
        items: Each has a tensor.
        limit: Elements per batch.
        tensor_of: Returns an item's tensor.
        kind_of: Returns what the tensors of a batch have in common.
    """
    batches: list[list[T]] = []
    room, kind = 0, None
    for item in items:
        tensor = tensor_of(item)
        if tensor.numel() == 0:
            continue
        if not batches or tensor.numel() > room or kind_of(tensor) != kind:
            batches.append([])
            room, kind = limit, kind_of(tensor)
        batches[-1].append(item)
        room -= tensor.numel()
    return batches


def by_kind(
    items: Iterable[T],
    tensor_of: Callable[[T], Tensor],
    kind_of: Callable[[Tensor], Hashable] = device_of,
) -> list[T]:
    """Returns the items with those of one kind next to one another, in the order of the first."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(kind_of(tensor_of(item)), []).append(item)
    return [item for group in groups.values() for item in group]
