"""Trainer's callback leaves figures on the device until they are logged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_dlion import DistributedLion
from hf_dlion.exchange import Agreed
from hf_dlion.trainer import DistributedLionCallback, callback


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Agreed]:
    """What was read, once for each time."""
    seen: list[Agreed] = []
    mean = Agreed.__dict__["mean"]
    monkeypatch.setattr(Agreed, "mean", property(lambda own: seen.append(own) or mean.func(own)))
    return seen


@pytest.mark.parametrize("steps", [3, callback.KEPT, 2 * callback.KEPT + 3])
def test_agreement_is_read_when_it_is_logged_or_much_of_it_waits(
    read: list[Agreed], steps: int
) -> None:
    optimizer = DistributedLion([torch.nn.Parameter(torch.zeros(3))])
    figures = DistributedLionCallback()
    figures.on_train_begin(optimizer=optimizer)
    for step in range(steps):
        sums = torch.tensor([step % 2, 1])
        optimizer.wire.agreed = Agreed([sums])
        figures.on_optimizer_step(optimizer=optimizer)
        assert len(read) == (step + 1) // callback.KEPT * callback.KEPT
    logs: dict[str, Any] = {"loss": 1.0}
    state: Any = SimpleNamespace(log_history=[])
    figures.on_log(None, state, None, logs=logs, optimizer=optimizer)  # type: ignore[arg-type]
    assert logs["dlion/agreement"] == pytest.approx(steps // 2 / steps)
