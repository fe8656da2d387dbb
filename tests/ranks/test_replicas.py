"""Parameters that aren't bitwise equal on all ranks are found, with ranks and names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_dlion.exchange.wire import Wire, WireStats
from hf_dlion.ranks.failures import Disagreement
from hf_dlion.ranks.fingerprint import ROW, digest, fingerprints
from hf_dlion.ranks.replicas import compare_parameters
from tests.support.spawn import RankPools

ranks_needed = pytest.mark.multiproc


def params() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(5, 64, generator=draw),
        "half": torch.randn(7, generator=draw).bfloat16(),
        "frozen": torch.randn(3, generator=draw),
        "empty": torch.empty(0),
    }


def wire_of() -> Wire:
    assert dist.group.WORLD is not None
    return Wire(dist.group.WORLD, WireStats())


def compare(own: Any, wire: Wire, same_parts: list[list[int]] | None = None) -> None:
    compare_parameters(
        lambda: [*own.items()], wire, same_parts, "Remove the cause", when=" after step 4"
    )


def equal(rank: int, world_size: int) -> int:
    wire, own = wire_of(), params()
    # The hash doesn't depend on strides.
    own["embed"] = own["embed"].t().contiguous().t() if rank else own["embed"]
    compare(own, wire)
    return wire.stats.bytes_sent


@ranks_needed
@pytest.mark.smoke
@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_replicas_exchange_a_hash(pools: RankPools, world_size: int) -> None:
    assert pools(world_size).run(equal) == [24 * (world_size - 1)] * world_size


def changed(rank: int, world_size: int, names: dict[int, list[str]]) -> str:
    own = params()
    for name in names.get(rank, []):
        own[name].view(-1)[0].neg_()
    before = {name: value.clone() for name, value in own.items()}
    with pytest.raises(Disagreement) as caught:
        compare(own, wire_of())
    assert all(torch.equal(own[name], value) for name, value in before.items())
    return str(caught.value)


@ranks_needed
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("world_size", "names", "expected"),
    [
        (2, {1: ["half"]}, "1 of 4 parameters, first in 'half': rank 1 from rank 0 (no majority)"),
        (
            3,
            {0: ["frozen"]},
            "1 of 4 parameters, first in 'frozen': rank 0 from ranks 1 and 2 ",
        ),
        (
            3,
            {2: ["frozen", "embed"]},
            "2 of 4 parameters, first in 'embed': rank 2 from ranks ",
        ),
        (
            3,
            {1: ["embed"], 2: ["half"]},
            "2 of 4 parameters, first in 'embed': ranks 1 and 2 f",
        ),
    ],
)
def test_the_first_parameter_and_the_minority_are_named(
    pools: RankPools, world_size: int, names: dict[int, list[str]], expected: str
) -> None:
    text, *others = pools(world_size).run(changed, names)
    assert others == [text] * (world_size - 1)
    assert text.startswith(f"replicas differ after step 4 in {expected}")


def other_kind(rank: int, world_size: int, kind: str) -> str:
    own = params()
    if rank == 1 and kind == "shape":
        own["embed"] = own["embed"].view(64, 5)
    elif rank == 1 and kind == "missing":
        del own["empty"]
    with pytest.raises(Disagreement) as caught:
        compare(own, wire_of())
    return str(caught.value)


@ranks_needed
@pytest.mark.parametrize(("kind", "first"), [("shape", "embed"), ("missing", "empty")])
def test_another_shape_or_a_missing_parameter_is_a_difference(
    pools: RankPools, kind: str, first: str
) -> None:
    text, other = pools(2).run(other_kind, kind)
    assert text == other
    assert f"in 1 of 4 parameters, first in '{first}': rank 1 from rank 0" in text


def shards(rank: int, world_size: int, odd: int) -> Any:
    own = {"part": torch.full((3,), float(rank % 2 + 10 * (rank == odd)))}
    try:
        compare(own, wire_of(), [[0, 2], [1, 3]])
    except Disagreement as error:
        return str(error)
    return ""


@ranks_needed
def test_shards_are_compared_with_the_same_shards(pools: RankPools) -> None:
    assert pools(4).run(shards, -1) == [""] * 4
    text, *others = pools(4).run(shards, 1)
    assert others == [text] * 3
    assert "first in 'part': rank 3 from rank 1 (no majority)" in text


def failing(rank: int, world_size: int) -> str:
    values: Any = {"bad": None} if rank == 1 else params()
    with pytest.raises(AttributeError if rank == 1 else Disagreement) as caught:
        compare(values, wire_of())
    return str(caught.value)


@ranks_needed
def test_a_rank_that_cannot_hash_is_named(pools: RankPools) -> None:
    text = pools(2).run(failing)[0]
    assert text.startswith("the comparison of parameters failed on 1 of 2 ranks: rank 1: Attribute")


# The hash.

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def by_definition(tensor: Tensor) -> int:
    """Returns the hash of the docstring's formula, in Python integers."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[k : k + 4], "little", signed=True) for k in range(0, len(data), 4)]
    total = 0
    for k, word in enumerate(words):
        total += weight(1, k % ROW) * weight(2, k // ROW) * word
    total %= 2**64
    return total - 2**64 * (total >> 63)


def weight(stream: int, index: int) -> int:
    z = ((index + 1 + (stream << 32)) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return (z ^ (z >> 31)) | 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 3, 63, ROW - 1, ROW + 1, 2 * ROW + 1])
def test_the_hash_is_the_documented_one(length: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
    assert fingerprints([tensor, tensor.clone()]) == [by_definition(tensor)] * 2


def test_a_part_that_begins_inside_a_word_hashes_like_its_copy() -> None:
    whole = torch.randn(9).bfloat16()
    assert fingerprints([whole[1:5]]) == fingerprints([whole[1:5].clone()])


def test_digests_of_plain_values_differ_and_fit_64_bits() -> None:
    values = [None, 0, 0.0, False, "0", [0], {"a": 1}, {"a": True}, torch.float32]
    found = [digest(value) for value in values]
    assert len(set(found)) == len(values)
    assert all(-(2**63) <= value < 2**63 for value in found)
    assert digest(("a", 1)) == digest(["a", 1])
