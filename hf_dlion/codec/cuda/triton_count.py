"""The Triton kernels that count packed votes (rule S4, S5); see `hf_dlion.codec.count`."""

from __future__ import annotations

from hf_dlion.codec.cuda.triton import (
    ROWS_AT,
    STRIDE,
    WORDS_AT,
    block_of,
    elements,
    pack,
    rows_of,
    tl,
    triton,
    voters_of,
)


@triton.jit
def spread(jobs, job_of, counts, totals, BLOCK: tl.constexpr, DIGITS: tl.constexpr):
    """Writes the rows' counts as bit-sliced numbers per element, 0 in the padding.

    Args:
        jobs: A table with a row per stretch of a parameter. WORDS_AT and ROWS_AT hold the places
            of its first 32-bit word in a plane and of its first row among the counts.
        job_of: The job of each block.
        counts: int32, shape (rows,).
        totals: uint32, DIGITS planes, STRIDE apart.
    """
    job, start, count = block_of(jobs, job_of, BLOCK)
    first, row, touched = rows_of(job, start, count, BLOCK)
    voters = voters_of(counts + tl.load(job + ROWS_AT) + first, row, touched, count, BLOCK)
    inside = elements(BLOCK) < count
    word = tl.arange(0, BLOCK // 32)
    at = totals + tl.load(job + WORDS_AT) + start // 32 + word
    for digit in tl.static_range(DIGITS):
        bits = pack(inside & (((voters >> digit) & 1) == 1))
        tl.store(at + digit * tl.load(job + STRIDE), bits, mask=word < (count + 63) // 64 * 2)


@triton.jit
def _ones(words):
    """Returns the number of ones in each uint64 word, as int64."""
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((words * 0x0101010101010101) >> 56).to(tl.int64)


@triton.jit
def _plus(planes, vote, DIGITS: tl.constexpr):
    """Returns bit-sliced counters with a vote added: a ripple of half adders."""
    total = ()
    for digit in tl.static_range(DIGITS):
        total = total + (planes[digit] ^ vote,)
        vote = planes[digit] & vote
    return total


@triton.jit(do_not_specialize=["ranks", "tie_word"])
def count(
    votes, votes_stride, ranks, words, totals, totals_stride, out, out_stride, tie_word, change,
    DIGITS: tl.constexpr, TOTALS: tl.constexpr, AVERAGE: tl.constexpr, ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts votes and writes the verdict's planes; strides are in words.

    Args:
        votes: int64, a row of words per rank.
        votes_stride: From rank to rank.
        ranks: N.
        words: Words to count.
        totals: int64, DIGITS planes: how many ranks voted on each element, bit-sliced; not read
            unless TOTALS, where all N did on all.
        totals_stride: From plane to plane.
        out: int64, receives the planes.
        out_stride: From plane to plane.
        tie_word: int64, `TieRule.word`.
        change: int64, one element; the sum of |n - 2 c| less the sum of n over all elements, c of
            n votes being negative, is added to it.
        DIGITS: The bit length of N.
        TOTALS: Whether some ranks did not vote on some rows.
        AVERAGE: The planes are the counters.
        ZERO: A second plane says where the verdict is not 0.
        BLOCK: Words per program.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < words
    none = tl.full((BLOCK,), 0, tl.uint64)
    planes = ()
    for _ in tl.static_range(DIGITS):
        planes = planes + (none,)
    row = votes + at
    for _ in range(ranks):
        vote = tl.load(row, mask=held, other=0)
        planes = _plus(planes, vote.to(tl.uint64, bitcast=True), DIGITS)
        row += votes_stride

    voters = ()
    for digit in tl.static_range(DIGITS):
        if TOTALS:
            total = tl.load(totals + digit * totals_stride + at, mask=held, other=0)
            voters = voters + (total.to(tl.uint64, bitcast=True),)
        else:
            voters = voters + (none - ((ranks >> digit) & 1).to(tl.uint64),)

    # Twice the counter against the total, from the highest digit.
    greater, equal, voted = none, ~none, none
    for back in tl.static_range(DIGITS + 1):
        twice, total = none, none
        if back < DIGITS:
            twice = planes[DIGITS - 1 - back]
        if back > 0:
            total = voters[DIGITS - back]
        greater = greater | (equal & twice & ~total)
        equal = equal & ~(twice ^ total)
        voted = voted | total

    found = none.to(tl.int64)
    for digit in tl.static_range(DIGITS):
        both, plane = voters[digit] & greater, planes[digit]
        found += (4 * _ones(plane & greater) - 2 * _ones(plane) - 2 * _ones(both)) << digit
    tl.atomic_add(change, tl.sum(found, axis=0))

    if AVERAGE:
        for digit in tl.static_range(DIGITS):
            tl.store(out + digit * out_stride + at, planes[digit].to(tl.int64, bitcast=True), held)
    else:
        # A word of 0 comes as 32 bits.
        negative = greater | (equal & tie_word.to(tl.int64).to(tl.uint64, bitcast=True))
        if ZERO:
            nonzero = (~equal & voted).to(tl.int64, bitcast=True)
            tl.store(out + out_stride + at, nonzero, mask=held)
        tl.store(out + at, (negative & voted).to(tl.int64, bitcast=True), mask=held)
