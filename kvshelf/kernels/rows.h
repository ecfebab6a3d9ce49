/* Rows of states, read from front to end: it is memory that limits. */

#ifndef KVSHELF_ROWS_H
#define KVSHELF_ROWS_H

#include "native.h"

/* Rows of a block, which is one thread's. */
enum { BLOCK_ROWS = 256 };

/* States [heads, rows, dim] of a type, strides in bytes. */
typedef struct {
    const char *data;
    int64_t heads, rows, dim, head_stride, row_stride;
    int type;
} States;

INLINE int64_t blocks_of(const States *a) { return (a->rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

/* A vector of a row from channel `c` on; zeros for those that it does not have. */
INLINE Floats part_of(const char *row, const int64_t c, const int64_t dim, const int type) {
    if (c + LANES <= dim) return load(row, c, type);
    const int64_t width = type == FP32 ? 4 : 2;
    char rest[LANES * 4] = {0};
    memcpy(rest, row + c * width, (dim - c) * width);
    return load(rest, 0, type);
}

/* Eight sums, each product rounded before it is added, and then one sum after the other: so does torch on x86, and of
   rows of a multiple of 8 every bit is torch's. Repeated tokens have norms that differ in the last bit only, and some
   of them are kept by it. */
INLINE float norm_of(const char *row, const int64_t dim, const int type) {
    float total = 0;
#if LANES >= 8
    Eight sums = {0};
    for (int64_t c = 0; c < dim; c += LANES) {
        const Floats part = part_of(row, c, dim, type);
        for (int at = 0; at < LANES; at += 8) {
            Eight squares = eight_of(part * part, at);
#ifdef __x86_64__
            __asm__("" : "+x"(squares)); /* nothing: but what has passed it is not fused with the sum */
#endif
            sums += squares;
        }
    }
    for (int i = 0; i < 8; i++) total += sums[i];
#else
    Floats sums[2] = {{0}};
    for (int64_t c = 0; c < dim; c += 2 * LANES) {
        const Floats low = part_of(row, c, dim, type);
        const Floats high = c + LANES < dim ? part_of(row, c + LANES, dim, type) : (Floats){0};
        sums[0] += low * low, sums[1] += high * high;
    }
    for (int i = 0; i < 8; i++) total += sums[i / LANES][i % LANES];
#endif
    return sqrtf(total);
}

#endif
