"""Triton kernels for the words of a message: which rows a rank votes on, and everyone's votes.

They work on a table of all rows in the message. A table has a line for each stretch of words, which
a program finds by a search; see `launches.Table`. No number is specialized, so one compiled kernel
serves all of them, and a later step doesn't wait for the compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a table with numbers of the layout, and the number of all columns.
PROGRAM, SIZE, WORD, ROW, SKIPPED, ROW_WORDS = map(tl.constexpr, range(6))
COLUMNS = tl.constexpr(21)
# Words of a tile, and tiles of a program, for kernels that take the elements of tensors.
ROWS, TILES = tl.constexpr(16), tl.constexpr(8)
# Words of a program here, and the lowest bit of each byte.
BLOCK, ONES = tl.constexpr(256), tl.constexpr(0x0101010101010101)


@triton.jit
def find(table, lines, half, column, x):
    """Returns the address of the last line that has at most x in a column of rising numbers."""
    table, line = table.to(tl.pointer_type(tl.int64)), x * 0
    while half > 0:
        later = line + half
        begin = tl.load(table + later * COLUMNS + column, later < lines, 1 << 62)
        line = tl.where(begin <= x, later, line)
        half = half // 2
    return table + line * COLUMNS


@triton.jit
def row_of(line, word):
    """Returns the message's rows of words of a part (section 1)."""
    row = (tl.load(line + SKIPPED) + word).to(tl.int32) // tl.load(line + ROW_WORDS).to(tl.int32)
    return tl.load(line + ROW) + row


@triton.jit
def elements(word):
    """Returns numbers of the words' elements, shape (words, 64)."""
    return word[:, None] * 64 + tl.arange(0, 64)[None, :]


@triton.jit(do_not_specialize=range(9))
def abstain(table: tl.int64, lines: tl.int32, half: tl.int32, planes: tl.int64, count: tl.int32,
            end: tl.int32, flags: tl.int64, rows: tl.int32, packed: tl.int64):  # fmt: skip
    """Clears the votes in rows without a mark, and words up to `end`, and packs the marks.

    Bytes per element: 1 / 32 for each of the message's rows.
    """
    first, flags = tl.program_id(0) * BLOCK, flags.to(tl.pointer_type(tl.int8))
    word = first + tl.arange(0, BLOCK)
    line = find(table, lines, half, WORD, word)
    active = tl.load(flags + row_of(line, word - tl.load(line + WORD)), word < count, 0) != 0
    votes = planes.to(tl.pointer_type(tl.int64)) + word
    tl.store(votes, tl.zeros((BLOCK,), tl.int64), (word < end) & ~active)
    out = tl.arange(0, BLOCK // 64)
    row = first + elements(out)
    marks = tl.load(flags + row, row < rows, 0).to(tl.int64) << (row % 64).to(tl.int64)
    out += first // 64
    tl.store(packed.to(tl.pointer_type(tl.int64)) + out, tl.sum(marks, 1), out * 64 < rows)


@triton.jit
def _voters(packed, stride, row, rows, N: tl.constexpr):
    """Returns how many ranks vote on each row."""
    at, total = packed.to(tl.pointer_type(tl.int64)) + row // 64, (row * 0).to(tl.int64)
    for rank in range(N):
        total += (tl.load(at + rank * stride, row < rows, 0) >> (row % 64).to(tl.int64)) & 1
    return total


@triton.jit
def _gathered(bits, column):
    """Returns words from the lowest bits of their bytes, shape (BLOCK, 8)."""
    return tl.sum((bits & ONES) << column, 1)


@triton.jit(do_not_specialize=range(14))
def count(table: tl.int64, lines: tl.int32, half: tl.int32, planes: tl.int64, stride: tl.int64,
          first: tl.int32, size: tl.int32, packed: tl.int64, packed_stride: tl.int64,
          rows: tl.int32, verdict: tl.int64, each: tl.int64, voters: tl.int64, tie: tl.int64,
          N: tl.constexpr, RULE: tl.constexpr):  # fmt: skip
    """Counts votes on words `first` to `first + size` - 1 of a message, and decides (section 4).

    Writes planes of the verdict, of `each` words and 0 after `size`, and the number of voters of
    each row. `tie` is `codec.alternating_word` of the phase, and `RULE` the name of a rule. Bytes
    per element: (N + planes) / 8, and 4 for each of the message's rows.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, column = planes.to(tl.pointer_type(tl.int64)) + i, tl.arange(0, 8).to(tl.int64)[None, :]
    total = tl.zeros((BLOCK, 8), tl.int64)  # S of element 8 b + c is in byte b of number c.
    for rank in range(N):
        total += (tl.load(at + rank * stride, i < size, 0)[:, None] >> column) & ONES
    out = verdict.to(tl.pointer_type(tl.int64)) + i
    if RULE == "average":
        for bit in tl.static_range(7):
            if N >> bit > 0:
                tl.store(out + bit * each, _gathered(total >> bit, column), i < each)
    else:
        line = find(table, lines, half, WORD, first + i)
        row = row_of(line, first + i - tl.load(line + WORD)).to(tl.int32)
        n = _voters(packed, packed_stride, row, tl.where(i < size, rows, 0), N)
        # Byte by byte, bit 7 of S + 127 - n // 2 is set if S > n // 2.
        over = total + ((127 - n // 2) * ONES)[:, None]
        greater = _gathered(over >> 7, column)
        equal = _gathered((over + ONES) >> 7, column) & ~greater & ((n & 1) - 1)
        equal = tl.where(i < size, equal, 0)
        if RULE == "zero":
            tl.store(out + each, equal, i < each)
        else:
            greater |= equal & tie
        tl.store(out, greater, i < each)
    n = _voters(packed, packed_stride, i, rows, N).to(tl.int32)
    tl.store(voters.to(tl.pointer_type(tl.int32)) + i, n, i < rows)
