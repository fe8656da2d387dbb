"""A definition and an optimizer that take the same steps, on shapes and gradients of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from hf_dlion.core import layout
from hf_dlion.optimizer import DistributedLion
from tests.support.definition import Lions
from tests.support.steps import bits_of

SHAPES = [(3, 64), (5,), (), (0, 4), (130, 128), (7, 3), (2, 200), (300, 64), (70,), (1, 64)]
KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
Definition = TypeVar("Definition", bound=Lions)


class Pair(Generic[Definition]):
    """A definition of all ranks and this rank's optimizer, in small messages and two groups.

    The order of the shapes follows from the seed, so other tensors share pieces and messages, and
    they have the dtypes `kinds` in turns. `options` are those of the optimizer.
    """

    def __init__(
        self, definition: type[Definition], rank: int, ranks: int, options: dict[str, Any],
        kinds: Sequence[torch.dtype], seed: int, device: str = "cpu",
    ) -> None:  # fmt: skip
        layout.PIECE[device], layout.MESSAGE[device], layout.MESSAGES = 1 << 10, 1 << 13, 1 << 20
        self.rank, self.seed = rank, seed
        self.shapes = [SHAPES[k] for k in np.random.default_rng(seed).permutation(len(SHAPES))]
        torch.manual_seed(0)
        start = [
            torch.randn(shape).to(kinds[k % len(kinds)]) for k, shape in enumerate(self.shapes)
        ]
        for p in start:
            p[p.abs() < 0.2] = -0.0  # As pruned weights may be.
        own = dict(options)
        own.pop("exchange", None)
        if every := own.pop("vote_every", 0):
            own = {"bits": 4, **own, "every": every}
            own["sync_every"] = own.pop("momentum_sync_every", 0)
            own["synced"] = range(len(SHAPES))
        self.params = [torch.nn.Parameter(p.clone().to(device)) for p in start]
        groups = [
            # Betas with which rows without a gradient are old after 3 and 2 steps.
            {"params": self.params[:4], "lr": 0.1, "weight_decay": 0.3, "betas": (0.9, 0.7)},
            {"params": self.params[4:], "lr": 0.01, "weight_decay": 0.0, "betas": (0.8, 0.5)},
        ]
        lrs, decays, betas = (
            [group[name] for group in groups for _ in group["params"]]
            for name in ("lr", "weight_decay", "betas")
        )
        self.lions = definition([p.clone() for p in start], ranks, lrs, decays, betas, **own)
        self.optimizer = DistributedLion(groups, **options)

    def step(self, number: int, faults: bool) -> None:
        grads = self.gradients(self.seed + number, faults)
        for param, grad in zip(self.params, grads[self.rank], strict=True):
            param.grad = None if grad is None else grad.clone().to(param.device)
        self.lions.step(grads)
        self.optimizer.step()
        assert self.optimizer.steps == self.lions.t

    def check(self, wanted: Sequence[torch.Tensor], *where: Any) -> None:
        """Compares this rank's parameters with those that are wanted, and its momenta."""
        for k, (param, expected) in enumerate(zip(self.params, wanted, strict=True)):
            assert bits_of(param) == bits_of(expected), (k, self.shapes[k], param.dtype, *where)
            if param in self.optimizer.state:
                momentum = self.optimizer.state[param]["exp_avg"]
                assert bits_of(momentum) == bits_of(self.lions.momenta[self.rank][k]), (k, *where)

    def gradients(self, seed: int, faults: bool) -> list[list[torch.Tensor | None]]:
        """Returns every rank's gradients: some missing, some with rows of zeros, some with NaN."""
        random = np.random.default_rng(seed)
        grads: list[list[torch.Tensor | None]] = []
        for _ in range(self.lions.ranks):
            own: list[torch.Tensor | None] = []
            for shape, param in zip(self.shapes, self.params, strict=True):
                grad = torch.from_numpy(np.asarray(random.normal(size=shape))).to(param.dtype)
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
