"""The NumPy definition of the code, against hand-made values and the sentences of docs/rule.md."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dlion.codec.reference import votes as reference

F32 = np.float32
MASK = 0xFFFFFFFF


def _float32(*bits: int) -> np.ndarray:
    return np.array(bits, dtype=np.uint32).view(F32)


def _hexes(values: np.ndarray) -> list[str]:
    return [hex(value) for value in values.tolist()]


def test_bit_k_of_word_w_is_element_64_w_plus_k_and_1_means_negative() -> None:
    u = np.ones(130, dtype=F32)
    u[[0, 3, 64, 129]] = -1
    words, active = reference.pack_signs(u, t=1, rank=0, world_size=2)
    assert words.dtype == np.uint64
    assert words.tolist() == [0b1001, 1, 2]
    assert active.tolist() == [True]


def test_bits_behind_the_last_element_are_zero() -> None:
    words, _ = reference.pack_signs(-np.ones(65, dtype=F32), t=1, rank=0, world_size=2)
    assert words.tolist() == [2**64 - 1, 1]


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((), 1), ((5,), 1), ((3, 2), 3), ((2, 3, 4), 2), ((0,), 0), ((3, 0), 0), ((0, 3), 0)],
)
def test_a_row_is_a_slice_along_the_first_dimension(shape: tuple[int, ...], rows: int) -> None:
    words, active = reference.pack_signs(np.ones(shape, F32), t=1, rank=0, world_size=2)
    assert active.tolist() == [True] * rows
    assert words.size == -(-math.prod(shape) // 64)


def test_a_row_of_zeros_abstains_with_all_its_bits() -> None:
    u = np.array([[0.0, -0.0, 0.0], [-1.0, -1.0, -1.0]], dtype=F32)
    for t, rank in itertools.product(range(1, 9), range(3)):
        words, active = reference.pack_signs(u, t=t, rank=rank, world_size=3)
        assert active.tolist() == [False, True]
        assert words.tolist() == [0b111000]


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_an_isolated_zero_votes_by_element_step_and_rank(zero: float) -> None:
    u = np.array([zero, zero, 1.0], dtype=F32)

    def votes(t: int, rank: int) -> list[int]:
        ballot = reference.pack_signs(u, t=t, rank=rank, world_size=2)
        return reference.unpack_signs(ballot, (3,)).tolist()

    # k + t // 2 + (r + t) % N is even: +1.
    assert votes(t=1, rank=0) == [-1, 1, 1]
    assert votes(t=1, rank=1) == [1, -1, 1]
    assert votes(t=2, rank=0) == [-1, 1, 1]
    assert votes(t=2, rank=1) == [1, -1, 1]
    assert votes(t=3, rank=0) == [1, -1, 1]
    assert votes(t=4, rank=0) == [1, -1, 1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_the_votes_of_an_isolated_zero_cancel_over_time(world_size: int) -> None:
    u = np.array([1.0, 0.0, 0.0], dtype=F32)
    for rank in range(world_size):
        ballots = [
            reference.pack_signs(u, t=t, rank=rank, world_size=world_size)
            for t in range(1, 1 + math.lcm(4, world_size))
        ]
        assert reference.count_votes(ballots, (3,))[1:].tolist() == [0, 0]


def test_infinity_votes_with_its_sign_and_nan_as_plus_one() -> None:
    u = np.array([[np.inf, -np.inf], [np.nan, -np.nan]], dtype=F32)
    ballot = reference.pack_signs(u, t=1, rank=0, world_size=2)
    assert reference.unpack_signs(ballot, (2, 2)).tolist() == [[1, -1], [1, 1]]


@given(data=st.data())
def test_unpack_signs_undoes_pack_signs(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 20), max_size=3).map(tuple))
    values = data.draw(
        st.lists(
            st.sampled_from([-2.5, -1e-45, -0.0, 0.0, 1e-45, 3.0]),
            min_size=math.prod(shape),
            max_size=math.prod(shape),
        )
        if math.prod(shape) < 200
        else st.just([1.0, -1.0] * (math.prod(shape) // 2) + [1.0] * (math.prod(shape) % 2))
    )
    u = np.array(values, dtype=F32).reshape(shape)
    signs = reference.unpack_signs(reference.pack_signs(u, t=5, rank=1, world_size=3), shape)
    rows = u.reshape(shape[0], -1) if u.ndim >= 2 and u.size else u.reshape(1, -1)
    for row, out in zip(rows, signs.reshape(rows.shape), strict=True):
        if (row == 0).all():
            assert (out == 0).all()
        else:
            assert (out[row != 0] == np.sign(row[row != 0])).all()
            assert (np.abs(out) == 1).all()


def test_a_transposed_direction_is_packed_in_row_major_order() -> None:
    u = np.arange(-6, 6, dtype=F32).reshape(3, 4)
    a = reference.pack_signs(u.T, t=3, rank=0, world_size=2)
    b = reference.pack_signs(np.ascontiguousarray(u.T), t=3, rank=0, world_size=2)
    assert a[0].tolist() == b[0].tolist()
    assert a[1].tolist() == b[1].tolist()


def _ballots(*votes: list[list[float]], t: int = 1) -> list[reference.Ballot]:
    return [
        reference.pack_signs(np.array(vote, dtype=F32), t=t, rank=r, world_size=len(votes))
        for r, vote in enumerate(votes)
    ]


def test_only_the_ranks_active_in_a_row_decide_it() -> None:
    ballots = _ballots([[0, 0], [-1, 1]], [[0, 0], [-1, -1]], [[-1, 1], [1, -1]])
    assert reference.majority(ballots, (2, 2), t=1).tolist() == [[-1, 1], [-1, -1]]


@pytest.mark.parametrize("ties", ["alternate", "zero"])
def test_a_row_in_which_all_abstain_has_verdict_zero(ties: str) -> None:
    ballots = _ballots([[0, 0], [1, 1]], [[0, -0.0], [1, 1]])
    for t in (1, 2):
        verdict = reference.majority(ballots, (2, 2), t=t, ties=ties)  # type: ignore[arg-type]
        assert verdict.tolist() == [[0, 0], [1, 1]]


def test_ties_alternate_with_the_element_and_the_step() -> None:
    ballots = _ballots([[1, 1], [1, 1]], [[-1, -1], [-1, -1]])
    assert reference.majority(ballots, (2, 2), t=1).tolist() == [[-1, 1], [-1, 1]]
    assert reference.majority(ballots, (2, 2), t=2).tolist() == [[1, -1], [1, -1]]
    assert reference.majority(ballots, (2, 2), t=2, ties="zero").tolist() == [[0, 0], [0, 0]]


def test_average_divides_by_all_ranks_also_by_those_who_abstain() -> None:
    ballots = _ballots([[1, -1], [0, 0]], [[1, 1], [-1, 1]], [[1, -1], [0, 0]])
    verdict = reference.average(ballots, (2, 2), world_size=3)
    third = F32(1) / F32(3)
    assert verdict.dtype == F32
    assert verdict.tolist() == [[1, -third], [-third, third]]


def _mean_verdict(directions: tuple[float, ...], ties: str) -> float:
    # A second element keeps the row active, so that a zero of the first one is an isolated one.
    size = len(directions)
    period = math.lcm(4, size)
    total = 0
    for t in range(1, 1 + period):
        ballots = _ballots(*[[[u, 1.0]] for u in directions], t=t)
        total += reference.majority(ballots, (1, 2), t=t, ties=ties)[0, 0]  # type: ignore[arg-type]
    return total / period


@pytest.mark.parametrize("ties", ["alternate", "zero"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6])
def test_the_mean_verdict_over_time_is_the_same_whichever_rank_casts_which_vote(
    world_size: int, ties: str
) -> None:
    for votes in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), world_size):
        if world_size > 3 and votes.count(0.0) > 1:
            # Zeros of two ranks at one element depend on each other, by the distance of the ranks.
            orders = {votes[k:] + votes[:k] for k in range(world_size)}
        else:
            orders = set(itertools.permutations(votes))
        assert len({_mean_verdict(order, ties) for order in orders}) == 1, votes


@pytest.mark.parametrize("ties", ["alternate", "zero"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_opposite_votes_have_opposite_mean_verdicts(world_size: int, ties: str) -> None:
    for votes in itertools.product((-1.0, 0.0, 1.0), repeat=world_size):
        opposite = tuple(-vote for vote in votes)
        assert _mean_verdict(votes, ties) == -_mean_verdict(opposite, ties)


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def _random(i: int, seed: int, t: int, index: int, stream: int) -> int:
    k = 0
    for w in (seed & MASK, seed >> 32, t & MASK, t >> 32, index, stream, i >> 32):
        k = _mix((k ^ w) + 0x9E3779B9 & MASK)
    return _mix(i & MASK ^ k)


# Elements 0, 1, 63, 2^32 - 1 and 2^32. These numbers are part of the rule: a checkpoint of one
# version continues in another only if they stay.
HASH_VECTORS = {
    (0, 1, 0, 0): [0x1F4B9439, 0xA808784B, 0x18D86B1B, 0x85D20D36, 0x74B8C020],
    (0, 2, 0, 0): [0x1F4F97C6, 0x30FA08EE, 0xC10F3751, 0x5F776638, 0x11CC2945],
    (0, 1, 1, 0): [0xBA29731A, 0x40DD72BB, 0xD1958B20, 0xC5C542F4, 0x2D7B9723],
    (0, 1, 0, 1): [0x7B0B02A1, 0x94BF7E20, 0x924FF71D, 0x93A8289C, 0xE3F60F52],
    (1, 1, 0, 0): [0xE93CABD8, 0xB2722088, 0x123DA8FC, 0x5E70C44A, 0xDC1FF0FC],
    (2**63 + 7, 2**32 + 5, 9, 4): [0xE2222E70, 0x9F8D9CCA, 0xBCBDCC2A, 0xD0AC8960, 0xB7600636],
}


@pytest.mark.parametrize("key", HASH_VECTORS)
def test_random_bits_have_their_pinned_values(key: tuple[int, int, int, int]) -> None:
    elements = (0, 1, 63, 2**32 - 1, 2**32)
    drawn = [int(reference.random_bits(*key, count=1, start=i)[0]) for i in elements]
    assert list(map(hex, drawn)) == list(map(hex, HASH_VECTORS[key]))


@given(
    seed=st.integers(0, 2**64 - 1),
    t=st.integers(1, 2**40),
    index=st.integers(0, 2**20),
    stream=st.integers(0, 2**10),
    start=st.sampled_from([0, 1, 1000, 2**32 - 3, 2**40]),
)
def test_random_bits_are_the_written_formula(
    seed: int, t: int, index: int, stream: int, start: int
) -> None:
    drawn = reference.random_bits(seed, t, index, stream, count=6, start=start)
    expected = [_random(i, seed, t, index, stream) for i in range(start, start + 6)]
    assert drawn.dtype == np.uint32
    assert drawn.tolist() == expected


def test_random_bits_of_no_element_are_none() -> None:
    assert reference.random_bits(0, 1, 0, 0, count=0).size == 0


# float32 bits, random bits, the bfloat16 bits.
BFLOAT16_VECTORS = [
    (0x3F800000, 0xFFFFFFFF, 0x3F80),  # 1.0 is representable: no bits move it
    (0x3F800001, 0x0000FFFF, 0x3F81),
    (0x3F800001, 0x0000FFFE, 0x3F80),
    (0x3F80FFFF, 0x00000001, 0x3F81),
    (0x3F80FFFF, 0x00010000, 0x3F80),  # only the low 16 random bits count
    (0xBF808000, 0x00008000, 0xBF81),  # away from zero for both signs
    (0xBF808000, 0x00007FFF, 0xBF80),
    (0x00000000, 0xFFFFFFFF, 0x0000),
    (0x80000000, 0xFFFFFFFF, 0x8000),
    (0x00000001, 0x0000FFFF, 0x0001),  # subnormals round like all others
    (0x00000001, 0x0000FFFE, 0x0000),
    (0x8000FFFF, 0x00000000, 0x8000),
    (0x007FFFFF, 0x00000001, 0x0080),  # into the normal numbers
    (0x3FFFFFFF, 0x0000FFFF, 0x4000),  # over a power of two
    (0x7F7FFFFF, 0x00000000, 0x7F7F),
    (0x7F7F0001, 0x0000FFFF, 0x7F80),  # over the largest: Inf
    (0xFF7FFFFF, 0x00000001, 0xFF80),
    (0x7F800000, 0xFFFFFFFF, 0x7F80),
    (0xFF800000, 0xFFFFFFFF, 0xFF80),
]

# float32 value, random bits, the float16 bits.
FLOAT16_VECTORS = [
    (1.0, 0xFFFFFFFF, 0x3C00),
    (1.0 + 2.0**-23, 0x00001FFF, 0x3C01),
    (1.0 + 2.0**-23, 0x00001FFE, 0x3C00),
    (1.0 + 2.0**-23, 0xFFFFE000, 0x3C00),  # only the low 13 random bits count
    (-1.0 - 2.0**-11, 0x00001000, 0xBC01),
    (-1.0 - 2.0**-11, 0x00000FFF, 0xBC00),
    (0.0, 0xFFFFFFFF, 0x0000),
    (-0.0, 0xFFFFFFFF, 0x8000),
    (65504.0, 0xFFFFFFFF, 0x7BFF),
    (65505.0, 0x00000000, 0x7BFF),
    (65535.0, 0x00000000, 0x7BFF),
    (65535.0, 0x00001FFF, 0x7C00),
    (-65535.0, 0x00001FFF, 0xFC00),
    (65536.0, 0x00000000, 0x7C00),
    (-1e30, 0x00000000, 0xFC00),
    (math.inf, 0xFFFFFFFF, 0x7C00),
    (-math.inf, 0xFFFFFFFF, 0xFC00),
    (2.0**-14, 0xFFFFFFFF, 0x0400),
    (2.0**-14 * (1 - 2.0**-24), 0x00000000, 0x03FF),  # the largest float32 below 2^-14
    (2.0**-14 * (1 - 2.0**-24), 0x0000FFFF, 0x0400),
    (2.0**-24, 0x0000FFFF, 0x0001),  # the smallest subnormal stays
    (2.0**-25, 0x00007FFF, 0x0000),
    (2.0**-25, 0x00008000, 0x0001),
    (-(2.0**-25), 0x00008000, 0x8001),
    (-(2.0**-25), 0x00007FFF, 0x8000),
    (2.0**-25, 0xFFFF7FFF, 0x0000),  # only the low 16 random bits count
    (2.0**-40, 0x0000FFFF, 0x0001),
    (2.0**-40, 0x0000FFFE, 0x0000),
    (2.0**-41, 0x0000FFFF, 0x0000),  # trunc(|x| 2^40) is zero
    (2.0**-149, 0x0000FFFF, 0x0000),
    (-(2.0**-149), 0x0000FFFF, 0x8000),
]


def test_stochastic_bfloat16_has_its_pinned_values() -> None:
    bits, random, expected = zip(*BFLOAT16_VECTORS, strict=True)
    rounded = reference.round_bfloat16(_float32(*bits), np.array(random, dtype=np.uint32))
    assert _hexes(rounded) == list(map(hex, expected))


def test_stochastic_float16_has_its_pinned_values() -> None:
    values, random, expected = zip(*FLOAT16_VECTORS, strict=True)
    rounded = reference.round_float16(np.array(values, F32), np.array(random, dtype=np.uint32))
    assert _hexes(rounded) == list(map(hex, expected))


@pytest.mark.parametrize("random", [0, 1, 0x1FFF, 0xFFFF, MASK, None])
@pytest.mark.parametrize("nan", [0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0xFF800001, 0xFFFFFFFF])
def test_nan_stays_nan_whatever_the_random_bits(nan: int, random: int | None) -> None:
    x = _float32(nan)
    bits = None if random is None else np.array([random], dtype=np.uint32)
    assert np.isnan(reference.widen_bfloat16(reference.round_bfloat16(x, bits))).all()
    assert np.isnan(reference.widen_float16(reference.round_float16(x, bits))).all()


def test_what_is_representable_is_never_moved() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    for wide, back in [
        (reference.widen_bfloat16(every), reference.round_bfloat16),
        (reference.widen_float16(every), reference.round_float16),
    ]:
        number = ~np.isnan(wide)
        for value in (0, 0x1FFF, 0xFFFF, MASK):
            random = np.full(number.sum(), value, dtype=np.uint32)
            assert (back(wide[number], random) == every[number]).all()
        assert (back(wide[number], None) == every[number]).all()


def test_nearest_bfloat16_takes_ties_to_even() -> None:
    x = _float32(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7F8000, 0x00008000, 0x00008001)
    expected = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0x0000, 0x0001]
    assert _hexes(reference.round_bfloat16(x, None)) == list(map(hex, expected))


def test_nearest_float16_takes_ties_to_even() -> None:
    x = np.array(
        [1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.0, 65520.0, -65520.0, 2.0**-25, 3 * 2.0**-25], F32
    )
    expected = [0x3C00, 0x3C02, 0x7BFF, 0x7C00, 0xFC00, 0x0000, 0x0002]
    assert _hexes(reference.round_float16(x, None)) == list(map(hex, expected))


@pytest.mark.parametrize(
    "value", [1.001, -1.001, 3.14159, 1e-3, 2.0**-14 * 1.0003, 2e-5, -3.3e-6, 7.01 * 2.0**-26]
)
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_stochastic_rounding_is_unbiased(kind: str, value: float) -> None:
    count = 200_000
    x = np.full(count, value, F32)
    random = reference.random_bits(seed=1, t=1, index=0, stream=0, count=count)
    if kind == "bfloat16":
        rounded = reference.widen_bfloat16(reference.round_bfloat16(x, random))
    else:
        rounded = reference.widen_float16(reference.round_float16(x, random))
    neighbours = np.unique(rounded).astype(np.float64)
    assert len(neighbours) == 2
    assert neighbours[0] < value < neighbours[1]
    # A mean of `count` draws from two values: five standard deviations, at most half a step each.
    step = neighbours[1] - neighbours[0]
    assert abs(rounded.mean(dtype=np.float64) - float(F32(value))) < 5 * step / 2 / count**0.5


def test_zero_dimensional_and_empty_arrays_keep_their_shape() -> None:
    for shape in [(), (0,), (2, 0)]:
        x, random = np.full(shape, np.nan, F32), np.full(shape, MASK, np.uint32)
        for rounded in (reference.round_bfloat16(x, random), reference.round_float16(x, random)):
            assert rounded.shape == shape
            assert rounded.dtype == np.uint16


def test_direction_rounds_each_product_and_then_the_sum() -> None:
    # Chosen so that a fused multiply-add would give another last bit.
    rng = np.random.default_rng(0)
    m, g = rng.standard_normal((2, 1000)).astype(F32)
    u = reference.direction(m, g, 0.9)
    exact_sum = (m.astype(np.float64) * F32(0.9) + g.astype(np.float64) * F32(1.0 - 0.9)).astype(
        F32
    )
    assert u.dtype == F32
    assert (u != exact_sum).any()
    for k in range(20):
        first = F32(float(m[k]) * float(F32(0.9)))
        second = F32(float(g[k]) * float(F32(1.0 - 0.9)))
        assert u[k] == F32(float(first) + float(second))


def test_a_momentum_beyond_its_dtype_saturates() -> None:
    m = reference.saturated(np.array([1e6, -1e6, 3.0, np.nan], F32), 65504.0)
    assert m.dtype == F32
    assert m[:3].tolist() == [65504.0, -65504.0, 3.0]
    assert np.isnan(m[3])


def test_float64_keeps_its_precision() -> None:
    m, g = np.full(2, 1.0), np.full(2, 1e-12)
    assert reference.direction(m, g, 0.9).tolist() == [0.9 * 1.0 + (1.0 - 0.9) * 1e-12] * 2
    p = reference.apply_verdict(np.array([1.0]), np.array([1]), lr=1e-12, weight_decay=0.1)
    assert p.tolist() == [1.0 * (1.0 - 1e-12 * 0.1) - 1e-12]


def test_apply_verdict_decays_and_then_moves_against_the_verdict() -> None:
    p = np.array([2.0, 2.0, 2.0, -0.0], dtype=F32)
    moved = reference.apply_verdict(p, np.array([1, -1, 0, 0]), lr=0.25, weight_decay=1.0)
    assert moved.tolist() == [1.25, 1.75, 1.5, 0.0]
    assert np.signbit(moved).tolist() == [False, False, False, True]
