"""Every codec equals the NumPy definition bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_dlion.codec import ApplyJob, Codec, EncodeJob
from hf_dlion.codec import bits as bits_module
from hf_dlion.codec.bits import pack_bits, popcount, unpack_bits
from hf_dlion.codec.layout import MessageLayout, words_for
from hf_dlion.codec.lion import momentum_stream, random_bits, round_stochastically, rounding_key
from hf_dlion.codec.native.codec import NativeCodec
from hf_dlion.codec.reference import votes as reference
from hf_dlion.codec.rule import Verdict
from hf_dlion.step.message import stretches_of
from tests.support.codec_cases import (
    CODECS,
    SHAPES,
    examples,
    gradients,
    rounded,
    rule,
    same_bits,
    short_chunks,
    verdict_of,
    widened,
)
from tests.support.oracle import bits_of

__all__ = ["short_chunks"]  # a fixture of every test here


@CODECS
@examples(150)
@given(
    shape=SHAPES,
    seed=st.integers(0, 10**6),
    zero_share=st.sampled_from([0.0, 0.0, 0.1, 0.7, 1.0]),
    step=st.integers(1, 9),
    rank_of=st.sampled_from([(0, 2), (1, 2), (2, 3), (3, 4)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    transposed=st.booleans(),
)
def test_encode_equals_the_reference(
    codec: Codec,
    shape: tuple[int, ...],
    seed: int,
    zero_share: float,
    step: int,
    rank_of: tuple[int, int],
    dtype: torch.dtype,
    transposed: bool,
) -> None:
    rank, world_size = rank_of
    grad = gradients(shape, seed, zero_share, dtype)
    if transposed and len(shape) >= 2:
        grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
    # Where the gradient is zero, so is half of the momentum: u is zero in places and rows.
    exp_avg = torch.where(grad == 0, 0.0, gradients(shape, seed + 1, 0.0, dtype).double()).to(dtype)
    exp_avg = exp_avg.contiguous()
    old, new = widened(exp_avg).copy(), widened(grad.contiguous())
    words = torch.full((words_for(grad.numel()),), -1)
    active = torch.ones(reference.row_count(shape), dtype=torch.bool)
    tensor_rule = rule(step=step, rank=rank, world_size=world_size)

    codec.encode(grad, exp_avg, words, active, tensor_rule)

    direction = reference.direction(old, new, 0.9)
    expected_words, expected_active = reference.pack_signs(
        direction, t=step, rank=rank, world_size=world_size
    )
    np.testing.assert_array_equal(active.numpy(), expected_active)
    np.testing.assert_array_equal(words.numpy().view(np.uint64), expected_words)
    momentum = reference.updated_momentum(old, new, 0.99)
    expected = rounded(momentum, dtype, tensor_rule, momentum_stream(rank))
    assert same_bits(exp_avg, expected)


@CODECS
@examples(100)
@given(
    shape=SHAPES,
    seed=st.integers(0, 10**6),
    zero_share=st.sampled_from([0.0, 0.1, 0.7]),
    scale=st.sampled_from([1.0, 0.5, float(np.float32(0.3)), 0.0, float(np.float32(1e-30))]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    momentum_dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
)
def test_preview_and_advance_are_the_halves_of_encode(
    codec: Codec,
    shape: tuple[int, ...],
    seed: int,
    zero_share: float,
    scale: float,
    dtype: torch.dtype,
    momentum_dtype: torch.dtype | None,
) -> None:
    if dtype == torch.float64:
        momentum_dtype = None
    grad = gradients(shape, seed, zero_share, dtype)
    exp_avg = gradients(shape, seed + 1, zero_share, momentum_dtype or dtype)
    before = exp_avg.clone()
    words = torch.full((words_for(grad.numel()),), -1)
    active = torch.ones(reference.row_count(shape), dtype=torch.bool)

    finite = codec.preview(grad, exp_avg, words, active, rule(), scale)

    assert same_bits(exp_avg, before)
    wide = np.float64 if dtype == torch.float64 else np.float32
    scaled = wide(scale) * widened(grad).astype(wide)
    direction = reference.direction(widened(exp_avg).astype(wide), scaled, 0.9)
    expected_words, expected_active = reference.pack_signs(direction, t=3, rank=1, world_size=3)
    np.testing.assert_array_equal(active.numpy(), expected_active)
    np.testing.assert_array_equal(words.numpy().view(np.uint64), expected_words)

    if isinstance(codec, NativeCodec) and dtype in (torch.float32, torch.bfloat16):
        assert finite == bool(np.isfinite(scaled).all())
    assert not finite or np.isfinite(scaled).all()

    codec.advance(grad, exp_avg, rule())
    codec.encode(grad, before, words, active, rule())
    assert same_bits(exp_avg, before)


@CODECS
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_autograd_learns_of_all_that_is_written(
    codec: Codec, dtype: torch.dtype, bits: int, transposed: bool
) -> None:
    grad, exp_avg = torch.randn(3, 70, dtype=dtype), torch.zeros(3, 70, dtype=dtype)
    param = torch.randn(70, 3, dtype=dtype).T if transposed else torch.randn(3, 70, dtype=dtype)
    words = torch.zeros(bits * words_for(grad.numel()), dtype=torch.int64)
    active = torch.zeros(3, dtype=torch.bool)
    r = rule()
    r = dataclasses.replace(r, step_rule=dataclasses.replace(r.step_rule, bits=bits))
    verdict = Verdict(words[:4].view(1, 4), torch.ones(3, dtype=torch.int32))

    def writes(tensor: Tensor, call: Callable[[], object]) -> bool:
        before = tensor._version
        call()
        return tensor._version > before

    assert writes(exp_avg, lambda: codec.encode(grad, exp_avg, words, active, r))
    assert writes(exp_avg, lambda: codec.advance(grad, exp_avg, r))
    assert not writes(exp_avg, lambda: codec.preview(grad, exp_avg, words, active, r, 1.0))
    assert writes(param, lambda: codec.apply(param, verdict, r))
    assert writes(param, lambda: codec.step_alone(param, grad, exp_avg, r))
    assert writes(exp_avg, lambda: codec.step_alone(param, grad, exp_avg, r))


@CODECS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("place", [0, 63, 64, 149])
def test_a_gradient_that_is_not_finite_is_never_said_to_be(
    codec: Codec, bad: float, place: int
) -> None:
    grad = torch.ones(150)
    grad[place] = bad
    words, active = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    assert not codec.preview(grad, torch.zeros(150), words, active, rule(), 2.0)


@CODECS
@examples(150)
@given(
    shape=SHAPES,
    seed=st.integers(0, 10**6),
    combination=st.sampled_from(
        [("majority", "alternate"), ("majority", "zero"), ("average", "alternate")]
    ),
    world_size=st.integers(2, 5),
    absent_share=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    stochastic_rounding=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    lr=st.sampled_from([0.01, 0.0]),
    transposed=st.booleans(),
)
def test_apply_equals_the_reference(
    codec: Codec,
    shape: tuple[int, ...],
    seed: int,
    combination: tuple[str, str],
    world_size: int,
    absent_share: float,
    dtype: torch.dtype,
    stochastic_rounding: bool,
    weight_decay: float,
    lr: float,
    transposed: bool,
) -> None:
    param = gradients(shape, seed, 0.1, dtype)
    if transposed and len(shape) >= 2:
        param = param.transpose(0, 1).contiguous().transpose(0, 1)
    random = np.random.default_rng(seed)
    row = reference.row_of_element(shape)
    votes = random.integers(1, world_size + 1, reference.row_count(shape))
    votes[random.random(votes.shape) < absent_share] = 0
    sums = votes[row] - 2 * random.integers(0, votes[row] + 1)
    tensor_rule = rule(
        world_size=world_size,
        aggregation=combination[0],
        ties=combination[1],
        stochastic_rounding=stochastic_rounding,
        weight_decay=weight_decay,
        lr=lr,
    )
    step_rule = tensor_rule.step_rule
    if combination == ("majority", "alternate"):
        sums[(sums == 0) & (votes[row] > 0)] = 1  # no tie is left after the exchange
    before = widened(param.contiguous()).copy()

    codec.apply(param, verdict_of(sums, votes, row, step_rule), tensor_rule)

    one = before.dtype.type
    sums = sums.reshape(shape)
    moved = sums.astype(one) / one(world_size) if combination[0] == "average" else np.sign(sums)
    expected = reference.apply_verdict(before, moved, tensor_rule.lr, weight_decay)
    assert same_bits(param, rounded(expected, dtype, tensor_rule, stream=0))


@CODECS
@examples(80)
@given(
    shape=SHAPES,
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    momentum_dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
)
def test_a_step_alone_is_lion_with_sign_of_zero_zero(
    codec: Codec,
    shape: tuple[int, ...],
    seed: int,
    dtype: torch.dtype,
    momentum_dtype: torch.dtype | None,
) -> None:
    param, grad = (gradients(shape, seed + k, 0.3, dtype) for k in range(2))
    exp_avg = torch.zeros(shape, dtype=momentum_dtype or dtype)
    old = exp_avg.to(torch.float64 if dtype == torch.float64 else torch.float32).numpy().copy()
    before, new = widened(param).copy(), widened(grad)
    tensor_rule = rule(rank=0, world_size=1)

    codec.step_alone(param, grad, exp_avg, tensor_rule)

    direction = reference.direction(old, new, 0.9)
    expected = reference.apply_verdict(before, np.sign(direction), 0.01, 0.1)
    assert same_bits(param, rounded(expected, dtype, tensor_rule, stream=0))
    momentum = reference.updated_momentum(old, new, 0.99)
    if exp_avg.dtype != torch.float64:
        momentum = momentum.astype(np.float32)
    assert same_bits(exp_avg, rounded(momentum, exp_avg.dtype, tensor_rule, momentum_stream(0)))


STRIDES = {
    "turned": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "apart": lambda x: torch.stack([x, torch.full_like(x, 9.0)], dim=-1)[..., 0],
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@CODECS
@pytest.mark.parametrize("of_param", ["turned", "apart", "channels last"])
@pytest.mark.parametrize("of_grad", STRIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strides_of_parameters_and_gradients_change_no_bit(
    codec: Codec, dtype: torch.dtype, of_grad: str, of_param: str
) -> None:
    shape, found = (3, 5, 4, 2), []
    for strided in (True, False):
        grad, param = (
            STRIDES[of_grad](gradients(shape, 1, 0.2, dtype)),
            gradients(shape, 2, 0, dtype),
        )
        assert not grad.is_contiguous()
        param = STRIDES[of_param](param) if strided else param
        grad = grad if strided else grad.contiguous()
        momenta = [gradients(shape, 3, 0.2, dtype) for _ in range(3)]
        words, seen = (torch.full((words_for(grad.numel()),), -1) for _ in range(2))
        active, rows = (torch.ones(3, dtype=torch.bool) for _ in range(2))
        codec.preview(grad, momenta[0], seen, rows, rule(), 0.5)
        codec.encode(grad, momenta[0], words, active, rule())
        codec.advance(grad, momenta[1], rule())
        codec.step_alone(param, grad, momenta[2], rule(rank=0, world_size=1))
        codec.apply(param, Verdict(words.view(1, -1), active.int()), rule())
        found.append([bits_of(x) for x in (param, *momenta, words, active, seen, rows)])
    assert found[0] == found[1]


@examples(200)
@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    start=st.sampled_from([0, 5, 2**31 - 3, 2**32 - 64]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_rounding_equals_the_reference_on_every_bit_pattern(
    bits: list[int], start: int, dtype: torch.dtype
) -> None:
    patterns = np.array(bits, dtype=np.uint32)
    values = patterns.view(np.float32)
    count = len(bits)
    expected_hash = reference.random_bits(1, 2, 3, 4, min(count, 2**32 - start), start)
    values = values[: len(expected_hash)]
    counter = torch.from_numpy(
        np.arange(start, start + len(values), dtype=np.uint64).astype(np.uint32).view(np.int32)
    )
    hashed = random_bits(
        counter,
        rounding_key(1, 2, 3, 4),
        out=torch.empty_like(counter),
        scratch=torch.empty_like(counter),
    )
    np.testing.assert_array_equal(hashed.numpy().view(np.uint32), expected_hash)
    found = round_stochastically(torch.from_numpy(values.copy()), hashed, dtype).to(dtype)
    round_to = reference.round_bfloat16 if dtype == torch.bfloat16 else reference.round_float16
    expected = torch.from_numpy(round_to(values, expected_hash).view(np.int16)).view(dtype)
    nan = torch.from_numpy(np.isnan(values))
    assert torch.equal(found.isnan(), nan)
    assert same_bits(found[~nan], expected[~nan])


def test_round_stochastically_refuses_other_dtypes() -> None:
    with pytest.raises(TypeError, match="knows bfloat16 and float16"):
        round_stochastically(torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.float32)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_bits_survive_packing(count: int) -> None:
    flags = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
    words = pack_bits(flags)
    assert words.shape == (words_for(count),)
    assert torch.equal(unpack_bits(words, count), flags)
    assert popcount(words) == int(flags.sum())


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_operations_for_other_devices_equal_those_for_the_cpu(count: int) -> None:
    flags = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
    words = pack_bits(flags)
    assert torch.equal(bits_module._pack_anywhere(flags, torch.empty_like(words)), words)
    assert torch.equal(bits_module._unpack_anywhere(words, count), flags)
    assert int(bits_module._popcount_anywhere(words).sum()) == popcount(words)


@CODECS
@pytest.mark.parametrize("stochastic_rounding", [True, False])
def test_a_momentum_saturates_instead_of_voting_one_way_for_ever(
    codec: Codec, stochastic_rounding: bool
) -> None:
    exp_avg = torch.zeros(2, dtype=torch.float16)
    grad = torch.tensor([1e8, -1e8])
    words, active = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    codec.encode(grad, exp_avg, words, active, rule(stochastic_rounding=stochastic_rounding))
    assert exp_avg.tolist() == [65504.0, -65504.0]


@CODECS
@examples(60)
@given(
    shape=st.sampled_from([(300,), (5, 70), (3, 128), (1, 400), (130, 3)]),
    cut=st.integers(0, 7),
    seed=st.integers(0, 10**6),
    zero_share=st.sampled_from([0.0, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    bits=st.sampled_from([1, 2, 4, 8]),
)
def test_stretches_of_a_parameter_give_what_the_whole_gives(
    codec: Codec,
    shape: tuple[int, ...],
    cut: int,
    seed: int,
    zero_share: float,
    dtype: torch.dtype,
    bits: int,
) -> None:
    grad, tensor_rule = gradients(shape, seed, zero_share, dtype), rule()
    step = dataclasses.replace(tensor_rule.step_rule, bits=bits, level_scale="word")
    tensor_rule = dataclasses.replace(tensor_rule, step_rule=step)
    # No part of a row without a sign that a cut between two words leaves, but whole rows.
    for first in (0, 63, 64):
        grad.view(-1)[first :: 3 if first == 0 else 64] = 0.5
    if len(shape) == 2 and shape[0] > 1:
        grad[seed % shape[0]] = 0
    exp_avg, param = torch.zeros_like(grad), gradients(shape, seed + 1, 0.0, dtype)
    layout = MessageLayout.of([(0, grad.shape)])
    words = torch.zeros(bits * layout.words).long()
    active = torch.zeros(layout.rows, dtype=torch.bool)
    codec.encode(grad, exp_avg, words, active, tensor_rule)
    alone, alone_avg = param.clone(), torch.zeros_like(grad)
    codec.step_alone(alone, grad, alone_avg, tensor_rule)
    for first, stop in ((0, cut), (cut, layout.words)):
        part = layout.part(layout.shard(first, stop))
        for slot in part.slots:
            own = slice(slot.start, slot.stop)
            momentum, packed = (
                torch.zeros(slot.numel, dtype=dtype),
                torch.full((bits * slot.words,), -1),
            )
            votes, piece = torch.zeros(slot.rows, dtype=torch.bool), grad.view(-1)[own]
            codec.encode(piece, momentum, packed, votes, tensor_rule, slot.run())
            assert same_bits(momentum, exp_avg.view(-1)[own])
            assert torch.equal(packed, words[bits * first : bits * stop][: bits * slot.words])
            rows = active[slot.first_row : slot.first_row + slot.rows]
            assert torch.equal(votes[1:-1], rows[1:-1])
            foreseen, seen = torch.full_like(packed, -1), torch.zeros_like(votes)
            momentum.zero_()
            codec.preview(piece, momentum, foreseen, seen, tensor_rule, 1.0, slot.run())
            assert not momentum.any()
            assert torch.equal(foreseen, packed)
            assert torch.equal(seen, votes)
            codec.advance(piece, momentum, tensor_rule, slot.run())
            assert same_bits(momentum, exp_avg.view(-1)[own])
            moved, momentum = param.view(-1)[own].clone(), torch.zeros(slot.numel, dtype=dtype)
            codec.step_alone(moved, piece, momentum, tensor_rule, slot.run())
            assert same_bits(moved, alone.view(-1)[own])
            assert same_bits(momentum, alone_avg.view(-1)[own])


@CODECS
@examples(60)
@given(
    shape=st.sampled_from([(300,), (5, 70), (3, 128), (1, 400), (130, 3), (3, 2, 40)]),
    count=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    zero_share=st.sampled_from([0.0, 0.3, 0.97]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    bits=st.sampled_from([1, 2, 4, 8]),
    options=st.sampled_from([{}, {"ties": "zero"}, {"aggregation": "average"}]),
)
def test_segments_of_a_message_give_what_the_whole_gives(
    codec: Codec,
    shape: tuple[int, ...],
    count: int,
    seed: int,
    zero_share: float,
    dtype: torch.dtype,
    bits: int,
    options: dict[str, str],
) -> None:
    tensor_rule = rule(**options)
    step = dataclasses.replace(tensor_rule.step_rule, bits=bits, level_scale="word")
    tensor_rule = dataclasses.replace(tensor_rule, step_rule=step)
    grad, old = (gradients(shape, seed + k, zero_share, dtype) for k in range(2))
    # Rows that vote by one of their parts only, and rows that do not vote at all.
    old[grad == 0] = 0
    layout = MessageLayout.of([(tensor_rule.index, grad.shape)])
    whole = torch.empty(bits * layout.words, dtype=torch.int64)
    active, exp_avg = torch.ones(layout.rows, dtype=torch.bool), old.clone()
    codec.encode(grad, exp_avg, whole, active, tensor_rule)

    length = -(-layout.words // count)
    votes, rows = torch.full((count, bits * length + 3), -1), torch.ones_like(active)
    ours = old.clone()
    stretches = list(stretches_of(layout, count, [(tensor_rule.index, grad)]))
    jobs = []
    for stretch in stretches:
        words = votes[stretch.segment, bits * stretch.words.start : bits * stretch.words.stop]
        own = stretch.of(grad), stretch.of(ours), words, rows[stretch.rows]
        jobs.append(EncodeJob(*own, tensor_rule, stretch.run))
    codec.preview_all(jobs, 1.0)
    seen = [votes.clone(), rows.clone()]
    assert same_bits(ours, old)
    codec.encode_all(jobs)
    assert same_bits(ours, exp_avg)
    for found, marked in ((votes, rows), seen):
        assert torch.equal(marked, active)
        assert torch.equal(found[:, : bits * length].reshape(-1)[: len(whole)], whole)
        assert (found[:, bits * length :] == -1).all()

    random = np.random.default_rng(seed)
    planes = torch.from_numpy(random.integers(0, 2**62, (step.planes, layout.words)))
    counts = torch.from_numpy(random.integers(0, 2, layout.rows)).int()
    if step.aggregation == "average":
        counts = torch.full_like(counts, step.world_size)
    param, moved = gradients(shape, seed + 2, 0.0, dtype), gradients(shape, seed + 2, 0.0, dtype)
    codec.apply(param, Verdict(planes, counts), tensor_rule)
    padded = torch.nn.functional.pad(planes, (0, count * length - layout.words))
    parts = padded.view(step.planes, count, length).transpose(0, 1).contiguous().transpose(0, 1)
    if len(shape) == 3:
        moved = moved.transpose(1, 2).contiguous().transpose(1, 2)
    pieces = [Verdict(parts[:, k.segment, k.words], counts[k.rows]) for k in stretches]
    runs = [stretch.run for stretch in stretches]
    codec.apply_all(
        [ApplyJob(moved, piece, tensor_rule, r) for piece, r in zip(pieces, runs, strict=True)]
    )
    assert same_bits(moved, param)
