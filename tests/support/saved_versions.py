"""Writes the checkpoints in tests/support/data, for tests/checkpoint/test_saved_versions.py.

Later versions are held to them. Run it once whenever the version of the momentum file or of the
state dict changes, before the next release, and keep what it wrote; it needs nothing that an older
version lacks:

    PYTHONPATH=. python tests/support/saved_versions.py
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dlion import DistributedLion, save_momentum
from hf_dlion.checkpoint import momentum_file
from tests.support.spawn import run_ranks

DATA = Path(__file__).parent / "data"
STEPS = 3


def make(size: int | None) -> tuple[nn.Module, DistributedLion]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 70), nn.Linear(70, 2).bfloat16())
    options: dict[str, Any] = {} if size is None else {"local_group": size}
    return model, DistributedLion(model.named_parameters(), lr=1e-2, **options)


def train(model: nn.Module, optimizer: DistributedLion, steps: int) -> None:
    for _ in range(steps):
        for index, p in enumerate(model.parameters()):
            seed = 97 * optimizer.steps + 7 * index + optimizer.rank
            noise = torch.randint(-9, 10, p.shape, generator=torch.Generator().manual_seed(seed))
            p.grad = noise.to(p.dtype)
        optimizer.step()


def save(rank: int, world_size: int, folder: str, size: int | None) -> None:
    model, optimizer = make(size)
    train(model, optimizer, STEPS)
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, Path(folder, "state.pt"))
    save_momentum(optimizer, folder)


if __name__ == "__main__":
    version = f"momentum_v{momentum_file.VERSION}"
    nodes = "local_group" in inspect.signature(DistributedLion).parameters
    for size in (None, 2) if nodes else (None,):
        folder = DATA / (version if size is None else f"{version}_nodes_of_{size}")
        folder.mkdir(parents=True, exist_ok=True)
        run_ranks(2 if size is None else 4, save, str(folder), size)
