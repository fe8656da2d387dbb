"""The Triton tally in Triton's interpreter, on CPU tensors; run by tests/codec/test_triton.py."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_dlion.codec.bits import pack_bits
from hf_dlion.codec.cuda import tables
from hf_dlion.codec.cuda.codec import TritonCodec
from hf_dlion.codec.cuda.launch import kernels
from hf_dlion.codec.eager import EagerCodec
from hf_dlion.codec.edges import Ends
from hf_dlion.codec.layout import MessageLayout, Shard
from hf_dlion.codec.reference import levels as reference_levels
from hf_dlion.codec.reference import votes as reference
from hf_dlion.codec.rule import StepRule, Verdict, verdict_planes
from hf_dlion.codec.tally import Segments, Tally
from tests.support.codec_cases import examples, rule

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/codec/test_triton.py"
CPU = torch.device("cpu")
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


def ballots_of(
    shapes: list[tuple[int, ...]], world_size: int, seed: int, absent_share: float, bits: Any
) -> list[tuple[Tensor, Tensor]]:
    """Returns every rank's words and activity, with some rows that abstain."""
    pack = partial(reference_levels.pack_levels, bits=bits) if bits > 1 else reference.pack_signs
    random, found = np.random.default_rng(seed), []
    for rank in range(world_size):
        parts = []
        for shape in shapes:
            u = random.integers(-1, 2, shape) * 1.0
            u *= random.random((shape[0],) + (1,) * (len(shape) - 1)) >= absent_share
            parts.append(pack(u, t=4, rank=rank, world_size=world_size))
        words = np.concatenate([words for words, _ in parts]).view(np.int64)
        rows = np.concatenate([active for _, active in parts])
        found.append((torch.from_numpy(words), torch.from_numpy(rows)))
    return found


def within(planes: Tensor, shard: Shard) -> Tensor:
    """Planes without what lies past a tensor's end, which is nobody's business."""
    held = torch.zeros(shard.words, dtype=torch.int64)
    for part in shard.runs:
        flags = torch.ones(part.stop - part.start, dtype=torch.bool)
        held[part.word : part.word + part.words] = pack_bits(flags)
    return planes & held


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


def exchanged(
    codec: Any,
    layout: MessageLayout,
    count: int,
    planes: tuple[int, int],
    ballots: list[tuple[Tensor, Tensor]],
    step: StepRule,
    elsewhere: bool,
) -> list[Tensor]:
    """Does what an exchange of `count` segments does; returns all that could differ."""
    ranks, found, tallies = len(ballots), [], []
    for place in range(count):
        segments = Segments.of(layout, count, place, step.bits, planes, ranks)
        tallies.append((segments, codec.tally(segments, CPU)))
    sent = torch.zeros((ranks, count, segments.vote_words), dtype=torch.int64)
    for rank, (words, active) in enumerate(ballots):
        for _, tally in tallies:
            tally.pack(words, active, sent[rank])
    found.append(sent)
    told = torch.zeros((count, segments.verdict_words), dtype=torch.int64)
    for place, (segments, tally) in enumerate(tallies):
        counted(tally, segments, sent[:, place].contiguous(), step, told[place], elsewhere, found)
    whole = tallies[0][1].unpack_verdict(told)
    return [*found, *of(whole, layout.shard(0, layout.words)), told]


def counted(
    tally: Tally,
    segments: Segments,
    received: Tensor,
    step: StepRule,
    told: Tensor,
    elsewhere: bool,
    found: list[Tensor],
) -> None:
    shard = segments.shard
    size, planes = segments.words, segments.planes[0]
    out = None if elsewhere else told[: planes * size].view(planes, size)[:, : shard.words]
    verdict = tally.count(received, step, out)
    verdict.planes.copy_(within(verdict.planes, shard))
    found += of(verdict, shard)
    tally.pack_verdict(verdict, told)


def of(verdict: Verdict, shard: Shard) -> list[Tensor]:
    return [part.clone() for part in (within(verdict.planes, shard), verdict.counts, verdict.sums)]


@examples(60)
@given(
    shapes=SHAPES,
    size=st.integers(2, 4),
    seed=st.integers(0, 10**6),
    bits=st.sampled_from([1, 2, 8]),
    step=st.integers(1, 4),
)
def test_cut_rows_are_completed_as_by_torch_operations(
    shapes: list[tuple[int, ...]], size: int, seed: int, bits: int, step: int
) -> None:
    layout = MessageLayout.of([(k, torch.Size(shape)) for k, shape in enumerate(shapes)])
    segments = Segments.of(layout, size, 0, bits, (1, 1), 3)
    made = dataclasses.replace(rule(step=step).step_rule, bits=bits)
    random = np.random.default_rng(seed)
    for place, shard in enumerate(segments.shards):
        if not shard.rows:
            continue
        last = shard.first_row + shard.rows - 1
        sharing: Any = tuple(
            [
                2 * other + end
                for other, theirs in enumerate(segments.shards)
                for end, row in enumerate((theirs.first_row, theirs.first_row + theirs.rows - 1))
                if theirs.rows and row == mine
            ]
            for mine in (shard.first_row, last)
        )
        everyone = torch.from_numpy(random.integers(0, 2, (size, 2)).astype(np.uint8))
        active = torch.from_numpy(random.random(shard.rows) < 0.5)
        if shard.rows == 1:
            everyone[place, 1] = everyone[place, 0]
        active[0], active[-1] = everyone[place].bool()
        words = torch.from_numpy(random.integers(0, 2**62, bits * shard.words))
        outcomes = []
        for codec in CODECS:
            edges = codec.edges(Ends(shard, bits, place, sharing), CPU)
            told, own, rows = torch.zeros(2, dtype=torch.uint8), words.clone(), active.clone()
            edges.tell(rows, told)
            edges.hear(own, rows, everyone, made)
            outcomes.append([told.tolist(), own.tolist(), rows.tolist()])
        assert outcomes[0] == outcomes[1]
