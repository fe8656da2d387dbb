"""What NCCL asks for, and what it cannot do; there is none here, only its name."""

from __future__ import annotations

import itertools
import random
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_dlion import DistributedLion
from hf_dlion.exchange import Wire, WireStats
from tests.support.ddp_training import new_model, optimizer_of
from tests.support.fake_gpu import FakeGpu
from tests.support.spawn import RankPools
from tests.support.zoo import short_messages


def sent(rank: int, world_size: int, overlap: bool) -> tuple[list[str], list[Tensor], int]:
    """Trains as if NCCL sent; returns what was sent in one step, the weights, and how often early.

    Gradients take their time, on each rank another one.
    """
    model = new_model()
    optimizer = optimizer_of(model, overlap=overlap, exchange="two_phase")
    pauses = random.Random(rank)
    for param in model.parameters():
        param.register_hook(lambda grad: time.sleep(0.01 * pauses.random()))
    order: list[str] = []

    def noted(send: Any) -> Any:
        def call(wire: Wire, out: Tensor, tensor: Tensor, what: str) -> Any:
            order.append(what)
            return send(wire, out, tensor, what)

        return call

    with pytest.MonkeyPatch.context() as patch, short_messages():
        patch.setattr(Wire, "backend_for", lambda wire, device: "nccl")
        patch.setattr(Wire, "_gather", noted(Wire._gather))
        patch.setattr(Wire, "_scatter", noted(Wire._scatter))
        for t in range(5):
            order.clear()
            tokens = torch.randint(
                0, 11, (3, 5), generator=torch.Generator().manual_seed(9 * rank + t)
            )
            optimizer.zero_grad()
            model(tokens).backward()
            optimizer.step()
    weights = [param.detach().clone() for param in model.parameters()]
    return order, weights, optimizer.wire.overlapped


@pytest.mark.multiproc
@pytest.mark.parametrize("world_size", [2, 3])
def test_votes_and_verdicts_leave_in_one_order(ranks: RankPools, world_size: int) -> None:
    found = ranks(world_size).run(sent, True)
    expected = ranks(world_size).run(sent, False)
    order = [what for what in found[0][0] if what in ("votes", "a verdict")]
    count = order.count("votes")
    assert count > 3
    # up 0, up 1, down 0, up 2, down 1, and so on, with the header before the last verdict.
    assert order == ["votes", *(count - 1) * ["votes", "a verdict"], "a verdict"]
    for (own, weights, early), (_, of_step_mode, _) in zip(found, expected, strict=True):
        assert own == found[0][0]
        assert early == 4  # The first step agrees on the messages.
        assert all(map(torch.equal, weights, of_step_mode))


def moved(rank: int, world_size: int, overlap: bool, mixed: bool) -> tuple[list[Tensor], int, bool]:
    """Trains while what sends the votes changes, as when a model is moved to a GPU."""
    model = new_model()
    optimizer = optimizer_of(model, overlap=overlap, exchange="two_phase")
    senders = itertools.cycle(["nccl", "gloo"] if mixed else ["nccl"])
    with pytest.MonkeyPatch.context() as patch, short_messages(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in range(7):
            if t == 3:
                patch.setattr(Wire, "backend_for", lambda wire, device: next(senders))
                # Another set of parameters, as of other devices.
                model.first.bias.requires_grad_(False)
            generator = torch.Generator().manual_seed(9 * rank + t)
            tokens = torch.randint(0, 11, (3, 5), generator=generator)
            optimizer.zero_grad()
            model(tokens).backward()
            optimizer.step()
    weights = [param.detach().clone() for param in model.parameters()]
    wires = getattr(optimizer._engine.early, "_wires", (None, None))
    return weights, optimizer.wire.overlapped, wires[0] is wires[1]


@pytest.mark.multiproc
@pytest.mark.parametrize("mixed", [False, True])
def test_what_sends_may_change(ranks: RankPools, mixed: bool) -> None:
    expected = ranks(2).run(moved, False, False)
    for found, (weights, *_) in zip(ranks(2).run(moved, True, mixed), expected, strict=True):
        assert all(map(torch.equal, found[0], weights))
        # Steps 2 and 3; then, unless backends are mixed, all but the one that agrees anew.
        assert found[1] == (2 if mixed else 5)
        assert found[2] is not mixed


def test_one_communicator_carries_both_ways() -> None:
    gpu = FakeGpu([(30, 70), (50,)], 4, overlap=True, exchange="two_phase", backend="nccl")
    try:
        for _ in range(3):
            gpu.step()
        wires = gpu.optimizer._engine.early._wires  # type: ignore[attr-defined]
        assert wires[0] is wires[1]
        assert gpu.optimizer.wire.overlapped == 2
    finally:
        gpu.close()


@pytest.mark.parametrize("bound", [True, False])
def test_a_group_of_some_ranks_is_not_split_where_all_would_have_to_help(bound: bool) -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        everyone, some = dist.group.WORLD, dist.new_group([0, 1])
        assert everyone is not None
        wires = [Wire(group, WireStats(), neighbours=0) for group in (everyone, some)]
        if bound:
            everyone.bound_device_id = torch.device("cuda:0")
            for make in (lambda: wires[1].subgroup([0]), wires[1].sibling):
                with pytest.raises(
                    NotImplementedError, match=r"has 2 of 4 ranks.*device_id=cuda:0"
                ):
                    make()
        else:
            assert dist.get_world_size(wires[1].subgroup([0])) == 1
            assert wires[1].sibling().world_size == 2
        everyone.bound_device_id = None
    finally:
        dist.destroy_process_group()


def test_a_step_is_not_captured_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = DistributedLion([param], lr=0.5)
    param.grad = torch.ones(5)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"step\(\) cannot be captured in a CUDA graph"):
        optimizer.step()
    assert bool((param == 1).all())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    optimizer.step()
    assert bool((param == 0.5).all())


def test_parameters_on_the_cpu_are_refused_in_words_where_only_gpus_can_send(
    fake_ranks: int,
) -> None:
    everyone = dist.group.WORLD
    assert everyone is not None
    wire = Wire(everyone, WireStats(), torch.device("cpu"))
    # As of init_process_group("nccl"), and parameters that FSDP offloads.
    wire._backends = {"cuda": "nccl"}
    with pytest.raises(RuntimeError, match=r"cannot send tensors on cpu; .*cpu:gloo,cuda:nccl"):
        _ = wire.control_device
