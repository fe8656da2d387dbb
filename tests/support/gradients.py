"""Shapes, dtypes and gradients on which steps are compared with the definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from hf_dlion.optimizer import DistributedLion
from hf_dlion.vote import layout
from tests.support.definition import Lions

SHAPES = [(3, 64), (5,), (), (0, 4), (130, 128), (7, 3), (2, 200), (300, 64), (70,), (1, 64)]
KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
Definition = TypeVar("Definition", bound=Lions)


def shuffled(seed: int) -> list[tuple[int, ...]]:
    """Returns the shapes in a random order, in which other tensors share pieces and messages."""
    return [SHAPES[k] for k in np.random.default_rng(seed).permutation(len(SHAPES))]


def pair(
    definition: type[Definition],
    world_size: int,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    options: dict[str, Any],
    device: str = "cpu",
) -> tuple[Definition, DistributedLion, list[torch.nn.Parameter]]:
    """Returns a definition and an optimizer of equal parameters, in small messages and two groups.

    `options` are those of the optimizer.
    """
    layout.PIECE[device], layout.MESSAGE[device], layout.MESSAGES = 1 << 10, 1 << 13, 1 << 20
    torch.manual_seed(0)
    start = [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    own = {"every" if name == "vote_every" else name: value for name, value in options.items()}
    own.pop("exchange", None)
    params = [torch.nn.Parameter(p.clone().to(device)) for p in start]
    groups = [
        # Betas with which rows without a gradient are old after 3 and 2 steps.
        {"params": params[:4], "lr": 0.1, "weight_decay": 0.3, "betas": (0.9, 0.7)},
        {"params": params[4:], "lr": 0.01, "weight_decay": 0.0, "betas": (0.8, 0.5)},
    ]
    lrs, decays, betas = (
        [group[name] for group in groups for _ in group["params"]]
        for name in ("lr", "weight_decay", "betas")
    )
    lions = definition([p.clone() for p in start], world_size, lrs, decays, betas, **own)
    return lions, DistributedLion(groups, **options), params


def gradients(
    seed: int,
    ranks: int,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    *,
    faults: bool,
) -> list[list[torch.Tensor | None]]:
    """Every rank's gradients, equal on all ranks: some missing, some rows of zeros, some NaN."""
    random = np.random.default_rng(seed)
    grads: list[list[torch.Tensor | None]] = []
    for _ in range(ranks):
        own: list[torch.Tensor | None] = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            grad = torch.from_numpy(np.asarray(random.normal(size=shape))).to(dtype)
            kind = random.random()
            if faults and grad.dim() and kind < 0.5:
                grad[torch.from_numpy(random.random(shape[0]) < 0.5)] = 0.0
            if faults and shape == SHAPES[0]:
                grad[2] = 0.0  # on all ranks, always
            if faults and kind > 0.985 and grad.numel():
                grad.view(-1)[-1] = torch.nan
            own.append(None if faults and 0.5 < kind < 0.65 else grad)
        grads.append(own)
    return grads
