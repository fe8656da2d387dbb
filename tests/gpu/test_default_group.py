"""DDP in the group that `init_process_group()` makes: with NCCL only on GPUs, else with gloo."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import DistributedLion, save_momentum
from hf_dlion.ranks.header import Disagreement
from tests.support.spawn import run_script

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.gpu
CASES = [{}, {"bits": 4}, {"vote_every": 2}, {"full_precision": "0.bias"}, {"local_group": 2}]


def main(folder: str) -> None:
    """Trains under DDP with each of the options; then the ranks do different things."""
    rank, device = dist.get_rank(), torch.device("cpu")
    if GPUS:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    for options in CASES:
        if dist.get_world_size() == 2 and "local_group" in options:
            continue
        torch.manual_seed(0)
        layers = nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)
        model = DistributedDataParallel(nn.Sequential(*layers).to(device))
        named = model.module.named_parameters()
        optimizer = DistributedLion(named, lr=0.01, check_replicas_every=1, **options)
        optimizer.attach(model)
        torch.manual_seed(rank)
        for _ in range(5):
            model(torch.randn(4, 64, device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.exchange_now()
        optimizer.check_replicas()
        try:
            optimizer.check_replicas() if rank else save_momentum(optimizer, folder)
        except Disagreement as error:
            print(f"rank {rank}, {options}: {error}\n", end="", flush=True)
        del model, optimizer
        gc.collect()  # The wrapper before its group.


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.skipif(GPUS == 1, reason="NCCL refuses two ranks on one GPU")
@pytest.mark.parametrize("bound", [False, True] if GPUS else [False])
def test_ddp_trains_and_ranks_that_differ_raise(tmp_path: Path, bound: bool) -> None:
    """`bound` gives the group a device, with which torch splits communicators."""
    ranks = 2 if 0 < GPUS < 4 else 4
    argv = ["-m", "tests.gpu.test_default_group", tmp_path, str(int(bound))]
    printed = run_script(ranks, argv, timeout=300).stdout
    cases = len(CASES) - (ranks == 2)
    assert printed.count("rank 0 saves") == ranks * cases


if __name__ == "__main__":
    bound = sys.argv[2] == "1"
    own = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(device_id=torch.device("cuda", own) if bound else None)
    main(sys.argv[1])
    dist.destroy_process_group()
