"""Triton kernels for a step's work on a GPU, in which every byte is read and written once.

`launches` launches them: `each_tile` once for all tensors of a message, on a table with a line for
each stretch of a tensor, and `abstain` and `count_votes` for the words of a message, on a table of
its rows. A program finds the line that it works on (`tables.Table`). No number is specialized, so
one compiled kernel serves all of them, and a later step doesn't wait for the compiler: `warm_up`
compiles them before the first step.

They take tensors of float32 and bfloat16, and encode one bit. Sections are those of docs/rule.md.
Compiled without fusion, all but `_lerp` rounds as the rule says, so every form has the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_dlion.gpu.tables import TILES_OF_A_PROGRAM, WORDS_OF_A_PROGRAM, WORDS_OF_A_TILE, Column

# Columns of a table, and their number.
PROGRAM = tl.constexpr(int(Column.PROGRAM))
SIZE = tl.constexpr(int(Column.SIZE))
WORD = tl.constexpr(int(Column.WORD))
ROW = tl.constexpr(int(Column.ROW))
SKIPPED = tl.constexpr(int(Column.SKIPPED))
ROW_WORDS = tl.constexpr(int(Column.ROW_WORDS))
GRAD = tl.constexpr(int(Column.GRAD))
MOMENTUM = tl.constexpr(int(Column.MOMENTUM))
MOVING = tl.constexpr(int(Column.MOVING))
ANCHOR = tl.constexpr(int(Column.ANCHOR))
COMPENSATION = tl.constexpr(int(Column.COMPENSATION))
OLD = tl.constexpr(int(Column.OLD))
KEY_MOMENTUM = tl.constexpr(int(Column.KEY_MOMENTUM))
KEY_PARAM = tl.constexpr(int(Column.KEY_PARAM))
KEY_COMPENSATION = tl.constexpr(int(Column.KEY_COMPENSATION))
W1 = tl.constexpr(int(Column.W1))
W2 = tl.constexpr(int(Column.W2))
LR = tl.constexpr(int(Column.LR))
DECAY = tl.constexpr(int(Column.DECAY))
UNIT = tl.constexpr(int(Column.UNIT))
COLUMNS = tl.constexpr(len(Column))
# Words of a tile, and tiles of a program, for kernels that take the elements of tensors.
TILE_WORDS, PROGRAM_TILES = tl.constexpr(WORDS_OF_A_TILE), tl.constexpr(TILES_OF_A_PROGRAM)
# Words of a program that takes words of a message, and the lowest bit of each byte.
PROGRAM_WORDS, ONES = tl.constexpr(WORDS_OF_A_PROGRAM), tl.constexpr(0x0101010101010101)


@triton.jit
def find(table, line_count, half, column, x):
    """Returns the address of the last line that has at most x in a column of rising numbers."""
    table, line = table.to(tl.pointer_type(tl.int64)), x * 0
    while half > 0:
        later = line + half
        begin = tl.load(table + later * COLUMNS + column, later < line_count, 1 << 62)
        line = tl.where(begin <= x, later, line)
        half = half // 2
    return table + line * COLUMNS


@triton.jit
def row_of(line, word):
    """Returns the message's rows of words of a line (section 1)."""
    row = (tl.load(line + SKIPPED) + word).to(tl.int32) // tl.load(line + ROW_WORDS).to(tl.int32)
    return tl.load(line + ROW) + row


@triton.jit
def elements(word):
    """Returns numbers of the words' elements, shape (words, 64)."""
    return word[:, None] * 64 + tl.arange(0, 64)[None, :]


# Kernels for the tensors of a message.


@triton.jit
def _number(line, column):
    return tl.load(line + column).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _load(line, column, k, T: tl.constexpr, WHOLE: tl.constexpr):
    """Returns elements as float32 numbers; a whole tile takes 128 bits at a time."""
    at = tl.load(line + column).to(tl.pointer_type(T))
    if WHOLE:
        x = tl.load(tl.multiple_of(at, 16) + k)
    else:
        x = tl.load(at + k, k < tl.load(line + SIZE), 0.0)
    if T == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _finite(x):
    """Returns the largest finite bfloat16 for what would become an Inf; a NaN stays."""
    x = tl.where(x > 3.3895313892515355e38, 3.3895313892515355e38, x)
    return tl.where(x < -3.3895313892515355e38, -3.3895313892515355e38, x)


@triton.jit
def _random(line, word, key, T: tl.constexpr):
    """Returns 16 random bits for each of the words' elements (section 6), for bfloat16."""
    random = 0
    if T == tl.bfloat16:
        pair = word[:, None] * 32 + tl.arange(0, 32)[None, :]
        h = pair.to(tl.uint32) * 0x9E3779B9 + tl.load(line + key).to(tl.uint32)
        h = (h ^ (h >> 16)) * 0x7FEB352D
        h = (h ^ (h >> 16)) * 0x846CA68B
        h ^= h >> 16
        random = tl.interleave(h & 0xFFFF, h >> 16)
    return random


@triton.jit
def _store(x, line, column, word, T: tl.constexpr, WHOLE: tl.constexpr, added):
    """Writes elements, and returns what was written as float32 numbers.

    To bfloat16 they are rounded by `added`, which is added to their bits.
    """
    k = elements(word)
    at = tl.load(line + column).to(tl.pointer_type(T))
    stored = x
    if T == tl.bfloat16:
        high = (x.to(tl.uint32, bitcast=True) + tl.where(x == x, added, 0)) >> 16
        x, stored = (
            (high << 16).to(tl.float32, bitcast=True),
            high.to(tl.uint16).to(T, bitcast=True),
        )
    if WHOLE:
        tl.store(tl.multiple_of(at, 16) + k, stored)
    else:
        tl.store(at + k, stored, k < tl.load(line + SIZE))
    return x


@triton.jit
def _lerp(m, g, weight):
    """Returns m + weight * (g - m) as torch.lerp does: from g if the weight is at least 0.5."""
    from_g = weight >= 0.5
    return tl.fma(g - m, tl.where(from_g, weight - 1.0, weight), tl.where(from_g, g, m))


@triton.jit
def _direction(line, word, G: tl.constexpr, M: tl.constexpr, WHOLE: tl.constexpr):
    """Returns u, which is 0 in old rows, and writes the momentum (section 2)."""
    k = elements(word)
    g, m = _load(line, GRAD, k, G, WHOLE), _load(line, MOMENTUM, k, M, WHOLE)
    new = _lerp(m, g, _number(line, W2))
    if M == tl.bfloat16:
        new = _finite(new)
    _store(new, line, MOMENTUM, word, M, WHOLE, _random(line, word, KEY_MOMENTUM, M))
    u, old = _lerp(m, g, _number(line, W1)), tl.load(line + OLD)
    if old != 0:
        flag = old.to(tl.pointer_type(tl.int8)) + (row_of(line, word) - tl.load(line + ROW))
        is_old = tl.load(flag, word * 64 < tl.load(line + SIZE), 0) != 0
        u = tl.where(is_old[:, None], 0.0, u)
    return u


@triton.jit
def _mark(row_flags, line, word, nonzero):
    """Marks the rows of words that have a nonzero element; after the end there is none."""
    flag = row_flags.to(tl.pointer_type(tl.int8)) + row_of(line, word)
    tl.store(flag, tl.full((TILE_WORDS,), 1, tl.int8), nonzero)


@triton.jit
def _encode(u, line, word, planes, row_flags, phase):
    """Writes one word of votes for 64 elements of u (section 3), and marks rows."""
    column = tl.arange(0, 64)[None, :]
    votes = tl.where((column + phase) % 2 == 0, u > 0.0, u > -1.1754943508222875e-38)  # -2^-126
    out = planes.to(tl.pointer_type(tl.int64)) + tl.load(line + WORD) + word
    inside = word * 64 < tl.load(line + SIZE)
    tl.store(out, tl.sum(votes.to(tl.int64) << column.to(tl.int64), 1), inside)
    _mark(row_flags, line, word, tl.max((u != 0.0).to(tl.int32), 1) != 0)  # A NaN is not zero.


@triton.jit
def _bits(planes, line, word, bit, stride):
    """Returns one bit of each element, shape (TILE_WORDS, 64), from a plane."""
    at = planes.to(tl.pointer_type(tl.int64)) + bit * stride + tl.load(line + WORD) + word
    plane = tl.load(at, word * 64 < tl.load(line + SIZE), 0)
    return ((plane[:, None] >> tl.arange(0, 64)[None, :].to(tl.int64)) & 1).to(tl.int32)


@triton.jit
def _voters_of(row_voters, line, word):
    """Returns n of the words' rows, shape (TILE_WORDS, 1)."""
    at = row_voters.to(tl.pointer_type(tl.int32)) + row_of(line, word)
    return tl.load(at, word * 64 < tl.load(line + SIZE), 0)[:, None]


@triton.jit
def _mean(planes, line, word, stride, n, N: tl.constexpr, TOP: tl.constexpr):
    """Returns (2 S - n TOP) / N, rounded once (section 4)."""
    total = _bits(planes, line, word, 0, stride)
    for bit in tl.static_range(1, 16):
        if (N * TOP) >> bit > 0:
            total += _bits(planes, line, word, bit, stride) << bit
    # Before triton 3.6, quotients that are subnormal become 0; these aren't.
    return tl.math.div_rn((2 * total - n * TOP).to(tl.float32), N * 1.0)


@triton.jit
def _move(line, word, planes, stride, n, P: tl.constexpr, N: tl.constexpr, RULE: tl.constexpr,
          WHOLE: tl.constexpr):  # fmt: skip
    """Decays and moves by a verdict (section 5)."""
    lr = _number(line, LR)
    if RULE == "average":
        move = _mean(planes, line, word, stride, n, N, 1) * lr
    else:
        # Triton's -lr is 0 - lr, which isn't -0.0 for a rate of 0.
        move = tl.where(_bits(planes, line, word, 0, stride) != 0, lr, lr * -1.0)
        move = tl.where(n == 0, 0.0, move)
        if RULE == "zero":
            move = tl.where(_bits(planes, line, word, 1, stride) != 0, 0.0, move)
    p = _load(line, MOVING, elements(word), P, WHOLE) * _number(line, DECAY) - move
    _store(p, line, MOVING, word, P, WHOLE, _random(line, word, KEY_PARAM, P))


@triton.jit
def _own_step(line, word, G: tl.constexpr, M: tl.constexpr, P: tl.constexpr, LOCAL: tl.constexpr,
              WHOLE: tl.constexpr):  # fmt: skip
    """Moves by sign(u): a local step (section 9), or the step of a single voter (section 5)."""
    lr, step = _number(line, LR), tl.zeros((TILE_WORDS, 64), tl.float32)
    if G is not None:
        u = _direction(line, word, G, M, WHOLE)
        step = tl.where(u > 0.0, lr, tl.where(u < 0.0, lr * -1.0, 0.0))
    p = _load(line, MOVING, elements(word), P, WHOLE)
    if LOCAL and P == tl.bfloat16:
        y = _finite(p + _load(line, COMPENSATION, elements(word), P, WHOLE) - step)
        to_nearest = 0x7FFF + ((y.to(tl.uint32, bitcast=True) >> 16) & 1)
        left = y - _store(y, line, MOVING, word, P, WHOLE, to_nearest)
        _store(
            _finite(left),
            line,
            COMPENSATION,
            word,
            P,
            WHOLE,
            _random(line, word, KEY_COMPENSATION, P),
        )
    else:
        p = p * _number(line, DECAY) - step
        _store(p, line, MOVING, word, P, WHOLE, _random(line, word, KEY_PARAM, P))


@triton.jit
def _end_period(line, word, planes, stride, n, P: tl.constexpr, N: tl.constexpr,
                TOP: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Moves from the anchor by the mean of what the ranks were moved (section 9)."""
    d = _mean(planes, line, word, stride, n, N, TOP) * _number(line, UNIT)
    p = (_load(line, ANCHOR, elements(word), P, WHOLE) - d) * _number(line, DECAY)
    _store(p, line, MOVING, word, P, WHOLE, _random(line, word, KEY_PARAM, P))


@triton.jit
def _tile(line, tile, planes, stride, by_row, phase, KIND: tl.constexpr, G: tl.constexpr,
          M: tl.constexpr, P: tl.constexpr, N: tl.constexpr, RULE: tl.constexpr,
          TOP: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    word = tile * TILE_WORDS + tl.arange(0, TILE_WORDS)
    if KIND == "encode":
        _encode(_direction(line, word, G, M, WHOLE), line, word, planes, by_row, phase)
    elif KIND == "move":
        _move(line, word, planes, stride, _voters_of(by_row, line, word), P, N, RULE, WHOLE)
    elif KIND == "step" or KIND == "local step":
        _own_step(line, word, G, M, P, KIND == "local step", WHOLE)
    elif KIND == "end of period":
        n = _voters_of(by_row, line, word)
        _end_period(line, word, planes, stride, n, P, N, TOP, WHOLE)


@triton.jit(do_not_specialize=range(7))
def each_tile(table: tl.int64, line_count: tl.int32, half: tl.int32, planes: tl.int64,
              stride: tl.int64, by_row: tl.int64, phase: tl.int32, KIND: tl.constexpr,
              G: tl.constexpr, M: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
              RULE: tl.constexpr, TOP: tl.constexpr):  # fmt: skip
    """Does one kind of work on the tensors of a table; bytes per element, float32 and bfloat16.

        encode                 12.14   6.14     gradient, momentum, votes
        move                    8.13   4.13     parameter, verdict
        step                   20     10        gradient, momentum, parameter
        local step             20     14        the same, and compensation of bfloat16
        end of period           8.6    4.6      anchor, parameter, verdict of 4 bits and two ranks

    A search in the table begins with steps of `half` lines. `planes` are votes or a verdict, with
    `stride` words between them. `by_row` has a flag for each of the message's rows, int8, or the
    number of its voters, int32.
    """
    program = tl.program_id(0).to(tl.int64)
    line = find(table, line_count, half, PROGRAM, program)
    first, size = (program - tl.load(line + PROGRAM)) * PROGRAM_TILES, tl.load(line + SIZE)
    addresses = tl.load(line + GRAD) | tl.load(line + MOMENTUM) | tl.load(line + MOVING)
    addresses |= tl.load(line + ANCHOR) | tl.load(line + COMPENSATION)
    for tile in range(first, first + PROGRAM_TILES):
        if ((tile + 1) * TILE_WORDS * 64 <= size) & (addresses % 16 == 0):
            _tile(line, tile, planes, stride, by_row, phase, KIND, G, M, P, N, RULE, TOP, True)
        elif tile * TILE_WORDS * 64 < size:
            _tile(line, tile, planes, stride, by_row, phase, KIND, G, M, P, N, RULE, TOP, False)


# Kernels for the words of a message.


@triton.jit(do_not_specialize=range(6))
def abstain(table: tl.int64, line_count: tl.int32, half: tl.int32, planes: tl.int64,
            words: tl.int32, row_flags: tl.int64):  # fmt: skip
    """Clears the votes in rows without a flag."""
    first, flags = tl.program_id(0) * PROGRAM_WORDS, row_flags.to(tl.pointer_type(tl.int8))
    word = first + tl.arange(0, PROGRAM_WORDS)
    line = find(table, line_count, half, WORD, word)
    active = tl.load(flags + row_of(line, word - tl.load(line + WORD)), word < words, 0) != 0
    votes = planes.to(tl.pointer_type(tl.int64)) + word
    tl.store(votes, tl.zeros((PROGRAM_WORDS,), tl.int64), (word < words) & ~active)


@triton.jit
def _count_voters(packed, stride, row, row_count, N: tl.constexpr):
    """Returns how many ranks vote on each row."""
    at, total = packed.to(tl.pointer_type(tl.int64)) + row // 64, (row * 0).to(tl.int64)
    for rank in range(N):
        total += (tl.load(at + rank * stride, row < row_count, 0) >> (row % 64).to(tl.int64)) & 1
    return total


@triton.jit
def _gathered(bits, column):
    """Returns words from the lowest bits of their bytes, shape (PROGRAM_WORDS, 8)."""
    return tl.sum((bits & ONES) << column, 1)


@triton.jit(do_not_specialize=range(14))
def count_votes(table: tl.int64, line_count: tl.int32, half: tl.int32, planes: tl.int64,
                stride: tl.int64, first: tl.int32, size: tl.int32, packed: tl.int64,
                packed_stride: tl.int64, row_count: tl.int32, verdict: tl.int64,
                plane_words: tl.int64, row_voters: tl.int64, tie: tl.int64,
                N: tl.constexpr, RULE: tl.constexpr):  # fmt: skip
    """Counts votes on words `first` to `first + size` - 1 of a message, and decides (section 4).

    Writes planes of the verdict, of `plane_words` words and 0 after `size`, and the number of
    voters of each row. `tie` is `codec.alternating_word` of the phase, and `RULE` the name of a
    rule. Bytes per element: (N + planes) / 8, and 4 for each of the message's rows.
    """
    i = tl.program_id(0) * PROGRAM_WORDS + tl.arange(0, PROGRAM_WORDS)
    at, column = planes.to(tl.pointer_type(tl.int64)) + i, tl.arange(0, 8).to(tl.int64)[None, :]
    total = tl.zeros((PROGRAM_WORDS, 8), tl.int64)  # S of element 8 b + c is in byte b of number c.
    for rank in range(N):
        total += (tl.load(at + rank * stride, i < size, 0)[:, None] >> column) & ONES
    out = verdict.to(tl.pointer_type(tl.int64)) + i
    if RULE == "average":
        for bit in tl.static_range(7):
            if N >> bit > 0:
                tl.store(out + bit * plane_words, _gathered(total >> bit, column), i < plane_words)
    else:
        line = find(table, line_count, half, WORD, first + i)
        row = row_of(line, first + i - tl.load(line + WORD)).to(tl.int32)
        n = _count_voters(packed, packed_stride, row, tl.where(i < size, row_count, 0), N)
        # Byte by byte, bit 7 of S + 127 - n // 2 is set if S > n // 2.
        over = total + ((127 - n // 2) * ONES)[:, None]
        greater = _gathered(over >> 7, column)
        equal = _gathered((over + ONES) >> 7, column) & ~greater & ((n & 1) - 1)
        equal = tl.where(i < size, equal, 0)
        if RULE == "zero":
            tl.store(out + plane_words, equal, i < plane_words)
        else:
            greater |= equal & tie
        tl.store(out, greater, i < plane_words)
    n = _count_voters(packed, packed_stride, i, row_count, N).to(tl.int32)
    tl.store(row_voters.to(tl.pointer_type(tl.int32)) + i, n, i < row_count)
