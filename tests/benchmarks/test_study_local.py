"""Less than one bit per step: what the study tries out is what its definitions say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.convergence.local_steps import (
    DeltaVote,
    LocalSteps,
    Mean,
    OuterVote,
    SignMuon,
    majority,
    orthogonal,
)
from benchmarks.convergence.setting import Setting
from hf_dlion.optimizer import DistributedLion

Array = np.ndarray[Any, Any]
WORKERS, STEPS, DECAY, BETAS = 3, 7, 0.1, (0.9, 0.99)
SETTING = Setting(
    scene="none", method="none", workers=WORKERS, batch=1, sequence=1, hidden=1, layers=1,
    steps=STEPS, lr=0.01, weight_decay=DECAY, betas=BETAS, schedule="constant", seed=0,
    evaluations=1,
)  # fmt: skip


class Linear:
    """A scene that knows but a model."""

    def model(self, seed: int) -> nn.Module:
        """Returns the same model each time."""
        torch.manual_seed(seed)
        return nn.Linear(5, 4)


def gradients(step: int, worker: int) -> list[Array]:
    random = np.random.default_rng([step, worker])
    found = [random.standard_normal(shape).astype(np.float32) for shape in ((4, 5), (4,))]
    found[0][2] = 0.0  # Nobody sees this row.
    return found


def trained(method: Any, alike: bool = False) -> list[list[Array]]:
    """Returns the weights of every worker."""
    for step in range(STEPS):
        for worker, model in method.places:
            for param, grad in zip(
                model.parameters(), gradients(step, 0 if alike else worker), strict=True
            ):
                param.grad = torch.from_numpy(grad.copy())
        method.step(0.01)
    return [[p.detach().numpy() for p in model.parameters()] for _, model in method.places]


def voted(wanted: list[Array], turn: int) -> Array:
    move = np.sign(sum(np.sign(own) for own in wanted))
    for place in range(move.size):
        if move.flat[place] == 0 and any(own.flat[place] != 0 for own in wanted):
            move.flat[place] = 1 if (place + turn) % 2 == 0 else -1
    return cast(Array, move)


class Expected:
    """The definitions, one tensor and worker after another."""

    def __init__(self, kind: str, every: int) -> None:
        self.kind, self.every = kind, every
        self.x = [p.detach().numpy().copy() for p in Linear().model(0).parameters()]
        self.momenta = [[np.zeros_like(x) for x in self.x] for _ in range(WORKERS)]
        self.sums = [[np.zeros_like(x) for x in self.x] for _ in range(WORKERS)]
        self.kept = [[np.zeros_like(x) for x in self.x] for _ in range(WORKERS)]
        self.outer = [[np.zeros_like(x) for x in self.x] for _ in range(WORKERS)]

    def run(self) -> list[Array]:
        taken = 0
        for step in range(STEPS):
            for worker in range(WORKERS):
                for k, g in enumerate(gradients(step, worker)):
                    m = self.momenta[worker][k]
                    self.sums[worker][k] += np.sign(BETAS[0] * m + (1 - BETAS[0]) * g)
                    self.momenta[worker][k] = BETAS[1] * m + (1 - BETAS[1]) * g
            taken += 1
            if (step + 1) % self.every == 0 or step + 1 == STEPS:
                for k, x in enumerate(self.x):
                    deltas = [own[k].copy() for own in self.sums]
                    move = self.move(k, deltas, taken, (step + 1) // self.every)
                    self.x[k] = x * (1 - taken * 0.01 * DECAY) - 0.01 * move
                    for own in self.sums:
                        own[k][...] = 0
                taken = 0
        return self.x

    def move(self, k: int, deltas: list[Array], taken: int, turn: int) -> Array:
        if self.kind == "mean":
            return cast(Array, sum(deltas) / WORKERS)
        if self.kind == "delta":
            wanted = [delta + own[k] for delta, own in zip(deltas, self.kept, strict=True)]
            sizes = [np.abs(own).mean() for own in wanted]
            for own, c, s in zip(self.kept, wanted, sizes, strict=True):
                own[k] = c - s * np.sign(c)
            return cast(Array, voted(wanted, turn) * np.mean(sizes))
        directions = [
            BETAS[0] * own[k] + (1 - BETAS[0]) * delta
            for own, delta in zip(self.outer, deltas, strict=True)
        ]
        for own, delta in zip(self.outer, deltas, strict=True):
            own[k] = BETAS[1] * own[k] + (1 - BETAS[1]) * delta
        return cast(Array, taken * voted(directions, turn))


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "made"), [("mean", Mean), ("delta", DeltaVote), ("outer", OuterVote)]
)
def test_local_steps_are_those_of_the_definition(
    kind: str, made: Callable[..., LocalSteps], every: int
) -> None:
    method = made(cast(Any, Linear()), SETTING, every)
    expected = Expected(kind, every).run()
    for weights in trained(method):
        for mine, theirs in zip(weights, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)
    exchanges = -(-STEPS // every)
    bits = {1: np.log2(3), 2: np.log2(5), 3: np.log2(7)}[every] if kind == "mean" else 1
    assert method.bytes_sent == pytest.approx(exchanges * (WORKERS - 1) * bits * 24 / 8)
    assert method.rounds == exchanges * (WORKERS - 1)


def test_workers_that_see_the_same_take_lions_step() -> None:
    model = Linear().model(0)
    lion = DistributedLion(model.parameters(), lr=0.01, betas=BETAS, weight_decay=DECAY)
    for step in range(STEPS):
        for param, grad in zip(model.parameters(), gradients(step, 0), strict=True):
            param.grad = torch.from_numpy(grad.copy())
        lion.step()
    for weights in trained(Mean(cast(Any, Linear()), SETTING, 1), alike=True):
        for mine, param in zip(weights, model.parameters(), strict=True):
            np.testing.assert_allclose(mine, param.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5)])
def test_an_orthogonal_matrix_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    sizes = torch.linalg.svdvals(orthogonal(matrix))
    assert 0.5 < float(sizes.min())
    assert float(sizes.max()) < 1.4
    # The same directions: the product with what it is near to has those values as its trace.
    assert float((orthogonal(matrix) * (u @ v)).sum()) == pytest.approx(
        float(sizes.sum()), rel=1e-4
    )


def test_sign_muon_votes_on_orthogonalised_matrices_and_other_directions_as_they_are() -> None:
    method = SignMuon(cast(Any, Linear()), SETTING)
    before = [p.detach().clone() for p in method.places[0][1].parameters()]
    for worker, model in method.places:
        for param, grad in zip(model.parameters(), gradients(0, worker), strict=True):
            param.grad = torch.from_numpy(grad)
    method.step(0.01)
    for k, old in enumerate(before):
        grads = [torch.from_numpy(gradients(0, worker)[k]) for worker in range(WORKERS)]
        wanted = [orthogonal(g * 0.1) if k == 0 else g * 0.1 for g in grads]
        signs = sum(torch.sign(own) for own in wanted)
        move = torch.sign(cast(Any, signs))
        expected = old * (1 - 0.01 * DECAY) - 0.01 * move
        for _, model in method.places:
            torch.testing.assert_close(list(model.parameters())[k].detach(), expected)
    assert all(param.grad is None for _, model in method.places for param in model.parameters())


def test_ties_alternate_and_what_nobody_wants_stays() -> None:
    wanted = torch.tensor([[1.0, -2.0, 0.0, 3.0], [-1.0, 2.0, 0.0, 0.5]])
    assert majority(wanted, 0).tolist() == [1.0, -1.0, 0.0, 1.0]
    assert majority(wanted, 1).tolist() == [-1.0, 1.0, 0.0, 1.0]
