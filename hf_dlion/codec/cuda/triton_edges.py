"""The Triton kernels for rows that shards cut; see `hf_dlion.codec.edges`."""

from __future__ import annotations

from hf_dlion.codec.cuda.triton import (
    NUMEL,
    ROWS_AT,
    SKIPPED,
    WORDS_AT,
    block_of,
    elements,
    pack,
    tl,
    triton,
)
from hf_dlion.codec.cuda.triton_levels import pack_codes


@triton.jit(do_not_specialize=["count"])
def tell(active, told, count, out, BLOCK: tl.constexpr):
    """Copies the activity of some rows.

    Args:
        active: uint8 per row.
        told: int64, for each copy the row, and the place that it goes to.
        count: Of copies.
        out: uint8.
        BLOCK: Copies per program.
    """
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = number < count
    row = tl.load(told + 2 * number, mask=held, other=0)
    place = tl.load(told + 2 * number + 1, mask=held, other=0)
    tl.store(out + place, tl.load(active + row, mask=held, other=0), mask=held)


@triton.jit(do_not_specialize=["count"])
def hear(
    jobs, job_of, words, active, everyone, sharing, count, zeros,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes the votes of ends those of whole rows.

    Args:
        jobs: A row per end: its elements begin SKIPPED elements into the word at WORDS_AT.
        job_of: The end of each block.
        words: uint32, the votes.
        active: uint8 per row.
        everyone: uint8, what all ranks told of their ends.
        sharing: int64, for each end a line of those that lie in its row, `count` long; the last of
            a line is the end itself.
        count: See `sharing`.
        zeros: uint32, 2 * BITS words: the votes on 64 zeros.
        BITS: Of a vote.
        BLOCK: Elements per program.
    """
    job, start, numel = block_of(jobs, job_of, tl.program_id(0), BLOCK)
    line = sharing + tl.load(job_of + tl.program_id(0)).to(tl.int64) * count
    told = tl.full((), 0, tl.int32)
    for k in range(count):
        told += tl.load(everyone + tl.load(line + k)).to(tl.int32)
    own = tl.load(everyone + tl.load(line + count - 1))
    # Its own part may vote, and nothing is to be done; or no part does.
    if (own == 0) & (told != 0):
        tl.store(active + tl.load(job + ROWS_AT), 1)
        offset = start + elements(BLOCK)
        inside = (offset >= tl.load(job + SKIPPED)) & (offset < tl.load(job + NUMEL))
        if BITS == 1:
            word = tl.arange(0, BLOCK // 32)
            mask = pack(inside) & tl.load(zeros + word % 2)
            held = word < (numel + 63) // 64 * 2
            # Both ends may lie in one word.
            tl.atomic_or(words + tl.load(job + WORDS_AT) + start // 32 + word, mask, mask=held)
        else:
            ones = inside.to(tl.uint32) * ((1 << BITS) - 1)
            word = tl.arange(0, BLOCK // 64)[:, None]
            part = tl.arange(0, 2 * BITS)[None, :]
            mask = pack_codes(ones, BITS, BLOCK) & tl.load(zeros + part)
            at = words + tl.load(job + WORDS_AT) + start // 64 * (2 * BITS)
            held = (word < (numel + 63) // 64) & (part >= 0)
            tl.atomic_or(at + word * (2 * BITS) + part, mask, mask=held)
