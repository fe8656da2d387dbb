"""Ranks that vote alike on everything are told of: what they have in common cost the network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_dlion import DistributedLion
from hf_dlion.options import warn_once
from hf_dlion.options.warn_once import kept_back
from tests.support.spawn import RankPools


def told(rank: int, world_size: int, same: bool, size: int) -> list[str]:
    """Returns what rank 0 is told in seven steps with its own, or everyone's, gradients."""

    def train() -> None:
        param = nn.Parameter(torch.zeros(size, 32))
        optimizer = DistributedLion([param])
        for step in range(7):
            generator = torch.Generator().manual_seed(10 * step + (0 if same else rank))
            param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()

    if rank > 0:  # Nothing is told there, and threads share what a process has warned of.
        train()
        return []
    with kept_back("unanimity") as messages:
        train()
        return list(messages)


@pytest.mark.parametrize(("same", "size"), [(True, 32), (True, 31), (False, 32)])
def test_equal_gradients_are_told_of_once(
    ranks: RankPools, monkeypatch: pytest.MonkeyPatch, same: bool, size: int
) -> None:
    monkeypatch.setattr(warn_once, "_given", set())
    messages = ranks(2).run(told, same, size)[0]
    # Fewer elements may be alike by chance.
    assert len(messages) == (same and size == 32)
    assert all("voted alike on every one of 1024 elements" in message for message in messages)


def test_a_rank_alone_agrees_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn_once, "_given", set())
    assert told(0, 1, True, 32) == []
