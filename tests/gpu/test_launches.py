"""Counts the operations of one message on a device: each would be a kernel launch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from benchmarks.codec import Counting
from benchmarks.codec import launches as torch_launches
from hf_dlion import DistributedLion
from hf_dlion.cli.plan.machine import step_work, vote_work
from hf_dlion.gpu import launches
from tests.support import fake_gpu
from tests.support.forms import DEVICE, form
from tests.support.spawn import on_ranks

pytestmark = pytest.mark.gpu
# Measured, so a change that asks for more is seen.
MOST = {1: 77, 2: 123, 4: 157, 8: 225}


@pytest.mark.parametrize("bits", MOST)
def test_launches_do_not_grow_with_tensors_or_time(bits: int) -> None:
    torch_launches(bits, 2, torch.float32)  # Fills the tables of constants.
    assert MOST[bits] / 3 < torch_launches(bits, 2, torch.float32) <= MOST[bits]


@on_ranks(1)
def test_kernels_need_nine_launches_for_a_message_and_two_for_a_local_step() -> None:
    with form("kernels") as device:
        params = [torch.ones(shape, device=device) for shape in 3 * [(8, 64), (64,), (5,)]]
        for param in params:
            param.grad = torch.ones_like(param)
        local_step = step_work(params[0])["local step"]
        local_step()  # Makes the anchor.
        works = [list(vote_work(params, 1, [2]).values()), [local_step]]
        for calls, most in zip(works, (9, 2), strict=True):
            own = mock.patch.object(launches, "launch", wraps=launches.launch)
            with Counting() as mode, own as launch:
                for call in calls:
                    call()
            assert 1 < mode.launches + launch.call_count <= most


@pytest.mark.skipif(DEVICE != fake_gpu.NAME, reason="counts on a device made of CPU memory")
@on_ranks(2)
def test_the_host_waits_only_for_the_finite_check_and_the_scales_of_an_exchange(rank: int) -> None:
    """The copies of `routes` are those of gloo, and rows of zeros need one more."""
    for vote_every, zero, expected in (
        (1, False, ["idle_rows.survey"]),
        (1, True, ["idle_rows.survey"] * 2),
        (2, False, ["idle_rows.survey", *["flat.numbers"] * 2]),
    ):
        with form("kernels") as device:
            params = [torch.ones(shape, device=device) for shape in [(8, 64), (64,), (5,)]]
            optimizer = DistributedLion([p.requires_grad_() for p in params], vote_every=vote_every)
            for _ in range(4):
                for param in params:
                    param.grad = torch.ones_like(param)
                    param.grad[:1] *= not zero
                fake_gpu.waits.clear()
                optimizer.step()
            assert [own for own in fake_gpu.waits if not own.startswith("routes.")] == expected
