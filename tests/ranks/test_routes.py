"""Planes of a verdict can be viewed as bytes, and what a tie without a move is."""

from __future__ import annotations

import pytest
import torch

from hf_dlion.core.rule import Majority
from hf_dlion.ranks.routes import _joined


@pytest.mark.parametrize("words", [1, 3, 4])
def test_joined_planes_can_be_viewed_as_bytes(words: int) -> None:
    share = -(-words // 2)
    shares = torch.arange(2 * 2 * share).view(2, 2, share)  # Ranks, planes, words.
    planes = _joined(shares, words)
    for k, plane in enumerate(planes):
        assert plane.tolist() == shares[:, k].flatten()[:words].tolist()
        assert plane.view(torch.uint8).numel() == 8 * words


def test_a_tie_that_moves_nothing_keeps_a_weight_of_minus_zero() -> None:
    negative_and_tied = torch.tensor([[0], [-1]])
    delta = Majority("zero").decode(negative_and_tied, None, 0.1, torch.empty(64))
    assert torch.signbit(torch.full((64,), -0.0) - delta).all()
