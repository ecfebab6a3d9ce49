/* Rows that are stored as codes of 2, 3, 4 or 8 bits: what they stand for, as `kvshelf.kernels.quantize` says. */

#ifndef KVSHELF_CODES_H
#define KVSHELF_CODES_H

#include "native.h"

/* How rows lie in memory. bits 0: plain numbers, `stride` of them from row to row. Otherwise codes, as many bytes from
   row to row. A group has `group` rows of one channel where `by_tokens` is set, and else channels of one row, a multiple
   of 16. dim: channels; those of rows that are not grouped by tokens are a multiple of 16. */
typedef struct {
    int64_t bits, group, by_tokens, stride, dim;
} Layout;

/* Channels in whole vectors. */
INLINE int64_t whole(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

/* The rows of a head. scales, zeros: bf16, of codes only: [groups, dim] by tokens, [rows, groups] by channels. */
typedef struct {
    const void *data;
    const uint16_t *scales, *zeros;
} HeadRows;

/* A vector of codes of 3 bits, from bit `start` of a byte on: 0 or 4, as 4 lanes end within a byte. */
INLINE Floats codes_of_three(const uint8_t *from, const int start) {
    typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
    uint32_t low = (uint32_t)from[0] | (uint32_t)from[1] << 8; /* a copy of three bytes would go through memory */
    if (LANES > 4) low |= (uint32_t)from[2] << 16;
    if (LANES > 8) low |= (uint32_t)from[3] << 24;
#if LANES == 16
    uint32_t high; /* from bit 16 on, for the upper 8 lanes */
    memcpy(&high, from + 2, sizeof high);
    const Words lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, upper = (Words)(lane >= 8);
    const Words word = (((Words){0} + low) & ~upper) | (((Words){0} + high) & upper), bit = lane * 3 - (upper & 16);
#elif LANES == 4
    const Words lane = {0, 1, 2, 3}, word = (Words){0} + low, bit = lane * 3 + (uint32_t)start;
#else
    const Words lane = {0, 1, 2, 3, 4, 5, 6, 7}, word = (Words){0} + low, bit = lane * 3;
#endif
    return __builtin_convertvector((Ints)((word >> bit) & 7), Floats);
}

/* A vector of codes from channel `c` on, a multiple of LANES. A lane takes its code out of 4 bytes. */
INLINE Floats codes_of(const uint8_t *row, const int64_t c, const int bits) {
    typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
    const uint8_t *from = row + c * bits / 8;
    if (bits == 3) return codes_of_three(from, c * bits & 7);
    if (bits == 8 && LANES > 4) {
#if defined(__AVX512F__)
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from)));
#elif defined(__AVX2__)
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from)));
#else
        Floats codes;
        for (int l = 0; l < LANES; l++) codes[l] = from[l];
        return codes;
#endif
    }
#if LANES == 16
    uint32_t low, high = 0;
    memcpy(&low, from, sizeof low);
    if (bits == 4) memcpy(&high, from + sizeof low, sizeof high);
    const Words lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, second = (Words)(lane * bits >= 32);
    const Words word = (((Words){0} + low) & ~second) | (((Words){0} + high) & second);
#elif LANES == 4
    uint32_t low = 0;
    memcpy(&low, from, LANES * bits / 8);
    const Words lane = {0, 1, 2, 3}, word = (Words){0} + low;
#else
    uint16_t half;
    uint32_t low;
    memcpy(&half, from, sizeof half);
    if (bits == 4) memcpy(&low, from, sizeof low);
    const Words lane = {0, 1, 2, 3, 4, 5, 6, 7}, word = (Words){0} + (bits == 4 ? low : half);
#endif
    const Words code = (word >> (lane * bits & 31)) & ((1u << bits) - 1);
    return __builtin_convertvector((Ints)code, Floats);
}

/* The nearest bf16 to each number, half to even; what is not a number stays none. */
INLINE Floats nearest_bf16(const Floats x) {
    const Ints bits = (Ints)x, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & ~0xffff;
    return choose(x == x, (Floats)nearest, x);
}

/* The last channels of a row whose groups are by tokens, fewer than a vector has, from bit `start` of the first byte on;
   zeros behind them. What follows in memory is another row, or no memory. */
static Floats last_codes(const uint8_t *row, const uint16_t *scales, const uint16_t *zeros, int64_t left, int bits,
                         int start) {
    uint8_t codes[LANES] = {0};
    uint16_t both[2][LANES] = {{0}};
    memcpy(codes, row, (start + left * bits + 7) / 8);
    memcpy(both[0], scales, left * sizeof *scales);
    memcpy(both[1], zeros, left * sizeof *zeros);
    const Floats made = bits == 8   ? codes_of(codes, 0, 8)
                        : bits == 4 ? codes_of(codes, 0, 4)
                        : bits == 3 ? codes_of_three(codes, start)
                                    : codes_of(codes, 0, 2);
    return made * load(both[0], 0, BF16) + load(both[1], 0, BF16);
}

INLINE void dequantize_as(const HeadRows *rows, const Layout *layout, const int64_t first, const int count,
                          const int type, float *out, const int bits, const int by_tokens) {
    const int64_t dim = layout->dim, groups = by_tokens ? dim : (dim + layout->group - 1) / layout->group;
    for (int64_t r = first; r < first + count; r++, out += whole(dim)) {
        const uint8_t *row = (const uint8_t *)rows->data + r * layout->stride;
        const int64_t at = (by_tokens ? r / layout->group : r) * groups;
        for (int64_t c = 0; c < dim; c += LANES) {
            const int64_t g = at + (by_tokens ? c : c / layout->group);
            if (by_tokens && c + LANES > dim) {
                const Floats x = last_codes(row + c * bits / 8, rows->scales + g, rows->zeros + g, dim - c, bits,
                                            c * bits & 7);
                *(FloatsAnywhere *)(out + c) = type == FP32 ? x : nearest_bf16(x);
                continue;
            }
            const Floats scale = by_tokens ? load(rows->scales, g, BF16) : spread(number_at(rows->scales, g, BF16));
            const Floats zero = by_tokens ? load(rows->zeros, g, BF16) : spread(number_at(rows->zeros, g, BF16));
            /* A code has 8 bits at most and a scale as many: their product is exact, fused with the sum or not. */
            const Floats x = codes_of(row, c, bits) * scale + zero;
            *(FloatsAnywhere *)(out + c) = type == FP32 ? x : nearest_bf16(x);
        }
    }
}

/* Rows `first` to `first + count` of a head, [count, whole(dim)]. As numbers of `type`, in fp32. */
static void dequantize(const HeadRows *rows, const Layout *layout, int64_t first, int count, int type, float *out) {
#define FORM(BITS, BY_TOKENS)                                   \
    if (layout->bits == BITS && layout->by_tokens == BY_TOKENS) \
        return dequantize_as(rows, layout, first, count, type, out, BITS, BY_TOKENS);
    FORM(2, 0) FORM(2, 1) FORM(3, 0) FORM(3, 1) FORM(4, 0) FORM(4, 1) FORM(8, 0) FORM(8, 1)
#undef FORM
}

#endif
