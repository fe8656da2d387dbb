"""An error about a lost rank names that rank, and no other, however it was lost."""

from __future__ import annotations

import datetime
import shlex
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hf_dlion.ranks import lost_ranks
from hf_dlion.ranks.stats import WireStats
from hf_dlion.ranks.wire import LostRank, Wire
from tests.support.spawn import free_port, on_ranks, run_command, run_script

# A rank of this program ends in the third of its steps. The others write down what they raise.
PROGRAM = """
import datetime, os, signal, sys, time
from pathlib import Path
import torch, torch._dynamo, torch.distributed as dist
from hf_dlion import DistributedLion, LostRank

folder, way, lost = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
(folder / f"pid_{rank}").write_text(str(os.getpid()))
param = torch.nn.Parameter(torch.zeros(8))
dist.barrier()  # Imports took a while.
group = dist.new_group(timeout=datetime.timedelta(seconds=6))
optimizer = DistributedLion([param], lr=1e-3, process_group=group)
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
while len(list(folder.glob("message_*"))) < dist.get_world_size() - 1:
    time.sleep(0.1)
if way == "is stopped":
    os.kill(int((folder / f"pid_{lost}").read_text()), signal.SIGKILL)
os._exit(0)
"""


@pytest.mark.multiproc
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("way", ["is killed", "is stopped", "leaves"])
@pytest.mark.parametrize("launcher", ["torchrun", "no launcher"])
def test_only_the_lost_rank_is_named(
    tmp_path: Path, launcher: str, way: str, world_size: int
) -> None:
    if launcher == "torchrun" and way == "is killed":
        pytest.skip("torchrun ends the other ranks at once, and names the killed one")
    program, lost = tmp_path / "program.py", world_size - 1
    program.write_text(PROGRAM)
    words = [str(program), str(tmp_path), way, str(lost)]
    if launcher == "torchrun":
        run_script(world_size, words, check=False)
    else:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        one = shlex.join([sys.executable, *words])
        starts = " & ".join(f"RANK={rank} {one}" for rank in range(world_size))
        run_command(
            ["bash", "-c", f"{starts} & wait"], env={**shared, "WORLD_SIZE": str(world_size)}
        )
    messages = {p.name: p.read_text() for p in tmp_path.glob("message_*")}
    assert len(messages) == world_size - 1
    for name, text in messages.items():
        rank = name.removeprefix("message_")
        assert text.startswith(f"rank {rank} lost rank {lost} while waiting for "), text


# Rank 0 looks for lost ranks in the first of two groups, and rank 1 never does.
TWO_WORLDS = """
import os, sys
import torch, torch.distributed as dist
from hf_dlion import DistributedLion
from hf_dlion.ranks import lost_ranks

place = {"rank": int(os.environ["RANK"]), "world_size": 2}
for world in range(2):  # In one store, gloo could find addresses of the first group.
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{world}", **place)
    DistributedLion([torch.nn.Parameter(torch.zeros(8))], lr=1e-3)
    if world == 0 and dist.get_rank() == 0:
        lost_ranks.was_reported(dist.group.WORLD)
    keys = [None, None]
    dist.all_gather_object(keys, lost_ranks._key(dist.group.WORLD, "any") if world else "")
    dist.destroy_process_group()
assert keys[0] == keys[1], keys
"""


@pytest.mark.multiproc
def test_all_ranks_look_for_the_reports_of_the_same_group(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(TWO_WORLDS)
    run_script(2, [str(program), str(tmp_path)])


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
