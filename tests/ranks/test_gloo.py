"""Headers take a gloo group if the ranks' own group has NCCL only, and that group if gloo fails.

The backend here isn't called gloo, so the package takes it for one that needs such a group.
"""

from __future__ import annotations

import datetime
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroupGloo

from hf_dlion.checkpoint import save_momentum
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Disagreement
from hf_dlion.ranks.stats import WireStats
from hf_dlion.ranks.wire import LostRank, Wire
from tests.support.spawn import on_ranks
from tests.support.steps import attached, single, take_step
from tests.support.training import batch, everyones, warned

SECONDS = 3


def other_group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Returns a group of the default ranks with a backend called "other"."""
    if "other" not in dist.Backend.backend_list:

        def create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
            return ProcessGroupGloo(store, rank, size, timeout=timeout)

        dist.Backend.register_backend("other", create, devices=["cpu"])
    timeout = datetime.timedelta(seconds=SECONDS)
    return dist.new_group(ranks, backend="other", timeout=timeout)


def trained(group: dist.ProcessGroup | None, rank: int, **options: Any) -> list[float]:
    """Returns what a parameter is after three steps on random gradients."""
    param, optimizer = single(process_group=group, **options)
    for step in range(3):
        param.grad = batch(step, rank)[0, :2].repeat(64)
        optimizer.step()
    optimizer.exchange_now()
    return param.tolist()


@pytest.mark.parametrize("options", [{}, {"vote_every": 2}], ids=str)
@on_ranks(2)
def test_headers_take_gloo_and_votes_are_as_before(rank: int, options: dict[str, Any]) -> None:
    group, groups = other_group(), []
    for _ in range(2):  # The second optimizer takes the group of the first.
        _, optimizer = single(process_group=group, **options)
        optimizer.step()
        everyone = optimizer.peers.topology().everyone
        groups.append(everyone._cpu_group)
        assert dist.get_backend(groups[-1]) == "gloo"
        assert everyone.group is group
    assert groups[0] is groups[1]
    timeout = groups[0]._get_backend(torch.device("cpu")).options._timeout
    assert timeout == datetime.timedelta(seconds=SECONDS)
    assert trained(group, rank, **options) == trained(None, rank, **options)


@on_ranks(2)
def test_ranks_that_do_different_things_raise(rank: int, tmp_path: Any) -> None:
    _, optimizer = single(process_group=other_group())
    optimizer.step()
    with pytest.raises(Disagreement, match="rank 1 saves while rank 0 steps"):
        optimizer.step() if rank == 0 else save_momentum(optimizer, tmp_path)


@on_ranks(3)
def test_a_rank_that_leaves_is_lost(rank: int) -> None:
    _, optimizer = single(process_group=other_group())
    optimizer.step()
    if rank < 2:
        with pytest.raises(LostRank, match="lost rank 2 while waiting for a header"):
            optimizer.step()


@on_ranks(4)
def test_nodes_have_gloo_too(rank: int) -> None:
    """With NCCL in addition, the ranks of a node agree on a CPU."""
    ddp, optimizer = attached(local_group=2, vote_every=2)
    ends = []
    with mock.patch.object(Wire, "needs_gloo", True):
        other, own = attached(local_group=2, vote_every=2)
        topology = own.peers.topology()
    assert topology.node is not None
    assert topology.everyone._cpu_group is not topology.everyone.group
    for model, lion in ((ddp, optimizer), (other, own)):
        for step in range(2):
            take_step(lion, model, batch(step, rank // 2))
        ends.append([param.tolist() for param in model.parameters()])
        model.zero_grad()
    assert ends[0] == ends[1]


@pytest.mark.parametrize("failing", [[1], [0, 1]])
@on_ranks(2)
def test_if_gloo_fails_on_a_rank_all_go_on_without_it(rank: int, failing: list[int]) -> None:
    group = other_group()
    error = RuntimeError("Gloo connectFullMesh failed")
    fails = mock.patch.object(Wire, "new_gloo_group", side_effect=error)
    with warned() as texts:
        if rank in failing:
            with fails:
                ends = trained(group, rank)
        else:
            ends = trained(group, rank)
    told = [text for text in texts if "gloo can't connect the ranks (" in text]
    assert len(told) == (rank == 0)
    assert ends == trained(None, rank)


@on_ranks(2)
def test_ranks_in_different_numbers_of_groups_go_on_without_gloo(rank: int) -> None:
    """Of which torch makes the name of the new group."""
    group = other_group()
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    with warned() as texts:
        ends = everyones(torch.tensor(trained(group, rank)))
    told = [text for text in texts if "different numbers of process groups" in text]
    assert len(told) == (rank == 0)
    assert torch.equal(*ends)


@on_ranks(2)
def test_a_gloo_group_has_the_order_of_the_other_group(rank: int) -> None:
    wire = Wire(other_group(), WireStats())
    wire.global_ranks = [1, 0]
    with pytest.raises(RuntimeError, match="aren't in ascending order"):
        wire.new_gloo_group()


@on_ranks(1)
def test_a_rank_alone_and_gloo_itself_need_no_other_group(rank: int) -> None:
    for group in (other_group(), dist.group.WORLD):
        optimizer = DistributedLion([nn.Parameter(torch.zeros(64))], process_group=group)
        assert not optimizer.peers.topology().everyone.needs_gloo
