"""Planes of a verdict can be viewed as bytes."""

from __future__ import annotations

import pytest
import torch

from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Scratch
from hf_dlion.core.rule import Majority
from hf_dlion.core.votes import Rows, Votes
from hf_dlion.options import Options
from hf_dlion.ranks.routes import _joined, exchange_votes
from hf_dlion.ranks.topology import Topology
from tests.support.spawn import on_ranks


@pytest.mark.parametrize("words", [1, 3, 4])
def test_joined_planes_can_be_viewed_as_bytes(words: int) -> None:
    share = -(-words // 2)
    shares = torch.arange(2 * 2 * share).view(2, 2, share)  # Ranks, planes, words.
    planes = _joined(shares, words)
    for k, plane in enumerate(planes):
        assert plane.tolist() == shares[:, k].flatten()[:words].tolist()
        assert plane.view(torch.uint8).numel() == 8 * words


@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
@on_ranks(4)
def test_messages_of_both_routes_are_suspended_equally_often(rank: int, exchange: str) -> None:
    """Twice between nodes, then once before and once in the node: NCCL needs one order."""
    ranks = Topology(local_group=2)
    ranks.form()
    rows = Rows([(1, 4)], torch.device("cpu"))
    votes = Votes(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, dtype=torch.bool), rows)
    context = StepContext(
        number=1, voter=ranks.voter, voters=2, options=Options(exchange=exchange, local_group=2),
        groups=[], scratch=Scratch(),
    )  # fmt: skip
    task = exchange_votes(votes, Majority("alternate"), context, ranks)
    assert sum(1 for _ in task) == 4
