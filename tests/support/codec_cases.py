"""What the tests of codecs share: the codecs, shapes, gradients, and rules of a step."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from hf_dlion.codec import cpu as cpu_codec
from hf_dlion.codec import eager as eager_codec
from hf_dlion.codec.bits import pack_bits
from hf_dlion.codec.cpu import CpuCodec
from hf_dlion.codec.cuda import tables
from hf_dlion.codec.cuda.codec import TritonCodec
from hf_dlion.codec.cuda.launch import kernels
from hf_dlion.codec.eager import EagerCodec
from hf_dlion.codec.native.codec import NativeCodec
from hf_dlion.codec.native.library import library
from hf_dlion.codec.reference import votes as reference
from hf_dlion.codec.rule import StepRule, TensorRule, Verdict

COMPILED = library()

NATIVE = pytest.param(
    None if COMPILED is None else NativeCodec(COMPILED),
    id="native",
    marks=pytest.mark.skipif(COMPILED is None, reason="there is no C compiler"),
)

# In Triton's interpreter, which takes CPU tensors; tests/codec/test_triton.py starts pytest so.
KERNELS = kernels(torch.device("cpu")) if os.environ.get("TRITON_INTERPRET") == "1" else None

TRITON = [] if KERNELS is None else [pytest.param(TritonCodec(KERNELS), id="triton")]

CODECS = pytest.mark.parametrize(
    "codec",
    [pytest.param(CpuCodec(), id="cpu"), NATIVE, pytest.param(EagerCodec(), id="eager"), *TRITON],
)

SHAPES = st.one_of(
    st.tuples(),
    st.tuples(st.integers(0, 200)),
    st.tuples(st.integers(0, 9), st.integers(0, 70)),
    st.tuples(st.integers(1, 3), st.sampled_from([64, 128, 192])),
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 30)),
)

# The interpreter is slow: of so many examples tests/codec/test_triton.py has one drawn, if not all.
SHARE = int(os.environ.get("HF_DLION_EXAMPLES_SHARE", "1"))


def examples(count: int) -> settings:
    return settings(max_examples=count // SHARE, deadline=None)


def rule(**changes: Any) -> TensorRule:
    step_rule = StepRule(
        step=changes.pop("step", 3),
        rank=changes.pop("rank", 1),
        world_size=changes.pop("world_size", 3),
        aggregation=changes.pop("aggregation", "majority"),
        ties=changes.pop("ties", "alternate"),
        stochastic_rounding=changes.pop("stochastic_rounding", True),
        seed=changes.pop("seed", 7),
    )
    defaults = {"index": 2, "lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    return TensorRule(step_rule=step_rule, **(defaults | changes))


def gradients(shape: tuple[int, ...], seed: int, zero_share: float, dtype: torch.dtype) -> Tensor:
    """Values with exact zeros of both signs, whole zero rows, subnormals and large numbers."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * 10.0 ** random.integers(-4, 4, shape)
    values = np.where(random.random(shape) < zero_share, random.choice([0.0, -0.0], shape), values)
    if len(shape) >= 2 and values.size:
        values[random.random(shape[0]) < zero_share] = -0.0
    return torch.tensor(values, dtype=dtype)


def widened(tensor: Tensor) -> np.ndarray[Any, Any]:
    return (tensor if tensor.dtype == torch.float64 else tensor.float()).numpy()


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one word group, so that small tensors cross their bounds."""
    monkeypatch.setattr(cpu_codec, "CHUNK", 128)
    monkeypatch.setattr(cpu_codec, "_buffers", cpu_codec._Buffers())
    monkeypatch.setattr(eager_codec, "CHUNK", 128)
    monkeypatch.setattr(tables, "BLOCK", 128)


def rounded(
    values: np.ndarray[Any, Any], dtype: torch.dtype, tensor_rule: TensorRule, stream: int
) -> Tensor:
    if dtype in (torch.float32, torch.float64):
        return torch.tensor(values, dtype=dtype)
    step = tensor_rule.step_rule
    hashed = None
    if step.stochastic_rounding:
        hashed = reference.random_bits(
            step.seed, step.step, tensor_rule.index, stream, values.size
        ).reshape(values.shape)
    round_to = reference.round_bfloat16 if dtype == torch.bfloat16 else reference.round_float16
    bits = round_to(values, hashed)
    return torch.from_numpy(bits.view(np.int16)).view(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(integer), b.contiguous().view(integer)
    )


def verdict_of(
    sums: np.ndarray[Any, Any], votes: np.ndarray[Any, Any], row: np.ndarray[Any, Any], r: StepRule
) -> Verdict:
    """Packs sums of signs and per-row numbers of votes as an exchange would hand them over."""

    def plane(bits: np.ndarray[Any, Any]) -> Tensor:
        return pack_bits(torch.from_numpy(np.ascontiguousarray(bits.reshape(-1))))

    if r.aggregation == "average":
        negative = (votes[row] - sums) // 2
        planes = [plane(negative >> digit & 1 == 1) for digit in range(r.world_size.bit_length())]
        counts = votes
    else:
        planes = [plane(sums < 0)] + ([plane(sums != 0)] if r.ties == "zero" else [])
        counts = np.minimum(votes, 1)
    return Verdict(torch.stack(planes), torch.from_numpy(counts.astype(np.int32)))
