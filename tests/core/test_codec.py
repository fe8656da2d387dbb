"""The codec equals its definition in NumPy, bit for bit, on a CPU and in the form for GPUs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dlion.core import codec
from tests.support import definition
from tests.support.definition import TOP, Layout
from tests.support.fake_gpu import DEVICE

SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 2.0**-126, -(2.0**-126), 3e38, -3e38, 1.0, -1.0]

on_both_devices = pytest.mark.parametrize("device", ["cpu", DEVICE])


def draw(words: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns numbers of many magnitudes, and words in which only one is nonzero, or none."""
    random = np.random.default_rng(seed)
    u = random.normal(size=64 * words) * 10.0 ** random.integers(-40, 30, size=64 * words)
    special = random.random(64 * words) < 0.2
    u[special] = random.choice(SPECIAL, size=int(special.sum()))
    u.reshape(-1, 64)[random.random(words) < 0.3, 1:] = 0.0
    u.reshape(-1, 64)[random.random(words) < 0.3] = 0.0
    with np.errstate(over="ignore"):
        return torch.from_numpy(u.clip(-3e38, 3e38)).to(dtype)


def check(codes: torch.Tensor, u: torch.Tensor, phase: int, bits: int = 1) -> np.ndarray:
    """Compares codes with the definition, and returns which words vote."""
    layout = Layout([(len(u) // 64, 64)])
    expected, active = definition.codes_of(u.numpy(), layout, phase=phase, bits=bits)
    on = active[layout.row_of_element]
    assert np.array_equal(codes.cpu().numpy()[on], expected[on])
    return active


@on_both_devices
@given(words=st.integers(0, 200), seed=st.integers(0, 2**32), phase=st.integers(0, 9))
def test_one_bit_is_the_sign_and_zeros_take_turns(
    device: str, words: int, seed: int, phase: int
) -> None:
    u = draw(words, seed)
    on_device = u.to(device)
    codes = codec.sign_codes(on_device, phase, torch.empty_like(on_device, dtype=torch.bool))
    active = check(codes, u, phase)
    plane = torch.empty(words, dtype=torch.int64, device=device)
    codec.pack(codes, 0, plane)
    for found in (codec.active_words(on_device), codec.active_words(on_device, plane, phase)):
        assert active.all() if found is None else np.array_equal(found.cpu().numpy(), active)


@on_both_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [2, 4, 8])
@settings(max_examples=30)
@given(words=st.integers(1, 40), seed=st.integers(0, 2**32), phase=st.integers(0, 1))
def test_levels_equal_the_definition(
    bits: int, dtype: torch.dtype, device: str, words: int, seed: int, phase: int
) -> None:
    u = draw(words, seed, dtype)
    on_device, scratch = u.to(device), torch.empty_like(u, device=device)
    sums, counts = codec.word_magnitudes(on_device, scratch)
    means = (sums / counts.clamp_min(1)).to(dtype)
    out = torch.empty(2, u.numel(), dtype=torch.uint8, device=device)
    check(codec.level_codes(on_device, means, bits, phase, out, scratch), u, phase, bits)


@on_both_devices
@given(words=st.integers(0, 70), seed=st.integers(0, 2**32), bit=st.integers(0, 7))
def test_unpacking_a_packed_plane_gives_its_bits_back(
    device: str, words: int, seed: int, bit: int
) -> None:
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, 64 * words, np.uint8))
    plane = torch.empty(words, dtype=torch.int64, device=device)
    codec.pack(codes.to(device), bit, plane)
    values = codec.unpack(plane, -0.5, 2.5, torch.empty(64 * words, device=device)).cpu()
    assert torch.equal(values, torch.where(codes >> bit & 1 == 1, 2.5, -0.5))
    if words:
        assert int(plane[0]) & 1 == int(codes[0]) >> bit & 1
        assert (int(plane[0]) >> 63 & 1) == int(codes[63]) >> bit & 1


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@settings(max_examples=25)
@given(ranks=st.integers(1, 40), seed=st.integers(0, 2**32), whole=st.booleans())
def test_counted_planes_equal_the_sum_of_codes(
    bits: int, ranks: int, seed: int, whole: bool
) -> None:
    random = np.random.default_rng(seed)
    words = 7
    codes = random.integers(0, TOP[bits] + 1, (ranks, 64 * words))
    active = np.ones((ranks, words), bool) if whole else random.random((ranks, words)) < 0.6
    codes *= np.repeat(active, 64, axis=1)
    votes = []
    for own in codes:
        planes = torch.empty(bits, words, dtype=torch.int64)
        for j in range(bits):
            codec.pack(torch.from_numpy(own.astype(np.uint8)), j, planes[j])
        votes.append(list(planes))
    planes = codec.tally(votes, bits)
    assert len(planes) == (ranks * TOP[bits]).bit_length()
    assert np.array_equal(_numbers(planes), codes.sum(axis=0))
    voters = torch.from_numpy(active.sum(axis=0)) * TOP[bits]
    greater, equal = codec.compare(planes, int(voters[0]) if whole else voters)
    twice, all_votes = 2 * codes.sum(axis=0), np.repeat(voters.numpy(), 64)
    assert np.array_equal(_numbers([greater]), twice > all_votes)
    assert np.array_equal(_numbers([equal]), twice == all_votes)


def _numbers(planes: list[torch.Tensor]) -> np.ndarray:
    """Returns the number of every element, from its bits."""
    bits = [np.unpackbits(plane.numpy().view(np.uint8), bitorder="little") for plane in planes]
    return sum(own.astype(np.int64) << j for j, own in enumerate(bits))
