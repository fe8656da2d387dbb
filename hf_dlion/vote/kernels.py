"""Triton kernels for a step's work on a GPU, in which every byte is read and written once.

`launches` launches them, once for all tensors of a message. A table has a line for each part of a
tensor, with addresses and numbers, and a program finds the line that it works on:

    program          0  1  2  3 | 4 | 5  6 | ...
    line             0          | 1 | 2    | ...

They take tensors of float32 and bfloat16, and encode one bit. Sections are those of docs/rule.md.
Compiled without fusion, all but `_lerp` rounds as the rule says, so every form has the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_dlion.exchange.count_kernels import (
    PROGRAM,
    ROW,
    ROWS,
    SIZE,
    TILES,
    WORD,
    elements,
    find,
    row_of,
)

# Addresses, keys of random bits, and float32 numbers: columns of a table after those of the layout.
GRAD, MOMENTUM, TARGET, X, C, OLD = map(tl.constexpr, range(6, 12))
KEY_M, KEY_P, KEY_C, KEY_X = map(tl.constexpr, range(12, 16))
W1, W2, LR, DECAY, UNIT = map(tl.constexpr, range(16, 21))


@triton.jit
def _number(line, column):
    return tl.load(line + column).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _load(line, column, k, T: tl.constexpr, FULL: tl.constexpr):
    """Returns elements as float32 numbers; a full tile takes 128 bits at a time."""
    at = tl.load(line + column).to(tl.pointer_type(T))
    if FULL:
        x = tl.load(tl.multiple_of(at, 16) + k)
    else:
        x = tl.load(at + k, k < tl.load(line + SIZE), 0.0)
    if T == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _store(x, line, column, word, key, T: tl.constexpr, FULL: tl.constexpr, CLAMP: tl.constexpr):
    """Writes elements, and returns what was written as float32 numbers (section 6)."""
    k, at, stored = elements(word), tl.load(line + column).to(tl.pointer_type(T)), x
    if T == tl.bfloat16:
        if CLAMP:  # A NaN stays.
            x = tl.where(x > 3.3895313892515355e38, 3.3895313892515355e38, x)
            x = tl.where(x < -3.3895313892515355e38, -3.3895313892515355e38, x)
        pair = word[:, None] * 32 + tl.arange(0, 32)[None, :]
        h = pair.to(tl.uint32) * 0x9E3779B9 + tl.load(line + key).to(tl.uint32)
        h = (h ^ (h >> 16)) * 0x7FEB352D
        h = (h ^ (h >> 16)) * 0x846CA68B
        h ^= h >> 16
        random = tl.interleave(h & 0xFFFF, h >> 16)
        high = (x.to(tl.uint32, bitcast=True) + tl.where(x == x, random, 0)) >> 16
        x, stored = (
            (high << 16).to(tl.float32, bitcast=True),
            high.to(tl.uint16).to(T, bitcast=True),
        )
    if FULL:
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
def _direction(line, word, G: tl.constexpr, M: tl.constexpr, FULL: tl.constexpr):
    """Returns u, which is 0 in old rows, and writes the momentum (section 2)."""
    k = elements(word)
    g, m = _load(line, GRAD, k, G, FULL), _load(line, MOMENTUM, k, M, FULL)
    _store(_lerp(m, g, _number(line, W2)), line, MOMENTUM, word, KEY_M, M, FULL, True)
    u, old = _lerp(m, g, _number(line, W1)), tl.load(line + OLD)
    if old != 0:
        flag = old.to(tl.pointer_type(tl.int8)) + (row_of(line, word) - tl.load(line + ROW))
        is_old = tl.load(flag, word * 64 < tl.load(line + SIZE), 0) != 0
        u = tl.where(is_old[:, None], 0.0, u)
    return u


@triton.jit
def _displacement(line, k, P: tl.constexpr, FULL: tl.constexpr):
    """Returns w: c, or x - p (section 9)."""
    if P == tl.bfloat16:
        return _load(line, C, k, P, FULL)
    return _load(line, X, k, P, FULL) - _load(line, TARGET, k, P, FULL)


@triton.jit
def _mark(rows, line, word, nonzero):
    """Marks the rows of words that have a nonzero element; after the end there is none."""
    flag = rows.to(tl.pointer_type(tl.int8)) + row_of(line, word)
    tl.store(flag, tl.full((ROWS,), 1, tl.int8), nonzero)


@triton.jit
def _encode(u, line, word, planes, rows, phase):
    """Writes one word of votes for 64 elements of u or w (section 3), and marks rows."""
    column = tl.arange(0, 64)[None, :]
    votes = tl.where((column + phase) % 2 == 0, u > 0.0, u > -1.1754943508222875e-38)  # -2^-126
    out = planes.to(tl.pointer_type(tl.int64)) + tl.load(line + WORD) + word
    inside = word * 64 < tl.load(line + SIZE)
    tl.store(out, tl.sum(votes.to(tl.int64) << column.to(tl.int64), 1), inside)
    _mark(rows, line, word, tl.max((u != 0.0).to(tl.int32), 1) != 0)  # A NaN is not zero.


@triton.jit
def _bits(planes, line, word, bit, stride):
    """Returns one bit of each element, shape (ROWS, 64), from a plane."""
    at = planes.to(tl.pointer_type(tl.int64)) + bit * stride + tl.load(line + WORD) + word
    plane = tl.load(at, word * 64 < tl.load(line + SIZE), 0)
    return ((plane[:, None] >> tl.arange(0, 64)[None, :].to(tl.int64)) & 1).to(tl.int32)


@triton.jit
def _voters_of(voters, line, word):
    """Returns n of the words' rows, shape (ROWS, 1)."""
    at = voters.to(tl.pointer_type(tl.int32)) + row_of(line, word)
    return tl.load(at, word * 64 < tl.load(line + SIZE), 0)[:, None]


@triton.jit
def _mean(planes, line, word, stride, n, N: tl.constexpr):
    """Returns (2 S - n) / N, rounded once (section 4)."""
    total = _bits(planes, line, word, 0, stride)
    for bit in tl.static_range(1, 7):
        if N >> bit > 0:
            total += _bits(planes, line, word, bit, stride) << bit
    # Before triton 3.6, quotients that are subnormal become 0; these aren't.
    return tl.math.div_rn((2 * total - n).to(tl.float32), N * 1.0)


@triton.jit
def _move(line, word, planes, stride, n, P: tl.constexpr, N: tl.constexpr, RULE: tl.constexpr,
          FULL: tl.constexpr):  # fmt: skip
    """Decays and moves by a verdict (section 5)."""
    lr = _number(line, LR)
    if RULE == "average":
        move = _mean(planes, line, word, stride, n, N) * lr
    else:
        # Triton's -lr is 0 - lr, which isn't -0.0 for a rate of 0.
        move = tl.where(_bits(planes, line, word, 0, stride) != 0, lr, lr * -1.0)
        move = tl.where(n == 0, 0.0, move)
        if RULE == "zero":
            move = tl.where(_bits(planes, line, word, 1, stride) != 0, 0.0, move)
    p = _load(line, TARGET, elements(word), P, FULL) * _number(line, DECAY) - move
    _store(p, line, TARGET, word, KEY_P, P, FULL, False)


@triton.jit
def _own_step(line, word, G: tl.constexpr, M: tl.constexpr, P: tl.constexpr, LOCAL: tl.constexpr,
              FULL: tl.constexpr):  # fmt: skip
    """Moves by sign(u): a local step (section 9), or the step of a single voter (section 5)."""
    lr, step = _number(line, LR), tl.zeros((ROWS, 64), tl.float32)
    if G is not None:
        u = _direction(line, word, G, M, FULL)
        step = tl.where(u > 0.0, lr, tl.where(u < 0.0, lr * -1.0, 0.0))
    if LOCAL and P == tl.bfloat16:
        c = _load(line, C, elements(word), P, FULL)
        if G is not None:
            c = _store(c + step, line, C, word, KEY_C, P, FULL, True)
        p = _load(line, X, elements(word), P, FULL) - c
        _store(p, line, TARGET, word, KEY_P, P, FULL, True)
    else:
        p = _load(line, TARGET, elements(word), P, FULL) * _number(line, DECAY) - step
        _store(p, line, TARGET, word, KEY_P, P, FULL, False)


@triton.jit
def _pairs(line, word, at, P: tl.constexpr, FULL: tl.constexpr):
    """Returns sums of |w| of the words' elements k and k + 32, for eight k from `at` on."""
    k = word[:, None] * 64 + at + tl.arange(0, 8)[None, :]
    low, high = _displacement(line, k, P, FULL), _displacement(line, k + 32, P, FULL)
    return tl.abs(low) + tl.abs(high)


@triton.jit
def _amounts(line, word, sums, rows, P: tl.constexpr, FULL: tl.constexpr):
    """Writes a tile's sum of |w|, in the order of section 3, and marks rows."""
    total = _pairs(line, word, 0, P, FULL) + _pairs(line, word, 16, P, FULL)
    total += _pairs(line, word, 8, P, FULL) + _pairs(line, word, 24, P, FULL)
    for i in tl.static_range(3):
        low, high = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, 4 >> i)), (0, 2, 1)))
        total = low + high
    _mark(rows, line, word, tl.reshape(total, (ROWS,)) != 0.0)
    total = tl.reshape(total, (ROWS,)).to(tl.float64)
    for i in tl.static_range(4):
        low, high = tl.split(tl.reshape(total, (8 >> i, 2)))
        total = low + high
    tile = tl.load(line + WORD) + word // ROWS
    tl.store(sums.to(tl.pointer_type(tl.float64)) + tile, tl.broadcast_to(total, (ROWS,)))


@triton.jit
def _move_exchange(line, word, planes, stride, n, mine, voted, P: tl.constexpr, N: tl.constexpr,
                   FULL: tl.constexpr):  # fmt: skip
    """Moves anchor, displacement, and own weights by an exchange (section 9)."""
    unit, decay, row = _number(line, UNIT), _number(line, DECAY), row_of(line, word)
    at = voted.to(tl.pointer_type(tl.int64)) + row // 64
    active = (tl.load(at, word * 64 < tl.load(line + SIZE), 0) >> (row % 64)) & 1
    q = (2 * _bits(mine, line, word, 0, 0) - 1) * active.to(tl.int32)[:, None]
    sent = q.to(tl.float32) * unit
    mean = _mean(planes, line, word, stride, n, N) * unit
    y = (_load(line, X, elements(word), P, FULL) - mean) * decay
    x = _store(y, line, X, word, KEY_X, P, FULL, False)
    if P == tl.bfloat16:
        left = tl.where(n == 0, 0.0, x - y)
        c = (_load(line, C, elements(word), P, FULL) - sent) * decay + left
        p = x - _store(c, line, C, word, KEY_C, P, FULL, True)
    else:
        p = (_load(line, TARGET, elements(word), P, FULL) + sent - mean) * decay
    _store(p, line, TARGET, word, KEY_P, P, FULL, True)


@triton.jit
def _tile(line, tile, planes, stride, rows, mine, voted, phase, KIND: tl.constexpr,
          G: tl.constexpr, M: tl.constexpr, P: tl.constexpr, N: tl.constexpr, RULE: tl.constexpr,
          FULL: tl.constexpr):  # fmt: skip
    word = tile * ROWS + tl.arange(0, ROWS)
    if KIND == "encode":
        _encode(_direction(line, word, G, M, FULL), line, word, planes, rows, phase)
    elif KIND == "move":
        _move(line, word, planes, stride, _voters_of(rows, line, word), P, N, RULE, FULL)
    elif KIND == "step" or KIND == "local step":
        _own_step(line, word, G, M, P, KIND == "local step", FULL)
    elif KIND == "amounts":
        _amounts(line, word, planes, rows, P, FULL)
    elif KIND == "encode displacement":
        _encode(_displacement(line, elements(word), P, FULL), line, word, planes, rows, phase)
    elif KIND == "move exchange":
        n = _voters_of(rows, line, word)
        _move_exchange(line, word, planes, stride, n, mine, voted, P, N, FULL)


@triton.jit(do_not_specialize=range(9))
def each_tile(table: tl.int64, lines: tl.int32, half: tl.int32, planes: tl.int64,
              stride: tl.int64, rows: tl.int64, mine: tl.int64, voted: tl.int64, phase: tl.int32,
              KIND: tl.constexpr, G: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
              N: tl.constexpr, RULE: tl.constexpr):  # fmt: skip
    """Does one kind of work on the tensors of a table; bytes per element, float32 and bfloat16.

        encode                 12.14   6.14     gradient, momentum, votes
        move                    8.13   4.13     parameter, verdict
        step                   20     10        gradient, momentum, parameter
        local step             20     14        the same, and anchor and displacement of bfloat16
        amounts                 8.01   2.01     parameter and anchor, or displacement
        encode displacement     8.14   2.14     the same, votes
        move exchange          16.3   10.3      parameter, anchor, displacement, verdict, own votes

    A search in the table begins with steps of `half` lines. `planes` are votes or a verdict, with
    `stride` words between them, or sums of tiles, float64. `rows` are flags of the message's rows,
    int8, or numbers of voters, int32. `mine` and `voted` are own votes and their packed rows.
    """
    program = tl.program_id(0).to(tl.int64)
    line = find(table, lines, half, PROGRAM, program)
    first, size = (program - tl.load(line + PROGRAM)) * TILES, tl.load(line + SIZE)
    addresses = tl.load(line + GRAD) | tl.load(line + MOMENTUM) | tl.load(line + TARGET)
    addresses |= tl.load(line + X) | tl.load(line + C)
    for tile in range(first, first + TILES):
        if ((tile + 1) * ROWS * 64 <= size) & (addresses % 16 == 0):
            _tile(
                line, tile, planes, stride, rows, mine, voted, phase, KIND, G, M, P, N, RULE, True
            )
        elif tile * ROWS * 64 < size:
            _tile(
                line, tile, planes, stride, rows, mine, voted, phase, KIND, G, M, P, N, RULE, False
            )
