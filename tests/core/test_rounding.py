"""Stochastic rounding equals its definition in NumPy, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_dlion.core import rounding
from hf_dlion.optimizer import DistributedLion
from tests.support import definition
from tests.support.fake_gpu import DEVICE


@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(
    count=st.integers(0, 150).map(lambda half: 2 * half),
    seed=st.integers(0, 2**32),
    step=st.integers(0, 2**40),
)
def test_rounding_equals_the_definition(
    dtype: torch.dtype, device: str, count: int, seed: int, step: int
) -> None:
    random = np.random.default_rng(seed)
    x = (random.normal(size=count) * 10.0 ** random.integers(-42, 6, size=count)).astype("f4")
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65519.0, 65504.0, 1e-45, 3.3e38, 2.0**-14]
    chosen = random.random(count) < 0.2
    x[chosen] = random.choice(np.array(special, "f4"), size=int(chosen.sum()))
    first = 2 * int(random.integers(0, 2**32 - 400))
    out = torch.empty(count // 2, dtype=torch.int32, device=device)
    bits = rounding.random_bits(count, first, step, seed, 3, out)
    expected = definition.random_bits(count, first, step, seed, 3)
    assert np.array_equal(bits.cpu().numpy(), expected)
    wanted = definition.rounded(x.copy(), dtype, expected)
    rounded = rounding.round_to(torch.from_numpy(x.copy()).to(device), dtype, bits).cpu()
    found = rounded.to(dtype).float().numpy()
    finite = np.isfinite(found)
    assert np.array_equal(rounded.numpy()[finite], found[finite])  # Converted without rounding.
    assert np.array_equal(found.view(np.uint32)[~np.isnan(x)], wanted.view(np.uint32)[~np.isnan(x)])
    assert np.isnan(found[np.isnan(x)]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_numbers_stay_whatever_the_random_bits_are(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    numbers = numbers[~numbers.isnan()]
    for random in (0, 1, 2**16 - 1):
        bits = torch.full(numbers.shape, random, dtype=torch.uint16)
        found = rounding.round_to(numbers.float(), dtype, bits).to(dtype)
        assert torch.equal(found.view(torch.int16), numbers.view(torch.int16)), random


def test_random_bits_equal_the_definition_beyond_32_bits() -> None:
    out = torch.empty(3, dtype=torch.int32)
    for first in (0, 2**32 - 2, 2**33 - 4, 2**33, 5 * 2**33 + 8):
        found = rounding.random_bits(6, first, 2**33 + 1, 2**63 + 5, 2, out)
        expected = definition.random_bits(6, first, 2**33 + 1, 2**63 + 5, 2)
        assert np.array_equal(found.numpy(), expected), first


def test_a_momentum_of_16_bits_never_becomes_infinite() -> None:
    param = nn.Parameter(torch.zeros(64))
    optimizer = DistributedLion([param], betas=(0.9, 0.5), momentum_dtype=torch.float16)
    for grad in (1e6, -1e6):
        param.grad = torch.full((64,), grad)
        optimizer.step()
        assert bool((optimizer.state[param]["exp_avg"] == math.copysign(65504.0, grad)).all())


@pytest.mark.parametrize(("dtype", "cut"), [(torch.bfloat16, 16), (torch.float16, 13)])
@pytest.mark.parametrize("low", [1.0, 1.5, -0.75])
def test_a_number_rounds_away_from_0_exactly_as_often_as_its_rest_is_large(
    dtype: torch.dtype, cut: int, low: float
) -> None:
    """A small step, such as a learning rate of 1e-7, leaves a rest of few units."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    for rest in (0, 1, 3, 2 ** (cut - 1) + 1, 2**cut - 1):
        x = torch.full((2**16,), low).view(torch.int32).add(rest).view(torch.float32)
        found = rounding.round_to(x, dtype, bits).to(dtype)
        assert int(found.ne(low).sum()) == rest << (16 - cut), rest


def test_random_bits_are_unrelated_between_elements_steps_and_streams() -> None:
    count = 1 << 20
    out = torch.empty(count // 2, dtype=torch.int32)

    def bits(step: int, stream: int) -> torch.Tensor:
        return rounding.random_bits(count, 0, step, 0, stream, out).double() / 2**15 - 1

    one = bits(1, 0)
    pairs = [(one, bits(2, 0)), (one, bits(1, 1))]
    # Neighbors, halves of a word, and elements of neighboring words and rows.
    pairs += [(one[:-lag], one[lag:]) for lag in (1, 2, 3, 4, 64, 576, 1024)]
    for mine, other in pairs:
        assert abs(float((mine * other).mean())) < 5 / 3 / count**0.5
    assert abs(float(one.mean())) < 5 / (3 * count) ** 0.5
    assert float(one.square().mean()) == pytest.approx(1 / 3, rel=0.01)
