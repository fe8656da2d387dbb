"""Synchronised momenta and full precision on real ranks equal the simulation, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from spawn import RankPools

pytestmark = pytest.mark.multiproc

CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "sync": ({"momentum_sync_every": 3}, ()),
    "sync-float32": ({"momentum_sync_every": 1, "momentum_sync_dtype": torch.float32}, ()),
    "sync-narrow": (
        {
            "momentum_sync_every": 2,
            "momentum_sync_dtype": torch.float32,
            "momentum_dtype": torch.bfloat16,
            "aggregation": "average",
        },
        (),
    ),
    "sync-float16": (
        {"momentum_sync_every": 2, "momentum_dtype": torch.float16, "ties": "zero"},
        (),
    ),
    "full-vectors": ({}, (1,)),
    "full-small": ({"momentum_dtype": torch.bfloat16, "exchange": "two_phase"}, (2, 3)),
    "full-all": ({"stochastic_rounding": False}, (0, 1, 2, 3)),
    "warmup": ({"warmup_full_steps": 7, "momentum_dtype": torch.float32}, ()),
    "warmup-and-all": ({"warmup_full_steps": 4, "momentum_sync_every": 4}, (1,)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_step_equals_the_simulation(ranks: RankPools, world_size: int, case: str) -> None:
    options, full_groups = CASES[case]
    records = ranks(world_size).run(zoo.train_full, 16, options, full_groups)
    oracle = zoo.replay(records, options, full_groups)
    assert oracle.steps == 15
