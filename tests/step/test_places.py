"""Parameters that take the places of others in the groups: what goes by index does not go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dlion import DistributedLion
from tests.support.ddp_training import alike
from tests.support.spawn import RankPools

PARTS = ("embedding", "norm", "head")


def gradients(params: list[Tensor], rank: int, step: int) -> None:
    for k, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * rank + 10 * step + k)
        param.grad = torch.randn(param.shape, generator=generator)


def move_groups(rank: int, world_size: int, how: str, options: dict[str, Any]) -> list[bool]:
    """Trains; in step 3 the groups change places, or the first one goes."""
    parts = {name: nn.Parameter(torch.zeros(64, 8)) for name in PARTS}
    groups = [{"params": [(f"{name}.weight", param)]} for name, param in parts.items()]
    optimizer = DistributedLion(groups, lr=0.1, **options)
    equal = []
    for step in range(6):
        if step == 3 and how == "removed":
            del optimizer.param_groups[0]
        elif step == 3:
            optimizer.param_groups.append(optimizer.param_groups.pop(0))
        gradients([group["params"][0] for group in optimizer.param_groups], rank, step)
        optimizer.step()
        optimizer.zero_grad()
        present = {f"{name}.weight" for name in PARTS[how == "removed" and step >= 3 :]}
        assert set(optimizer.momentum_divergence) <= present
        equal.append(alike(*(param.detach() for param in parts.values())))
    return equal


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("removed", {"full_precision": "norm.*"}),
        ("in another order", {"full_precision": "norm.*"}),
        ("removed", {"momentum_sync_every": 2, "momentum_sync": "auto"}),
    ],
    ids=str,
)
def test_groups_that_change_places_keep_what_their_names_select(
    ranks: RankPools, how: str, options: dict[str, Any]
) -> None:
    assert ranks(2).run(move_groups, how, options) == [[True] * 6] * 2


def replace_parameters(rank: int, world_size: int, here: int | None) -> str | None:
    """Puts new parameters into a group's places, on one rank with values of its own."""
    params = [nn.Parameter(torch.zeros(64, 8)) for _ in range(2)]
    optimizer = DistributedLion(params, lr=0.1)
    for step in range(4):
        if step == 2:
            value = 1.0 if rank == here else 0.0
            params = [nn.Parameter(torch.full((64, 8), value)) for _ in range(2)]
            optimizer.param_groups[0]["params"] = params
            optimizer.state.clear()
        gradients(params, rank, step)
        try:
            optimizer.step()
        except RuntimeError as error:
            return f"{step}: {type(error).__name__}: {error}"
    return None


@pytest.mark.multiproc
def test_new_parameters_in_old_places_must_start_equal(ranks: RankPools) -> None:
    for said in ranks(2).run(replace_parameters, 1):
        assert said is not None
        assert said.startswith("2: Disagreement: ")
        assert "start" in said
    assert ranks(2).run(replace_parameters, None) == [None] * 2


def test_names_that_are_gone_are_missed_in_every_step() -> None:
    """Not in the first one only, after which the names of other parameters would go on."""
    parts = [(name, nn.Parameter(torch.zeros(8))) for name in PARTS]
    optimizer = DistributedLion(parts, lr=0.1, full_precision="norm")
    gradients([param for _, param in parts], 0, 0)
    optimizer.step()
    others = [nn.Parameter(torch.zeros(8)) for _ in PARTS]
    optimizer.param_groups[0].pop("param_names")
    optimizer.param_groups[0]["params"] = others
    gradients(list(others), 0, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="by name, and they have none"):
            optimizer.step()
