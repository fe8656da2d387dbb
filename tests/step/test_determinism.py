"""Two runs with the same seed make the same bytes, whatever carries and computes the votes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hf_dlion
from hf_dlion import DistributedLion
from hf_dlion.codec.eager import EagerCodec
from hf_dlion.codec.native import codec as native
from hf_dlion.codec.native import library as native_library
from tests.support import zoo
from tests.support.messages import message_numel
from tests.support.oracle import bits_of
from tests.support.random_training import backward, random_param
from tests.support.spawn import RankPools

STEPS = 4
# The first is long enough for a second thread of the compiled codec, at so many elements for each.
PART = 256
SHAPES = [(2 * PART + 77,), (30, 7), (5, 130), (64,)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]

# What must make no difference.
WAYS: dict[str, dict[str, Any]] = {
    "again": {},
    "torch and NumPy": {"codec": "numpy"},
    "any device's operations": {"codec": "eager"},
    "two threads": {"threads": 2},
    "many messages": {"numel": 500},
    "two_phase": {"options": {"exchange": "two_phase"}},
    "overlap": {"options": {"overlap": True}},
    "overlap, many messages, two_phase": {
        "numel": 500,
        "options": {"overlap": True, "exchange": "two_phase"},
    },
}


@contextlib.contextmanager
def computed(codec: str = "native", threads: int = 1, numel: int | None = None) -> Iterator[None]:
    """Chooses what makes the votes, on how many threads, and how long the messages are."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, message_numel(numel):
        patch.setattr(native, "PART", PART)
        if codec == "numpy":
            patch.setattr(native_library, "library", lambda: None)
        if codec == "eager":
            for module in ("voters.every_rank", "voters.node", "delivery"):
                patch.setattr(f"hf_dlion.step.{module}.codec_for", lambda device: EagerCodec())
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def train(
    rank: int, world_size: int, rule: dict[str, Any], ways: list[dict[str, Any]]
) -> tuple[str, str]:
    """Returns hashes of parameters and momenta; gradients are made by hand, element by element."""
    way = ways[rank % len(ways)]
    params = [
        random_param(*shape, seed=k, dtype=dtype)
        for k, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))
    ]
    with computed(**{k: v for k, v in way.items() if k != "options"}):
        optimizer = DistributedLion(params, lr=1e-2, **{**rule, **way.get("options", {})})
        for t in range(STEPS):
            backward(params, 10 * t + rank)
            optimizer.step()
        if way.get("options", {}).get("overlap") and world_size > 1:
            assert optimizer.wire.overlapped == STEPS - 1
    if "local_group" in rule:
        optimizer.synchronize_momentum()
    return digest(params), digest([optimizer.state[p]["exp_avg"] for p in params])


def digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(map(bits_of, tensors))).hexdigest()


RULES: dict[str, dict[str, Any]] = {
    "majority": {},
    "average": {"aggregation": "average", "momentum_dtype": torch.bfloat16, "seed": 3},
    "4 bits": {"bits": 4},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_how_votes_are_made_and_travel_changes_no_bit(
    ranks: RankPools, world_size: int, rule: str
) -> None:
    first = ranks(world_size).run(train, RULES[rule], [{}])
    assert len({params for params, _ in first}) == 1
    for way, changes in WAYS.items():
        assert ranks(world_size).run(train, RULES[rule], [changes]) == first, way


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
def test_how_a_node_s_votes_are_made_and_travel_changes_no_bit(ranks: RankPools, rule: str) -> None:
    options = {**RULES[rule], "local_group": 2}
    first = ranks(4).run(train, options, [{}])
    assert len({params for params, _ in first}) == 1
    for way in ("again", "torch and NumPy", "two threads", "many messages", "two_phase"):
        assert ranks(4).run(train, options, [WAYS[way]]) == first, way


def train_elsewhere(
    rank: int, world_size: int, rule: dict[str, Any], ways: list[dict[str, Any]]
) -> tuple[str, str]:
    """Trains as on machines with other software: another release on every rank, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_dlion, "__version__", f"0.1.{rank}")
        return train(rank, world_size, rule, ways)


@pytest.mark.parametrize("rule", [{}, {"local_group": 2}], ids=["every rank votes", "nodes"])
def test_ranks_may_make_their_votes_in_different_ways(
    ranks: RankPools, rule: dict[str, Any]
) -> None:
    ways: list[dict[str, Any]] = [{}, {"codec": "numpy"}, {"codec": "eager"}, {"threads": 2}]
    assert ranks(4).run(train_elsewhere, rule, ways) == ranks(4).run(train, rule, [{}])


def train_and_clip(rank: int, world_size: int) -> list[tuple[list[bytes], float]]:
    """With clipping, overlapped directions take the factor of the step before: not step mode's."""
    with computed(numel=150):
        records = zoo.train(rank, world_size, 12, {"overlap": True, "seed": 5})
    assert any(record.foreseen for record in records)
    return [(record.params, record.agreement) for record in records[1:]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_overlap_with_clipping_makes_the_same_bytes_twice(
    ranks: RankPools, world_size: int
) -> None:
    runs = [ranks(world_size).run(train_and_clip) for _ in range(2)]
    # repr, since the agreement of a step that nobody took is no number.
    assert repr(runs[0]) == repr(runs[1])
