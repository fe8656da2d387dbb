"""Batches hold every tensor with elements once, in order, of one kind and within the limit."""

from __future__ import annotations

import itertools
import operator

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_dlion.exchange.batches import by_kind, in_batches

TENSORS = st.lists(
    st.builds(
        torch.empty, st.integers(0, 9), dtype=st.sampled_from([torch.float32, torch.bfloat16])
    ),
    max_size=12,
)
dtype_of = operator.attrgetter("dtype")


@given(TENSORS, st.integers(1, 12))
def test_neighbours_of_one_kind_share_a_batch_as_far_as_it_goes(
    tensors: list[torch.Tensor], limit: int
) -> None:
    items = list(enumerate(tensors))
    batches = in_batches(items, limit, operator.itemgetter(1), dtype_of)
    held = [pair for batch in batches for pair in batch]
    assert [k for k, _ in held] == [k for k, tensor in items if tensor.numel()]
    for batch in batches:
        assert len({tensor.dtype for _, tensor in batch}) == 1
        assert len(batch) == 1 or sum(tensor.numel() for _, tensor in batch) <= limit
    for first, second in itertools.pairwise(batches):
        joined = sum(tensor.numel() for _, tensor in first) + second[0][1].numel()
        assert joined > limit or first[0][1].dtype != second[0][1].dtype


@given(TENSORS)
def test_kinds_come_in_the_order_of_their_first(tensors: list[torch.Tensor]) -> None:
    items = list(enumerate(tensors))
    found = by_kind(items, operator.itemgetter(1), dtype_of)
    kinds = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    assert found == [pair for kind in kinds for pair in items if pair[1].dtype == kind]
