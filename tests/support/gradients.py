"""Shapes, dtypes and gradients on which steps are compared with the definition."""

from __future__ import annotations

import numpy as np
import torch

SHAPES = [(3, 64), (5,), (), (0, 4), (130, 128), (7, 3), (2, 200), (300, 64), (70,), (1, 64)]
KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def gradients(
    seed: int, ranks: int, dtypes: list[torch.dtype], *, faults: bool
) -> list[list[torch.Tensor | None]]:
    """Every rank's gradients, equal on all ranks: some missing, some rows of zeros, some NaN."""
    random = np.random.default_rng(seed)
    grads: list[list[torch.Tensor | None]] = []
    for _ in range(ranks):
        own: list[torch.Tensor | None] = []
        for k, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True)):
            grad = torch.from_numpy(np.asarray(random.normal(size=shape))).to(dtype)
            kind = random.random()
            if faults and grad.dim() and kind < 0.5:
                grad[torch.from_numpy(random.random(shape[0]) < 0.5)] = 0.0
            if faults and k == 0:
                grad[2] = 0.0  # on all ranks, always
            if faults and kind > 0.985 and grad.numel():
                grad.view(-1)[-1] = torch.nan
            own.append(None if faults and 0.5 < kind < 0.65 else grad)
        grads.append(own)
    return grads
