"""Encoding votes of more than one bit with Triton kernels (rule S6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dlion.codec.codec import EncodeJob
from hf_dlion.codec.cuda import tables
from hf_dlion.codec.cuda.launch import key_of, run
from hf_dlion.codec.cuda.tables import Launch
from hf_dlion.codec.layout import WORD_BITS, whole_run
from hf_dlion.codec.levels import LEVELS, factor_of, fold
from hf_dlion.codec.lion import compute_dtype, momentum_stream


def encode_levels(
    found: Any,
    on: Launch,
    jobs: Sequence[EncodeJob],
    zeros_in: Tensor,
    types: Mapping[str, object],
    flags: Mapping[str, bool],
) -> None:
    """Encodes some jobs of one kind; activity is 0 before.

    Args:
        found: The kernels' module.
        on: The launch.
        jobs: In its order.
        zeros_in: uint8, shape (blocks,), for the kernels' own use.
        types: What the compiler must know of the tensors.
        flags: ADVANCE and SCALED.
    """
    step, dtype = jobs[0].rule.step_rule, compute_dtype(jobs[0].grad.dtype)
    code = {
        "BITS": step.bits,
        "LARGEST": LEVELS[step.bits].largest,
        "TOP": torch.finfo(dtype).max,
    }
    measured = step.level_scale == "tensor"
    factors = zeros_in
    if measured:
        factors = _factors(found, on, jobs, zeros_in, types, flags["SCALED"])
    run(
        found.encode_levels, on.blocks, on.jobs, on.constants, on.job_of, zeros_in, factors,
        key_of(step), momentum_stream(step.rank), step.zero_phase,
        **types, **flags, **code, MEASURED=measured,
    )  # fmt: skip
    run(found.clear_levels, on.blocks, on.jobs, on.job_of, zeros_in, BITS=step.bits)


def _factors(
    found: Any,
    on: Launch,
    jobs: Sequence[EncodeJob],
    zeros_in: Tensor,
    types: Mapping[str, object],
    scaled: bool,
) -> Tensor:
    """Marks rows that vote, and returns the factor of each job, float64.

    In as many small launches for each job as its number of words has binary digits, and a few.
    """
    bits, dtype = jobs[0].rule.step_rule.bits, compute_dtype(jobs[0].grad.dtype)
    per_block = tables.BLOCK // WORD_BITS
    sums = torch.empty(on.blocks * per_block, dtype=torch.float64, device=zeros_in.device)
    run(
        found.measure,
        on.blocks,
        on.jobs,
        on.constants,
        on.job_of,
        zeros_in,
        sums,
        **types,
        SCALED=scaled,
    )
    factors, first = [], 0
    for job in jobs:
        numel = job.grad.numel()
        last = first + -(-numel // tables.BLOCK) * per_block
        # Behind a job's last word there are zeros, which change no sum.
        total = fold(sums[first:last])
        count = job.active.sum() * (job.run or whole_run(job.grad.shape)).row_numel
        factors.append(factor_of(total, count, bits, dtype).to(torch.float64))
        first = last
    return torch.cat(factors)
