"""What the Triton kernels for CUDA are made of: tables of jobs, packing, rounding, rows.

This is the package's only import of triton, and `hf_dlion.codec.cuda.launch` the only way to it.

Every kernel works on many tensors: a program takes one block of one job. `jobs` is an int64 table
with a row per job, whose columns are named below (addresses and sizes); `job_of` is int32, the job
of each block; `constants` is int64, a row of floating constants, as their bits, for every set of
them that jobs have: these change with the learning rate, and the jobs mostly do not. The formulas
are those of `hf_dlion.codec.lion` and `hf_dlion.codec.reference`, which these equal bit for bit:
launch with enable_fp_fusion=False, so that every product and every sum is rounded by itself. Bits
are packed 32 at a time: on a little-endian device two such words are the int64 word of the rule.

Common arguments, known to the compiler: GRAD, AVG, PARAM, WIDE: Triton's dtypes of the tensors and
of the arithmetic; STOCHASTIC: how narrow tensors are rounded; ALIGNED: all tensors begin at
multiples of 16 bytes; BLOCK: elements per program, a power of two of at least 64. `key` is
`hf_dlion.codec.lion.step_key`, as int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The columns of a row of `jobs`.
PARAM_AT = tl.constexpr(0)
GRAD_AT = tl.constexpr(1)
AVG_AT = tl.constexpr(2)
WORDS_AT = tl.constexpr(3)  # the votes, or the verdict's planes
ROWS_AT = tl.constexpr(4)  # bool activity, or int32 counts
NUMEL = tl.constexpr(5)
ROW_NUMEL = tl.constexpr(6)
FIRST_BLOCK = tl.constexpr(7)
INDEX = tl.constexpr(8)  # of the parameter
STRIDE = tl.constexpr(9)  # from plane to plane, in 32-bit words
SET = tl.constexpr(10)  # the job's row of `constants`
SKIPPED = tl.constexpr(11)  # elements of the first row that lie before the job
START = tl.constexpr(12)  # elements of the parameter that lie before the job
COLUMNS = tl.constexpr(13)

# The columns of a row of `constants`.
BETA1 = tl.constexpr(0)
REST1 = tl.constexpr(1)
BETA2 = tl.constexpr(2)
REST2 = tl.constexpr(3)
DECAY = tl.constexpr(4)
LR = tl.constexpr(5)
SCALE = tl.constexpr(6)  # of the gradient
CONSTANTS = tl.constexpr(7)


@triton.jit
def _mix(x):
    """Returns uint32 x after the finaliser "lowbias32"."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def rounding_key(key, job, stream, element):
    """Returns the uint32 key of the random bits of an element, counted in its parameter."""
    key = key.to(tl.uint32, bitcast=True)
    key = _mix((key ^ tl.load(job + INDEX).to(tl.uint32)) + 0x9E3779B9)
    key = _mix((key ^ stream.to(tl.uint32)) + 0x9E3779B9)
    return _mix((key ^ (element >> 32).to(tl.uint32)) + 0x9E3779B9)


@triton.jit
def set_of(job, constants):
    """Returns the row of a job's constants."""
    return constants + tl.load(job + SET) * CONSTANTS


@triton.jit
def constant(held, COLUMN: tl.constexpr, WIDE: tl.constexpr):
    """Returns a floating constant, stored as its bits, of a row of them."""
    bits = tl.load(held + COLUMN)
    if WIDE == tl.float32:
        bits = bits.to(tl.int32)
    return bits.to(WIDE, bitcast=True)


@triton.jit
def block_of(jobs, job_of, block, BLOCK: tl.constexpr):
    """Returns a block's job's row, its first element, and how many elements it has."""
    job = jobs + tl.load(job_of + block).to(tl.int64) * COLUMNS
    start = (block - tl.load(job + FIRST_BLOCK)) * BLOCK
    return job, start, tl.minimum(tl.load(job + NUMEL) - start, BLOCK).to(tl.int32)


@triton.jit
def elements(BLOCK: tl.constexpr):
    """Returns the elements' places in a block, 32 to a row: one row is one packed word."""
    return tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def pack(flags):
    """Returns the 32-bit words that hold the flags, one word per row."""
    return tl.sum(flags.to(tl.uint32) << tl.arange(0, 32)[None, :].to(tl.uint32), axis=1)


@triton.jit
def address(job, COLUMN: tl.constexpr, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Returns the place of element `start` of a job's tensor."""
    first = tl.load(job + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first + start


@triton.jit
def read(at, count, TYPE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a block's values in WIDE, 0 past the end."""
    offset = elements(BLOCK)
    # A mask keeps loads from being 16 bytes long; only a tensor's last block needs one.
    if count == BLOCK:
        values = tl.load(at + offset)
    else:
        values = tl.load(at + offset, mask=offset < count, other=0)
    # Through float32, which holds every narrow number exactly.
    if TYPE != tl.float64:
        values = values.to(tl.float32)
    return values.to(WIDE)


@triton.jit
def write(at, values, count, BLOCK: tl.constexpr):
    """Writes a block's values, as they are."""
    offset = elements(BLOCK)
    if count == BLOCK:
        tl.store(at + offset, values)
    else:
        tl.store(at + offset, values, mask=offset < count)


@triton.jit
def _bfloat16(bits, random, STOCHASTIC: tl.constexpr):
    """Returns the bfloat16 bits of float32 bits; NaN stays a NaN, large values become Inf."""
    if STOCHASTIC:
        added = random & 0xFFFF
    else:
        added = ((bits >> 16) & 1) + 0x7FFF
    # A NaN could carry into the sign and become zero.
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(nan, 0x7FC0, (bits + added) >> 16).to(tl.uint16)


@triton.jit
def _float16(values, bits, random):
    """Returns the float16 bits of float32 values, rounded stochastically.

    Below 2**-14 float16 has the fixed step 2**-24, and 16 random bits decide; above, the low 13
    bits of the float32 do. Magnitudes of 2**16 and more become Inf; NaN stays a NaN.
    """
    magnitude = bits & 0x7FFFFFFF
    small = magnitude < 0x38800000  # 2**-14
    steps = tl.where(small, tl.abs(values) * 1099511627776.0, 0.0).to(tl.int32).to(tl.uint32)
    steps = (steps + (random & 0xFFFF)) >> 16
    # A float32 exponent counts from -127, a float16 exponent from -15.
    normal = (magnitude + (random & 0x1FFF)) >> 13
    normal = tl.where(normal > 0x23C00, 0x23C00, normal) - 0x1C000
    rounded = tl.where(small, steps, normal)
    rounded = tl.where(magnitude > 0x7F800000, 0x7E00, rounded)
    return (rounded | ((bits >> 16) & 0x8000)).to(tl.uint16)


@triton.jit
def as_bits(values, TYPE: tl.constexpr):
    """Returns values in the bits of TYPE, rounded to nearest, ties to even."""
    if TYPE == tl.float64:
        return values.to(tl.int64, bitcast=True)
    elif TYPE == tl.float32:
        return values.to(tl.int32, bitcast=True)
    elif TYPE == tl.bfloat16:
        bits = values.to(tl.float32).to(tl.uint32, bitcast=True)
        return _bfloat16(bits, bits, False)
    else:
        return values.to(tl.float16).to(tl.uint16, bitcast=True)


@triton.jit
def round_to(
    job, COLUMN: tl.constexpr, start, count, values, key, stream,
    TYPE: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a block's values to a tensor of TYPE, rounded as `hf_dlion.codec.lion` says."""
    if TYPE == tl.float32 or TYPE == tl.float64:
        write(address(job, COLUMN, start, TYPE, ALIGNED), values.to(TYPE), count, BLOCK)
    else:
        # A float64 value is narrowed first, as everywhere.
        values = values.to(tl.float32)
        bits = values.to(tl.uint32, bitcast=True)
        random = bits
        if STOCHASTIC:
            # Of a stretch a block may cross element 2**32, where the key changes.
            element = start + tl.load(job + START)
            before = tl.minimum(0x100000000 - (element & 0xFFFFFFFF), BLOCK).to(tl.int32)
            counter = element.to(tl.uint32) + elements(BLOCK).to(tl.uint32)
            random = counter ^ rounding_key(key, job, stream, element)
            if before < BLOCK:
                after = rounding_key(key, job, stream, element + BLOCK - 1)
                random = tl.where(elements(BLOCK) < before, random, counter ^ after)
            random = _mix(random)
        if TYPE == tl.bfloat16:
            rounded = _bfloat16(bits, random, STOCHASTIC)
        elif STOCHASTIC:
            rounded = _float16(values, bits, random)
        else:
            rounded = values.to(tl.float16).to(tl.uint16, bitcast=True)
        write(address(job, COLUMN, start, tl.uint16, ALIGNED), rounded, count, BLOCK)


@triton.jit
def rows_of(job, start, count, BLOCK: tl.constexpr):
    """Returns a block's first row, how many it touches, and for `row_of` two lengths.

    They are the elements up to the second row, and those of a row, in 32 bits whatever the tensor's
    size: beyond a block's length no row needs to be measured.
    """
    row_numel = tl.load(job + ROW_NUMEL)
    start += tl.load(job + SKIPPED)
    first = start // row_numel
    to_next = tl.minimum((first + 1) * row_numel - start, BLOCK).to(tl.int32)
    short = tl.minimum(row_numel, BLOCK).to(tl.int32)
    touched = tl.where(count <= to_next, 1, (count - to_next - 1) // short + 2)
    return first, touched, to_next, short


@triton.jit
def row_of(to_next, short, BLOCK: tl.constexpr):
    """Returns the elements' rows, counted from the block's first; the arguments are `rows_of`'s.

    A division for each element: to be called where a block touches several rows, and only there.
    """
    offset = elements(BLOCK)
    return tl.where(offset < to_next, 0, (offset - to_next) // short + 1)


@triton.jit
def voters_of(counts, touched, to_next, short, count, BLOCK: tl.constexpr):
    """Returns how many ranks voted on each element of a block, 0 or anything past the end.

    Args:
        counts: Place of the int32 count of the block's first row.
        touched: How many rows there are.
        to_next: As for `row_of`.
        short: As for `row_of`.
        count: How many elements.
    """
    lowest = tl.load(counts)
    highest = lowest
    # Mostly a block lies in one row.
    if touched > 1:
        each = tl.arange(0, BLOCK)
        lowest = tl.min(tl.load(counts + each, mask=each < touched, other=0x7FFFFFFF), axis=0)
        highest = tl.max(tl.load(counts + each, mask=each < touched, other=0), axis=0)
    voters = tl.full((BLOCK // 32, 32), 0, tl.int32) + lowest
    # Only where rows differ is a count fetched for each element.
    if lowest != highest:
        row = row_of(to_next, short, BLOCK)
        voters = tl.load(counts + row, mask=elements(BLOCK) < count, other=0)
    return voters
