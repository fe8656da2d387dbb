"""Counts the operations of one message on a device: each would be a kernel launch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from benchmarks.codec import Counting
from benchmarks.codec import launches as torch_launches
from hf_dlion.cli.plan.machine import step_work, vote_work
from hf_dlion.exchange import launches
from tests.support.forms import form
from tests.support.spawn import on_ranks

# Measured, so a change that asks for more is seen.
MOST = {1: 72, 2: 119, 4: 155, 8: 227}


@pytest.mark.parametrize("bits", MOST)
def test_launches_do_not_grow_with_tensors_or_time(bits: int) -> None:
    torch_launches(bits, 2, torch.float32)  # Fills the tables of constants.
    assert MOST[bits] / 3 < torch_launches(bits, 2, torch.float32) <= MOST[bits]


@on_ranks(1)
def test_kernels_need_six_launches_for_a_message_and_two_for_a_local_step() -> None:
    with form("kernels") as device:
        params = [torch.ones(shape, device=device) for shape in 3 * [(8, 64), (64,), (5,)]]
        for param in params:
            param.grad = torch.ones_like(param)
        local_step = step_work(params[0])["local step"]
        local_step()  # Makes the anchor.
        works = [list(vote_work(params, 1, [2]).values()), [local_step]]
        for calls, most in zip(works, (6, 2), strict=True):
            own = mock.patch.object(launches, "launch", wraps=launches.launch)
            with Counting() as mode, own as launch:
                for call in calls:
                    call()
            assert 1 < mode.launches + launch.call_count <= most
