"""The spawn helper shows what went wrong on which rank, and leaves nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.support.spawn import RankPool, RanksFailedError, run_script

pytestmark = pytest.mark.multiproc


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Returns two ranks that are running, so that limits are not for their start."""
    with closing(RankPool(2)) as pool:
        pool.run(_pid)
        yield pool


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


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


def test_a_failure_shows_tracebacks_and_output_and_renews_the_pool(pool: RankPool) -> None:
    before = set(pool.run(_pid))
    with pytest.raises(RanksFailedError) as failure:
        pool.run(_raise_on_rank_1)
    zero, one = str(failure.value).split("rank 1:\n")
    assert one.startswith("Traceback")
    assert "ValueError: the error of rank one" in one
    assert "this is the output of 1" in one
    # Rank 0 was left alone in a collective, and one sees where.
    assert "rank 0:\ndid not answer in time" in zero
    assert "barrier" in zero
    assert not before & set(pool.run(_pid))
    assert not any(map(psutil.pid_exists, before))


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        (_die_on_rank_0, ["rank 0:\ndied with exit code 7"]),
        (_sleep_on_rank_1, ["in _sleep_on_rank_1", "limit 3 s", "rank 0:\nreturned"]),
    ],
)
def test_a_rank_that_dies_or_is_stuck_is_named(
    pool: RankPool, function: object, texts: list[str]
) -> None:
    with pytest.raises(RanksFailedError) as failure:
        pool.run(function, timeout=3.0)
    assert [text for text in texts if text not in str(failure.value)] == []


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
