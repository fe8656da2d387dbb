"""Local steps of real ranks equal the definition in NumPy, and fail together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_dlion.optimizer import DistributedLion
from hf_dlion.vote import message
from tests.support.local_definition import LocalLions
from tests.support.spawn import RankPools

pytestmark = pytest.mark.multiproc

SHAPES = [(3, 64), (5,), (), (0, 4), (130, 128), (7, 3), (2, 200), (300, 64), (70,), (1, 64)]
KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def gradients(
    seed: int, ranks: int, dtypes: list[torch.dtype], faults: bool
) -> list[list[torch.Tensor | None]]:
    """Every rank's gradients, equal on all ranks: some missing, some rows of zeros, some NaN."""
    random = np.random.default_rng(seed)
    grads: list[list[torch.Tensor | None]] = []
    for _ in range(ranks):
        own: list[torch.Tensor | None] = []
        for shape, dtype in zip(SHAPES, dtypes, strict=True):
            grad = torch.from_numpy(np.asarray(random.normal(size=shape))).to(dtype)
            kind = random.random()
            if faults and grad.dim() and kind < 0.5:
                grad[torch.from_numpy(random.random(shape[0]) < 0.5)] = 0.0
            if faults and kind > 0.985 and grad.numel():
                grad.view(-1)[-1] = torch.nan
            own.append(None if faults and 0.5 < kind < 0.65 else grad)
        grads.append(own)
    return grads


def equals_the_definition(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    kinds: list[torch.dtype],
    seed: int,
    faults: bool = True,
) -> None:
    """Takes eleven steps beside the definition, the last exchange amid a period."""
    message.PIECE["cpu"], message.MESSAGE["cpu"], message.MESSAGES = 1 << 10, 1 << 13, 1 << 20
    torch.manual_seed(0)
    dtypes = [kinds[k % len(kinds)] for k in range(len(SHAPES))]
    start = [torch.randn(shape).to(dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]
    lions = LocalLions(
        [p.clone() for p in start],
        world_size,
        [0.1 if k < 4 else 0.01 for k in range(len(SHAPES))],
        [0.3 if k < 4 else 0.0 for k in range(len(SHAPES))],
        every=options["vote_every"],
        **{
            name: value for name, value in options.items() if name not in ("exchange", "vote_every")
        },
    )
    params = [torch.nn.Parameter(p.clone()) for p in start]
    groups = [
        {"params": params[:4], "lr": 0.1, "weight_decay": 0.3},
        {"params": params[4:], "lr": 0.01, "weight_decay": 0.0},
    ]
    optimizer = DistributedLion(groups, **options)

    def check(step: int) -> None:
        for k, (param, wanted) in enumerate(zip(params, lions.own[rank], strict=True)):
            assert torch.equal(param, wanted), (step, SHAPES[k], param.dtype)
            if param in optimizer.state:
                momentum = optimizer.state[param]["exp_avg"]
                assert torch.equal(momentum, lions.momenta[rank][k]), (step, SHAPES[k])
        own = [p.clone() for p in params]
        optimizer.eval()
        for k, (param, wanted) in enumerate(zip(params, lions.params, strict=True)):
            assert torch.equal(param, wanted), (step, SHAPES[k], param.dtype, "anchor")
        optimizer.train()
        for param, wanted in zip(params, own, strict=True):
            assert torch.equal(param, wanted)

    for step in range(11):
        scale = min(1.0, (step + 1) / 4)  # warm-up
        for group, lr in zip(optimizer.param_groups, (0.1, 0.01), strict=True):
            group["lr"] = lr * scale
        lions.lrs = [scale * (0.1 if k < 4 else 0.01) for k in range(len(SHAPES))]
        grads = gradients(seed + step, world_size, dtypes, faults)
        for param, grad in zip(params, grads[rank], strict=True):
            param.grad = None if grad is None else grad.clone()
        lions.step(grads)
        optimizer.step()
        check(step)
    lions.exchange()
    optimizer.exchange_now()
    check(11)
    assert optimizer.steps == lions.t
    assert optimizer._local.exchanges == lions.exchanges


CASES: list[dict[str, Any]] = [
    {"vote_every": 3},
    {"vote_every": 4, "exchange": "two_phase"},
    {"vote_every": 2, "bits": 2},
    {"vote_every": 4, "bits": 4, "exchange": "two_phase"},
    {"vote_every": 3, "bits": 8},
]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_equal_the_definition(pools: RankPools, case: dict[str, Any], ranks: int) -> None:
    pools(ranks).run(equals_the_definition, case, [torch.float32], 7 * ranks)


@pytest.mark.smoke
@pytest.mark.parametrize("bits", [1, 4])
def test_two_ranks_equal_the_definition(pools: RankPools, bits: int) -> None:
    pools(2).run(equals_the_definition, {"vote_every": 3, "bits": bits}, [torch.float32], 3)


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS[:3]], ids=str)
def test_ranks_equal_the_definition_in_other_dtypes(
    pools: RankPools, kinds: list[torch.dtype]
) -> None:
    pools(3).run(equals_the_definition, {"vote_every": 3, "seed": 2**40 + 1}, kinds, 5)
    pools(2).run(equals_the_definition, {"vote_every": 2, "bits": 2}, kinds, 6)
