"""The Triton kernels that look at gradients beside votes: whether they are finite, how large.

`hf_dlion.codec.cuda.triton` names their common arguments.
"""

from __future__ import annotations

from hf_dlion.codec.cuda.triton import (
    COLUMNS,
    GRAD_AT,
    NUMEL,
    ROWS_AT,
    address,
    as_bits,
    block_of,
    read,
    rows_of,
    tl,
    triton,
    write,
)


@triton.jit
def check(
    jobs, job_of, scale, finite,
    GRAD: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Divides gradients by a scale if SCALED, and sets `finite` to 0 where a NaN or an Inf is.

    A product is rounded to nearest, ties to even, as torch does with the scale's inverse.

    Args:
        jobs: The table.
        job_of: The job of each block.
        scale: float64, one element; not read unless SCALED.
        finite: uint8, one element.
    """
    job, start, count = block_of(jobs, job_of, tl.program_id(0), BLOCK)
    at = address(job, GRAD_AT, start, GRAD, ALIGNED)
    values = read(at, count, GRAD, WIDE, BLOCK)
    if SCALED:
        values = values * (1.0 / tl.load(scale)).to(WIDE)
    bits = as_bits(values, GRAD)
    if SCALED:
        write(at.to(tl.pointer_type(bits.dtype)), bits, count, BLOCK)
    if GRAD == tl.float64:
        infinite = (bits & 0x7FFFFFFFFFFFFFFF) >= 0x7FF0000000000000
    elif GRAD == tl.float32:
        infinite = (bits & 0x7FFFFFFF) >= 0x7F800000
    elif GRAD == tl.bfloat16:
        infinite = (bits & 0x7FFF) >= 0x7F80
    else:
        infinite = (bits & 0x7FFF) >= 0x7C00
    if tl.max(tl.max(infinite.to(tl.int32), axis=1), axis=0) != 0:
        tl.store(finite, 0)


@triton.jit
def prepare(jobs, job_of, BLOCK: tl.constexpr):
    """Sets the activity of all rows to 0."""
    job, start, count = block_of(jobs, job_of, tl.program_id(0), BLOCK)
    first, touched, _, _ = rows_of(job, start, count, BLOCK)
    each = tl.arange(0, BLOCK)
    none = tl.full((BLOCK,), 0, tl.uint8)
    tl.store(address(job, ROWS_AT, first, tl.uint8, False) + each, none, mask=each < touched)


@triton.jit
def probe(jobs, magnitudes, GRAD: tl.constexpr, PROBED: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up |x| + x / 2 of PROBED elements x of each gradient, evenly spaced, in float64.

    Args:
        jobs: The table; a program takes a job, whatever its length.
        magnitudes: float64, one per job.
    """
    job = jobs + tl.program_id(0).to(tl.int64) * COLUMNS
    numel = tl.load(job + NUMEL)
    place = tl.arange(0, PROBED) * ((numel + PROBED - 1) // PROBED)
    at = address(job, GRAD_AT, place, GRAD, False)
    values = tl.load(at, mask=place < numel, other=0)
    if GRAD != tl.float64:
        values = values.to(tl.float32)
    values = values.to(tl.float64)
    tl.store(magnitudes + tl.program_id(0), tl.sum(tl.abs(values) + 0.5 * values, axis=0))
