"""What the messages of a step keep in memory is held to a budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dlion import DistributedLion
from tests.support.fake_gpu import SHAPES, FakeGpu

# Bytes per parameter: what is sent and what is received take an eighth each; the rest is rows,
# which votes they are on, and tables.
BUDGET = 0.28


def storages_in(thing: object, seen: dict[int, object]) -> Iterator[torch.UntypedStorage]:
    """Yields the memory of every tensor that something holds, however deep."""
    if id(thing) in seen or isinstance(thing, (str, int, float, torch.nn.Parameter, FakeGpu)):
        return
    seen[id(thing)] = thing
    if isinstance(thing, Tensor):
        yield thing.untyped_storage()
    parts = [*thing] if isinstance(thing, (list, tuple, set)) else []
    parts += [*thing.values()] if isinstance(thing, dict) else []
    for part in [*parts, *getattr(thing, "__dict__", {}).values()]:
        yield from storages_in(part, seen)


def bytes_kept(optimizer: DistributedLion) -> int:
    """Returns the bytes that the messages of the last step keep."""
    messages = optimizer._engine.messages
    found = {part._cdata: part.nbytes() for part in storages_in(messages, {})}
    return sum(found.values())


@pytest.mark.parametrize(
    ("ranks", "options", "budget"),
    [
        (2, {}, BUDGET),
        (16, {}, BUDGET),
        (16, {"ties": "zero"}, 2 * BUDGET),  # A verdict of two bits.
        (16, {"bits": 4}, 4 * BUDGET),
        (16, {"local_group": 8}, BUDGET),
        (2, {"overlap": True}, BUDGET),
        (16, {"overlap": True}, BUDGET),
    ],
    ids=str,
)
def test_messages_keep_little_memory(ranks: int, options: dict[str, Any], budget: float) -> None:
    gpu = FakeGpu(SHAPES, ranks, **options)
    try:
        for _ in range(3):
            gpu.step()
        kept = bytes_kept(gpu.optimizer) / sum(param.numel() for param in gpu.params)
    finally:
        gpu.close()
    assert 0.1 < kept <= budget
