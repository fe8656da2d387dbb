"""A process that trains alone although a launcher was asked for several says so."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from hf_dlion import DistributedLion
from hf_dlion.options import warn_once
from hf_dlion.ranks import launched

# What `accelerate launch --num_processes 2` leaves without --multi_gpu.
SIMPLE = {"ACCELERATE_DYNAMO_BACKEND": "NO", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process starts that nobody launched and that has not warned yet."""
    for name in (*launched.SIZES, *SIMPLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(warn_once, "_given", set())


def train() -> list[str]:
    """Makes two steps with each of two optimizers; returns what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            param = torch.nn.Parameter(torch.ones(3))
            optimizer = DistributedLion([param])
            for _ in range(2):
                param.grad = torch.ones(3)
                optimizer.step()
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but torch.distributed is not initialised"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4, but torch.distributed"),
        (SIMPLE, "accelerate launch was asked for several processes and started this one alone"),
    ],
    ids=["torchrun", "mpirun", "accelerate"],
)
def test_one_process_of_several_warns_once_that_it_trains_alone(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = train()
    assert len(said) == 1
    assert re.search(f"^{re.escape(words)}.*nothing is exchanged", said[0])


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "two"},
        {"ACCELERATE_DYNAMO_BACKEND": "NO"},
        {"MASTER_ADDR": "127.0.0.1"},
        {**SIMPLE, "WORLD_SIZE": "1"},
    ],
    ids=str,
)
def test_a_process_that_was_meant_to_train_alone_says_nothing(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not train()
