"""The magnitude to which the levels of voters are relative."""

from __future__ import annotations

import math

import pytest
import torch

from hf_dlion.core.quantized_mean import Scale
from hf_dlion.core.slot import Slot


@pytest.mark.parametrize(("of_largest", "expected"), [(True, 2.0), (False, 1.5)])
def test_a_magnitude_is_of_voters_with_a_finite_amount(of_largest: bool, expected: float) -> None:
    slot, scale = Slot.of(torch.ones(64), 0), Scale(4, of_largest=of_largest, factor=0.5)
    scale.set_magnitudes([slot], [[2.0], [0.0], [math.inf], [math.nan], [4.0]])
    assert slot.magnitude == expected
    scale.set_magnitudes([slot], [[0.0], [0.0], [0.0]])
    assert slot.magnitude == 0.0
