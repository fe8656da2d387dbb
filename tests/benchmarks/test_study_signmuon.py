"""SignMuon votes on orthogonalised directions, as its paper says."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.convergence.methods import SignMuon, majority, orthogonal
from benchmarks.convergence.setting import Setting

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
