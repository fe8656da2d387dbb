"""Messages follow one another in one order, and planes of a verdict can be viewed as bytes."""

from __future__ import annotations

import pytest
import torch

from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Scratch
from hf_dlion.core.rule import Majority
from hf_dlion.core.votes import Rows, Votes
from hf_dlion.options import Options
from hf_dlion.ranks.routes import Task, _joined, exchange_votes, run_as_pipeline
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
    """Twice between nodes, then once in the node: NCCL needs one order."""
    ranks = Topology(local_group=2)
    ranks.form()
    rows = Rows([(1, 4)], torch.device("cpu"))
    votes = Votes(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, dtype=torch.bool), rows)
    context = StepContext(
        number=1, voter=ranks.voter, voters=2, options=Options(exchange=exchange, local_group=2),
        groups=[], scratch=Scratch(),
    )  # fmt: skip
    task = exchange_votes(votes, Majority("alternate"), context, ranks)
    assert sum(1 for _ in task) == 3


def test_messages_begin_one_after_another_and_few_are_in_memory() -> None:
    log: list[str] = []
    most, under_way = 0, set[int]()

    def message(number: int) -> Task:
        nonlocal most
        under_way.add(number)
        most = max(most, len(under_way))
        for work in ("encode", "count"):
            log.append(f"{work} {number}")
            yield
        log.append(f"move {number}")
        under_way.remove(number)

    run_as_pipeline(message(number) for number in range(3))
    assert log == [
        "encode 0",
        "encode 1", "count 0",
        "encode 2", "count 1", "move 0",
        "count 2", "move 1",
        "move 2",
    ]  # fmt: skip
    run_as_pipeline(message(number) for number in range(16))
    assert most == 3
