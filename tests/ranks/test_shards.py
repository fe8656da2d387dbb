"""Who votes with whom where replicas share out parameters, from what all ranks claim."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dlion import Disagreement
from hf_dlion.ranks.header import Header, one_per_voter
from hf_dlion.ranks.shards import members_of

Grid = list[list[int]]


def claims_of(replicas: Grid, voting: Grid | None = None) -> list[dict[str, list[int]]]:
    """What each rank claims, in rank order, of the ranks of each replica in the order of parts."""
    columns = voting or [list(column) for column in zip(*replicas, strict=True)]
    ranks = sorted(rank for row in replicas for rank in row)
    return [
        {
            "votes": next(column for column in columns if rank in column),
            "shards": next(row for row in replicas if rank in row),
        }
        for rank in ranks
    ]


@pytest.mark.parametrize(
    "replicas", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2]], [[0], [1]], [[1, 0], [3, 2]]]
)
def test_replicas_are_found_in_the_order_of_their_votes_and_parts(replicas: Grid) -> None:
    found = members_of(claims_of(replicas), range(sum(map(len, replicas))))
    assert [list(row) for row in found] == replicas


@pytest.mark.parametrize(
    ("replicas", "voting", "why"),
    [
        ([[0, 1], [2, 3]], [[0, 2], [3, 1]], "in one order"),
        ([[0, 1], [2, 3]], [[0, 3], [1, 2]], "in one order"),
        ([[0, 1], [2, 3]], [[0, 2], [1], [3]], "the voting groups must share out all 4 ranks"),
        ([[0, 1], [2], [3]], [[0, 2], [1, 3]], "the shard groups must share out all 4 ranks"),
    ],
)
def test_ranks_that_are_no_grid_are_refused(replicas: Grid, voting: Grid, why: str) -> None:
    with pytest.raises(Disagreement, match=why):
        members_of(claims_of(replicas, voting), range(4))


def test_ranks_outside_of_the_mesh_are_refused() -> None:
    claims = claims_of([[0, 1], [2, 3]])
    with pytest.raises(Disagreement, match="must share out all 6 ranks"):
        members_of(claims, range(6))


def header(**said: Any) -> Header:
    common: dict[str, Any] = {"step": 3, "layout": 1, "options": 1, "groups": 1}
    return Header(finite=True, failed=False, present=torch.ones(1).bool(), **common, **said)


@pytest.mark.parametrize("ranks", [[0, 1], [1, 0]])
def test_votes_of_a_replica_are_stale_if_a_rank_s_are_and_ordered_if_all_ranks_are(
    ranks: list[int],
) -> None:
    headers = [header(stale=False, ordered=True), header(stale=True, ordered=False)]
    (heard,) = one_per_voter(headers, [ranks])
    assert (heard.stale, heard.ordered) == (True, False)
