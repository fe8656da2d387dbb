"""The Triton kernels that count packed votes of one bit (rule S4, S5).

`hf_dlion.codec.count` says what is counted. In a table of a shard's stretches WORDS_AT and ROWS_AT
hold the places of a stretch's first 32-bit word among a rank's votes, and in a plane, and of its
first row among the shard's.
"""

from __future__ import annotations

from hf_dlion.codec.cuda.triton import (
    ROWS_AT,
    WORDS_AT,
    block_of,
    elements,
    pack,
    row_of,
    rows_of,
    tl,
    triton,
)


@triton.jit
def _voters_of_rows(
    row_bits, stride, ranks, counts, first, touched, AVERAGE: tl.constexpr, ROWS: tl.constexpr
):
    """Writes how many ranks vote on each row of a block; returns the least of them and the most."""
    each = tl.arange(0, ROWS)
    inside = each < touched
    place = first + each
    source = row_bits + place // 32
    shift = (place % 32).to(tl.int32)
    voters = tl.full((ROWS,), 0, tl.int32)
    for _ in range(ranks):
        voters += (tl.load(source, mask=inside, other=0) >> shift) & 1
        source += stride
    # Blocks that share a row write the same number.
    kept = voters if AVERAGE else tl.minimum(voters, 1)
    tl.store(counts + place, kept, mask=inside)
    lowest = tl.min(tl.where(inside, voters, 0x7FFFFFFF), axis=0)
    return lowest, tl.max(tl.where(inside, voters, 0), axis=0)


@triton.jit
def voters_of_block(
    job, start, count, row_bits, stride, ranks, counts, AVERAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Counts a block's voters, and writes those of its rows.

    Args:
        job: The table's row.
        start: First element of the block.
        count: How many there are.
        row_bits: int32, which rows a rank votes on.
        stride: From rank to rank.
        ranks: N.
        counts: int32 per row of the shard, receives how many vote on it, or whether any does.
        AVERAGE: Which of the two.
        BLOCK: Elements per program.

    Returns:
        How many ranks vote on each element, shape (BLOCK // 32, 32), and the least and the most of
        them. Past the end there may be anything.
    """
    first, touched, to_next, short = rows_of(job, start, count, BLOCK)
    first += tl.load(job + ROWS_AT)
    # Mostly a block lies in a few rows.
    if touched <= 32:
        lowest, highest = _voters_of_rows(
            row_bits, stride, ranks, counts, first, touched, AVERAGE, 32
        )
    else:
        lowest, highest = _voters_of_rows(
            row_bits, stride, ranks, counts, first, touched, AVERAGE, BLOCK
        )
    voters = tl.full((BLOCK // 32, 32), 0, tl.int32) + lowest
    if lowest != highest:
        place = first + row_of(to_next, short, BLOCK)
        source = row_bits + place // 32
        shift = (place % 32).to(tl.int32)
        inside = elements(BLOCK) < count
        voters = tl.full((BLOCK // 32, 32), 0, tl.int32)
        for _ in range(ranks):
            voters += (tl.load(source, mask=inside, other=0) >> shift) & 1
            source += stride
    return voters, lowest, highest


@triton.jit
def _ones(words):
    """Returns the number of ones in each uint32 word, as int32."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _plus(planes, vote, DIGITS: tl.constexpr):
    """Returns bit-sliced counters with a vote added: a ripple of half adders."""
    total = ()
    for digit in tl.static_range(DIGITS):
        total = total + (planes[digit] ^ vote,)
        vote = planes[digit] & vote
    return total


@triton.jit(do_not_specialize=["stride", "ranks", "out_stride", "tie_word"])
def count(
    jobs, job_of, votes, row_bits, stride, ranks, counts, out, out_stride, tie_word, sums,
    DIGITS: tl.constexpr, AVERAGE: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts votes and writes the verdict on them; strides are in words of 32 bits.

    Args:
        jobs: The table.
        job_of: The job of each block.
        votes: uint32, a row of words per rank; 0 in a row of a parameter that abstains.
        row_bits: int32, which rows each rank votes on.
        stride: From rank to rank, of both.
        ranks: N.
        counts: int32 per row of the shard; see `voters_of_block`.
        out: uint32, receives the planes; a single one may be a row of votes.
        out_stride: From plane to plane.
        tie_word: int64, `TieRule.word`.
        sums: int64, two elements, to which are added the sum over all elements of |n - 2 c|, c of n
            votes being negative, and N for each element on which any rank votes.
        DIGITS: The bit length of N.
        AVERAGE: The planes are the counters.
        ZERO: A second plane says where the verdict is not 0.
        BLOCK: Elements per program.
    """
    job, start, numel = block_of(jobs, job_of, tl.program_id(0), BLOCK)
    voters, lowest, highest = voters_of_block(
        job, start, numel, row_bits, stride, ranks, counts, AVERAGE, BLOCK
    )
    word = tl.arange(0, BLOCK // 32)
    held = word < (numel + 63) // 64 * 2
    at = tl.load(job + WORDS_AT) + start // 32 + word
    none = tl.full((BLOCK // 32,), 0, tl.uint32)
    planes = ()
    for _ in tl.static_range(DIGITS):
        planes = planes + (none,)
    source = votes + at
    for _ in range(ranks):
        planes = _plus(planes, tl.load(source, mask=held, other=0), DIGITS)
        source += stride

    inside = elements(BLOCK) < numel
    totals = ()
    for digit in tl.static_range(DIGITS):
        total = none - ((lowest >> digit) & 1).to(tl.uint32)
        if lowest != highest:
            total = pack(inside & (((voters >> digit) & 1) == 1))
        totals = totals + (total,)

    # Twice the counter against the total, from the highest digit.
    greater, equal, voted = none, ~none, none
    for back in tl.static_range(DIGITS + 1):
        twice, total = none, none
        if back < DIGITS:
            twice = planes[DIGITS - 1 - back]
        if back > 0:
            total = totals[DIGITS - back]
        greater = greater | (equal & twice & ~total)
        equal = equal & ~(twice ^ total)
        voted = voted | total

    # |n - 2 c| is n - 2 c where c is at most half of n, and 4 c - 2 n more than that elsewhere.
    found = none.to(tl.int32)
    for digit in tl.static_range(DIGITS):
        both, plane = totals[digit] & greater, planes[digit]
        found += (4 * _ones(plane & greater) - 2 * _ones(plane) - 2 * _ones(both)) << digit
    cast, reached = lowest * numel, tl.where(lowest > 0, numel, 0)
    if lowest != highest:
        seen = tl.where(inside, voters, 0)
        cast = tl.sum(tl.sum(seen, axis=1), axis=0)
        reached = tl.sum(tl.sum((seen > 0).to(tl.int32), axis=1), axis=0)
    tl.atomic_add(sums, (tl.sum(found, axis=0) + cast).to(tl.int64))
    tl.atomic_add(sums + 1, reached.to(tl.int64) * ranks)

    # `out` may be one of the rows of votes: the sums, for which all warps wait, come before.
    if AVERAGE:
        for digit in tl.static_range(DIGITS):
            tl.store(out + digit * out_stride + at, planes[digit], mask=held)
    else:
        # A word of 0 comes as 32 bits; words of a tensor begin at even ones.
        tie = (tie_word.to(tl.int64) >> (word % 2 * 32).to(tl.int64)).to(tl.uint32)
        if ZERO:
            tl.store(out + out_stride + at, ~equal & voted, mask=held)
        tl.store(out + at, (greater | (equal & tie)) & voted, mask=held)
