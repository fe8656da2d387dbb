"""Who abstained, from how many steps, and what is said about it (rule S10)."""

from __future__ import annotations

import math
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_dlion import DistributedLion
from hf_dlion.options import warn_once
from hf_dlion.ranks.abstention import Abstentions
from tests.support.spawn import RankPools

LIMIT = 6
# In which of twelve steps each voter abstains. The last one stays below the limit once, recovers,
# and then reaches it in the last step; two nodes are the last two.
ABSTAINED = [{1}, {0, 1, 4}, {0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11}]


def train(rank: int, world_size: int, local_group: int | None) -> dict[str, Any]:
    """Takes twelve steps; each rank, or the last rank of each node, abstains when it should."""
    size = local_group or 1
    mine = ABSTAINED[-(world_size // size) :][rank // size] if (rank + 1) % size == 0 else set()
    param = nn.Parameter(torch.ones(70))
    optimizer = DistributedLion([param], max_abstained_steps=LIMIT, local_group=local_group)
    seen, error = [], ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(12):
            bad = t in mine
            param.grad = torch.full((70,), math.nan if bad else 1.0)
            try:
                optimizer.step()
            except RuntimeError as raised:
                error = f"{t}: {raised}"
            now = optimizer.abstentions
            seen.append((tuple(now.steps), tuple(now.in_a_row), optimizer.wire.abstentions))
    return {
        "seen": seen,
        "error": error,
        "told": [str(w.message) for w in caught if issubclass(w.category, UserWarning)],
        "moved": optimizer.steps,
    }


def expected(voters: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    steps, row, found, total = [0] * voters, [0] * voters, [], 0
    for t in range(12):
        for voter, own in enumerate(ABSTAINED[-voters:]):
            bad = t in own
            steps[voter] += bad
            row[voter] = row[voter] + 1 if bad else 0
            # The step that raises is none of which the total tells.
            total += bad and t < 11
        found.append((tuple(steps), tuple(row), total))
    return found


@pytest.mark.parametrize(("local_group", "voter"), [(None, "rank"), (2, "node")])
def test_who_abstained_is_counted_and_told_on_every_rank(
    ranks: RankPools, local_group: int | None, voter: str
) -> None:
    size = local_group or 1
    voters = 4 // size if local_group else 3
    results = ranks(voters * size).run(train, local_group)
    together = set.intersection(*ABSTAINED[-voters:])
    last = f"gradients of {voter} {voters - 1} held a NaN or an Inf in"
    for rank, result in enumerate(results):
        assert result["seen"] == expected(voters)
        assert result["moved"] == 11 - len(together)
        assert result["error"].startswith(f"11: {last} {LIMIT} steps in a row")
        own = [line for line in result["told"] if "said once" in line]
        assert [f"gradients of {voter} {rank // size} hold" in line for line in own] == [True]
        halves = [line for line in result["told"] if "so that the others" in line]
        assert len(halves) == (rank == 0), "rank 0 tells, once"
        for line in halves:
            assert line.startswith(f"{last} 3 steps in a row")
            assert f"at {LIMIT} (max_abstained_steps) all ranks raise" in line


def steps_of(count: int, limit: int) -> tuple[list[str], Abstentions]:
    """Returns what rank 0 of five tells of steps in which ranks 1 and 4 abstain."""
    abstentions = Abstentions(5, limit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            abstentions.note([True, False, True, True, False])
            abstentions.warn(0, others=True)
    return [str(w.message) for w in caught], abstentions


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has warned of nothing yet."""
    monkeypatch.setattr(warn_once, "_given", set())


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(("limit", "half"), [(1, 0), (2, 0), (3, 0), (4, 2), (5, 2), (20, 10)])
def test_the_warning_comes_at_half_of_the_limit(limit: int, half: int) -> None:
    for count in range(limit):
        warn_once._given.clear()
        told, abstentions = steps_of(count, limit)
        assert len(told) == (0 < half <= count), count
        assert abstentions.steps == abstentions.in_a_row == [0, count, 0, 0, count]
        assert all(f"gradients of rank 1, 4 held a NaN or an Inf in {half}" in t for t in told)
    with pytest.raises(RuntimeError, match=rf"rank 1, 4 held .* in {limit} steps in a row"):
        steps_of(limit, limit)


@pytest.mark.usefixtures("unwarned")
def test_where_warnings_are_errors_the_step_has_been_taken() -> None:
    """As the other ranks have taken it."""
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = DistributedLion([first, second])
    first.sum().backward()
    second.grad = torch.full((3,), math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="said once"):
            optimizer.step()
    assert optimizer.wire.abstentions == 1
    assert not optimizer._engine.presence.seen([first]), "a batch that was stepped"


def go_on_with_rank_0s_momentum(rank: int, world_size: int, how: str) -> tuple[str, int]:
    warn_once._given.discard("momentum")
    param = nn.Parameter(torch.ones(64))
    optimizer = DistributedLion([param], lr=0.1)
    said = ""
    for step in range(3):
        param.grad = torch.full((64,), float(rank + step))
        if step == 1:
            states: list[Any] = [optimizer.state_dict()]
            dist.broadcast_object_list(states, 0)
            if how == "pickled":
                pickled: list[Any] = [pickle.dumps((optimizer, param))]
                dist.broadcast_object_list(pickled, 0)
                optimizer, param = pickle.loads(pickled[0])
                param.grad = torch.full((64,), float(rank + step))
            else:
                optimizer.load_state_dict(states[0])
            if how == "saved_again":
                # As Accelerate's `prepare` does.
                optimizer.load_state_dict(optimizer.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                optimizer.step()
            except UserWarning as warning:
                said += str(warning)
    return said, optimizer.steps


@pytest.mark.multiproc
@pytest.mark.parametrize("how", ["loaded", "saved_again", "pickled"])
def test_where_warnings_are_errors_a_lost_momentum_holds_up_nobody(
    ranks: RankPools, how: str
) -> None:
    found = ranks(2).run(go_on_with_rank_0s_momentum, how, timeout=30)
    (first, steps), (second, as_many) = found
    assert first == ""
    assert "its own is lost" in second
    assert steps == as_many == 3


@pytest.mark.usefixtures("unwarned")
def test_loading_a_state_counts_from_where_the_process_is() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = DistributedLion([param])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        param.grad = torch.full((3,), math.nan)
        optimizer.step()
    twin = DistributedLion([nn.Parameter(torch.ones(3))])
    twin.load_state_dict(optimizer.state_dict())
    assert twin.abstentions.steps == [0]
    optimizer.load_state_dict(twin.state_dict())
    assert optimizer.abstentions.steps == [1]
