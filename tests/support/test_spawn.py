"""The spawn helper shows what went wrong on which rank, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support.spawn import RankPool, RankPools, RanksFailedError, run_script

pytestmark = pytest.mark.multiproc


def _sum_of_ranks(rank: int, world_size: int, scale: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(rank * scale)])
    dist.all_reduce(total)
    return os.getpid(), total


def _raise_on_rank_1(rank: int, world_size: int) -> None:
    print(f"this is the output of {rank}")
    if rank == 1:
        raise ValueError("the error of rank one")
    dist.barrier()


def _die_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)


def _sleep_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(1000)


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def _threads_and_seed(rank: int, world_size: int) -> tuple[int, float]:
    return torch.get_num_threads(), float(torch.rand(()))


def test_results_come_back_in_rank_order_from_processes_that_are_reused(pools: RankPools) -> None:
    first = pools(3).run(_sum_of_ranks, 1)
    second = pools(3).run(_sum_of_ranks, 10)
    assert [float(total) for _, total in first] == [3.0] * 3
    assert [float(total) for _, total in second] == [30.0] * 3
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({pid for pid, _ in first}) == 3


def test_every_call_starts_from_one_thread_and_the_same_seed(pools: RankPools) -> None:
    answers = pools(2).run(_threads_and_seed) + pools(2).run(_threads_and_seed)
    assert set(answers) == {(1, answers[0][1])}


def test_a_failure_shows_the_traceback_and_the_output_of_each_rank_and_renews_the_pool() -> None:
    with contextlib.closing(RankPool(2)) as pool:
        before = pool.run(_pid)
        with pytest.raises(RanksFailedError) as failure:
            pool.run(_raise_on_rank_1)
        text = str(failure.value)
        assert "rank 1:\nTraceback" in text
        assert "ValueError: the error of rank one" in text
        assert "this is the output of 1" in text
        # Rank 0 was left alone in a collective, and one sees where.
        assert "rank 0:\ndid not answer in time" in text
        assert "barrier" in text.split("rank 1:")[0]
        assert not set(before) & set(pool.run(_pid))
    assert not any(psutil.pid_exists(pid) for pid in before)


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    text = "rank 0:\ndied with exit code 7"
    with contextlib.closing(RankPool(2)) as pool, pytest.raises(RanksFailedError, match=text):
        pool.run(_die_on_rank_0)


def test_a_timeout_shows_where_each_rank_was() -> None:
    with contextlib.closing(RankPool(2)) as pool:
        pool.run(_pid)  # The limit is not for their start.
        with pytest.raises(RanksFailedError) as failure:
            pool.run(_sleep_on_rank_1, timeout=3.0)
    assert "in _sleep_on_rank_1" in str(failure.value)
    assert "limit 3 s" in str(failure.value)
    assert "rank 0:\nreturned" in str(failure.value)


@pytest.mark.long
@pytest.mark.slow
def test_run_script_shows_the_stacks_of_a_stuck_rank_and_kills_it(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(
        "import os, sys, time\n"
        "def wait_forever():\n"
        "    path = os.path.join(sys.argv[1], 'pid' + os.environ['RANK'])\n"
        "    open(path, 'w').write(str(os.getpid()))\n"
        "    time.sleep(100)\n"
        "wait_forever()\n"
    )
    with pytest.raises(RanksFailedError, match="in wait_forever"):
        run_script(2, [script, tmp_path], timeout=15)
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_run_script_fails_with_the_output_of_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("raise SystemExit('no luck today')\n")
    with pytest.raises(RanksFailedError, match="no luck today"):
        run_script(1, [script])
    assert run_script(1, [script], check=False).returncode != 0
