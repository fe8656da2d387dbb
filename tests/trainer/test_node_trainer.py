"""One vote per node under Trainer and Accelerate, by the text of `optim_args` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hf_dlion
from tests.support.accelerate_training import Loop
from tests.support.nodes import environment
from tests.support.spawn import RankPools
from tests.support.tiny import tiny_args, tiny_llama, tiny_trainer, weights_digest

pytestmark = pytest.mark.multiproc

STEPS, HALF = 8, 4


def train(
    rank: int, world_size: int, folder: str, changes: dict[str, Any], resume: bool = False
) -> tuple[str, int, int, int]:
    hf_dlion.register()
    # Accelerate wants to know the address where there are several nodes.
    launched = {"LOCAL_RANK": str(rank % 2), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with environment(LOCAL_WORLD_SIZE="2", **launched):
        args = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": HALF, **changes}
        trainer = tiny_trainer(tiny_args(folder, **args))
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{HALF}" if resume else None)
    lion = trainer.optimizer.optimizer
    held = sum(state["exp_avg"].numel() for state in lion.state.values())
    return weights_digest(trainer.model), held, lion.wire.last_bytes_sent, lion.wire.exchanges


@pytest.mark.parametrize(
    "changes",
    [
        {"optim_args": "local_group=node"},
        {"optim_args": "local_group=2,aggregation=average", "gradient_accumulation_steps": 2},
        {"optim_args": "local_group=node,checkpoint=mean", "bf16": True},
    ],
    ids=lambda changes: changes["optim_args"],
)
def test_trainer_trains_saves_and_resumes(
    ranks: RankPools, tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = ranks(4).run(train, str(tmp_path), changes)
    assert len({digest for digest, *_ in whole}) == 1
    total = sum(p.numel() for p in tiny_llama().parameters())
    # The last step's checkpoint leaves the mean on every rank.
    mean = "mean" in changes["optim_args"]
    assert whole[0][1] + whole[1][1] == whole[2][1] + whole[3][1] == total * (1 + mean)
    # Two nodes send a bit per parameter each way, shared by two ranks.
    assert all(sent < total / 8 for _, _, sent, _ in whole)
    saved = Path(tmp_path, f"checkpoint-{HALF}", "dlion_momentum_3_of_4.pt").exists()
    assert saved != mean
    rest = ranks(4).run(train, str(tmp_path), changes, True)
    assert len({digest for digest, *_ in rest}) == 1
    if saved:
        assert rest[0][0] == whole[0][0]


def save(rank: int, world_size: int, folder: str, local_group: int) -> tuple[str, str]:
    loop = Loop(local_group=local_group)
    loop.train(3)
    loop.accelerator.save_state(folder)
    before = loop.digest()
    loop.train(2)
    return before, loop.digest()


def load(rank: int, world_size: int, folder: str, local_group: int) -> tuple[str, str]:
    loop = Loop(local_group=local_group)
    loop.accelerator.load_state(folder)
    before = loop.digest()
    loop.train(2)
    return before, loop.digest()


def test_accelerate_saves_and_loads_the_shares(ranks: RankPools, tmp_path: Path) -> None:
    saved = ranks(4).run(save, str(tmp_path / "state"), 2)
    assert saved == ranks(4).run(load, str(tmp_path / "state"), 2)
    assert len(set(saved)) == 1
