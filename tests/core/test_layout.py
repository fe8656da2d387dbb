"""The layout of messages, and what steps do with the memory of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dlion import DistributedLion
from hf_dlion.core import layout
from hf_dlion.core.flat import momentum_of
from hf_dlion.core.layout import Layout, messages_of
from hf_dlion.core.slot import LocalState, Slot
from tests.support.spawn import on_ranks


def in_memory(image: Tensor) -> Tensor:
    """Returns a channels-last tensor as the matrix that its memory holds."""
    return image.detach().permute(0, 2, 3, 1).reshape(len(image), -1)


@on_ranks(3)
def test_a_channels_last_tensor_moves_in_its_own_memory_order(rank: int) -> None:
    image = nn.Parameter(torch.randn(4, 64, 3, 5).to(memory_format=torch.channels_last))
    flat = nn.Parameter(in_memory(image).clone())
    random = torch.Generator().manual_seed(rank)
    optimizers = [DistributedLion([p], lr=0.1, weight_decay=0.1, bits=2) for p in (image, flat)]
    for _ in range(3):
        image.grad = torch.randn(image.shape, generator=random)
        flat.grad = in_memory(image.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(in_memory(image), flat)


def test_a_row_is_never_cut_between_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layout.PIECE, "cpu", 1 << 10)
    monkeypatch.setitem(layout.MESSAGE, "cpu", 1 << 13)
    monkeypatch.setattr(layout, "MESSAGES", 1 << 20)
    shapes = [(37, 64 * 5), (3,), (1000, 64), (11, 64 * 40)]
    plan = messages_of([Slot.of(torch.empty(shape), 0) for shape in shapes])
    for own in plan:
        for _, _, words, row in own.spans:
            assert words % row == 0
    assert len(plan) > 3
    assert max(len(own.pieces) for own in plan) > 1


def test_ranks_that_split_a_model_over_devices_differently_see_it() -> None:
    """Their messages differ in size."""

    def signatures(places: list[int]) -> list[object]:
        slots = [Slot.of(torch.empty(64, device="meta"), 0) for _ in places]
        for slot, place in zip(slots, places, strict=True):
            slot.device = torch.device("cuda", place)
        return Layout(slots=slots).signatures

    assert signatures([0, 0, 1, 1]) == signatures([2, 2, 0, 0]) != signatures([0, 1, 1, 1])
    assert signatures([0, 0]) == signatures([1, 1])


def test_a_momentum_and_an_anchor_follow_their_parameter_to_a_device() -> None:
    """A kernel would read an address of another device."""
    param, state = torch.empty(4, 64, device="meta"), {"exp_avg": torch.ones(4, 64)}
    assert momentum_of(state, param, None) is state["exp_avg"]
    assert state["exp_avg"].device == param.device
    local = LocalState.of(torch.ones(4, 64).bfloat16())
    local.fit("w", param.bfloat16())
    assert local.compensation is not None
    assert local.anchor.device == local.compensation.device == param.device


def test_a_layout_follows_a_parameter_to_a_device() -> None:
    """As `model.to` moves it: the same object, shape, and strides."""
    param = nn.Parameter(torch.ones(64))
    optimizer = DistributedLion([param])
    for kind in ("cpu", "meta"):
        torch.utils.swap_tensors(param, nn.Parameter(torch.ones(64, device=kind)))
        plan = optimizer.params.fresh_layout()
        assert plan.device.type == plan.slots[0].device.type == kind


class DestinationsOfCopies(TorchDispatchMode):
    """Notes the dtypes of each `_foreach_copy_`, which torch before 2.11 mixes up on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_foreach_copy_":
            self.dtypes.append({tensor.dtype for tensor in args[0]})
        return func(*args, **(kwargs or {}))


def test_one_copy_of_several_tensors_writes_one_dtype() -> None:
    sizes = {torch.bfloat16: 64, torch.float32: 10, torch.float16: 7}
    params = [nn.Parameter(torch.ones(size, dtype=dtype)) for dtype, size in sizes.items()]
    optimizer = DistributedLion(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    with DestinationsOfCopies() as mode:
        optimizer.step()
    assert max(map(len, mode.dtypes)) == 1
