/* Products of a matrix with 32 rows of another, which stand in the lanes of vectors. */

#ifndef KVSHELF_TILES_H
#define KVSHELF_TILES_H

#include "native.h"

enum { ROWS = 32, VECTORS = ROWS / LANES };

/* What one number for every row is made of. */
typedef Floats OfRows[VECTORS];

/* Sums that are worked on together, SPAN vectors of each: as many as registers hold beside the rows and one number. With
   fewer than 10 a unit waits for the sums before. Each number is read once for the rows of a span. */
#if defined(__AVX512F__)
enum { ABREAST = 8, SPAN = 2 };
#elif defined(__AVX2__)
enum { ABREAST = 6, SPAN = 2 };
#else
enum { ABREAST = 2, SPAN = VECTORS };
#endif

INLINE void add_some(OfRows *sums, const float *numbers, const int64_t across, const int64_t along, const OfRows *rows,
                     const int64_t count, const int some, const int from, const int type) {
    Floats total[ABREAST][SPAN];
#pragma GCC unroll 8
    for (int i = 0; i < some; i++)
#pragma GCC unroll 8
        for (int v = 0; v < SPAN; v++) total[i][v] = sums[i][from + v];
    for (int64_t n = 0; n < count; n++)
#pragma GCC unroll 8
        for (int i = 0; i < some; i++) {
            const Floats number = spread(numbers[i * across + n * along]);
#pragma GCC unroll 8
            for (int v = 0; v < SPAN; v++) total[i][v] = added(total[i][v], rows[n][from + v], number, type);
        }
#pragma GCC unroll 8
    for (int i = 0; i < some; i++)
#pragma GCC unroll 8
        for (int v = 0; v < SPAN; v++) sums[i][from + v] = total[i][v];
}

/* sums[i] += numbers[i * across + n * along] * rows[n], over `count` of n and for `many` of i, a multiple of 16: groups
   of ABREAST, or of one less. type: FP32, or PAIRS, of numbers and rows. */
INLINE void add_products(OfRows *sums, const int64_t many, const float *numbers, const int64_t across,
                         const int64_t along, const OfRows *rows, const int64_t count, const int type) {
    const int64_t groups = (many + ABREAST - 1) / ABREAST;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t i = g * many / groups, some = (g + 1) * many / groups - i;
        for (int from = 0; from < VECTORS; from += SPAN)
            if (some == ABREAST)
                add_some(sums + i, numbers + i * across, across, along, rows, count, ABREAST, from, type);
            else
                add_some(sums + i, numbers + i * across, across, along, rows, count, ABREAST - 1, from, type);
    }
}

#endif
