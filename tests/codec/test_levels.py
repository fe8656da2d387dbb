"""Votes of 2, 4 and 8 bits: every codec equals the NumPy definition bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_dlion.codec import Codec
from hf_dlion.codec.layout import words_for
from hf_dlion.codec.levels import LEVELS, fold, magnitude_sums, unpack_codes
from hf_dlion.codec.lion import momentum_stream
from hf_dlion.codec.native import codec as native
from hf_dlion.codec.native import library as native_library
from hf_dlion.codec.native.codec import NativeCodec
from hf_dlion.codec.reference import levels as reference_levels
from hf_dlion.codec.reference import votes as reference
from hf_dlion.codec.rule import TensorRule
from tests.support.codec_cases import (
    CODECS,
    SHAPES,
    examples,
    gradients,
    rounded,
    rule,
    same_bits,
    short_chunks,
    widened,
)

__all__ = ["short_chunks"]  # a fixture of every test here too

BITS: Any = st.sampled_from([2, 4, 8])
SCALES: Any = st.sampled_from(["tensor", "word"])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


def rule_with(bits: int, level_scale: Any = "tensor", **changes: Any) -> TensorRule:
    made = rule(**changes)
    step_rule = dataclasses.replace(made.step_rule, bits=bits, level_scale=level_scale)
    return dataclasses.replace(made, step_rule=step_rule)


def buffers(shape: tuple[int, ...], bits: int) -> tuple[Tensor, Tensor]:
    """Returns words and activity that hold what an encoder must overwrite."""
    words = torch.full((bits * words_for(int(np.prod(shape))),), -1)
    return words, torch.ones(reference.row_count(shape), dtype=torch.bool)


@CODECS
@examples(150)
@given(
    bits=BITS,
    scale=SCALES,
    shape=SHAPES,
    seed=st.integers(0, 10**6),
    zero_share=st.sampled_from([0.0, 0.0, 0.1, 0.7, 1.0]),
    step=st.integers(1, 9),
    rank_of=st.sampled_from([(0, 2), (1, 2), (2, 3), (3, 4)]),
    dtype=DTYPES,
    spread=st.sampled_from([None, 1.0, 1e-38, 1e30]),
    bad=st.sampled_from([None, None, None, float("nan"), float("inf"), -float("inf")]),
    transposed=st.booleans(),
)
def test_encode_equals_the_reference(
    codec: Codec,
    bits: Any,
    scale: Any,
    shape: tuple[int, ...],
    seed: int,
    zero_share: float,
    step: int,
    rank_of: tuple[int, int],
    dtype: torch.dtype,
    spread: float | None,
    bad: float | None,
    transposed: bool,
) -> None:
    rank, world_size = rank_of
    grad = gradients(shape, seed, zero_share, torch.float64)
    if spread is not None:
        # Of one magnitude, as gradients mostly are: many levels are in use.
        random = torch.Generator().manual_seed(seed)
        values = spread * torch.randn(shape, dtype=torch.float64, generator=random)
        grad = torch.where(grad == 0, grad, values)
    grad = grad.to(dtype)
    if bad is not None and grad.numel():
        grad.view(-1)[seed % grad.numel()] = bad
    if transposed and len(shape) >= 2:
        grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
    exp_avg = torch.where(grad == 0, 0.0, gradients(shape, seed + 1, 0.0, dtype).double()).to(dtype)
    exp_avg = exp_avg.contiguous()
    old, new = widened(exp_avg).copy(), widened(grad.contiguous())
    words, active = buffers(shape, bits)
    tensor_rule = rule_with(bits, scale, step=step, rank=rank, world_size=world_size)

    codec.encode(grad, exp_avg, words, active, tensor_rule)

    with np.errstate(all="ignore"):
        direction = reference.direction(old, new, 0.9)
        momentum = reference.updated_momentum(old, new, 0.99)
    expected_words, expected_active = reference_levels.pack_levels(
        direction, bits=bits, t=step, rank=rank, world_size=world_size, scale=scale
    )
    np.testing.assert_array_equal(active.numpy(), expected_active)
    np.testing.assert_array_equal(words.numpy().view(np.uint64), expected_words)
    if bad is None:
        if dtype in (torch.bfloat16, torch.float16):
            momentum = reference.saturated(momentum, torch.finfo(dtype).max)
        assert same_bits(exp_avg, rounded(momentum, dtype, tensor_rule, momentum_stream(rank)))


@CODECS
@examples(60)
@given(
    bits=BITS,
    level_scale=SCALES,
    shape=SHAPES,
    seed=st.integers(0, 10**6),
    zero_share=st.sampled_from([0.0, 0.1, 0.7]),
    scale=st.sampled_from([1.0, 0.5, float(np.float32(0.3)), 0.0]),
    dtype=DTYPES,
    momentum_dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
)
def test_preview_writes_what_encode_does_and_leaves_the_momentum(
    codec: Codec,
    bits: Any,
    level_scale: Any,
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
    words, active = buffers(shape, bits)

    finite = codec.preview(grad, exp_avg, words, active, rule_with(bits, level_scale), scale)

    assert same_bits(exp_avg, before)
    wide = np.float64 if dtype == torch.float64 else np.float32
    scaled = wide(scale) * widened(grad).astype(wide)
    direction = reference.direction(widened(exp_avg).astype(wide), scaled, 0.9)
    expected_words, expected_active = reference_levels.pack_levels(
        direction, bits=bits, t=3, rank=1, world_size=3, scale=level_scale
    )
    np.testing.assert_array_equal(active.numpy(), expected_active)
    np.testing.assert_array_equal(words.numpy().view(np.uint64), expected_words)
    if isinstance(codec, NativeCodec) and dtype in (torch.float32, torch.bfloat16):
        assert finite == bool(np.isfinite(scaled).all())
    assert not finite or np.isfinite(scaled).all()


@CODECS
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), 3e38])
@pytest.mark.parametrize("scale", ["tensor", "word"])
def test_a_gradient_that_is_not_finite_is_never_said_to_be(
    codec: Codec, bits: int, bad: float, scale: str
) -> None:
    grad = torch.ones(150)
    grad[149] = bad
    words, active = buffers((150,), bits)
    assert not codec.preview(grad, torch.zeros(150), words, active, rule_with(bits, scale), 2.0)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [3 * (1 << 16) + 77, 1 << 17])
def test_threads_and_chunks_do_not_change_the_mean(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, numel: int
) -> None:
    from hf_dlion.codec.cpu import CpuCodec
    from hf_dlion.codec.eager import EagerCodec

    grad = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = native_library.library()
    codecs = [CpuCodec(), EagerCodec(), *([NativeCodec(found)] if found else [])]
    results = []
    for threads in (1, 3):
        monkeypatch.setattr(native, "PART", 64)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for codec in codecs:
            words, active = buffers((numel,), 8)
            codec.encode(grad, torch.zeros_like(grad), words, active, rule_with(8))
            results.append(words)
    direction = reference.direction(np.zeros_like(widened(grad)), widened(grad), 0.9)
    expected, _ = reference_levels.pack_levels(direction, bits=8, t=3, rank=1, world_size=3)
    for words in results:
        np.testing.assert_array_equal(words.numpy().view(np.uint64), expected)


@given(seed=st.integers(0, 10**6), numel=st.integers(1, 700))
@examples(50)
def test_the_mean_is_that_of_all_active_rows_however_it_is_added(seed: int, numel: int) -> None:
    u = np.random.default_rng(seed).standard_normal((3, numel)).astype(np.float32)
    u[1] = 0
    active = np.array([True, False, True])
    found = reference_levels.mean_magnitude(u, active)
    assert found == pytest.approx(np.abs(u[[0, 2]]).mean(dtype=np.float64), rel=1e-12)
    total = fold(magnitude_sums(torch.from_numpy(u).view(-1)))
    assert float(total) / (2 * numel) == found


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_levels_are_those_of_the_rule(bits: Any) -> None:
    # Mean magnitude 1: levels are multiples of 2 / L, or thresholds at 0 and 1.5.
    u = np.array([1.0, -1.0, 0.25, -0.25, 1.75, -1.75, 0.0, 2.0], dtype=np.float32)
    q, active = reference_levels.levels(u, bits=bits, t=1, rank=0, world_size=2)
    expected = {
        # 3.5 and -3.5 are rounded to even, 6.125 down and 7 is the largest; at k = 6 a zero is +1
        # where k + t // 2 + (rank + t) % N is even: -1.
        2: [1, -1, 1, -1, 3, -3, -1, 3],
        4: [4, -4, 1, -1, 6, -6, 0, 7],
        8: [64, -64, 16, -16, 111, -111, 0, 127],
    }[bits]
    assert np.abs(u).mean() == 1.0
    assert active.all()
    assert q.tolist() == expected


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_word_s_levels_do_not_depend_on_other_words(bits: Any) -> None:
    # Rows of rare tokens beside others: relative to the tensor's mean all of them would be alike.
    u = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    u[1] *= 1e-6
    q, _ = reference_levels.levels(u, bits=bits, t=1, rank=0, world_size=2, scale="word")
    for row in range(3):
        alone = u[row : row + 1]
        found, _ = reference_levels.levels(alone, bits=bits, t=1, rank=0, world_size=2)
        np.testing.assert_array_equal(q[row : row + 1], found)
    whole, _ = reference_levels.levels(u, bits=bits, t=1, rank=0, world_size=2)
    assert np.unique(np.abs(q[1])).size > np.unique(np.abs(whole[1])).size == 1


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_do_not_lower_the_mean_of_a_word(bits: Any) -> None:
    u = np.zeros(128, dtype=np.float32)
    u[[3, 70, 71]] = 5, 1, 3
    q, _ = reference_levels.levels(u, bits=bits, t=1, rank=0, world_size=2, scale="word")
    largest = reference_levels.LARGEST[bits]
    at_mean = 1 if bits == 2 else round(largest / 2)
    assert q[3] == at_mean
    assert q[[70, 71]].tolist() == (
        [1, 1] if bits == 2 else [round(largest / 4), round(largest * 0.75)]
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_survive_packing(bits: Any) -> None:
    u = np.random.default_rng(0).standard_normal((5, 41))
    u[2] = 0
    ballot = reference_levels.pack_levels(u, bits=bits, t=1, rank=0, world_size=2)
    assert ballot[0].size == bits * words_for(5 * 41)
    q, _ = reference_levels.levels(u, bits=bits, t=1, rank=0, world_size=2)
    np.testing.assert_array_equal(reference_levels.unpack_levels(ballot, (5, 41), bits), q)
    codes = unpack_codes(torch.from_numpy(ballot[0].view(np.int64)), bits)
    largest, spacing = LEVELS[bits]
    rows = codes[: 5 * 41].view(5, 41).long()
    assert not rows[2].any()
    assert not codes[5 * 41 :].any()
    kept = [0, 1, 3, 4]
    np.testing.assert_array_equal((spacing * rows - largest)[kept].numpy(), q[kept])
