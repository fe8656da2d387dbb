"""A rank that leaves the loop early, without `Join`: the others end with an error that says why."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_dlion import DistributedLion
from hf_dlion.ranks.header import WIRE_VERSION
from tests.support import tiny
from tests.support.random_training import backward, random_param
from tests.support.spawn import RankPools, run_command

pytestmark = pytest.mark.multiproc

# How long the processes may take in all: far below the process group's timeout.
LIMIT_S = 120
TIMEOUT_S = 600

SCRIPT = """
import datetime, gc, os, sys
from math import isfinite, nan
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from hf_dlion import DistributedLion

what, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group(
    "gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=int(sys.argv[3])),
)

class Data(Dataset):
    def __len__(self):
        return 6 if what == "fewer batches" and rank == 1 else 24

    def __getitem__(self, index):
        if what in ("ddp", "accelerate", "trainer") and rank == 1 and index >= 8:
            raise OSError("the file of rank 1 is damaged")
        if what == "trainer":
            return tiny_data(24)[index]
        return torch.full((4,), float(index))

if what == "trainer":
    from tests.support.tiny import tiny_args, tiny_data, tiny_trainer
    import hf_dlion
    hf_dlion.register()
    args = tiny_args(sys.argv[2] + "_out", per_device_train_batch_size=2, max_steps=6)
    tiny_trainer(args, train_dataset=Data()).train()
    sys.exit("trained to the end")
model = torch.nn.Linear(4, 2)
optimizer = DistributedLion(model.parameters(), lr=0.1)
data = DataLoader(Data(), batch_size=2)
if what == "accelerate":
    from accelerate import Accelerator
    model, optimizer, data = Accelerator(cpu=True).prepare(model, optimizer, data)
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
for x in data:
    optimizer.zero_grad()
    (model(x).square().sum() * (nan if rank == 1 and x[-1, 0] == 23 else 1.0)).backward()
    if what == "skipped" and not isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
        continue
    optimizer.step()
# A process that ends with a DDP model of a gloo group aborts at times.
del model, optimizer
gc.collect()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    (path.parent / "tiny.py").write_text(Path(tiny.__file__).read_text())
    path.write_text(SCRIPT)
    return path


def run_without_launcher(script: Path, what: str) -> list[subprocess.CompletedProcess[str]]:
    """Runs the script on two ranks; no launcher ends the one when the other fails."""

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        words = [sys.executable, script, what, script.with_name(what), str(TIMEOUT_S)]
        return run_command(words, env=env, cwd=script.parent, timeout=LIMIT_S, check=False)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["ddp", pytest.param("accelerate", marks=pytest.mark.long), "trainer"]
)
def test_data_that_fails_on_one_rank_ends_all(script: Path, what: str) -> None:
    other, failed = run_without_launcher(script, what)
    assert failed.returncode != 0
    assert "OSError: the file of rank 1 is damaged" in failed.stderr
    assert other.returncode != 0
    assert "Traceback" in other.stderr
    assert "Connection closed by peer" in other.stderr


@pytest.mark.slow
def test_a_rank_that_ends_with_fewer_batches_ends_all(script: Path) -> None:
    other, ended = run_without_launcher(script, "fewer batches")
    assert ended.returncode == 0
    assert other.returncode != 0
    assert "Connection closed by peer" in other.stderr
    assert "if a rank left the training loop earlier" in other.stderr


@pytest.mark.slow
def test_a_rank_that_skips_its_last_step_ends_all(script: Path) -> None:
    other, ended = run_without_launcher(script, "skipped")
    assert ended.returncode == 0
    assert other.returncode != 0
    assert "Connection closed by peer" in other.stderr
    assert "if it skipped a step (`if not isfinite(norm): continue`)" in other.stderr


def wait_elsewhere(rank: int, world_size: int, where: str) -> str:
    """Rank 1 takes a step less, and enters another collective of the same group."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=8))
    params = [random_param(4, 5)]
    optimizer = DistributedLion(params, process_group=group)
    try:
        for t in range(2 - rank):
            backward(params, t)
            optimizer.step()
        if where == "barrier":
            dist.barrier(group)
        elif where == "reduction":
            dist.all_reduce(torch.ones(3), group=group)
        else:
            words = torch.full((7,), 7)
            dist.all_gather([torch.zeros_like(words) for _ in range(2)], words, group=group)
    except RuntimeError:
        return traceback.format_exc()
    return "went on"


@pytest.mark.parametrize("where", ["barrier", "reduction", "gathering"])
def test_a_rank_that_waits_elsewhere_is_told_of(ranks: RankPools, where: str) -> None:
    first, second = ranks(2).run(wait_elsewhere, where, timeout=60)
    assert "if a rank left the training loop earlier" in first
    if where == "gathering":
        # Of the same size as a header: the other rank gets one.
        told = f"ranks speak different versions of the wire format, [{WIRE_VERSION}, 7]"
        assert told in first
        assert second == "went on"
    else:
        # The one whose time is up first closes the other's connection.
        assert "Timed out waiting 8000ms" in first + second
        assert re.search("Timed out waiting 8000ms|Connection closed by peer", first)
        assert re.search("Timed out waiting 8000ms|Connection closed by peer", second)
