"""The programs of docs/guides/frameworks_loops.md with the real lightning, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.spawn import run_script

pytest.importorskip("lightning")
pytestmark = [pytest.mark.multiproc, pytest.mark.full, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "frameworks_loops.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)

# What a user would change for a CPU; a checkpoint in each epoch; and weights of every rank.
RESUMABLE = """
import os, sys
from lightning.pytorch.callbacks import ModelCheckpoint
saver = ModelCheckpoint(dirpath="out/checkpoints", filename="{epoch}", save_top_k=-1)
"""
FABRIC = """
import sys, torch, hf_dlion
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(64, 4)
BLOCK
torch.manual_seed(fabric.global_rank)
for _ in range(5):
    wrapped.zero_grad()
    fabric.backward(model(torch.randn(8, 64)).square().sum())
    wrapped.step()
assert optimizer.wire.bytes_sent > 0 and fabric.world_size == 2
torch.save([model.weight, model.weight.grad], f"weights_{fabric.global_rank}.pt")
"""


def weights(folder: Path) -> list[list[torch.Tensor]]:
    return [torch.load(folder / f"weights_{rank}.pt") for rank in range(2)]


def write_program(folder: Path, more: str, steps: int = 12) -> None:
    """Writes the page's programs for two ranks on a CPU, with more arguments of the Trainer."""
    callback, program = BLOCKS[:2]
    (folder / "dlion_callback.py").write_text(callback)
    program = program.replace(
        'accelerator="auto",\n        devices="auto"', 'accelerator="cpu", devices=2'
    )
    program = program.replace("callbacks=[", more)
    program = program.replace("import lightning as L\n", f"import lightning as L\n{RESUMABLE}", 1)
    program = program.replace(
        "batch_size=8))\n", "batch_size=8), ckpt_path=(sys.argv[1:] or [None])[0])\n"
    )
    program += (
        "    lion = trainer.optimizers[0]\n"
        f"    assert lion.steps == {steps} and lion.wire.bytes_sent > 0\n"
        "    params = [p.detach() for p in trainer.model.parameters()]\n"
        "    torch.save(params, f'weights_{trainer.global_rank}.pt')\n"
    )
    (folder / "train.py").write_text(program)


@pytest.mark.parametrize("validates", [True, False])
def test_the_callback_trains_and_resumes_with_the_same_bits(
    tmp_path: Path, validates: bool
) -> None:
    """Saves between two exchanges, if no validation exchanges before."""
    more = "" if validates else "limit_val_batches=0, "
    write_program(tmp_path, f"{more}callbacks=[saver, ")
    run_script(2, ["train.py"], cwd=tmp_path)
    first, second = weights(tmp_path)
    assert all(map(torch.equal, first, second))
    saved = [
        torch.load(tmp_path / "out" / "checkpoints" / f"epoch={k}.ckpt", weights_only=False)
        for k in (0, 1)
    ]
    own = [torch.equal(a, b) for a, b in zip(saved[1]["state_dict"].values(), first, strict=True)]
    assert all(own)
    run_script(2, ["train.py", "out/checkpoints/epoch=0.ckpt"], cwd=tmp_path)
    assert all(map(torch.equal, first, weights(tmp_path)[0]))
    assert all(map(torch.equal, first, weights(tmp_path)[1]))
    assert not torch.equal(first[0], next(iter(saved[0]["state_dict"].values())))


def test_the_steps_after_the_last_exchange_are_exchanged_at_the_end(tmp_path: Path) -> None:
    more = "max_steps=10, limit_val_batches=0, enable_checkpointing=False, callbacks=["
    write_program(tmp_path, more, steps=10)
    run_script(2, ["train.py"], cwd=tmp_path)
    assert all(map(torch.equal, *weights(tmp_path)))


def test_fabric_trains_with_votes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FABRIC.replace("BLOCK", BLOCKS[2]))
    run_script(2, ["train.py"], cwd=tmp_path)
    (first, gradient), (second, other) = weights(tmp_path)
    assert torch.equal(first, second)
    assert not torch.equal(gradient, other)
