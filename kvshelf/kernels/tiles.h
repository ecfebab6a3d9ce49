/* Products of a matrix with 32 rows of another, which stand in the lanes of vectors. */

#ifndef KVSHELF_TILES_H
#define KVSHELF_TILES_H

#include "native.h"

enum { ROWS = 32, VECTORS = ROWS / LANES };

/* What one number for every row is made of. */
typedef Floats OfRows[VECTORS];

/* Sums that are worked on together: as many as registers hold. Each number is read once for all rows. */
#ifdef __AVX512F__
enum { ABREAST = 8 };
#else
enum { ABREAST = 2 };
#endif

/* sums[i] += numbers[i * across + n * along] * rows[n], over `count` of n and for ABREAST of i. */
INLINE void add_products(OfRows sums[ABREAST], const float *numbers, const int64_t across, const int64_t along,
                         const OfRows *rows, const int64_t count) {
    OfRows total[ABREAST];
    memcpy(total, sums, sizeof total);
    for (int64_t n = 0; n < count; n++)
#pragma GCC unroll 8
        for (int i = 0; i < ABREAST; i++) {
            const Floats number = spread(numbers[i * across + n * along]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) total[i][v] += rows[n][v] * number;
        }
    memcpy(sums, total, sizeof total);
}

#endif
