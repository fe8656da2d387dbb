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
from hf_dlion.ranks import wire
from hf_dlion.ranks.header import Disagreement
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
        with mock.patch.object(wire, "_CONNECT", datetime.timedelta(seconds=1)):
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
    """In addition to NCCL, so the ranks of a node agree on a CPU."""
    _, optimizer = attached(local_group=2, process_group=other_group())
    topology = optimizer.peers.topology()
    for own in (topology.node, topology.voters):
        assert own is not None
        assert str(dist.get_backend_config(own.group)) == "cpu:gloo"


@pytest.mark.parametrize("failing", [[1], [0, 1, 2, 3]], ids=["one", "all"])
@on_ranks(4)
def test_if_gloo_fails_on_a_rank_all_go_on_without_it(rank: int, failing: list[int]) -> None:
    """On the other ranks it works. The second optimizer has nodes, and doesn't try again."""
    create, tries = Wire.new_gloo_group, list[Wire]()

    def fails(own: Wire) -> dist.ProcessGroup:
        tries.append(own)
        group = create(own)
        dist.barrier()  # Or another rank, which still connects, would lose this one.
        if rank in failing:
            dist.destroy_process_group(group)
            raise RuntimeError("Gloo connectFullMesh failed")
        return group

    group = other_group()
    with warned() as texts, mock.patch.object(Wire, "new_gloo_group", fails):
        ends = trained(group, rank)
        ddp, optimizer = attached(local_group=2, process_group=group)
        take_step(optimizer, ddp, batch(0, rank))
    told = [text for text in texts if "gloo can't be used: RuntimeError: Gloo connect" in text]
    assert len(told) == (rank == 0)
    assert len(tries) == 1
    assert ends == trained(None, rank)
    assert optimizer.steps == 1


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
def test_a_group_in_another_order_has_no_gloo(rank: int) -> None:
    """torch would sort the ranks of the new group."""
    _, optimizer = single(process_group=other_group())
    optimizer.peers.topology().everyone.global_ranks = [1, 0]
    with warned() as texts:
        optimizer.step()
    assert sum("aren't in ascending order" in text for text in texts) == (rank == 0)


@on_ranks(1)
def test_a_rank_alone_and_gloo_itself_need_no_other_group(rank: int) -> None:
    for group in (other_group(), dist.group.WORLD):
        optimizer = DistributedLion([nn.Parameter(torch.zeros(64))], process_group=group)
        assert not optimizer.peers.topology().everyone.needs_gloo
