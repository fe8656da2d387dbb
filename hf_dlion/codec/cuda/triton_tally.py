"""The Triton kernels that pack votes and verdicts into segments, and unpack what is not words.

A segment is described in `hf_dlion.codec.tally`. Words are those of the rule, of 64 bits, as two of
32 bits where bits are packed. In a table of shards NUMEL is a shard's number of rows, and ROWS_AT
its first row in the message; `copies` programs copy words, and those after them take a block of
rows each. `hf_dlion.codec.cuda.triton` names the rest.
"""

from __future__ import annotations

from hf_dlion.codec.cuda.triton import (
    ROW_NUMEL,
    ROWS_AT,
    WORDS_AT,
    block_of,
    elements,
    pack,
    tl,
    triton,
)


@triton.jit
def _words_of(count, BLOCK: tl.constexpr):
    """Returns the places of a block's 32-bit words, and which of them its bits need."""
    word = tl.arange(0, BLOCK // 32)
    return word, word < (count + 63) // 64 * 2


@triton.jit
def _copy_votes(words, out, program, vote_words, size, stride, BLOCK: tl.constexpr):
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < vote_words
    values = tl.load(words + at, mask=held, other=0)
    tl.store(out + at // size * stride + at % size, values, mask=held)


@triton.jit
def _pack_rows(jobs, job_of, block, active, out, BLOCK: tl.constexpr):
    job, start, count = block_of(jobs, job_of, block, BLOCK)
    offset = elements(BLOCK)
    here = active + tl.load(job + ROWS_AT) + start
    flags = tl.load(here + offset, mask=offset < count, other=0)
    word, held = _words_of(count, BLOCK)
    narrow = out.to(tl.pointer_type(tl.uint32))
    at = narrow + tl.load(job + WORDS_AT) + start // 32 + word
    tl.store(at, pack(flags != 0), mask=held)


@triton.jit(do_not_specialize=["copies", "vote_words", "size", "stride"])
def pack_votes(
    jobs, job_of, words, active, out, sums, copies, vote_words, size, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes votes into segments, and sets the sums to 0 that are to be counted.

    Args:
        jobs: A row per shard; WORDS_AT is the place of its rows' first 32-bit word in `out`.
        job_of: The shard of each block of rows.
        words: int64, shape (vote_words,); the other votes lie in their places already.
        active: bool as uint8, shape (rows,).
        out: int64, the segments, `stride` apart, of which the first `size` words are votes.
        sums: int64, shape (2,).
        copies: How many programs copy, at least 1.
        vote_words: How many words there are.
        size: Words of votes in a segment.
        stride: Words in a segment.
    """
    program = tl.program_id(0)
    if program < copies:
        _copy_votes(words, out, program, vote_words, size, stride, BLOCK)
        if program == 0:
            tl.store(sums + tl.arange(0, 2), tl.full((2,), 0, tl.int64))
    else:
        _pack_rows(jobs, job_of, program - copies, active, out, BLOCK)


@triton.jit
def _copy_planes(
    planes, plane_stride, stride, length, out, program, words, size,
    PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < words
    here = planes + at // length * stride + at % length
    for plane in tl.static_range(PLANES):
        values = tl.load(here + plane * plane_stride, mask=held, other=0)
        tl.store(out + plane * size + at, values, mask=held)


@triton.jit
def _pack_counts(counts, out, start, rows, row_words, DIGITS: tl.constexpr, BLOCK: tl.constexpr):
    count = tl.minimum(rows - start, BLOCK)
    offset = elements(BLOCK)
    voters = tl.load(counts + start + offset, mask=offset < count, other=0)
    word, held = _words_of(count, BLOCK)
    narrow = out.to(tl.pointer_type(tl.uint32)) + start // 32 + word
    for digit in tl.static_range(DIGITS):
        bits = pack(((voters >> digit) & 1) != 0)
        tl.store(narrow + digit * 2 * row_words, bits, mask=held)


@triton.jit(
    do_not_specialize=[
        *("plane_stride", "stride", "length", "copies", "words", "rows", "size", "row_words")
    ]
)
def pack_verdict(
    planes, plane_stride, stride, length, counts, sums, out, following,
    copies, words, rows, size, row_words,
    PLANES: tl.constexpr, DIGITS: tl.constexpr, SUMS: tl.constexpr, COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the verdict on a shard into a segment.

    Args:
        planes: int64, segments of `length` words, `stride` apart, in each of PLANES planes, which
            are `plane_stride` apart; not read unless COPY, and nor are these three.
        plane_stride: See `planes`.
        stride: See `planes`.
        length: See `planes`.
        counts: int32, shape (rows,).
        sums: int64, SUMS of them.
        out: int64, the segment.
        following: int64, two sums to be found by `unpack_verdict`, set to 0.
        copies: How many programs copy, at least 1.
        words: Words of the shard.
        rows: Rows of the shard.
        size: Words of a plane in a segment.
        row_words: Words of a row plane in a segment.
        PLANES: Bits per parameter of a verdict.
        DIGITS: Bits per row.
        SUMS: How many sums travel.
        COPY: Whether the planes lie elsewhere than in the segment.
    """
    program = tl.program_id(0)
    if program < copies:
        if COPY:
            _copy_planes(
                planes, plane_stride, stride, length, out, program, words, size, PLANES, BLOCK
            )
        if program == 0:
            tl.store(following + tl.arange(0, 2), tl.full((2,), 0, tl.int64))
            for k in tl.static_range(SUMS):
                tl.store(out + PLANES * size + DIGITS * row_words + k, tl.load(sums + k))
    else:
        start = (program - copies) * BLOCK
        _pack_counts(counts, out + PLANES * size, start, rows, row_words, DIGITS, BLOCK)


@triton.jit(do_not_specialize=["row_words", "stride", "segments", "voters"])
def unpack_verdict(
    jobs, job_of, received, counts, row_numels, sums, row_words, stride, segments, voters,
    DIGITS: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Takes rows and sums of the verdict on a message out of all segments; planes stay there.

    The first program takes the sums, those after it a block of rows each.

    Args:
        jobs: A row per shard; WORDS_AT is the place of its rows' first 32-bit word in `received`,
            ROW_NUMEL that of its first row in `row_numels`.
        job_of: The shard of each block of rows.
        received: int64, the segments.
        counts: int32, receives the rows' counts.
        row_numels: int64, shard by shard the elements of each row; not read unless SUMS is 1.
        sums: int64, two elements to which agreement and what it could be are added.
        row_words: Words of a row plane in a segment.
        stride: Words in a segment.
        segments: How many there are.
        voters: How many ranks vote.
        DIGITS: Bits per row.
        SUMS: How many sums travelled: if 1, the other one is found here.
    """
    program = tl.program_id(0)
    if program == 0:
        for k in tl.static_range(SUMS):
            total = tl.full((), 0, tl.int64)
            at = received + stride - SUMS + k
            for _ in range(segments):
                total += tl.load(at)
                at += stride
            tl.atomic_add(sums + k, total)
    else:
        _take_counts(
            jobs, job_of, program - 1, received, counts, row_numels, sums, row_words, voters,
            DIGITS, SUMS, BLOCK,
        )  # fmt: skip


@triton.jit
def _take_counts(
    jobs, job_of, block, received, counts, row_numels, sums, row_words, voters,
    DIGITS: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    job, start, count = block_of(jobs, job_of, block, BLOCK)
    word, held = _words_of(count, BLOCK)
    narrow = received.to(tl.pointer_type(tl.uint32))
    at = narrow + tl.load(job + WORDS_AT) + start // 32 + word
    lane = tl.arange(0, 32)[None, :].to(tl.uint32)
    found = tl.full((BLOCK // 32, 32), 0, tl.int32)
    for digit in tl.static_range(DIGITS):
        bits = tl.load(at + digit * 2 * row_words, mask=held, other=0)[:, None]
        found += ((bits >> lane) & 1).to(tl.int32) << digit
    offset = elements(BLOCK)
    inside = offset < count
    # A row that two shards share has the same count in both.
    tl.store(counts + tl.load(job + ROWS_AT) + start + offset, found, mask=inside)
    if SUMS == 1:
        first = row_numels + tl.load(job + ROW_NUMEL) + start
        numels = tl.load(first + offset, mask=inside & (found > 0), other=0)
        tl.atomic_add(sums + 1, tl.sum(tl.sum(numels, axis=1), axis=0) * voters)
