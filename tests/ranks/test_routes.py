"""Planes of a verdict can be viewed as bytes."""

from __future__ import annotations

import pytest
import torch

from hf_dlion.ranks.routes import _joined


@pytest.mark.parametrize("words", [1, 3, 4])
def test_joined_planes_can_be_viewed_as_bytes(words: int) -> None:
    share = -(-words // 2)
    shares = torch.arange(2 * 2 * share).view(2, 2, share)  # Ranks, planes, words.
    planes = _joined(shares, words)
    for k, plane in enumerate(planes):
        assert plane.tolist() == shares[:, k].flatten()[:words].tolist()
        assert plane.view(torch.uint8).numel() == 8 * words
