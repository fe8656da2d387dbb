"""The Triton kernels in Triton's interpreter, on CPU tensors; run by tests/codec/test_triton.py.

Not collected by itself: TRITON_INTERPRET=1 must be in the environment before triton is imported.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_dlion.codec import AloneJob, ApplyJob, EncodeJob
from hf_dlion.codec.cpu import CpuCodec
from hf_dlion.codec.cuda import tables
from hf_dlion.codec.cuda.codec import TritonCodec
from hf_dlion.codec.cuda.launch import kernels, run
from hf_dlion.codec.eager import EagerCodec
from hf_dlion.codec.layout import words_for
from hf_dlion.codec.lion import signed32, step_key
from hf_dlion.codec.reference import votes as reference
from hf_dlion.codec.rule import Verdict
from tests.support.codec_cases import (
    SHARE,
    examples,
    gradients,
    rounded,
    rule,
    same_bits,
    widened,
)
from tests.support.oracle import bits_of

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/codec/test_triton.py"
KERNELS = kernels(torch.device("cpu"))
assert KERNELS is not None
CODEC = TritonCodec(KERNELS)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES: list[tuple[int, ...]] = [
    *((), (0,), (1,), (300,), (9, 70), (200, 1), (3, 64), (2, 192), (4, 5, 30), (1, 400)),
]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that small tensors cross."""
    monkeypatch.setattr(tables, "BLOCK", 128)


def buffers(grad: Tensor) -> tuple[Tensor, Tensor]:
    words = torch.full((words_for(grad.numel()),), -1)
    return words, torch.ones(reference.row_count(tuple(grad.shape)), dtype=torch.bool)


@examples(60)
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 10**6),
    zero_share=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from(DTYPES),
    momentum_dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.3, 1e-30]),
)
def test_a_preview_votes_on_the_scaled_gradient_and_leaves_the_momentum(
    shape: tuple[int, ...],
    seed: int,
    zero_share: float,
    dtype: torch.dtype,
    momentum_dtype: torch.dtype,
    scale: float,
) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    grad = gradients(shape, seed, zero_share, dtype)
    exp_avg = gradients(shape, seed + 1, zero_share, momentum_dtype)
    words, active = buffers(grad)
    before = exp_avg.clone()

    CODEC.preview(grad, exp_avg, words, active, rule(), scale)

    assert same_bits(exp_avg, before)
    scaled = grad.to(wide) if scale == 1.0 else grad.to(wide) * scale
    u = reference.direction(exp_avg.to(wide).numpy(), scaled.numpy(), 0.9)
    expected_words, expected_active = reference.pack_signs(u, t=3, rank=1, world_size=3)
    np.testing.assert_array_equal(active.numpy(), expected_active)
    np.testing.assert_array_equal(words.numpy().view(np.uint64), expected_words)


@pytest.mark.parametrize(
    ("dtype", "momentum_dtype"),
    [(d, m) for d in DTYPES for m in DTYPES if d == m or m != torch.float64],
    ids=str,
)
def test_an_advance_does_to_the_momentum_what_an_encoding_does(
    dtype: torch.dtype, momentum_dtype: torch.dtype
) -> None:
    for seed, shape in enumerate(SHAPES):
        grad = gradients(shape, seed, 0.1, dtype)
        ours, theirs = (gradients(shape, seed + 1, 0.1, momentum_dtype) for _ in range(2))
        CODEC.advance(grad, ours, rule())
        CpuCodec().encode(grad, theirs, *buffers(grad), rule())
        assert same_bits(ours, theirs)


def lots(seed: int) -> list[Tensor]:
    """Tensors of every shape and dtype, contiguous or not, some off the grid of 16 bytes."""
    found = []
    for k, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            tensor = gradients(shape, seed + k, 0.2, dtype)
            if k % 3 == 1:
                room = torch.empty(tensor.numel() + 1, dtype=dtype)
                tensor = room[1:].view(shape).copy_(tensor)
            elif len(shape) == 2 and k % 3 == 2:
                tensor = tensor.T.contiguous().T
            found.append(tensor)
    return found


# Where examples are few: every dtype still, and every third tensor.
SOME = slice(None, None, 1 if SHARE == 1 else 3)


def test_many_tensors_at_once_are_treated_as_each_alone() -> None:
    outcomes = []
    for codec in (CODEC, CpuCodec()):
        grads, params = lots(1)[SOME], lots(2)[SOME]
        averages = [gradients(tuple(grad.shape), 3, 0.2, grad.dtype) for grad in grads]
        rules = [
            rule(index=k, lr=0.1 * (k % 3), betas=(0.9, 0.9 + 0.01 * (k % 5)))
            for k in range(len(grads))
        ]
        made = [buffers(grad) for grad in grads]
        codec.encode_all(
            [
                EncodeJob(grad, exp_avg, *votes, constants)
                for grad, exp_avg, votes, constants in zip(
                    grads, averages, made, rules, strict=True
                )
            ]
        )
        verdicts = [Verdict(words[None], active.int()) for words, active in made]
        codec.apply_all([ApplyJob(*job) for job in zip(params, verdicts, rules, strict=True)])
        outcomes.append([*params, *averages, *(part for votes in made for part in votes)])
        codec.step_alone_all(
            [AloneJob(*job) for job in zip(params, grads, averages, rules, strict=True)]
        )
        outcomes[-1] += [*params, *averages]
    for ours, theirs in zip(*outcomes, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.tolist() == theirs.tolist()
        assert torch.equal(ours.signbit(), theirs.signbit())


@examples(100)
@given(
    patterns=st.lists(
        st.one_of(
            st.integers(0, 2**31 - 1),
            # Around the bounds of float16: 2**-24, 2**-14, its largest number, 2**16; and NaN.
            st.builds(
                lambda bound, step: bound + step,
                st.sampled_from([0x33800000, 0x38800000, 0x477FE000, 0x47800000, 0x7F800000]),
                st.integers(-(2**14), 2**14),
            ),
        ),
        min_size=1,
        max_size=12,
    ),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    negative=st.booleans(),
    stochastic_rounding=st.booleans(),
)
def test_rounding_equals_the_reference_on_every_bit_pattern(
    patterns: list[int], dtype: torch.dtype, negative: bool, stochastic_rounding: bool
) -> None:
    # A parameter of 0 becomes its learning rate, times the verdict.
    values = np.array(patterns, dtype=np.uint32).view(np.float32)
    params = [torch.zeros(1, dtype=dtype) for _ in values]
    verdict = Verdict(torch.tensor([[0 if negative else 1]]), torch.ones(1, dtype=torch.int32))
    rules = [
        rule(index=k, lr=float(v), weight_decay=0.0, stochastic_rounding=stochastic_rounding)
        for k, v in enumerate(values)
    ]
    jobs = zip(params, rules, strict=True)
    CODEC.apply_all([ApplyJob(param, verdict, constants) for param, constants in jobs])
    for value, param, constants in zip(values, params, rules, strict=True):
        expected = np.array([-value if negative else value])
        if not np.isfinite(value):
            assert param.isnan().all()  # 1 - lr * 0, the decay, is a NaN too
        elif value != 0:
            assert same_bits(param, rounded(expected, dtype, constants, stream=0)), value


def test_tensors_off_the_grid_of_16_bytes_are_launched_apart() -> None:
    room = torch.zeros(9)
    kinds = [tables.entry_of(rule(), param=room[k : k + 4]).kind.aligned for k in range(6)]
    assert kinds == [True, False, False, False, True, False]
    words, counts = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    entries = [
        tables.entry_of(rule(), param=room[k : k + 4], words=words, rows=counts) for k in range(6)
    ]
    found = list(tables.launches(entries, torch.device("cpu")))
    assert [(on.kind.aligned, on.blocks) for on in found] == [(True, 2), (False, 4)]


@pytest.mark.parametrize("first", [2**32 - 128, 2**32])
def test_elements_beyond_32_bits_have_random_bits_of_their_own(first: int) -> None:
    param = gradients((128,), 0, 0.1, torch.bfloat16)
    before = widened(param).copy()
    words, counts = torch.zeros(2, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    constants = rule()
    entry = tables.entry_of(constants, param=param, words=words[None], rows=counts)
    # A tensor whose first elements do not exist; only its last block is launched.
    entry = dataclasses.replace(
        entry,
        tensors=(param.data_ptr() - 2 * first, 0, 0),
        words=words.data_ptr() - first // 8,
        numel=first + 128,
        row_numel=first + 128,
    )
    jobs, job_of = torch.tensor([entry.row(-first // 128)]), torch.zeros(1, dtype=torch.int32)
    held = torch.tensor([entry.constants])
    run(
        KERNELS.codec.apply, 1, jobs, held, job_of, signed32(step_key(7, 3)), 3,
        PARAM=KERNELS.triton.tl.bfloat16, WIDE=KERNELS.triton.tl.float32, STOCHASTIC=True,
        ALIGNED=True, AVERAGE=False, PLANES=1,
    )  # fmt: skip
    expected = reference.apply_verdict(before, np.ones(128), 0.01, 0.1)
    random = reference.random_bits(7, 3, 2, 0, 128, start=first)
    bits = torch.from_numpy(reference.round_bfloat16(expected, random).view(np.int16))
    assert torch.equal(param.view(torch.int16), bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_of_the_momentum_stays_one(dtype: torch.dtype) -> None:
    exp_avg = torch.tensor([torch.nan, 1.0]).to(dtype)
    # All ones: whatever is added to its low bits carries into the sign.
    exp_avg.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[exp_avg.element_size()])[0] = -1
    param = torch.ones(2, dtype=dtype)
    CODEC.step_alone(param, torch.ones(2, dtype=dtype), exp_avg, rule())
    assert exp_avg.isnan().tolist() == [True, False]
    assert param[0] > param[1]  # the sign of NaN is 0


@pytest.mark.parametrize("level_scale", ["word", "tensor"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_levels_of_many_tensors_are_those_of_each_alone(bits: int, level_scale: Any) -> None:
    outcomes = []
    for codec in (CODEC, CpuCodec()):
        grads = lots(1)[SOME]
        averages = [gradients(tuple(grad.shape), 3, 0.2, grad.dtype) for grad in grads]
        rules = [rule(index=k, betas=(0.9, 0.9 + 0.01 * (k % 5))) for k in range(len(grads))]
        rules = [
            dataclasses.replace(
                own,
                step_rule=dataclasses.replace(own.step_rule, bits=bits, level_scale=level_scale),
            )
            for own in rules
        ]
        jobs = []
        for grad, exp_avg, own in zip(grads, averages, rules, strict=True):
            words, active = buffers(grad)
            jobs.append(EncodeJob(grad, exp_avg, words.repeat(bits), active, own))
        codec.encode_all(jobs)
        outcomes.append([part for job in jobs for part in (job.exp_avg, job.words, job.active)])
    for ours, theirs in zip(*outcomes, strict=True):
        assert bits_of(ours) == bits_of(theirs)


@pytest.mark.parametrize("scale", [None, 3.0, 2.0**16, 1e-30])
@pytest.mark.parametrize("poison", [None, torch.nan, torch.inf, -torch.inf])
def test_gradients_are_unscaled_and_checked_as_by_torch(
    scale: float | None, poison: float | None
) -> None:
    for seed, dtype in enumerate(DTYPES):
        outcomes = []
        for codec in (CODEC, EagerCodec()):
            grads = [own.clamp(-1e4, 1e4) for own in lots(seed) if own.dtype == dtype]
            grads.append(gradients((7, 9), seed, 0.1, dtype).clamp(-1e4, 1e4)[:, 2:5])
            if poison is not None:
                grads[seed + 3].view(-1)[-1] = poison
            versions = [grad._version for grad in grads]
            by = None if scale is None else torch.tensor(scale)
            finite = codec.all_finite(grads, by)
            assert finite.dtype == torch.bool
            assert finite.shape == ()
            outcomes.append([bool(finite), *map(bits_of, grads)])
            # Whoever marked a gradient by its version must see that it changed.
            moved = [v != g._version for v, g in zip(versions, grads, strict=True) if g.numel()]
            assert all(moved) if scale is not None else not any(moved)
        assert outcomes[0] == outcomes[1]
        if scale != 1e-30:
            assert outcomes[0][0] == (poison is None)


def test_the_magnitudes_of_some_elements_are_those_that_torch_finds() -> None:
    grads = [grad for grad in lots(5) if grad.numel()]
    grads += [gradients((40, 17), 1, 0.1, torch.bfloat16), gradients((129,), 2, 0.1, torch.float64)]
    expected = EagerCodec().magnitudes(grads)[0][1]
    told = CODEC.magnitudes(grads)
    assert sorted(place for places, _ in told for place in places) == list(range(len(grads)))
    for places, sums in told:
        torch.testing.assert_close(sums, expected[places], rtol=1e-12, atol=0.0)
