"""The GPU that is not there counts what is asked of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.fake_gpu import GPU, PACKAGE, Asked, Counting


def counted(source: str) -> Asked:
    """What some lines ask for, as if they were the package's."""
    path = PACKAGE + "asking.py"
    names: dict[str, Any] = {"torch": torch, "x": torch.empty(6, dtype=torch.int64, device=GPU)}
    with Counting() as mode:
        exec(compile(source, path, "exec"), names)
    return mode.asked


@pytest.mark.parametrize(
    ("source", "launches", "waits"),
    [
        ("x.view(2, 3)[1:].t(); torch.empty_like(x)", 0, 0),
        ("(x + 1).sum()", 2, 0),
        ("x[2:4] = x[:2]", 1, 0),
        ("bool((x == 1).all())", 2, 1),
        ("x.tolist()", 1, 1),
        ("x[x > 0]", 2, 1),
        ("torch.arange(6).to(x.device)", 1, 1),
        ("torch.arange(6).to(x.device, non_blocking=True)", 1, 0),
    ],
)
def test_launches_and_waits_are_told_apart(source: str, launches: int, waits: int) -> None:
    asked = counted(source)
    assert (asked.launched, asked.waited) == (launches, waits), (asked.launches, asked.waits)
