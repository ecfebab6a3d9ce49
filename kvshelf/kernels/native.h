/* What the C forms of all operations share: vectors of floats, and the threads they run on.

   Vectors are a language extension of GCC and Clang and not intrinsics, so that one source serves every width. They are
   as wide as the registers of the CPU that is compiled for: wider ones are allowed, but GCC 12 keeps them in memory, and
   column sums took forty times as long on AVX2. */

#ifndef KVSHELF_NATIVE_H
#define KVSHELF_NATIVE_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#define LOG2_E 1.44269504f
#define LN_2 0.693147181f

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__ARM_NEON)
#define LANES 4
#else
#define LANES 8
#endif

/* Head sizes are multiples of 16, and 256 at most. */
enum { MOST_PARTS = 256 / LANES };

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef float Eight __attribute__((vector_size(32)));
typedef float FloatsAnywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef int32_t IntsAnywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t HalvesAnywhere __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* What tensors are made of; `native.py` gives these numbers. */
enum { FP32 = 0, BF16 = 1 };

/* PAIRS: two neighbours in bf16 in place of one number in fp32, whose products one instruction of AVX512-BF16 sums in
   fp32. Wherever numbers are counted, these are pairs. */
enum { PAIRS = 3 };

/* A vector of halves from element `at` of `data`, as whole numbers. GCC widens one in two parts. */
INLINE Ints load_halves(const void *data, int64_t at) {
    const uint16_t *halves = (const uint16_t *)data + at;
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)halves));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)halves));
#else
    return __builtin_convertvector(*(const HalvesAnywhere *)halves, Ints);
#endif
}

/* A vector of numbers from element `at` of `data`, as fp32. */
INLINE Floats load(const void *data, int64_t at, int type) {
    if (type == FP32) return *(const FloatsAnywhere *)((const float *)data + at);
    return (Floats)(load_halves(data, at) << 16);
}

/* Number `at` of `data`, as fp32. */
INLINE float number_at(const void *data, int64_t at, int64_t type) {
    if (type == FP32) return ((const float *)data)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)data)[at] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

#if LANES >= 8
/* Eight numbers of a vector, from `at` on. By a copy where there is no instruction known: GCC before 12 has no
   __builtin_shufflevector. */
INLINE Eight eight_of(const Floats x, const int at) {
#if defined(__AVX512F__)
    return (Eight)(at ? _mm512_extractf32x8_ps(x, 1) : _mm512_castps512_ps256(x));
#elif LANES == 8
    return (Eight)x;
#else
    Eight part;
    memcpy(&part, (const float *)&x + at, sizeof part);
    return part;
#endif
}

INLINE float sum(Floats x) {
    Eight low = eight_of(x, 0);
    for (int at = 8; at < LANES; at += 8) low += eight_of(x, at);
    return ((low[0] + low[4]) + (low[2] + low[6])) + ((low[1] + low[5]) + (low[3] + low[7]));
}
#else
INLINE float sum(Floats x) { return (x[0] + x[2]) + (x[1] + x[3]); }
#endif

/* `yes` where the mask is set (all bits, as comparisons give it), elsewhere `no`. */
INLINE Floats choose(Ints mask, Floats yes, Floats no) { return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no)); }

/* Whether the mask is set in any lane. */
INLINE int any(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__ARM_NEON)
    return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= mask[i];
    return any;
#endif
}

/* `sum` with the products of two numbers in each lane, or of two pairs. By the assembler's name for it: the rest of this
   library also runs where the instruction is not there. */
INLINE Floats added(Floats sum, const Floats a, const Floats b, const int type) {
#if defined(__AVX512F__)
    if (type == PAIRS) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
#endif
    return sum + a * b;
}

/* By an instruction that reads a number in memory into all lanes: for `{0} + x` GCC reads, spreads and adds. */
INLINE Floats spread(float x) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(x);
#elif defined(__AVX2__)
    return _mm256_set1_ps(x);
#elif defined(__ARM_NEON)
    return vdupq_n_f32(x);
#else
    return (Floats){0} + x;
#endif
}

/* Query rows that stay in registers; the distance of prefetches in bytes. */
enum { FEW_ROWS = 8, AHEAD = 4096 };

/* Prefetch the memory `AHEAD` bytes behind a row of `width` bytes. step: bytes from row to row. */
INLINE void look_ahead(const char *row, const int64_t step, const int64_t width) {
    const int64_t ahead = AHEAD / width * step;
    for (int64_t line = 0; line < width; line += 64) __builtin_prefetch(row + ahead + line);
}

INLINE float dot(const Floats *a, const Floats *b, const int parts) {
    Floats product = a[0] * b[0];
    for (int p = 1; p < parts; p++) product += a[p] * b[p];
    return sum(product);
}

/* The larger of two in each lane; `old` where either is NaN. */
INLINE Floats larger(Floats new, Floats old) {
#if defined(__AVX512F__)
    return _mm512_max_ps(new, old);
#elif defined(__AVX2__)
    return _mm256_max_ps(new, old);
#else
    return choose(new > old, new, old);
#endif
}

/* 2^y to 2e-7 of itself. Below 2^-126 it comes out as about that; what is not a number, or too large for fp32, comes
   out as inf or NaN. Logarithms to the base 2 throughout save a product for each.

   y = n + rest, |rest| <= 1/2; the polynomial is the one of its degree whose largest relative error is least, 8e-8. */
INLINE Floats power_of_2(Floats y) {
    y = larger(spread(-126), y);
#if defined(__AVX512F__)
    const Floats n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    y = _mm256_min_ps(spread(128), y); /* the second where either is NaN */
    const Ints whole = (Ints)_mm256_cvtps_epi32(y);
    const Floats n = _mm256_cvtepi32_ps((__m256i)whole);
#elif defined(__ARM_NEON)
    y = choose(y > 128, spread(128), y);
    const Ints whole = vcvtnq_s32_f32(y);
    const Floats n = vcvtq_f32_s32(whole);
#else
    y = choose(y > 128, spread(128), y);
    const Ints whole = __builtin_convertvector(y + choose(y < 0, spread(-0.5f), spread(0.5f)), Ints);
    const Floats n = __builtin_convertvector(whole, Floats);
#endif
    const Floats rest = y - n;
    Floats power = rest * 1.32764720e-3f + 9.67554148e-3f;
    power = power * rest + 5.55071327e-2f;
    power = power * rest + 2.40221197e-1f;
    power = power * rest + 6.93146967e-1f;
    power = power * rest + 1.00000007f;
#ifdef __AVX512F__
    return _mm512_scalef_ps(power, n);
#else
    return power * (Floats)((whole + 127) << 23); /* 128 makes the bits of inf */
#endif
}

/* Call `work(context, i)` for every i below `count`, on as many threads. They are torch's own: threads of ours would
   share the cores with them, which stay awake for milliseconds after each of torch's operations. */
void for_each(int64_t count, int threads, void (*work)(const void *context, int64_t i), const void *context);

/* Call `work(context)` on that many of these threads, where there may be several: torch has an OpenMP that starts them. */
void start(int threads, void (*work)(void *context), void *context);
int may_start(int threads);

/* How bf16 is multiplied. Each is at least as fast as those before it, and a CPU that has it has them too. */
enum { FP32_PRODUCTS = 0, BF16_PAIRS = 1, BF16_TILES = 2 };
EXPORT int kvshelf_bf16_products(void);

#endif
