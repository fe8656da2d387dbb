"""Parameters that aren't bitwise equal on all ranks are found, with ranks and names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_dlion.ranks.compare import compare_parameters
from hf_dlion.ranks.header import Disagreement
from hf_dlion.ranks.stats import WireStats
from hf_dlion.ranks.wire import Wire, digest
from tests.support.spawn import on_ranks


def params() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(5, 64, generator=draw),
        "half": torch.randn(7, generator=draw).bfloat16(),
        "frozen": torch.randn(3, generator=draw),
        "empty": torch.empty(0),
    }


def wire_of() -> Wire:
    return Wire(dist.group.WORLD, WireStats())


def compare(own: Any, wire: Wire, same_parts: list[list[int]] | None = None) -> None:
    same_parts = same_parts or [[*range(wire.world_size)]]
    compare_parameters(
        lambda: [*own.items()], wire, same_parts, "Remove the cause", when=" after step 4"
    )


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_equal_replicas_exchange_a_hash(rank: int, ranks: int) -> None:
    wire, own = wire_of(), params()
    # The hash doesn't depend on strides.
    own["embed"] = own["embed"].t().contiguous().t() if rank else own["embed"]
    compare(own, wire)
    assert wire.stats.bytes_sent == 16 * (ranks - 1)


Change = Callable[[dict[str, Tensor]], Any]


def flip(*names: str) -> Change:
    return lambda own: [own[name].view(-1)[0].neg_() for name in names]


# What changes on which ranks, and the error.
CHANGES: list[tuple[int, dict[int, Change], str]] = [
    (2, {1: flip("half")}, "1 of 4 parameters, first in 'half': rank 1 from rank 0 (no majority)"),
    (3, {0: flip("frozen")}, "1 of 4 parameters, first in 'frozen': rank 0 from ranks 1 and 2 "),
    (3, {2: flip("frozen", "embed")}, "2 of 4 parameters, first in 'embed': rank 2 from ranks "),
    (3, {1: flip("embed"), 2: flip("half")}, "2 of 4 parameters, first in 'embed': ranks 1 and 2"),
    (2, {1: lambda own: own["embed"].resize_(64, 5)}, "1 of 4 parameters, first in 'embed': rank"),
    (2, {1: lambda own: own.pop("empty")}, "1 of 4 parameters, first in 'empty': rank 1 from rank"),
    (2, {1: lambda own: own.update(void=own.pop("empty"))}, "1 of 4 parameters, first in 'empty'"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("ranks", "case"), [(own[0], case) for case, own in enumerate(CHANGES)])
@on_ranks("ranks")
def test_the_first_parameter_and_the_minority_are_named(rank: int, case: int) -> None:
    own, (_, changes, text) = params(), CHANGES[case]
    changes.get(rank, lambda own: None)(own)
    before = {name: value.clone() for name, value in own.items()}
    with pytest.raises(Disagreement, match=re.escape(f"replicas differ after step 4 in {text}")):
        compare(own, wire_of())
    assert all(torch.equal(own[name], value) for name, value in before.items())


@on_ranks(4)
def test_shards_are_compared_with_the_same_shards(rank: int) -> None:
    own, same_parts = {"part": torch.full((3,), float(rank % 2))}, [[0, 2], [1, 3]]
    compare(own, wire_of(), same_parts)
    if rank == 1:
        own["part"] += 10
    with pytest.raises(Disagreement, match=r"first in 'part': rank 3 from rank 1 \(no majority\)"):
        compare(own, wire_of(), same_parts)


def test_digests_of_plain_values_differ_and_fit_64_bits() -> None:
    values = [None, 0, 0.0, False, "0", [0], {"a": 1}, {"a": True}, torch.float32]
    found = [digest(value) for value in values]
    assert len(set(found)) == len(values)
    assert all(-(2**63) <= value < 2**63 for value in found)
    assert digest(("a", 1)) == digest(["a", 1])
