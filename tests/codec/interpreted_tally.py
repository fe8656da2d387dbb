"""The Triton tally in Triton's interpreter, on CPU tensors; run by tests/codec/test_triton.py."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_dlion.codec.cuda import tables
from hf_dlion.codec.cuda.codec import TritonCodec
from hf_dlion.codec.cuda.launch import kernels
from hf_dlion.codec.eager import EagerCodec
from hf_dlion.codec.layout import MessageLayout, shards_of
from hf_dlion.codec.rule import verdict_planes
from hf_dlion.exchange.node import cut_rows, ends_of
from tests.support.codec_cases import examples, rule
from tests.support.tally_cases import CPU, ballots_of, exchanged

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/codec/test_triton.py"
KERNELS = kernels(CPU)
assert KERNELS is not None
CODECS = TritonCodec(KERNELS), EagerCodec()


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that small tensors cross."""
    monkeypatch.setattr(tables, "BLOCK", 128)


SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 300)),
        st.tuples(st.integers(1, 12), st.integers(1, 90)),
        st.tuples(st.integers(1, 5), st.sampled_from([64, 128])),
        st.tuples(st.integers(150, 200), st.just(1)),
    ),
    min_size=1,
    max_size=4,
)


@examples(100)
@given(
    shapes=SHAPES,
    seed=st.integers(0, 10**6),
    world_size=st.integers(2, 9),
    one_segment=st.booleans(),
    combination=st.sampled_from(
        [
            *(("majority", "alternate", 1), ("majority", "zero", 1), ("average", "alternate", 1)),
            *(("majority", "alternate", 2), ("majority", "zero", 4), ("majority", "alternate", 8)),
        ]
    ),
    absent_share=st.sampled_from([0.0, 0.4, 1.0]),
    elsewhere=st.booleans(),
)
def test_a_tally_does_what_torch_operations_do(
    shapes: list[tuple[int, ...]],
    seed: int,
    world_size: int,
    one_segment: bool,
    combination: tuple[Any, Any, Any],
    absent_share: float,
    elsewhere: bool,
) -> None:
    aggregation, ties, bits = combination
    layout = MessageLayout.of([(k, torch.Size(shape)) for k, shape in enumerate(shapes)])
    made = rule(step=4, world_size=world_size, aggregation=aggregation, ties=ties).step_rule
    step = dataclasses.replace(made, bits=bits)
    planes = verdict_planes(aggregation, ties, world_size)
    ballots = ballots_of(shapes, world_size, seed, absent_share, bits)
    count = 1 if one_segment else world_size
    outcomes = [
        exchanged(codec, layout, count, planes, ballots, step, elsewhere) for codec in CODECS
    ]
    ours, theirs = outcomes
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.tolist() == other.tolist()


@examples(60)
@given(
    messages=st.lists(SHAPES, min_size=1, max_size=3),
    size=st.integers(2, 4),
    seed=st.integers(0, 10**6),
    bits=st.sampled_from([1, 2, 8]),
    step=st.integers(1, 4),
)
def test_cut_rows_are_completed_as_by_torch_operations(
    messages: list[list[tuple[int, ...]]], size: int, seed: int, bits: int, step: int
) -> None:
    layouts = [MessageLayout.of(list(enumerate(map(torch.Size, shapes)))) for shapes in messages]
    made = dataclasses.replace(rule(step=step).step_rule, bits=bits)
    random = np.random.default_rng(seed)
    told = 2 * sum(bool(cut_rows(shards_of(layout, size))) for layout in layouts)
    for rank in range(size):
        ends = ends_of(layouts, size, rank, bits)
        if not ends:
            continue
        shards = [shards_of(layout, size)[rank] for layout in layouts]
        active = torch.from_numpy(random.random(sum(shard.rows for shard in shards)) < 0.5)
        words = torch.from_numpy(
            random.integers(0, 2**62, bits * sum(shard.words for shard in shards))
        )
        everyone = torch.from_numpy(random.integers(0, 2, (size, told)).astype(np.uint8))
        for one in ends:
            everyone[rank, one.told : one.told + 2] = active[list(one.rows())]
        outcomes = []
        for codec in CODECS:
            edges = codec.edges(ends, CPU)
            out = torch.full((told,), 7, dtype=torch.uint8)
            own, rows = words.clone(), active.clone()
            edges.tell(rows, out)
            edges.hear(own, rows, everyone, made)
            outcomes.append([out.tolist(), own.tolist(), rows.tolist()])
        assert outcomes[0] == outcomes[1]
        for one in ends:
            assert outcomes[0][0][one.told : one.told + 2] == active[list(one.rows())].tolist()
