/* Ranks: scores as numbers that are counted fast. */

#ifndef KVSHELF_RANKS_H
#define KVSHELF_RANKS_H

#include "native.h"

/* A number that is ordered as the scores are; what is not finite is above all, and 0 and -0 are one. Above INT32_MIN,
   which is that of what is kept whatever its score. */
INLINE int32_t rank_of(float score) {
    int32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, sizeof bits);
    if ((bits & 0x7f800000) == 0x7f800000) return INT32_MAX;
    return bits ^ (bits >> 31 & INT32_MAX);
}

/* How many ranks of a row are `least` or above. */
INLINE int64_t count_from(const int32_t *ranks, int64_t length, int32_t least) {
    Ints counts = {0};
    int64_t i = 0, total = 0;
    for (; i + LANES <= length; i += LANES) counts -= *(const IntsAnywhere *)(ranks + i) >= least;
    for (int lane = 0; lane < LANES; lane++) total += counts[lane];
    for (; i < length; i++) total += ranks[i] >= least;
    return total;
}

/* A rank that exactly `wanted` of a row reach, or where there are ties the highest that at least as many reach: a bit at
   a time from the highest one, in at most 32 passes of a compare and a sum over a row in the processor's cache. (A
   histogram of digits passes less often, and waits for its own last store in most steps: norms share exponents.) */
INLINE int32_t rank_at(const int32_t *ranks, int64_t length, int64_t wanted) {
    uint32_t least = 0;
    for (uint32_t bit = (uint32_t)1 << 31; bit; bit >>= 1) {
        const uint32_t raised = least | bit;
        const int64_t reached = count_from(ranks, length, (int32_t)(raised ^ 0x80000000));
        if (reached >= wanted) least = raised;
        if (reached == wanted) break;
    }
    return (int32_t)(least ^ 0x80000000);
}

#endif
