"""The Triton kernels of votes of more than one bit (rule S6).

`hf_dlion.codec.cuda.triton` names their common arguments, `hf_dlion.codec.levels` what a level
and its factor are. A word of the direction is 64 elements; its codes take 2 * BITS words of 32
bits. BITS, LARGEST and SPACING, and TOP, the largest finite number of the arithmetic, are known to
the compiler.
"""

from __future__ import annotations

from hf_dlion.codec.cuda.triton import WORDS_AT, address, block_of, pack, set_of, tl, triton
from hf_dlion.codec.cuda.triton_count import voters_of_block
from hf_dlion.codec.cuda.triton_kernels import directions, kept_of, mark


@triton.jit
def _magnitude_sums(u, BLOCK: tl.constexpr):
    """Returns the sum of |u| over each word, float64: halves are added, then their halves, ..."""
    # A sum of two is the same in either order.
    sums = tl.sum(tl.reshape(tl.abs(u).to(tl.float64), (BLOCK // 64, 2, 32)), axis=1)
    sums = tl.sum(tl.reshape(sums, (BLOCK // 64, 2, 16)), axis=1)
    sums = tl.sum(tl.reshape(sums, (BLOCK // 64, 2, 8)), axis=1)
    sums = tl.sum(tl.reshape(sums, (BLOCK // 64, 2, 4)), axis=1)
    sums = tl.sum(tl.reshape(sums, (BLOCK // 64, 2, 2)), axis=1)
    return tl.sum(tl.reshape(sums, (BLOCK // 64, 2)), axis=1)


@triton.jit
def _factors(
    u, WIDE: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr, TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the factor of each word; see `hf_dlion.codec.levels.factor_of`."""
    nonzero = tl.sum(tl.reshape((u != 0).to(tl.int32), (BLOCK // 64, 64)), axis=1)
    # Of a word of zeros the mean is 0, and so is the factor; nothing is divided by 0.
    mean = _magnitude_sums(u, BLOCK) / tl.maximum(nonzero, 1).to(tl.float64)
    if BITS == 2:
        factor = mean * 1.5
    else:
        half = tl.full((BLOCK // 64,), LARGEST / 2, tl.float64)
        factor = tl.where(mean > 0, half / tl.where(mean > 0, mean, 1.0), 0.0)
        factor = tl.where(factor > TOP, TOP, factor)
    return factor.to(WIDE)


@triton.jit
def pack_codes(codes, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the 32-bit words that hold a block's codes, shape (BLOCK // 64, 2 * BITS).

    Args:
        codes: uint32, shape (BLOCK // 32, 32).
    """
    if BITS == 8:
        octets = codes
    else:
        # Octet j of a word holds the codes of elements j, j + 8 * BITS, ...
        parts = tl.reshape(codes, (BLOCK // 64, 8 // BITS, 8 * BITS))
        place = tl.arange(0, 8 // BITS)[None, :, None].to(tl.uint32)
        octets = tl.sum(parts << (BITS * place), axis=1)
    octets = tl.reshape(octets, (BLOCK // 64, 2 * BITS, 4))
    place = tl.arange(0, 4)[None, None, :].to(tl.uint32)
    return tl.sum(octets << (8 * place), axis=2)


@triton.jit
def _places(job, start, count, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns where the words of a block's codes are, and which of them there are."""
    word = tl.arange(0, BLOCK // 64)[:, None]
    part = tl.arange(0, 2 * BITS)[None, :]
    words = address(job, WORDS_AT, start // 64 * (2 * BITS), tl.uint32, False)
    return words + word * (2 * BITS) + part, (word < (count + 63) // 64) & (part >= 0)


@triton.jit
def measure(
    jobs, constants, job_of, zeros_in, sums,
    GRAD: tl.constexpr, AVG: tl.constexpr, WIDE: tl.constexpr, STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Marks rows that vote and adds up magnitudes; momenta stay as they are.

    The activity must be 0 before.

    Args:
        jobs: The table.
        constants: The sets of constants.
        job_of: The job of each block.
        zeros_in: uint8 per block, receives whether a direction is exactly zero.
        sums: float64 per word of each block, BLOCK / 64 of them; receives the sums of |u|.
    """
    job, start, count = block_of(jobs, job_of, tl.program_id(0), BLOCK)
    none = tl.full((), 0, tl.int32)
    u = directions(
        job, set_of(job, constants), start, count, none, none,
        GRAD, AVG, WIDE, STOCHASTIC, ALIGNED, False, SCALED, BLOCK,
    )  # fmt: skip
    mark(job, start, count, u, zeros_in, BLOCK)
    word = tl.program_id(0) * (BLOCK // 64) + tl.arange(0, BLOCK // 64)
    tl.store(sums + word, _magnitude_sums(u, BLOCK))


@triton.jit(do_not_specialize=["key", "stream", "phase"])
def encode_levels(
    jobs, constants, job_of, zeros_in, factors, key, stream, phase,
    GRAD: tl.constexpr, AVG: tl.constexpr, WIDE: tl.constexpr, STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr, ADVANCE: tl.constexpr, SCALED: tl.constexpr, MEASURED: tl.constexpr,
    BITS: tl.constexpr, LARGEST: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Packs levels, marks rows that vote, advances momenta; see `Codec.encode`.

    `clear_levels` must follow.

    Args:
        jobs: The table.
        constants: The sets of constants.
        job_of: The job of each block.
        zeros_in: uint8 per block, receives whether a direction is exactly zero.
        factors: If MEASURED, by `measure`, which marked the rows then: float64 per job, what its
            directions are multiplied by, or with 2 bits compared with. Otherwise every word has a
            factor of its own, and the activity must be 0 before.
        key: `step_key`.
        stream: Of the momentum's rounding.
        phase: `StepRule.zero_phase`.
    """
    job, start, count = block_of(jobs, job_of, tl.program_id(0), BLOCK)
    u = directions(
        job, set_of(job, constants), start, count, key, stream,
        GRAD, AVG, WIDE, STOCHASTIC, ALIGNED, ADVANCE, SCALED, BLOCK,
    )  # fmt: skip
    if MEASURED:
        factor = tl.load(factors + tl.load(job_of + tl.program_id(0))).to(WIDE)
        factor = tl.full((BLOCK // 64,), 0, WIDE) + factor
    else:
        mark(job, start, count, u, zeros_in, BLOCK)
        factor = _factors(u, WIDE, BITS, LARGEST, TOP, BLOCK)

    u = tl.reshape(u, (BLOCK // 64, 64))
    offset = tl.arange(0, BLOCK // 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    if BITS == 2:
        negative = (u < 0) | ((u == 0) & ((offset + phase) % 2 == 1))
        far = (tl.abs(u) > factor[:, None]).to(tl.int32)
        level = tl.where(negative, 1 - far, 2 + far)
    else:
        scaled = u * factor[:, None]
        # Comparisons, because a clamp may keep a NaN.
        scaled = tl.where(scaled < LARGEST, scaled, LARGEST * 1.0)
        scaled = tl.where(scaled > -LARGEST, scaled, LARGEST * -1.0)
        # Beside this number the next ones are whole, and a sum rounds to nearest, halves to even.
        whole: tl.constexpr = 1.5 * 2.0**52 if WIDE == tl.float64 else 1.5 * 2.0**23
        level = ((scaled + whole) - whole).to(tl.int32) + LARGEST
    level = tl.where(offset < count, level, 0)
    codes = tl.reshape(level, (BLOCK // 32, 32)).to(tl.uint32)
    words, held = _places(job, start, count, BITS, BLOCK)
    tl.store(words, pack_codes(codes, BITS, BLOCK), mask=held)


@triton.jit
def clear_levels(jobs, job_of, zeros_in, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sets the codes of rows that abstain to 0; see `hf_dlion.codec.cuda.triton_kernels.clear`."""
    if tl.load(zeros_in + tl.program_id(0)) != 0:
        job, start, count = block_of(jobs, job_of, tl.program_id(0), BLOCK)
        ones = kept_of(job, start, count, BLOCK).to(tl.uint32) * ((1 << BITS) - 1)
        words, held = _places(job, start, count, BITS, BLOCK)
        kept = tl.load(words, mask=held, other=0) & pack_codes(ones, BITS, BLOCK)
        tl.store(words, kept, mask=held)


@triton.jit(do_not_specialize=["stride", "ranks", "out_stride", "tie_word"])
def sum_levels(
    jobs, job_of, votes, row_bits, stride, ranks, counts, out, out_stride, tie_word, sums,
    BITS: tl.constexpr, LARGEST: tl.constexpr, SPACING: tl.constexpr, ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up levels and writes the verdict on them; strides are in words of 32 bits.

    Args:
        jobs: The table, as for `hf_dlion.codec.cuda.triton_count.count`; WORDS_AT is the place in a
            plane.
        job_of: The job of each block.
        votes: uint32, a row of BITS times as many words per rank.
        row_bits: As for `count`, and so are `stride`, `ranks`, `counts`, `out`, `out_stride`,
            `tie_word`, `ZERO` and `BLOCK`.
        sums: int64, two elements, to which are added the sum over the elements of |sum of the
            levels|, and that over ranks too of |level|.
    """
    job, start, numel = block_of(jobs, job_of, tl.program_id(0), BLOCK)
    voters, _, _ = voters_of_block(job, start, numel, row_bits, stride, ranks, counts, False, BLOCK)
    voters = tl.reshape(voters, (BLOCK // 64, 64))
    word = tl.arange(0, BLOCK // 64)[:, None]
    element = tl.arange(0, 64)[None, :]
    inside = word * 64 + element < numel
    octet, place = element % (8 * BITS), element // (8 * BITS)
    shift = (octet % 4 * 8 + place * BITS).to(tl.uint32)
    first = tl.load(job + WORDS_AT) + start // 32
    source = votes + first * BITS + word * (2 * BITS) + octet // 4
    total = tl.full((BLOCK // 64, 64), 0, tl.int32)
    magnitude = tl.full((BLOCK // 64, 64), 0, tl.int32)
    for _ in range(ranks):
        packed = tl.load(source, mask=inside, other=0)
        code = ((packed >> shift) & ((1 << BITS) - 1)).to(tl.int32)
        level = code * SPACING - LARGEST
        total += level
        magnitude += tl.abs(level)
        source += stride
    # Of those that abstain the code 0 was taken for the lowest level.
    absent = (ranks - voters) * LARGEST
    total += absent
    tl.atomic_add(sums, tl.sum(tl.where(inside, tl.abs(total), 0).to(tl.int64)))
    tl.atomic_add(sums + 1, tl.sum(tl.where(inside, magnitude - absent, 0).to(tl.int64)))

    each = tl.arange(0, BLOCK // 32)
    held = each < (numel + 63) // 64 * 2
    at = out + first + each
    # A word of 0 comes as 32 bits.
    tie = (tie_word.to(tl.int64) >> element.to(tl.int64)) & 1
    negative = (total < 0) | ((total == 0) & (tie == 1))
    if ZERO:
        nonzero = inside & (total != 0) & (voters > 0)
        tl.store(at + out_stride, pack(tl.reshape(nonzero, (BLOCK // 32, 32))), mask=held)
    negative = inside & negative & (voters > 0)
    tl.store(at, pack(tl.reshape(negative, (BLOCK // 32, 32))), mask=held)
