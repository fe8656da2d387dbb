"""Exchanges equal one another and a vote counted in one process; bytes equal the formula."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.codec import count as count_module
from hf_dlion.codec import levels as levels_module
from hf_dlion.codec.bits import unpack_bits
from hf_dlion.codec.layout import MessageLayout
from hf_dlion.codec.levels import LEVELS, check_world_size, pack_codes
from hf_dlion.codec.native import library as native_library
from hf_dlion.codec.reference import levels as reference_levels
from hf_dlion.codec.reference import votes as reference
from hf_dlion.codec.rule import MessageVerdict, StepRule
from hf_dlion.exchange import (
    STRATEGIES,
    WireStats,
    choose_exchange,
    make_exchange,
    message_wire_bytes,
)
from hf_dlion.exchange.pending import naming_losses
from hf_dlion.exchange.wire import connect, default_group
from hf_dlion.options import ExchangeName, Options
from tests.support.spawn import RankPools

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 300)),
        st.tuples(st.integers(1, 12), st.integers(1, 90)),
        st.tuples(st.integers(1, 5), st.sampled_from([64, 128])),
    ),
    min_size=1,
    max_size=6,
)
COMBINATIONS = [
    Options(aggregation=aggregation, ties=ties)
    for aggregation, ties in [
        ("majority", "alternate"),
        ("majority", "zero"),
        ("average", "alternate"),
    ]
]
MORE_BITS = [Options(bits=2), Options(bits=4, ties="zero"), Options(bits=8)]


class Done:
    """The handle of a collective that is over."""

    def wait(self) -> None:
        """Does nothing."""


class ThreadWire:
    """A `Wire` between threads: the same calls, counted the same way, without processes."""

    def __init__(self, rank: int, world_size: int, shared: dict[Any, Any]) -> None:
        self.rank, self.world_size, self.stats = rank, world_size, WireStats()
        self._shared, self._calls = shared, 0

    def device_for(self, device: torch.device) -> torch.device:
        return device

    def _everyone(self, tensor: Tensor) -> list[Tensor]:
        self._calls += 1
        self._shared[self._calls, self.rank] = tensor.clone()
        self._shared["barrier"].wait(10)
        return [self._shared[self._calls, rank] for rank in range(self.world_size)]

    def all_gather(self, out: Tensor, tensor: Tensor, what: str) -> Done:
        out.copy_(torch.stack(self._everyone(tensor)))
        self.stats.bytes_sent += tensor.numel() * 8 * (self.world_size - 1)
        return Done()

    def all_to_all(self, out: Tensor, tensor: Tensor, what: str) -> Done:
        out.copy_(torch.stack([sent[self.rank] for sent in self._everyone(tensor)]))
        self.stats.bytes_sent += tensor[0].numel() * 8 * (self.world_size - 1)
        return Done()


def on_threads(world_size: int, function: Callable[[Any], Any]) -> list[Any]:
    shared: dict[Any, Any] = {"barrier": threading.Barrier(world_size)}
    wires = [ThreadWire(rank, world_size, shared) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(function, wires))


def ballots_of(
    shapes: list[tuple[int, ...]], world_size: int, seed: int, absent_share: float, bits: Any
) -> list[list[reference.Ballot]]:
    """Returns, per rank and parameter, a ballot with some rows that abstain."""
    pack = partial(reference_levels.pack_levels, bits=bits) if bits > 1 else reference.pack_signs
    random = np.random.default_rng(seed)
    ballots = []
    for rank in range(world_size):
        ballots.append([])
        for shape in shapes:
            u = random.standard_normal(shape)
            if len(shape) >= 2:
                u[random.random(shape[0]) < absent_share] = 0
            elif random.random() < absent_share:
                u[...] = 0
            ballots[rank].append(pack(u, t=1, rank=rank, world_size=world_size))
    return ballots


def message_of(ballots: list[reference.Ballot]) -> tuple[Tensor, Tensor]:
    words = np.concatenate([words for words, _ in ballots]).view(np.int64)
    return torch.from_numpy(words), torch.from_numpy(np.concatenate([a for _, a in ballots]))


def rule_of(options: Options, rank: int, world_size: int, step: int) -> StepRule:
    return StepRule(
        step=step,
        rank=rank,
        world_size=world_size,
        aggregation=options.aggregation,
        ties=options.ties,
        stochastic_rounding=True,
        seed=0,
        bits=options.bits,
    )


def signs_in(
    verdict: MessageVerdict, layout: MessageLayout, shapes: list[tuple[int, ...]], rule: StepRule
) -> list[np.ndarray[Any, Any]]:
    """Returns the verdict on each parameter as numbers: signs, or sums of signs for average."""
    found = []
    # The compiled codec reads a segment's words one after another.
    assert verdict.planes.stride(2) == 1
    whole = verdict.planes.flatten(1)
    for slot, shape in zip(layout.slots, shapes, strict=True):
        planes = whole[:, slot.word : slot.word + slot.words]
        bits = [unpack_bits(plane, slot.numel).numpy().astype(np.int64) for plane in planes]
        counts = verdict.counts[slot.row : slot.row + slot.rows].numpy()
        counts = counts[reference.row_of_element(shape)]
        if rule.aggregation == "average":
            values = counts - 2 * sum(bit << digit for digit, bit in enumerate(bits))
        else:
            values = (1 - 2 * bits[0]) * (counts > 0)
            if rule.ties == "zero":
                values = values * bits[1]
        found.append(values.reshape(shape))
    return found


def expected_signs(
    ballots: list[list[reference.Ballot]], shapes: list[tuple[int, ...]], rule: StepRule
) -> list[np.ndarray[Any, Any]]:
    expected = []
    for position, shape in enumerate(shapes):
        votes = [rank_ballots[position] for rank_ballots in ballots]
        bits: Any = rule.bits
        if bits > 1:
            expected.append(
                reference_levels.majority(votes, shape, bits=bits, t=rule.step, ties=rule.ties)
            )
        elif rule.aggregation == "average":
            expected.append(reference.count_votes(votes, shape))
        else:
            expected.append(reference.majority(votes, shape, t=rule.step, ties=rule.ties))
    return expected


def exchanged(
    wire: Any,
    name: str,
    shapes: list[tuple[int, ...]],
    ballots: Any,
    options: Options,
    step: int,
    in_place: bool = False,
) -> tuple[MessageVerdict, int]:
    layout = MessageLayout.of(list(enumerate(map(torch.Size, shapes))))
    exchange = make_exchange(name, layout, wire, torch.device("cpu"), options)
    words, active = message_of(ballots[wire.rank])
    if in_place:
        votes = exchange.votes
        assert votes is not None
        for part, segment in zip(words.split(votes.shape[1]), votes, strict=False):
            segment[: len(part)] = part
        exchange.start(None, active)
    else:
        exchange.start(words, active)
    # Room for the votes of another message, which may come before these leave.
    words.fill_(-1)
    active.fill_(True)
    exchange.leave()
    exchange.count(rule_of(options, wire.rank, wire.world_size, step))
    return exchange.verdict(), wire.stats.bytes_sent


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=60, deadline=None)
@given(
    shapes=SHAPES,
    world_size=st.integers(2, 7),
    seed=st.integers(0, 10**6),
    absent_share=st.sampled_from([0.0, 0.2, 1.0]),
    options=st.sampled_from([*COMBINATIONS, *MORE_BITS]),
    step=st.integers(1, 2),
    chunk_words=st.sampled_from([3, 1 << 14]),
    compiled=st.booleans(),
    in_place=st.booleans(),
)
def test_the_verdict_equals_a_vote_counted_in_one_process(
    name: str,
    shapes: list[tuple[int, ...]],
    world_size: int,
    seed: int,
    absent_share: float,
    options: Options,
    step: int,
    chunk_words: int,
    compiled: bool,
    in_place: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native_library, "library", lambda: None)
        patch.setattr(count_module, "CHUNK_WORDS", chunk_words)
        patch.setattr(levels_module, "CHUNK", 64 * chunk_words)
        ballots = ballots_of(shapes, world_size, seed, absent_share, options.bits)
        results = on_threads(
            world_size, lambda wire: exchanged(wire, name, shapes, ballots, options, step, in_place)
        )
    layout = MessageLayout.of(list(enumerate(map(torch.Size, shapes))))
    rule = rule_of(options, 0, world_size, step)
    expected = expected_signs(ballots, shapes, rule)
    each = [[own[k] for own in ballots] for k in range(len(shapes))]
    values = [
        [votes_in(ballot, shape, options.bits) for ballot in own]
        for own, shape in zip(each, shapes, strict=True)
    ]
    for verdict, sent in results:
        for found, wanted in zip(signs_in(verdict, layout, shapes, rule), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        agreement, most = verdict.sums.tolist()
        assert agreement == sum(int(np.abs(sum(own)).sum()) for own in values)
        if options.bits > 1:
            assert most == sum(int(np.abs(votes).sum()) for own in values for votes in own)
        assert sent == message_wire_bytes([layout], world_size, options, name)


def votes_in(ballot: reference.Ballot, shape: tuple[int, ...], bits: Any) -> Any:
    if bits > 1:
        return reference_levels.unpack_levels(ballot, shape, bits)
    return reference.unpack_signs(ballot, shape).astype(np.int64)


def real_ranks(
    rank: int, world_size: int, name: str, shapes: list[tuple[int, ...]], options: Options
) -> tuple[list[np.ndarray[Any, Any]], int]:
    group = default_group()
    assert group is not None
    wire = connect(group, WireStats(), torch.device("cpu"))
    ballots = ballots_of(shapes, world_size, 3, 0.2, options.bits)
    verdict, sent = exchanged(wire, name, shapes, ballots, options, 1)
    layout = MessageLayout.of(list(enumerate(map(torch.Size, shapes))))
    return signs_in(verdict, layout, shapes, rule_of(options, rank, world_size, 1)), sent


@pytest.mark.parametrize("options", [*COMBINATIONS, *MORE_BITS])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_real_ranks_reach_the_same_verdict_with_the_documented_bytes(
    ranks: RankPools, world_size: int, options: Options
) -> None:
    shapes = [(70,), (9, 33), (1,), (4, 128), (130, 3)]
    layout = MessageLayout.of(list(enumerate(map(torch.Size, shapes))))
    rule = rule_of(options, 0, world_size, 1)
    ballots = ballots_of(shapes, world_size, 3, 0.2, options.bits)
    expected = expected_signs(ballots, shapes, rule)
    for name in STRATEGIES:
        for found, sent in ranks(world_size).run(real_ranks, name, shapes, options):
            for values, wanted in zip(found, expected, strict=True):
                np.testing.assert_array_equal(values, wanted)
            assert sent == message_wire_bytes([layout], world_size, options, name)


def test_every_strategy_can_be_chosen_by_name() -> None:
    assert get_args(ExchangeName) == ("auto", *STRATEGIES)


def test_bytes_are_those_of_the_documentation() -> None:
    # 10 words of signs and 5 rows: W = 10, R = 5.
    layout = MessageLayout.of([(0, torch.Size([5, 128]))])
    assert (layout.words, layout.rows) == (10, 5)
    majority, zero, average = COMBINATIONS
    # gather: 8 * (N - 1) * (W + ceil(R / 64))
    assert message_wire_bytes([layout], 4, majority, "gather") == 8 * 3 * (10 + 1)
    # two_phase: 8 * (N - 1) * ((S + A) + (P * S + Q * A + 1)), S = ceil(10 / 4) = 3, A = 1
    assert message_wire_bytes([layout], 4, majority, "two_phase") == 8 * 3 * (4 + 3 + 1 + 1)
    assert message_wire_bytes([layout], 4, zero, "two_phase") == 8 * 3 * (4 + 6 + 1 + 1)
    # average among 4 ranks: counts 0 to 4 take three bits
    assert message_wire_bytes([layout], 4, average, "two_phase") == 8 * 3 * (4 + 9 + 3 + 1)
    # p bits: p * W words, and one more word that comes back
    two, four, eight = MORE_BITS
    assert message_wire_bytes([layout], 4, two, "gather") == 8 * 3 * (20 + 1)
    assert message_wire_bytes([layout], 4, eight, "gather") == 8 * 3 * (80 + 1)
    assert message_wire_bytes([layout], 4, two, "two_phase") == 8 * 3 * ((6 + 1) + (3 + 1 + 2))
    assert message_wire_bytes([layout], 4, four, "two_phase") == 8 * 3 * ((12 + 1) + (6 + 1 + 2))
    assert message_wire_bytes([layout], 4, eight, "two_phase") == 8 * 3 * ((24 + 1) + (3 + 1 + 2))


@pytest.mark.parametrize(
    ("world_size", "expected"), [(1, "gather"), (2, "gather"), (3, "two_phase"), (8, "two_phase")]
)
def test_auto_takes_the_exchange_with_fewer_bytes(world_size: int, expected: str) -> None:
    layouts = [MessageLayout.of([(0, torch.Size([512, 512]))])]
    assert choose_exchange(layouts, world_size, Options()) == expected
    assert choose_exchange(layouts, world_size, Options(exchange="gather")) == "gather"
    assert choose_exchange(layouts, world_size, Options(exchange="two_phase")) == "two_phase"


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_with_more_bits_auto_takes_two_phase_from_two_ranks_on(bits: int) -> None:
    # p against (p + 1) / 2 bits per parameter.
    layouts = [MessageLayout.of([(0, torch.Size([512, 512]))])]
    assert choose_exchange(layouts, 2, Options(bits=bits)) == "two_phase"
    assert choose_exchange(layouts, 1, Options(bits=bits)) == "gather"
    # A single word is sent whole by one of two ranks.
    assert choose_exchange([MessageLayout.of([(0, torch.Size([3]))])], 2, Options(bits=bits)) == (
        "gather"
    )


@pytest.mark.parametrize(("bits", "most"), [(2, 5592405), (4, 2396745), (8, 132104)])
def test_more_ranks_than_sums_of_32_bits_hold_are_refused(bits: int, most: int) -> None:
    check_world_size(most, bits)
    check_world_size(10**12, 1)
    with pytest.raises(ValueError, match=f"limit of {most} for bits={bits}"):
        check_world_size(most + 1, bits)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("compiled", [True, False])
def test_sums_of_many_ranks_are_exact(
    monkeypatch: pytest.MonkeyPatch, bits: int, compiled: bool
) -> None:
    # 700 ranks of 8 bits exceed sums of 16 bits in both directions.
    if not compiled:
        monkeypatch.setattr(native_library, "library", lambda: None)
    ranks, (largest, spacing) = 700, LEVELS[bits]
    layout = MessageLayout.of([(0, torch.Size([128]))])
    shard = layout.shard(0, layout.words)
    one = torch.zeros(128, dtype=torch.uint8)
    one[0], one[1] = 2 * largest // spacing, largest // spacing + 1
    words = torch.empty(2 * bits, dtype=torch.int64)
    pack_codes(one, bits, words)
    active = torch.ones((ranks, 1), dtype=torch.bool)
    votes = words.expand(ranks, -1).contiguous()
    rule = rule_of(Options(bits=bits), 0, ranks, 1)
    found = codec_for(torch.device("cpu")).count(
        votes, active, shard, shard.row_numels(torch.device("cpu")), rule
    )
    near = spacing * (largest // spacing + 1) - largest
    assert found.sums.tolist() == 2 * [ranks * (127 * largest + near)]
    assert found.planes[0].tolist() == [-4, -1]


def test_two_phase_sends_less_than_two_bits_per_parameter() -> None:
    shapes = [(4096, 4096)] * 4 + [(4096,)] * 8
    layouts = [MessageLayout.of(list(enumerate(map(torch.Size, shapes))))]
    numel = sum(np.prod(shape) for shape in shapes)
    for world_size in (2, 4, 16, 256):
        bits = 8 * message_wire_bytes(layouts, world_size, Options(), "two_phase") / numel
        assert bits == pytest.approx(2 * (world_size - 1) / world_size, rel=0.002)
        for p in (2, 4, 8):
            sent = message_wire_bytes(layouts, world_size, Options(bits=p), "two_phase")
            assert 8 * sent / numel == pytest.approx((p + 1) * (1 - 1 / world_size), rel=0.002)


def test_a_lack_of_memory_is_not_taken_for_a_lost_rank() -> None:
    group: Any = None
    with pytest.raises(torch.OutOfMemoryError), naming_losses("votes", group):
        raise torch.OutOfMemoryError("CUDA out of memory")
