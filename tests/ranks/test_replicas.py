"""Parameters that have drifted apart are found, named and, if asked for, made equal again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dlion import DistributedLion
from hf_dlion.options import warn_once
from hf_dlion.ranks import fingerprint
from hf_dlion.ranks.fingerprint import ROW, fingerprints
from hf_dlion.ranks.replicas import majority_of
from tests.support import zoo
from tests.support.oracle import bits_of
from tests.support.random_training import DTYPES, backward, normal, random_param
from tests.support.rule_cases import CASES
from tests.support.spawn import RankPools

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
LENGTHS = [0, 1, 2, 3, 63, ROW - 1, ROW, ROW + 1, 2 * ROW - 1, 2 * ROW, 2 * ROW + 1, 5 * ROW + 7]
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# The hash.


def flipped(tensor: Tensor, index: int, bit: int) -> Tensor:
    """Returns a copy with one bit of one element changed."""
    bits = tensor.clone().view(-1).view(INTEGERS[tensor.element_size()])
    width = 8 * tensor.element_size()
    bits[index] ^= -(2**bit) if bit == width - 1 else 2**bit
    return bits.view(tensor.dtype).view(tensor.shape)


def by_definition(tensor: Tensor) -> int:
    """The formula in the docstring, in Python's integers."""
    data = bits_of(tensor)
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


@DTYPE
@pytest.mark.parametrize("length", [length for length in LENGTHS if length < 2 * ROW])
def test_the_hash_is_the_documented_one(length: int, dtype: torch.dtype) -> None:
    tensor = normal(length, seed=length, dtype=dtype)
    assert fingerprint.fingerprint(tensor) == by_definition(tensor)


@DTYPE
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_may_be_hashed_one_by_one_or_many_at_once(
    monkeypatch: pytest.MonkeyPatch, length: int, dtype: torch.dtype
) -> None:
    tensor = normal(length, seed=1, dtype=dtype)
    alone = fingerprint.fingerprint(tensor)
    monkeypatch.setattr(fingerprint, "_ROWS_AT_ONCE", {})
    assert fingerprint.fingerprint(tensor) == alone


@DTYPE
def test_every_bit_of_every_element_counts(dtype: torch.dtype) -> None:
    tensor = normal(9, seed=0, dtype=dtype)
    width = 8 * tensor.element_size()
    changed = [flipped(tensor, index, bit) for index in range(9) for bit in range(width)]
    pairs = [
        flipped(flipped(tensor, index, bit), (index + 3) % 9, bit)
        for index in range(9)
        for bit in range(width)
    ]
    hashes = fingerprints([tensor, *changed, *pairs])
    assert len(set(hashes)) == 1 + len(changed) + len(pairs)


@DTYPE
@pytest.mark.parametrize("distance", [1, 2, 64, 4096, ROW, 2 * ROW, 3 * ROW + 1])
def test_places_count_even_of_powers_of_two(dtype: torch.dtype, distance: int) -> None:
    tensor = torch.ones(4 * ROW, dtype=dtype)
    tensor[5] = 2.0
    other = tensor.clone()
    other[5], other[5 + distance] = 1.0, 2.0
    assert len(set(fingerprints([tensor, other]))) == 2


def laid_out_otherwise(tensor: Tensor) -> dict[str, Tensor]:
    """Returns equal values at other places in memory."""
    odd = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    wide = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]
    turned = torch.empty(tensor.shape[::-1], dtype=tensor.dtype).permute(3, 2, 1, 0)
    last = torch.empty_like(tensor, memory_format=torch.channels_last)
    found = {"odd offset": odd, "strided": wide, "transposed": turned, "channels_last": last}
    for other in found.values():
        other.copy_(tensor)
    return found


@DTYPE
@pytest.mark.parametrize("rows", [3, 4])
def test_the_layout_in_memory_does_not_count(rows: int, dtype: torch.dtype) -> None:
    tensor = normal(rows, 5, 7, 9, seed=0, dtype=dtype)
    for what, other in laid_out_otherwise(tensor).items():
        assert fingerprint.fingerprint(other) == fingerprint.fingerprint(tensor), what


# The check.


class Named(nn.Module):
    """One parameter of each kind that has something of its own to go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first = random_param(6, 5, seed=1)
        self.bf16 = random_param(33, seed=2, dtype=torch.bfloat16)
        self.transposed = nn.Parameter(normal(5, 4, seed=3).t())
        self.fp64 = random_param(3, seed=4, dtype=torch.float64)
        self.frozen = nn.Parameter(normal(7, seed=5), requires_grad=False)


DAMAGES = {
    "lowest bit": "first",
    "sign of zero": "first",
    "NaN payload": "first",
    "last element": "bf16",
    "swap": "transposed",
    "signs of two": "fp64",
    "frozen": "frozen",
}


def prepare(model: Named, what: str) -> None:
    """Makes on every rank what the damage needs."""
    if what == "sign of zero":
        model.first.data[2, 3] = 0.0
    if what == "NaN payload":
        model.first.data[2, 3] = float("nan")


def damage(model: Named, what: str) -> None:
    first, bf16, transposed = (p.data for p in (model.first, model.bf16, model.transposed))
    if what == "lowest bit":
        first.copy_(flipped(first, 7, 0))
    elif what == "sign of zero":
        first[2, 3] = -first[2, 3]
    elif what == "NaN payload":
        first.copy_(flipped(first, 13, 0))
    elif what == "last element":
        bf16.copy_(flipped(bf16, 32, 0))
    elif what == "swap":
        transposed[[0, 3]] = transposed[[3, 0]]
    elif what == "signs of two":
        model.fp64.data[:2] *= -1.0
    else:
        model.frozen.data[6] += 1.0


def run(
    rank: int,
    world_size: int,
    what: str,
    where: Sequence[int],
    options: dict[str, Any],
    steps: int = 6,
) -> dict[str, Any]:
    """Damages a parameter after step 3 on the ranks `where`; a rank function.

    The learning rate is 0, so that a step leaves the damage as it is.
    """
    model = Named()
    prepare(model, what)
    optimizer = DistributedLion(model.named_parameters(), lr=0.0, **options)
    params = list(model.parameters())
    sent, error, kind, warned, momenta = [], "", "", [], []
    warn_once._given.discard("repaired replicas")
    for step in range(1, steps + 1):
        backward(params, 10 * step + rank)
        before = optimizer.wire.bytes_received
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                optimizer.step()
            except RuntimeError as raised:
                error, kind = str(raised), type(raised).__name__
                break
        warned += [str(warning.message) for warning in caught]
        sent.append((optimizer.wire.last_bytes_sent, optimizer.wire.bytes_received - before))
        momenta = [bits_of(optimizer.state[p]["exp_avg"]) for p in params if p.requires_grad]
        if step == 3 and rank in where:
            damage(model, what)
    return {
        "error": error,
        "kind": kind,
        "steps": optimizer.steps,
        "sent": sent,
        "warned": warned,
        "params": [bits_of(p) for p in params],
        "momenta": momenta,
        "repairs": optimizer.wire.repairs,
    }


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_difference_is_found_and_named_on_every_rank(
    ranks: RankPools, world_size: int, what: str
) -> None:
    odd = world_size - 1
    found = ranks(world_size).run(run, what, [odd], {"check_replicas_every": 1}, timeout=30)
    words = f"after step 4 in 1 of 5 parameters, first in '{DAMAGES[what]}': rank {odd} from rank"
    for result in found:
        assert words in result["error"]
        assert result["error"] == found[0]["error"]
        assert (result["kind"], result["steps"]) == ("Disagreement", 4)
        assert "on_divergence='repair'" in result["error"]


@pytest.mark.parametrize(("every", "step"), [(1, 4), (2, 4), (3, 6), (5, 5), (7, 7)])
def test_it_is_found_at_the_next_multiple(ranks: RankPools, every: int, step: int) -> None:
    options = {"check_replicas_every": every}
    for result in ranks(2).run(run, "swap", [0], options, 8, timeout=30):
        assert f"replicas differ after step {step} " in result["error"]
        assert result["steps"] == step


def test_without_the_option_nothing_is_compared(ranks: RankPools) -> None:
    for result in ranks(2).run(run, "swap", [0], {}, 12, timeout=30):
        assert (result["error"], result["steps"]) == ("", 12)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_eight_bytes_go_to_every_rank_at_multiples_and_none_between(
    ranks: RankPools, world_size: int
) -> None:
    plain = ranks(world_size).run(run, "swap", [], {}, 7, timeout=30)
    checked = ranks(world_size).run(run, "swap", [], {"check_replicas_every": 3}, 7, timeout=30)
    more = 8 * (world_size - 1)
    for without, having in zip(plain, checked, strict=True):
        pairs = zip(without["sent"], having["sent"], strict=True)
        told = [(b[0] - a[0], b[1] - a[1]) for a, b in pairs]
        assert told == [(more * (step in (3, 6)),) * 2 for step in range(1, 8)]


@pytest.mark.parametrize(
    ("world_size", "where", "source", "words"),
    [
        (2, [0], 0, "rank 1 from rank 0 (no majority"),
        (2, [1], 0, "rank 1 from rank 0 (no majority"),
        (3, [0], 1, "rank 0 from ranks 1, 2 (the majority)"),
        (3, [0, 2], 0, "rank 1 from ranks 0, 2 (the majority)"),
        (4, [3], 0, "rank 3 from ranks 0, 1, 2 (the majority)"),
        (4, [0, 2], 0, "ranks 1, 3 from ranks 0, 2 (no majority"),
        (4, [0, 1, 3], 0, "rank 2 from ranks 0, 1, 3 (the majority)"),
    ],
)
@pytest.mark.parametrize(
    "what",
    [
        *("NaN payload", "frozen"),
        *(pytest.param(w, marks=pytest.mark.full) for w in ("lowest bit", "swap", "last element")),
    ],
)
def test_a_repair_gives_all_ranks_what_most_of_them_have(
    ranks: RankPools, world_size: int, where: list[int], source: int, words: str, what: str
) -> None:
    options = {"check_replicas_every": 5, "on_divergence": "repair"}
    results = ranks(world_size).run(run, what, where, options, timeout=30)
    expected = Named()
    prepare(expected, what)
    if source in where:
        damage(expected, what)
    wanted = [bits_of(p) for p in expected.parameters()]
    plain = ranks(world_size).run(run, what, [], {}, timeout=30)
    for rank, result in enumerate(results):
        assert result["params"] == wanted, f"rank {rank}"
        assert result["momenta"] == plain[rank]["momenta"], f"rank {rank}"
        assert (result["error"], result["repairs"]) == ("", 1)
        (warning,) = result["warned"]
        assert words in warning
        assert f"first in '{DAMAGES[what]}'" in warning
        assert warning == results[0]["warned"][0]
        assert warning.endswith(f"rank {source}")
    sizes = dict((n, p.numel() * p.element_size()) for n, p in Named().named_parameters())
    size = sizes[DAMAGES[what]]
    # Beside the check and the table that all send alike.
    sent = [result["sent"][4][0] for result in results]
    received = [result["sent"][4][1] for result in results]
    table = min(sent)
    for rank in range(world_size):
        assert sent[rank] - table == (size * (world_size - 1) if rank == source else 0)
        assert received[rank] - table == (0 if rank == source else size)


def test_a_parameter_that_all_ranks_have_otherwise_is_that_of_the_lowest(ranks: RankPools) -> None:
    results = ranks(3).run(drift_everywhere, timeout=30)
    assert [result[0] for result in results] == [results[0][0]] * 3
    assert all("ranks 1, 2 from rank 0 (no majority" in result[1] for result in results)
    assert all("in 2 of 2 parameters, first in 'parameter 0'" in result[1] for result in results)


def drift_everywhere(rank: int, world_size: int) -> tuple[list[bytes], str]:
    params = [random_param(3, 2, seed=0), random_param(4, seed=1)]
    optimizer = DistributedLion(params, check_replicas_every=2, on_divergence="repair")
    warn_once._given.discard("repaired replicas")
    backward(params, rank)
    optimizer.step()
    for p in params:
        p.data += rank
    backward(params, rank)
    with pytest.warns(UserWarning, match="replicas differ") as caught:
        optimizer.step()
    return [bits_of(p) for p in params], str(caught[0].message)


def train_on_after_a_repair(rank: int, world_size: int, overlap: bool) -> list[bytes]:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    for k, p in enumerate(model.parameters()):
        p.data = normal(*p.shape, seed=k)
    called = [nn.parallel.DistributedDataParallel(model)]
    options: dict[str, Any] = {"overlap": overlap, "on_divergence": "repair"}
    optimizer = DistributedLion(model.parameters(), lr=0.01, check_replicas_every=4, **options)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(12):
            called[0](normal(4, 6, seed=10 * step + rank)).square().sum().backward()
            if step == 5 and rank == 1:
                model[0].weight.data[2] += 0.5
            optimizer.step()
            optimizer.zero_grad()
            found.append(b"".join(bits_of(p) for p in model.parameters()))
    assert optimizer.wire.repairs == 1
    assert bool(optimizer.wire.overlapped) == overlap
    called.clear()
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize("overlap", [False, True])
def test_training_goes_on_with_equal_replicas(ranks: RankPools, overlap: bool) -> None:
    found = ranks(3).run(train_on_after_a_repair, overlap, timeout=60)
    equal = [len(set(step)) == 1 for step in zip(*found, strict=True)]
    assert equal == [True] * 5 + [False] * 2 + [True] * 5


def run_in_nodes(rank: int, world_size: int, on_divergence: str) -> tuple[str, Any]:
    params = [random_param(20, 3, seed=0), random_param(40, seed=1)]
    optimizer = DistributedLion(
        zip(["first", "second"], params, strict=True),
        lr=0.0,
        local_group=2,
        check_replicas_every=2,
        on_divergence=on_divergence,  # type: ignore[arg-type]
    )
    sent, error = [], ""
    for step in range(1, 7):
        backward(params, step)
        received = optimizer.wire.bytes_received
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
        except RuntimeError as raised:
            error = str(raised)
            break
        wire = optimizer.wire
        counts = wire.last_bytes_sent, wire.last_node_bytes_sent, wire.bytes_received - received
        sent.append(counts)
        if step == 4 and rank == 1:
            params[1].data[39] += 1.0
    return error, (sent, [bits_of(p) for p in params])


def test_ranks_of_nodes_are_compared_one_by_one(ranks: RankPools) -> None:
    for error, _ in ranks(4).run(run_in_nodes, "raise", timeout=60):
        assert "first in 'second': rank 1 from ranks 0, 2, 3 (the majority)" in error


def test_the_bytes_of_nodes_are_counted_inside_and_between(ranks: RankPools) -> None:
    results = [rest for _, rest in ranks(4).run(run_in_nodes, "repair", timeout=60)]
    assert all(params == results[0][1] for _, params in results)
    table = [results[1][0][5][k] - results[1][0][2][k] for k in range(3)]
    for rank, (sent, _) in enumerate(results):
        # Step 3 has no check, steps 4 and 6 have one; in step 6 rank 0 sends 40 floats.
        assert [b - a for a, b in zip(sent[2], sent[3], strict=True)] == [16, 8, 16]
        repair = [b - a - t for a, b, t in zip(sent[2], sent[5], table, strict=True)]
        assert repair == {0: [320, 160, 0], 1: [0, 0, 0]}.get(rank, [0, 0, 160])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in ("default", "nearest") else pytest.mark.full)
        for case in CASES
    ],
)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_equal_replicas_of_every_dtype_pass(ranks: RankPools, world_size: int, case: str) -> None:
    options = {**CASES[case], "check_replicas_every": 1}
    records = ranks(world_size).run(zoo.train, 12, options)
    zoo.replay(records, options)
    assert all(record[-1].steps == 11 for record in records)


def freeze_one_more(rank: int, world_size: int) -> str:
    model = Named()
    optimizer = DistributedLion(
        model.named_parameters(), check_replicas_every=1, on_divergence="repair"
    )
    if rank == 1:
        model.frozen.data = torch.zeros(9)
    backward(list(model.parameters()), rank)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_other_shapes_cannot_be_repaired_and_do_not_hang(ranks: RankPools) -> None:
    for message in ranks(2).run(freeze_one_more, timeout=30):
        assert "first in 'frozen': rank 1 from rank 0" in message
        assert "in shape or dtype" in message


def abstain_together(rank: int, world_size: int) -> list[int]:
    params = [random_param(3, seed=0)]
    optimizer = DistributedLion(params, check_replicas_every=1)
    sent = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            backward(params, step)
            assert params[0].grad is not None
            if step == 1:
                params[0].grad.fill_(float("inf"))
            optimizer.step()
            sent.append(optimizer.wire.last_bytes_sent)
    return sent


def test_a_step_that_moved_nothing_is_not_checked(ranks: RankPools) -> None:
    for _, abstained, moved in ranks(2).run(abstain_together, timeout=30):
        assert abstained == 8 * 7
        assert moved == 8 * 7 + 8 * 2 + 8


def test_one_rank_has_nothing_to_compare() -> None:
    params = [random_param(3)]
    optimizer = DistributedLion(params, check_replicas_every=1)
    backward(params, 0)
    optimizer.step()
    assert (optimizer.steps, optimizer.wire.bytes_sent) == (1, 0)


@pytest.mark.parametrize(
    ("digests", "majority"),
    [
        ([5, 7], [0]),
        ([5, 7, 7], [1, 2]),
        ([5, 7, 7, 5], [0, 3]),
        ([1, 7, 5, 5, 7], [1, 4]),
        ([1, 2, 3], [0]),
        ([4, 4, 4], [0, 1, 2]),
    ],
)
def test_the_majority_is_most_frequent_and_of_a_tie_the_lowest(
    digests: list[int], majority: list[int]
) -> None:
    assert majority_of(digests) == majority
