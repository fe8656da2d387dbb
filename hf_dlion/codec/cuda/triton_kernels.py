"""The codec's Triton kernels: encode, apply and a step alone, each one pass over the tensors.

`hf_dlion.codec.cuda.triton` says what their common arguments are.
"""

from __future__ import annotations

from hf_dlion.codec.cuda.triton import (
    AVG_AT,
    BETA1,
    BETA2,
    DECAY,
    GRAD_AT,
    LR,
    PARAM_AT,
    REST1,
    REST2,
    ROWS_AT,
    SCALE,
    STRIDE,
    WORDS_AT,
    address,
    block_of,
    constant,
    elements,
    pack,
    read,
    round_to,
    row_of,
    rows_of,
    set_of,
    tl,
    triton,
    voters_of,
)


@triton.jit
def directions(
    job, held, start, count, key, stream,
    GRAD: tl.constexpr, AVG: tl.constexpr, WIDE: tl.constexpr, STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr, ADVANCE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns a block's directions, 0 past the end; advances its momentum if ADVANCE (S1)."""
    new = read(address(job, GRAD_AT, start, GRAD, ALIGNED), count, GRAD, WIDE, BLOCK)
    old = read(address(job, AVG_AT, start, AVG, ALIGNED), count, AVG, WIDE, BLOCK)
    if SCALED:
        new = new * constant(held, SCALE, WIDE)
    if ADVANCE:
        following = old * constant(held, BETA2, WIDE) + new * constant(held, REST2, WIDE)
        # A momentum that became Inf in a narrower dtype would stay so; a NaN passes through.
        limit: tl.constexpr = _limit(AVG, WIDE)
        if limit > 0:
            following = tl.where(following > limit, limit, following)
            following = tl.where(following < -limit, -limit, following)
        round_to(
            job, AVG_AT, start, count, following, key, stream, AVG, STOCHASTIC, ALIGNED, BLOCK
        )  # fmt: skip
    return old * constant(held, BETA1, WIDE) + new * constant(held, REST1, WIDE)


@triton.constexpr_function
def _limit(avg, wide):
    """Returns the largest finite number of a momentum narrower than the arithmetic, or else 0."""
    largest = {"fp16": 65504.0, "bf16": 2.0**128 - 2.0**120, "fp32": 2.0**128 - 2.0**104}
    return 0.0 if avg == wide else largest.get(avg.name, 0.0)


@triton.jit(do_not_specialize=["key", "stream", "phase"])
def encode(
    jobs, constants, job_of, zeros_in, key, stream, phase,
    GRAD: tl.constexpr, AVG: tl.constexpr, WIDE: tl.constexpr, STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr, ADVANCE: tl.constexpr, VOTE: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Packs signs, marks rows that vote, advances momenta; see `Codec.encode`.

    An exact zero at element k votes -1 where k + phase is odd, +1 elsewhere; a NaN votes +1. Bits
    past the end are 0. The activity must be 0 before; `clear` must follow.

    Args:
        jobs: The table.
        constants: The sets of constants.
        job_of: The job of each block.
        zeros_in: uint8 per block, receives whether a direction is exactly zero.
        key: `step_key`.
        stream: Of the momentum's rounding.
        phase: `StepRule.zero_phase`.
    """
    job, start, count = block_of(jobs, job_of, tl.program_id(0), BLOCK)
    held = set_of(job, constants)
    u = directions(
        job, held, start, count, key, stream,
        GRAD, AVG, WIDE, STOCHASTIC, ALIGNED, ADVANCE, SCALED, BLOCK,
    )  # fmt: skip
    if VOTE:
        offset = elements(BLOCK)
        zero = (u == 0) & (offset < count)
        negative = (u < 0) | (zero & ((offset + phase) % 2 == 1))
        word = tl.arange(0, BLOCK // 32)
        words = address(job, WORDS_AT, start // 32, tl.uint32, False)
        tl.store(words + word, pack(negative), mask=word < (count + 63) // 64 * 2)
        mark(job, start, count, u, zeros_in, BLOCK)


@triton.jit
def mark(job, start, count, u, zeros_in, BLOCK: tl.constexpr):
    """Marks the rows of a block in which a direction is not zero, and whether one is."""
    offset = elements(BLOCK)
    zeros = tl.sum(((u == 0) & (offset < count)).to(tl.int32))
    tl.store(zeros_in + tl.program_id(0), (zeros > 0).to(tl.uint8))
    first, touched, to_next, short = rows_of(job, start, count, BLOCK)
    active = address(job, ROWS_AT, first, tl.uint8, False)
    if touched == 1:
        if zeros < count:
            tl.store(active, 1)
    elif zeros == 0:
        each = tl.arange(0, BLOCK)
        tl.store(active + each, 1, mask=each < touched)
    else:
        row = row_of(to_next, short, BLOCK)
        tl.store(active + row, 1, mask=(offset < count) & (u != 0))


@triton.jit
def kept_of(job, start, count, BLOCK: tl.constexpr):
    """Returns which elements of a block are of rows that vote; False past the end."""
    first, _, to_next, short = rows_of(job, start, count, BLOCK)
    active = address(job, ROWS_AT, first, tl.uint8, False)
    row = row_of(to_next, short, BLOCK)
    return tl.load(active + row, mask=elements(BLOCK) < count, other=0) != 0


@triton.jit
def clear(jobs, job_of, zeros_in, BLOCK: tl.constexpr):
    """Sets the bits of rows that abstain to 0, once all blocks of `encode` have marked theirs.

    A row that abstains has zeros in every block that it touches: the other blocks return at once.
    """
    if tl.load(zeros_in + tl.program_id(0)) != 0:
        job, start, count = block_of(jobs, job_of, tl.program_id(0), BLOCK)
        kept = kept_of(job, start, count, BLOCK)
        word = tl.arange(0, BLOCK // 32)
        words = address(job, WORDS_AT, start // 32, tl.uint32, False) + word
        held = word < (count + 63) // 64 * 2
        tl.store(words, tl.load(words, mask=held, other=0) & pack(kept), mask=held)


@triton.jit
def _read_param(
    job, start, count, PARAM: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    return read(address(job, PARAM_AT, start, PARAM, ALIGNED), count, PARAM, WIDE, BLOCK)


@triton.jit
def _move(
    job, held, start, count, value, move, key,
    PARAM: tl.constexpr, WIDE: tl.constexpr, STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes p = fl(fl(p decay) - move) for a block of values p (S7)."""
    value = value * constant(held, DECAY, WIDE) - move
    # The parameters' stream is 0.
    round_to(
        job, PARAM_AT, start, count, value, key, tl.full((), 0, tl.int32),
        PARAM, STOCHASTIC, ALIGNED, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["key", "world_size"])
def apply(
    jobs, constants, job_of, key, world_size,
    PARAM: tl.constexpr, WIDE: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
    AVERAGE: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves parameters by a verdict of PLANES planes; see `Codec.apply` and `Verdict`.

    Rows on which nobody voted decay and do not move.

    Args:
        jobs: The table.
        constants: The sets of constants.
        job_of: The job of each block.
        key: `step_key`.
        world_size: N, for an average.
    """
    job, start, count = block_of(jobs, job_of, tl.program_id(0), BLOCK)
    # First, so that it is under way while the verdict is read.
    value = _read_param(job, start, count, PARAM, WIDE, ALIGNED, BLOCK)
    first, touched, to_next, short = rows_of(job, start, count, BLOCK)
    counts = address(job, ROWS_AT, first, tl.int32, False)
    voted = voters_of(counts, touched, to_next, short, count, BLOCK)

    held = set_of(job, constants)
    word = tl.arange(0, BLOCK // 32)
    there = word < (count + 63) // 64 * 2
    words = address(job, WORDS_AT, start // 32, tl.uint32, False) + word
    stride = tl.load(job + STRIDE)
    lane = tl.arange(0, 32)[None, :].to(tl.uint32)
    # A negation may be 0 - lr, by version of Triton: +0 for a learning rate of 0.
    lr = constant(held, LR, WIDE)
    if AVERAGE:
        negative = tl.full((BLOCK // 32, 32), 0, tl.int32)
        for place in tl.static_range(PLANES):
            plane = tl.load(words + place * stride, mask=there, other=0)[:, None]
            negative += ((plane >> lane) & 1).to(tl.int32) << place
        votes = (voted - 2 * negative).to(WIDE)
        total = tl.full((BLOCK // 32, 32), 0, WIDE) + world_size.to(WIDE)
        if WIDE == tl.float32:
            move = tl.div_rn(votes, total) * lr  # `/` is approximate in float32
        else:
            move = votes / total * lr
    else:
        negative = (tl.load(words, mask=there, other=0)[:, None] >> lane) & 1
        moves = voted > 0
        if PLANES == 2:
            nonzero = tl.load(words + stride, mask=there, other=0)[:, None]
            moves = moves & (((nonzero >> lane) & 1) != 0)
        move = tl.where(moves, tl.where(negative != 0, lr * -1.0, lr), 0.0)
    _move(job, held, start, count, value, move, key, PARAM, WIDE, STOCHASTIC, ALIGNED, BLOCK)


@triton.jit(do_not_specialize=["key", "stream"])
def step_alone(
    jobs, constants, job_of, key, stream,
    PARAM: tl.constexpr, GRAD: tl.constexpr, AVG: tl.constexpr, WIDE: tl.constexpr,
    STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Takes one step of plain Lion, the sign of zero and of NaN being 0; see `Codec.step_alone`."""
    job, start, count = block_of(jobs, job_of, tl.program_id(0), BLOCK)
    value = _read_param(job, start, count, PARAM, WIDE, ALIGNED, BLOCK)
    held = set_of(job, constants)
    u = directions(
        job, held, start, count, key, stream,
        GRAD, AVG, WIDE, STOCHASTIC, ALIGNED, True, False, BLOCK,
    )  # fmt: skip
    lr = constant(held, LR, WIDE)
    move = tl.where(u > 0, lr, tl.where(u < 0, lr * -1.0, 0.0))
    _move(job, held, start, count, value, move, key, PARAM, WIDE, STOCHASTIC, ALIGNED, BLOCK)
