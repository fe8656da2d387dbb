"""An error about a lost rank names that rank, and no other, however it was lost."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks import lost_ranks
from hf_dlion.ranks.stats import WireStats
from hf_dlion.ranks.wire import LostRank, Wire
from tests.support.spawn import ends_of, forked, free_port, on_ranks, run_script


def loses_a_rank(rank: int, ranks: int, store: str, folder: Path, way: str) -> None:
    """Takes three steps, in which the last rank ends, and the others write what they raise."""
    import torch._dynamo  # The first optimizer does, which takes a while.

    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    dist.barrier()
    lost = ranks - 1
    group = dist.new_group(timeout=datetime.timedelta(seconds=6))
    param = torch.nn.Parameter(torch.zeros(8))
    optimizer = DistributedLion([param], lr=1e-3, process_group=group)
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    for step in range(3):
        if step == 2 and rank == lost:
            if way == "leaves":
                break
            os.kill(os.getpid(), {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}[way])
        param.grad = torch.randn(8)
        try:
            optimizer.step()
        except LostRank as error:
            (folder / f"new_{rank}").write_text(str(error))
            (folder / f"new_{rank}").rename(folder / f"message_{rank}")
    # The end of one rank would end the waits of the others.
    while len(list(folder.glob("message_*"))) < ranks - 1:
        time.sleep(0.1)
    if way == "is stopped":
        with contextlib.suppress(ProcessLookupError):  # Another rank has killed it.
            os.kill(int((folder / f"pid_{lost}").read_text()), signal.SIGKILL)
    os._exit(0)


def assert_the_last_is_named(folder: Path, ranks: int) -> None:
    messages = {path.name: path.read_text() for path in folder.glob("message_*")}
    assert set(messages) == {f"message_{rank}" for rank in range(ranks - 1)}
    for rank in range(ranks - 1):
        text = messages[f"message_{rank}"]
        assert text.startswith(f"rank {rank} lost rank {ranks - 1} while waiting for "), text


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("way", ["is killed", "is stopped", "leaves"])
def test_only_the_lost_rank_is_named(tmp_path: Path, way: str, ranks: int) -> None:
    store = f"tcp://127.0.0.1:{free_port()}"  # in rank 0's process
    ends = ends_of(
        [forked(loses_a_rank, rank, ranks, store, tmp_path, way) for rank in range(ranks)]
    )
    assert ends == [0] * (ranks - 1) + [0 if way == "leaves" else -signal.SIGKILL]
    assert_the_last_is_named(tmp_path, ranks)


@pytest.mark.multiproc
@pytest.mark.slow
def test_only_the_lost_rank_is_named_if_torchrun_has_the_store(tmp_path: Path) -> None:
    run_script(4, ["-m", "tests.ranks.test_lost_ranks", str(tmp_path)], check=False)
    assert_the_last_is_named(tmp_path, 4)


def looks_for_reports_in_one_of_two_groups(rank: int, folder: Path) -> None:
    """Rank 0 looks for lost ranks in the first of two groups, and rank 1 never does."""
    for world in range(2):  # In one store, gloo could find addresses of the first group.
        store = f"file://{folder}/{world}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        DistributedLion([torch.nn.Parameter(torch.zeros(8))], lr=1e-3)
        if (world, rank) == (0, 0):
            lost_ranks.was_reported(dist.group.WORLD)
        keys = [None, None]
        dist.all_gather_object(keys, lost_ranks._key(dist.group.WORLD, "any") if world else "")
        dist.destroy_process_group()
    assert keys[0] == keys[1], keys


@pytest.mark.multiproc
def test_all_ranks_look_for_the_reports_of_the_same_group(tmp_path: Path) -> None:
    ranks = [forked(looks_for_reports_in_one_of_two_groups, rank, tmp_path) for rank in range(2)]
    assert ends_of(ranks) == [0, 0]


@pytest.mark.parametrize("store", ["is silent", "fails"])
@on_ranks(3)
def test_without_a_store_one_of_the_others_is_lost_and_no_rank_hangs(rank: int, store: str) -> None:
    wire = Wire(dist.new_group(timeout=datetime.timedelta(seconds=1)), WireStats())
    wire.gather_words([0], "a first word")
    if rank == 0:

        def answer() -> Any:
            if store == "is silent":
                threading.Event().wait()
            raise RuntimeError("Broken pipe")

        name = "torch.distributed.distributed_c10d._get_default_store"
        with (
            mock.patch(name, answer),
            mock.patch.object(lost_ranks, "_mute", set()),
            pytest.raises(LostRank, match=r"^rank 0 lost one of ranks 1 and 2 "),
        ):
            wire.gather_words([0], "votes")


@on_ranks(2)
def test_what_failed_here_is_raised_also_if_no_other_rank_comes(rank: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    param = torch.nn.Parameter(torch.zeros(2, 64))
    optimizer = DistributedLion([param], lr=1e-3, process_group=group)
    optimizer.step()
    if rank == 0:
        param.grad = torch.zeros(2, 64).to_sparse()
        with pytest.raises(NotImplementedError, match="must be dense") as raised:
            optimizer.step()
        assert isinstance(raised.value.__cause__, LostRank)
        assert raised.value.__notes__[0].startswith("The other ranks weren't told: rank 0 lost ")

        def fails() -> float:
            raise ValueError("no data") from KeyError("gone")

        with pytest.raises(ValueError, match="no data") as raised:
            optimizer.step(fails)
        assert isinstance(raised.value.__cause__, KeyError)


if __name__ == "__main__":
    loses_a_rank(int(os.environ["RANK"]), 4, "env://", Path(sys.argv[1]), "is stopped")
