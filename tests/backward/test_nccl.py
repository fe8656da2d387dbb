"""What does not go with NCCL is refused in words; there is none here, only its name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_dlion import DistributedLion
from hf_dlion.exchange import Wire, WireStats
from tests.support.fake_gpu import FakeGpu
from tests.support.spawn import RankPools


def refused(rank: int, world_size: int, overlap: bool) -> tuple[str, bool, int]:
    """What a step says where NCCL would send, whether the parameter moved, and the bytes sent."""
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = DistributedLion([param], lr=0.5, overlap=overlap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "backend_for", lambda wire, device: "nccl")
        said = ""
        for _ in range(2):
            param.grad = torch.ones(5) * (rank + 1)
            try:
                optimizer.step()
            except NotImplementedError as error:
                said = str(error)
    return said, bool((param != 1).any()), optimizer.wire.exchanges


def test_overlap_is_refused_on_all_ranks_before_anything_moves(ranks: RankPools) -> None:
    for said, moved, exchanges in ranks(2).run(refused, True):
        assert said.startswith("overlap=True does not work on NCCL yet")
        assert "leave out overlap" in said
        assert (moved, exchanges) == (False, 0)


def test_without_overlap_votes_travel(ranks: RankPools) -> None:
    assert ranks(2).run(refused, False) == [("", True, 2)] * 2


def test_the_backend_is_that_which_sends_the_votes() -> None:
    gpu = FakeGpu([(30, 70)], 2, overlap=True, backend="nccl")
    try:
        with pytest.raises(NotImplementedError, match="overlap=True does not work on NCCL"):
            gpu.step()
        assert ("send", "votes") not in gpu.history
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
