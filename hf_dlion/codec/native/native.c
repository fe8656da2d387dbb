/* The CPU codec's inner loops: encode, apply and a step alone, each one pass over memory.
 *
 * Every product and every sum is rounded by itself: compile with -ffp-contract=off and never with
 * -ffast-math. The formulas are those of hf_dlion/codec/lion.py and the NumPy reference, which this
 * equals bit for bit. A block is 64 elements, one word of signs; the first element of a call
 * always begins a word, the last block may be short. "Narrow" tensors are bfloat16, others float32.
 */
#include <float.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 64
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    float beta1, rest1, beta2, rest2; /* b and fl(1 - b) */
    float decay, lr;                  /* fl(1 - lr wd) and fl(lr), lr >= 0 */
    uint32_t momentum_key, param_key; /* of the random bits */
    int32_t stochastic;               /* or round to nearest even */
    uint64_t fill;                    /* an isolated exact zero votes -1 where this has a 1 */
} Rule;

INLINE float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE uint32_t mix(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

INLINE void load(float *out, const void *from, int64_t start, int count, int narrow)
{
    if (narrow)
        for (int k = 0; k < count; k++)
            out[k] = as_float((uint32_t)((const uint16_t *)from)[start + k] << 16);
    else
        for (int k = 0; k < count; k++)
            out[k] = ((const float *)from)[start + k];
}

/* To bfloat16: add random low bits, or half a unit to even, and drop them. NaN stays a NaN. */
INLINE void store(void *to, const float *values, int64_t start, int count, int narrow,
                  uint32_t key, int stochastic)
{
    if (!narrow) {
        for (int k = 0; k < count; k++)
            ((float *)to)[start + k] = values[k];
        return;
    }
    for (int k = 0; k < count; k++) {
        uint32_t bits = as_bits(values[k]);
        uint32_t added = stochastic ? mix((uint32_t)(start + k) ^ key) & 0xffffu
                                    : 0x7fffu + ((bits >> 16) & 1u);
        uint32_t rounded = (bits + added) >> 16;
        uint32_t nan = (bits & 0x7fffffffu) > 0x7f800000u;
        ((uint16_t *)to)[start + k] = (uint16_t)(nan ? 0x7fc0u : rounded);
    }
}

/* The directions of a block. */
INLINE void direct(float *u, const float *g, const float *m, int count, const Rule *rule)
{
    for (int k = 0; k < count; k++) {
        float kept = rule->beta1 * m[k], new = rule->rest1 * g[k];
        u[k] = kept + new;
    }
}

/* Advances a block of the momentum, held in m, which saturates where it is narrow. */
INLINE void advance(const float *g, float *m, void *exp_avg, int64_t start, int count,
                    int narrow_avg, const Rule *rule)
{
    for (int k = 0; k < count; k++) {
        float kept = rule->beta2 * m[k], new = rule->rest2 * g[k];
        m[k] = kept + new;
    }
    if (narrow_avg) {
        const float limit = as_float(0x7f7f0000u);
        for (int k = 0; k < count; k++)
            m[k] = m[k] > limit ? limit : m[k] < -limit ? -limit : m[k];
    }
    store(exp_avg, m, start, count, narrow_avg, rule->momentum_key, rule->stochastic);
}

/* Bit k of the result is flag k, which is 0 or 1. */
INLINE uint64_t packed(const uint8_t *flags)
{
    uint64_t word = 0;
    for (int octet = 0; octet < 8; octet++) {
        uint64_t eight;
        memcpy(&eight, flags + 8 * octet, 8);
        word |= ((eight * 0x0102040810204080ull) >> 56) << (8 * octet);
    }
    return word;
}

/* Packs the signs of a block's directions and marks the rows that vote. */
INLINE void vote_block(const float *u, uint64_t *words, uint8_t *active, int64_t row_numel,
                       int64_t start, int count, const Rule *rule)
{
    uint8_t negative[BLOCK] = {0}, zero[BLOCK] = {0};
    for (int k = 0; k < count; k++) {
        negative[k] = u[k] < 0;
        zero[k] = u[k] == 0;
    }
    uint64_t zeros = packed(zero);
    words[start / BLOCK] = packed(negative) | (zeros & rule->fill);
    int64_t row = start / row_numel, last = (start + count - 1) / row_numel;
    if (!zeros) {
        for (; row <= last; row++)
            active[row] = 1;
        return;
    }
    int64_t next = (row + 1) * row_numel - start;
    for (int k = 0; k < count; k++) {
        if (k == next) {
            row++;
            next += row_numel;
        }
        if (!zero[k])
            active[row] = 1;
    }
}

/* What a call on a block does; every combination is compiled by itself. */
enum { VOTE = 1, ADVANCE = 2 };

INLINE uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* Returns the largest magnitude of the gradients voted on, as bits: from 0x7f800000 on, not finite. */
INLINE uint32_t encode_block(const void *grad, void *exp_avg, uint64_t *words, uint8_t *active,
                             int64_t row_numel, int64_t start, int count, float scale, int what,
                             int narrow_grad, int narrow_avg, const Rule *rule)
{
    float u[BLOCK], g[BLOCK], m[BLOCK];
    uint32_t largest = 0;
    load(g, grad, start, count, narrow_grad);
    load(m, exp_avg, start, count, narrow_avg);
    if (what == VOTE) /* Times 1 changes no bit. */
        for (int k = 0; k < count; k++) {
            g[k] = scale * g[k];
            uint32_t magnitude = as_bits(g[k]) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
    if (what & VOTE)
        direct(u, g, m, count, rule);
    if (what & ADVANCE)
        advance(g, m, exp_avg, start, count, narrow_avg, rule);
    if (what & VOTE)
        vote_block(u, words, active, row_numel, start, count, rule);
    return largest;
}

/* Adds up doubles in pairs of neighbours, then the sums of pairs, and so on; overwrites them. */
double dlion_fold(double *sums, int64_t count)
{
    for (; count > 1; count = (count + 1) / 2) {
        for (int64_t k = 0; k < count / 2; k++)
            sums[k] = sums[2 * k] + sums[2 * k + 1];
        if (count % 2)
            sums[count / 2] = sums[count - 1];
    }
    return count ? sums[0] : 0;
}

/* The sum of the magnitudes of a block, zeros past its end: halves are added, then quarters, ... */
INLINE double magnitude(const float *u)
{
    double sums[BLOCK / 2];
    for (int k = 0; k < BLOCK / 2; k++)
        sums[k] = (double)as_float(as_bits(u[k]) & 0x7fffffffu) +
                  (double)as_float(as_bits(u[k + BLOCK / 2]) & 0x7fffffffu);
    for (int k = 0; k < 16; k++)
        sums[k] += sums[k + 16];
    for (int k = 0; k < 8; k++)
        sums[k] += sums[k + 8];
    for (int k = 0; k < 4; k++)
        sums[k] += sums[k + 4];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* Packs the codes of a block's directions where `kept` has a 1, and 0 elsewhere: `bits` words. */
INLINE void code_block(const float *u, uint64_t *words, uint64_t kept, float factor, int bits,
                       const Rule *rule)
{
    uint8_t code[BLOCK], octet[BLOCK];
    if (bits == 2) {
        uint32_t even = (uint32_t)rule->fill & 1u, odd = even ^ 1u;
        for (int k = 0; k < BLOCK; k++) {
            uint32_t negative = (u[k] < 0) | ((u[k] == 0) & (k % 2 ? odd : even));
            uint32_t far = as_float(as_bits(u[k]) & 0x7fffffffu) > factor;
            code[k] = (uint8_t)(negative ? 1u - far : 2u + far);
        }
    } else {
        const float most = bits == 4 ? 7 : 127;
        for (int k = 0; k < BLOCK; k++) {
            float level = u[k] * factor;
            level = level < most ? level : most; /* NaN too */
            level = level > -most ? level : -most;
            /* At 1.5 * 2^23 a unit in the last place is 1: the sum is rounded, to even halfway. */
            code[k] = (uint8_t)(as_bits(level + 12582912.0f) - 0x4b400000u + (uint32_t)most);
        }
    }
    if (~kept)
        for (int k = 0; k < BLOCK; k++)
            code[k] &= (uint8_t)(0 - (kept >> k & 1));
    for (int j = 0; j < 8 * bits; j++) {
        octet[j] = code[j];
        for (int place = 1; place < 8 / bits; place++)
            octet[j] |= (uint8_t)(code[j + 8 * bits * place] << (bits * place));
    }
    memcpy(words, octet, (size_t)(8 * bits));
}

/* v is -1 where `negative` has a 1 and +1 elsewhere, but 0 where `nonzero` has a 0. */
INLINE void move_block(void *param, uint64_t negative, uint64_t nonzero, int64_t start, int count,
                       int narrow, const Rule *rule)
{
    float p[BLOCK];
    uint32_t lr = as_bits(rule->lr);
    load(p, param, start, count, narrow);
    for (int half = 0; half * 32 < count; half++) {
        uint32_t sign = (uint32_t)(negative >> (32 * half));
        uint32_t moves = (uint32_t)(nonzero >> (32 * half));
        float *part = p + 32 * half;
        int length = count - 32 * half < 32 ? count - 32 * half : 32;
        for (int k = 0; k < length; k++) {
            uint32_t move = (lr | ((sign >> k) << 31)) & (0u - ((moves >> k) & 1u));
            float decayed = part[k] * rule->decay;
            part[k] = decayed - as_float(move);
        }
    }
    store(param, p, start, count, narrow, rule->param_key, rule->stochastic);
}

/* Ones for the elements of a block whose row has a vote. */
static uint64_t voted(const int32_t *counts, int64_t row_numel, int64_t start, int count)
{
    uint64_t word = 0;
    int64_t row = start / row_numel, next = (row + 1) * row_numel - start;
    for (int64_t k = 0; k < count; row++, next += row_numel) {
        uint64_t rest = ~0ull << k; /* of the row that k is in, up to the next one */
        if (counts[row] > 0)
            word |= next < BLOCK ? rest & ~(~0ull << next) : rest;
        k = next;
    }
    return word;
}

INLINE void alone_block(void *param, const void *grad, void *exp_avg, int64_t start, int count,
                        int narrow, int narrow_avg, const Rule *rule)
{
    float u[BLOCK], p[BLOCK], g[BLOCK], m[BLOCK];
    load(g, grad, start, count, narrow);
    load(m, exp_avg, start, count, narrow_avg);
    direct(u, g, m, count, rule);
    advance(g, m, exp_avg, start, count, narrow_avg, rule);
    load(p, param, start, count, narrow);
    for (int k = 0; k < count; k++) {
        float move = rule->lr * (float)((u[k] > 0) - (u[k] < 0));
        float decayed = p[k] * rule->decay;
        p[k] = decayed - move;
    }
    store(param, p, start, count, narrow, rule->param_key, rule->stochastic);
}

/* Full blocks get a constant length, which the compiler turns into vectors; a short one follows. */
#define FOR_BLOCKS(call_full, call_rest)                                                           \
    do {                                                                                           \
        int64_t at = start;                                                                        \
        for (; at + BLOCK <= stop; at += BLOCK)                                                    \
            call_full;                                                                             \
        if (at < stop)                                                                             \
            call_rest;                                                                             \
    } while (0)

#define ENCODE(what, gn, mn)                                                                       \
    FOR_BLOCKS(largest = larger(largest, encode_block(grad, exp_avg, words, active, row_numel, at, \
                                                      BLOCK, scale, what, gn, mn, rule)),          \
               largest = larger(largest, encode_block(grad, exp_avg, words, active, row_numel, at, \
                                                      (int)(stop - at), scale, what, gn, mn, rule)))

#define ENCODE_ANY(what)                                                                           \
    do {                                                                                           \
        if (narrow_grad && narrow_avg)                                                             \
            ENCODE(what, 1, 1);                                                                    \
        else if (narrow_grad)                                                                      \
            ENCODE(what, 1, 0);                                                                    \
        else if (narrow_avg)                                                                       \
            ENCODE(what, 0, 1);                                                                    \
        else                                                                                       \
            ENCODE(what, 0, 0);                                                                    \
    } while (0)

/* Elements start to stop; start is a multiple of 64. VOTE writes signs and sets `active`, which it
 * never clears; ADVANCE moves the momentum on. VOTE alone takes the gradient times `scale`, and
 * returns whether that is finite everywhere. */
int dlion_encode(const void *grad, void *exp_avg, uint64_t *words, uint8_t *active,
                  int64_t row_numel, int64_t start, int64_t stop, float scale, int what,
                  int narrow_grad, int narrow_avg, const Rule *rule)
{
    uint32_t largest = 0;
    if (what == VOTE)
        ENCODE_ANY(VOTE);
    else if (what == ADVANCE)
        ENCODE_ANY(ADVANCE);
    else
        ENCODE_ANY(VOTE | ADVANCE);
    return what == VOTE && largest < 0x7f800000u;
}

/* The directions of a block, 0 past its end; advances the momentum with ADVANCE. Returns the largest
 * magnitude of `scale` times the gradient, as bits. */
INLINE uint32_t directions_of(float *u, const void *grad, void *exp_avg, int64_t start, int count,
                              float scale, int what, int narrow_grad, int narrow_avg,
                              const Rule *rule)
{
    float g[BLOCK], m[BLOCK];
    uint32_t largest = 0;
    load(g, grad, start, count, narrow_grad);
    load(m, exp_avg, start, count, narrow_avg);
    for (int k = 0; k < count; k++) {
        g[k] = scale * g[k];
        uint32_t magnitude = as_bits(g[k]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    direct(u, g, m, count, rule);
    for (int k = count; k < BLOCK; k++)
        u[k] = 0;
    if (what & ADVANCE)
        advance(g, m, exp_avg, start, count, narrow_avg, rule);
    return largest;
}

/* The same. Not a function per dtype: compiling takes its time, and a block has one branch more. */
static uint32_t directions(float *u, const void *grad, void *exp_avg, int64_t start, int count,
                           float scale, int what, int narrow_grad, int narrow_avg,
                           const Rule *rule)
{
    return count == BLOCK ? directions_of(u, grad, exp_avg, start, BLOCK, scale, what, narrow_grad,
                                          narrow_avg, rule)
                          : directions_of(u, grad, exp_avg, start, count, scale, what, narrow_grad,
                                          narrow_avg, rule);
}

INLINE int least(int64_t a, int64_t b)
{
    return (int)(a < b ? a : b);
}

/* The row that a block begins in and where the next one begins: no division for every block. */
typedef struct {
    int64_t row, next;
} Cursor;

INLINE Cursor cursor_at(int64_t start, int64_t row_numel)
{
    return (Cursor){start / row_numel, (start / row_numel + 1) * row_numel};
}

/* Marks the rows of a block that vote: `active` is that of its first element, whose row ends `next`
 * elements behind the block's beginning. */
static void mark_nonzero(uint8_t *active, const float *u, int64_t row_numel, int64_t next,
                         int count)
{
    for (int k = 0; k < count; k++) {
        if (k == next) {
            active++;
            next += row_numel;
        }
        if (u[k] != 0)
            *active = 1;
    }
}

/* The same, for one block after another; `cursor` is moved on to it. */
INLINE void mark_rows(uint8_t *active, const float *u, int64_t row_numel, int64_t start, int count,
                      Cursor *cursor)
{
    int zeros = 0;
    for (int k = 0; k < BLOCK; k++)
        zeros += u[k] == 0;
    for (; cursor->next <= start; cursor->next += row_numel)
        cursor->row++;
    if (zeros) {
        mark_nonzero(active + cursor->row, u, row_numel, cursor->next - start, count);
        return;
    }
    for (active[cursor->row] = 1; cursor->next < start + count; cursor->next += row_numel)
        active[++cursor->row] = 1;
}

/* Blocks whose magnitudes are added up together: a subtree of the sum over a tensor. */
#define GROUP 1024

/* Writes the sums of the magnitudes of the directions of each GROUP of blocks, from element `start`
 * on, a multiple of theirs, and sets `active`, which it never clears. Returns whether the gradient
 * times `scale` is finite everywhere. */
int dlion_measure(const void *grad, void *exp_avg, double *sums, uint8_t *active,
                  int64_t row_numel, int64_t start, int64_t stop, float scale, int narrow_grad,
                  int narrow_avg, const Rule *rule)
{
    double of_blocks[GROUP];
    uint32_t largest = 0;
    int64_t blocks = 0;
    Cursor cursor = cursor_at(start, row_numel);
    for (int64_t at = start; at < stop; at += BLOCK) {
        float u[BLOCK];
        int count = least(BLOCK, stop - at);
        uint32_t found =
            directions(u, grad, exp_avg, at, count, scale, VOTE, narrow_grad, narrow_avg, rule);
        largest = larger(largest, found);
        of_blocks[blocks++] = magnitude(u);
        if (blocks == GROUP || at + BLOCK >= stop) {
            sums[at / (GROUP * BLOCK)] = dlion_fold(of_blocks, blocks);
            blocks = 0;
        }
        mark_rows(active, u, row_numel, at, count, &cursor);
    }
    return largest < 0x7f800000u;
}

/* What the directions of a block are multiplied by, or with 2 bits compared with. */
INLINE float factor_of_word(const float *u, int bits)
{
    int nonzero = 0;
    for (int k = 0; k < BLOCK; k++)
        nonzero += u[k] != 0;
    double mean = magnitude(u) / nonzero;
    if (bits == 2)
        return (float)(1.5 * mean);
    double factor = (bits == 4 ? 3.5 : 63.5) / mean;
    return mean > 0 ? (float)(factor < FLT_MAX ? factor : FLT_MAX) : 0;
}

/* Packs the codes of a block where `kept` has a 1. */
static void code_any(const float *u, uint64_t *words, uint64_t kept, float factor, int bits,
                     const Rule *rule)
{
    if (bits == 2)
        code_block(u, words, kept, factor, 2, rule);
    else if (bits == 4)
        code_block(u, words, kept, factor, 4, rule);
    else
        code_block(u, words, kept, factor, 8, rule);
}

/* Writes votes of more than one bit with one factor; with ADVANCE it moves the momentum on. Follows
 * dlion_measure; dlion_clear must follow. */
void dlion_levels(const void *grad, void *exp_avg, uint64_t *words, int64_t start, int64_t stop,
                  float scale, float factor, int bits, int what, int narrow_grad, int narrow_avg,
                  const Rule *rule)
{
    for (int64_t at = start; at < stop; at += BLOCK) {
        float u[BLOCK];
        int count = least(BLOCK, stop - at);
        uint64_t kept = count == BLOCK ? ~0ull : ~(~0ull << count);
        directions(u, grad, exp_avg, at, count, scale, what, narrow_grad, narrow_avg, rule);
        code_any(u, words + at / BLOCK * bits, kept, factor, bits, rule);
    }
}

/* Writes votes of more than one bit, every word with a factor of its own, in one pass; with ADVANCE
 * it moves the momentum on. Sets `active`, which it never clears; dlion_clear must follow. Returns
 * whether the gradient times `scale` is finite everywhere. */
int dlion_word_levels(const void *grad, void *exp_avg, uint64_t *words, uint8_t *active,
                      int64_t row_numel, int64_t start, int64_t stop, float scale, int bits,
                      int what, int narrow_grad, int narrow_avg, const Rule *rule)
{
    uint32_t largest = 0;
    Cursor cursor = cursor_at(start, row_numel);
    for (int64_t at = start; at < stop; at += BLOCK) {
        float u[BLOCK];
        int count = least(BLOCK, stop - at);
        uint64_t kept = count == BLOCK ? ~0ull : ~(~0ull << count);
        uint32_t found =
            directions(u, grad, exp_avg, at, count, scale, what, narrow_grad, narrow_avg, rule);
        largest = larger(largest, found);
        mark_rows(active, u, row_numel, at, count, &cursor);
        code_any(u, words + at / BLOCK * bits, kept, factor_of_word(u, bits), bits, rule);
    }
    return largest < 0x7f800000u;
}

/* Sets the codes to 0 of the rows whose count is 0. */
void dlion_clear(uint64_t *words, const int32_t *counts, int64_t row_numel, int64_t start,
                 int64_t stop, int bits)
{
    for (int64_t at = start; at < stop; at += BLOCK) {
        uint64_t kept = voted(counts, row_numel, at, least(BLOCK, stop - at));
        uint8_t *octet = (uint8_t *)(words + at / BLOCK * bits);
        if (!kept)
            memset(octet, 0, (size_t)(8 * bits));
        if (!kept || !~kept)
            continue;
        for (int k = 0; k < BLOCK; k++)
            if (!(kept >> k & 1))
                octet[k % (8 * bits)] &= (uint8_t)~(((1 << bits) - 1) << (bits * (k / (8 * bits))));
    }
}

#define APPLY(pn)                                                                                  \
    FOR_BLOCKS(move_block(param, negative[at / BLOCK],                                             \
                          (nonzero ? nonzero[at / BLOCK] : ~0ull) &                                \
                              (counts ? voted(counts, row_numel, at, BLOCK) : ~0ull),              \
                          at, BLOCK, pn, rule),                                                    \
               move_block(param, negative[at / BLOCK],                                             \
                          (nonzero ? nonzero[at / BLOCK] : ~0ull) &                                \
                              (counts ? voted(counts, row_numel, at, (int)(stop - at)) : ~0ull),   \
                          at, (int)(stop - at), pn, rule))

/* Applies a majority's verdict; `nonzero` and `counts` may be null where nothing is 0. */
void dlion_apply(void *param, const uint64_t *negative, const uint64_t *nonzero,
                 const int32_t *counts, int64_t row_numel, int64_t start, int64_t stop, int narrow,
                 const Rule *rule)
{
    if (narrow)
        APPLY(1);
    else
        APPLY(0);
}

#define ALONE(pn, mn)                                                                              \
    FOR_BLOCKS(alone_block(param, grad, exp_avg, at, BLOCK, pn, mn, rule),                         \
               alone_block(param, grad, exp_avg, at, (int)(stop - at), pn, mn, rule))

/* One step of plain Lion with sign(0) = 0. */
void dlion_alone(void *param, const void *grad, void *exp_avg, int64_t start, int64_t stop,
                 int narrow, int narrow_avg, const Rule *rule)
{
    if (narrow && narrow_avg)
        ALONE(1, 1);
    else if (narrow)
        ALONE(1, 0);
    else if (narrow_avg)
        ALONE(0, 1);
    else
        ALONE(0, 0);
}

#define TILE 64
#define MAX_DIGITS 32

/* Adds up the votes of a tile: bit k of plane b is bit b of how many votes have bit k. */
INLINE void add_votes(uint64_t plane[][TILE], const uint64_t *votes, int64_t stride, int ranks,
                      int digits, int count)
{
    memset(plane, 0, sizeof plane[0] * (size_t)digits);
    for (int rank = 0; rank < ranks; rank++) {
        uint64_t carry[TILE];
        memcpy(carry, votes + rank * stride, (size_t)count * sizeof *carry);
        /* After so many votes only so many digits can be other than 0. */
        for (int digit = 0; digit < digits && rank + 1 >= 1 << digit; digit++)
            for (int k = 0; k < count; k++) {
                uint64_t next = plane[digit][k] & carry[k];
                plane[digit][k] ^= carry[k];
                carry[k] = next;
            }
    }
}

/* Counts votes, `stride` words apart, and writes the verdict's planes, `out_stride` words apart.
 * `totals` are bit-sliced, `totals_stride` words apart: how many ranks voted on each element; null
 * where all of them did on all. Returns the sum of |n - 2 c| less the sum of n over all elements, c
 * of n votes being negative. A single plane may be one of the votes. If `average` the planes are the digits of c; else plane 0 says where
 * the verdict is -1, on a tie where `tie_word` has a 1, and plane 1, if `to_zero`, where it is not
 * a tie. */
int64_t dlion_count(const uint64_t *votes, int64_t stride, int ranks, int64_t words, int average,
                    int to_zero, uint64_t tie_word, const uint64_t *totals, int64_t totals_stride,
                    uint64_t *out, int64_t out_stride)
{
    int digits = 32 - __builtin_clz((unsigned)ranks);
    int64_t change = 0;
    for (int64_t at = 0; at < words; at += TILE) {
        uint64_t plane[MAX_DIGITS][TILE], total[MAX_DIGITS][TILE];
        uint64_t greater[TILE], equal[TILE], voted[TILE];
        int count = words - at < TILE ? (int)(words - at) : TILE;
        add_votes(plane, votes + at, stride, ranks, digits, count);
        for (int digit = 0; digit < digits; digit++)
            for (int k = 0; k < count; k++)
                total[digit][k] = totals ? totals[digit * totals_stride + at + k]
                                         : 0 - (uint64_t)(ranks >> digit & 1);
        for (int k = 0; k < count; k++) {
            greater[k] = 0;
            equal[k] = ~0ull;
            voted[k] = 0;
        }
        /* Twice the count against the total, from the highest digit. */
        for (int digit = digits; digit >= 0; digit--)
            for (int k = 0; k < count; k++) {
                uint64_t twice = digit ? plane[digit - 1][k] : 0;
                uint64_t all = digit < digits ? total[digit][k] : 0;
                greater[k] |= equal[k] & twice & ~all;
                equal[k] &= ~(twice ^ all);
                voted[k] |= all;
            }
        for (int digit = 0; digit < digits; digit++)
            for (int k = 0; k < count; k++)
                change += (4 * (int64_t)__builtin_popcountll(plane[digit][k] & greater[k]) -
                           2 * (int64_t)__builtin_popcountll(plane[digit][k]) -
                           2 * (int64_t)__builtin_popcountll(total[digit][k] & greater[k])) *
                          ((int64_t)1 << digit);
        if (average) {
            for (int digit = 0; digit < digits; digit++)
                memcpy(out + digit * out_stride + at, plane[digit], (size_t)count * sizeof *out);
            continue;
        }
        for (int k = 0; k < count; k++) {
            out[at + k] = (greater[k] | (equal[k] & tie_word)) & voted[k];
            if (to_zero)
                out[out_stride + at + k] = ~equal[k] & voted[k];
        }
    }
    return change;
}

/* So many codes of 8 bits, or levels without their signs, fit sums of 16 bits. */
#define BATCH 256

/* Adds up the codes of a block of 64 elements over the ranks; returns the sum of all |levels|. */
INLINE int64_t add_block(int32_t *total, const uint64_t *votes, int64_t stride, int ranks, int bits,
                         int largest, int spacing)
{
    int64_t cast = 0;
    memset(total, 0, BLOCK * sizeof *total);
    for (int first = 0; first < ranks; first += BATCH) {
        uint16_t codes[BLOCK] = {0}, sizes[BLOCK] = {0};
        for (int rank = first; rank < ranks && rank < first + BATCH; rank++) {
            uint8_t octet[BLOCK];
            memcpy(octet, votes + rank * stride, (size_t)(8 * bits));
            for (int place = 0; place < 8 / bits; place++)
                for (int j = 0; j < 8 * bits; j++) {
                    int16_t code = (int16_t)(octet[j] >> (bits * place) & ((1 << bits) - 1));
                    int16_t level = (int16_t)(spacing * code - largest);
                    codes[8 * bits * place + j] += (uint16_t)code;
                    sizes[8 * bits * place + j] += (uint16_t)(level < 0 ? -level : level);
                }
        }
        int32_t sum = 0;
        for (int k = 0; k < BLOCK; k++) {
            total[k] += codes[k];
            sum += sizes[k];
        }
        cast += sum;
    }
    return cast;
}

INLINE void sum_blocks(const uint64_t *votes, int64_t stride, int ranks, int64_t words,
                       int to_zero, uint64_t tie_word, const int32_t *voters, uint64_t *out,
                       int64_t out_stride, int64_t *sums, int bits, int largest, int spacing)
{
    for (int64_t at = 0; at < words; at++) {
        int32_t total[BLOCK];
        uint8_t negative[BLOCK], zero[BLOCK], some[BLOCK];
        sums[1] += add_block(total, votes + at * bits, stride, ranks, bits, largest, spacing);
        int32_t size = 0;
        for (int k = 0; k < BLOCK; k++)
            total[k] = spacing * total[k] - largest * (voters ? voters[BLOCK * at + k] : ranks);
        for (int k = 0; k < BLOCK; k++) {
            negative[k] = total[k] < 0;
            zero[k] = total[k] == 0;
        }
        for (int k = 0; k < BLOCK; k++)
            size += total[k] < 0 ? -total[k] : total[k];
        if (voters)
            for (int k = 0; k < BLOCK; k++)
                some[k] = voters[BLOCK * at + k] != 0;
        sums[0] += size;
        uint64_t tied = packed(zero);
        if (to_zero)
            out[out_stride + at] = ~tied;
        out[at] = packed(negative) | (tied & tie_word & (voters ? packed(some) : ~0ull));
    }
}

/* Adds up votes of 2, 4 or 8 bits, `stride` words apart from rank to rank, for `words` times 64
 * elements, and writes the verdict's planes as `dlion_count` does. `voters`: how many ranks vote on
 * each element; null where all do. Adds to `sums` the sum of |sum of levels| over the elements, and
 * the sum of |level| over ranks too, the code 0 of an abstention taken for the lowest level. */
void dlion_sum(const uint64_t *votes, int64_t stride, int ranks, int64_t words, int bits,
               int to_zero, uint64_t tie_word, const int32_t *voters, uint64_t *out,
               int64_t out_stride, int64_t *sums)
{
    if (bits == 2)
        sum_blocks(votes, stride, ranks, words, to_zero, tie_word, voters, out, out_stride, sums, 2,
                   3, 2);
    else if (bits == 4)
        sum_blocks(votes, stride, ranks, words, to_zero, tie_word, voters, out, out_stride, sums, 4,
                   7, 1);
    else
        sum_blocks(votes, stride, ranks, words, to_zero, tie_word, voters, out, out_stride, sums, 8,
                   127, 1);
}
