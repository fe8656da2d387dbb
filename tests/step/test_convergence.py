"""Training by votes converges as global Lion does, and a bad rule of ties is found out.

The ranks are threads of one process; that they do what real ranks do, bit for bit, is
`test_study.py`'s.
"""

from __future__ import annotations

import multiprocessing
import operator
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.convergence.setting import Setting
from benchmarks.convergence.train import simulate
from hf_dlion.codec import ties

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(600)]

# By the number of ranks.
SEEDS = {2: (0, 1, 2), 4: (0, 1)}
# Of the validation loss above global Lion's, in nats per byte, the mean over the seeds; below it is
# as good. Seen with four seeds and 2 ranks: -0.01 and 0.01 for average and majority, single seeds
# -0.05 to 0.05; with ties that always go one way 0.16, single seeds 0.12 to 0.24. 4 bits relative
# to their word ended 0.07 to 0.09 below it (two seeds).
BAND = 0.06

losses_of_lion: dict[tuple[int, int], float] = {}


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Two runs at a time, a thread of torch for each of their ranks."""
    context = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(2, context, torch.set_num_threads, (1,)) as found:
            yield found


def loss(method: str, workers: int, seed: int, folder: Path) -> float:
    """The validation loss of a byte-level Llama of 0.1 million parameters after 200 steps.

    The learning rate stays as it is: it is by drifting that a bad rule shows.
    """
    setting = Setting(
        scene="pretrain",
        method=method,
        workers=workers,
        batch=4,
        sequence=64,
        hidden=64,
        layers=2,
        steps=200,
        lr=1e-3,
        weight_decay=0.1,
        betas=(0.9, 0.99),
        schedule="constant",
        seed=seed,
        evaluations=1,
        folder=str(folder),
    )
    found = simulate(setting)["loss"]
    assert isinstance(found, float), "the run diverged"
    return found


def gap(workers: int, losses: Sequence[float], folder: Path, pool: ProcessPoolExecutor) -> float:
    """How far above global Lion's the losses are, one for each seed: the mean."""
    missing = [seed for seed in SEEDS[workers] if (workers, seed) not in losses_of_lion]
    found = pool.map(partial(loss, "lion", workers, folder=folder), missing)
    losses_of_lion.update(zip(((workers, seed) for seed in missing), found, strict=True))
    of_lion = [losses_of_lion[workers, seed] for seed in SEEDS[workers]]
    return statistics.fmean(map(operator.sub, losses, of_lion))


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "method",
    ["majority", *(pytest.param(name, marks=pytest.mark.long) for name in ("average", "bits4"))],
)
def test_votes_converge_as_global_lion_does(
    method: str, workers: int, tmp_path: Path, pool: ProcessPoolExecutor
) -> None:
    losses = list(pool.map(partial(loss, method, workers, folder=tmp_path), SEEDS[workers]))
    assert gap(workers, losses, tmp_path, pool) < BAND


@pytest.mark.long
def test_ties_that_always_go_one_way_are_outside_the_band(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: ProcessPoolExecutor
) -> None:
    def always_up(_phase: Any) -> int:
        return 0

    monkeypatch.setattr(ties, "alternating_word", always_up)
    losses = [loss("majority", 2, seed, tmp_path) for seed in SEEDS[2]]
    assert gap(2, losses, tmp_path, pool) > BAND
