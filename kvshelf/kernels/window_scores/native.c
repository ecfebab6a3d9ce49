/* The logits of few rows, and the way from logits to each key's score, a row at a time: its exponentials do not leave
   the first-level caches before they are summed and added up. */

#include "native.h"

enum { BLOCK_KEYS = 512 }; /* of a block, which is one thread's */

typedef struct {
    const void *rows, *keys; /* [count, dim] and [num_keys, dim] */
    float *logits;           /* [count, num_keys], `width` from row to row */
    int64_t count, num_keys, dim, width, key_stride;
    int type;
} Products;

/* The rows stay in registers, and each key is read once: torch copies the keys into blocks first. */
INLINE void multiply(const Products *a, const int64_t i, const int count, const int parts, const int type) {
    const int64_t begin = i * BLOCK_KEYS, end = begin + BLOCK_KEYS < a->num_keys ? begin + BLOCK_KEYS : a->num_keys;
    const int64_t dim = parts * LANES, stride = a->key_stride, bytes = type == FP32 ? 4 : 2;
    Floats rows[FEW_ROWS][MOST_PARTS];
    for (int r = 0; r < count; r++)
        for (int p = 0; p < parts; p++) rows[r][p] = load(a->rows, r * dim + p * LANES, type);
    for (int64_t k = begin; k < end; k++) {
        look_ahead((const char *)a->keys + k * stride * bytes, stride * bytes, dim * bytes);
        Floats key[MOST_PARTS];
        for (int p = 0; p < parts; p++) key[p] = load(a->keys, k * stride + p * LANES, type);
        for (int r = 0; r < count; r++) a->logits[r * a->width + k] = dot(rows[r], key, parts);
    }
}

static void multiply_block(const void *context, int64_t i) {
    const Products *a = context;
    const int count = (int)a->count, parts = (int)(a->dim / LANES);
#define SHAPE(R, P, T) \
    if (count == R && parts == P && a->type == T) return multiply(a, i, R, P, T);
#define SHAPES(P, T) SHAPE(1, P, T) SHAPE(2, P, T) SHAPE(4, P, T) SHAPE(8, P, T)
    SHAPES(64 / LANES, FP32) SHAPES(128 / LANES, FP32) SHAPES(64 / LANES, BF16) SHAPES(128 / LANES, BF16)
    if (a->type == FP32)
        multiply(a, i, count, parts, FP32);
    else
        multiply(a, i, count, parts, BF16);
}

/* sizes: rows, at most 8; keys; dim, a multiple of 16 and at most 256; elements from row to row of the logits, and from
   key to key. */
EXPORT void kvshelf_few_logits(const void *rows, const void *keys, float *logits, const int64_t *sizes, int type,
                               int threads) {
    const Products a = {rows, keys, logits, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], type};
    for_each((a.num_keys + BLOCK_KEYS - 1) / BLOCK_KEYS, threads, multiply_block, &a);
}

typedef struct {
    float *logits;   /* [rows, width], written over */
    float *partials; /* [parts, width]: what each part of the rows gives to the keys */
    int64_t rows, width, num_keys, parts;
    int largest; /* instead of sums */
} Windows;

/* Softmax in place, but for the division; returns the factor that is left. `whole`: elements in whole vectors. */
static float exponentials(float *row, int64_t width, int64_t whole) {
    Floats highest = spread(-INFINITY), mass = (Floats){0};
    for (int64_t j = 0; j < whole; j += LANES) highest = larger(load(row, j, FP32), highest);
    float top = -INFINITY, rest = 0;
    for (int l = 0; l < LANES; l++) top = highest[l] > top ? highest[l] : top;
    for (int64_t j = whole; j < width; j++) top = row[j] > top ? row[j] : top;
    for (int64_t j = 0; j < whole; j += LANES) {
        const Floats power = power_of_2((load(row, j, FP32) - top) * LOG2_E);
        *(FloatsAnywhere *)(row + j) = power;
        mass += power;
    }
    for (int64_t j = whole; j < width; j++) rest += row[j] = expf(row[j] - top);
    return 1 / (sum(mass) + rest);
}

INLINE float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

static void add_part(const void *context, int64_t part) {
    const Windows *a = context;
    const int64_t begin = a->rows * part / a->parts, end = a->rows * (part + 1) / a->parts;
    const int64_t whole = a->num_keys - a->num_keys % LANES;
    float *partial = a->partials + part * a->width;
    memset(partial, 0, a->num_keys * sizeof *partial);
    for (int64_t r = begin; r < end; r++) {
        float *row = a->logits + r * a->width;
        const float factor = exponentials(row, a->width, a->width - a->width % LANES);
        for (int64_t j = 0; j < whole; j += LANES) {
            const Floats weight = load(row, j, FP32) * factor, old = load(partial, j, FP32);
            *(FloatsAnywhere *)(partial + j) =
                a->largest ? choose((old > weight) | (old != old), old, weight) : old + weight; /* NaN stays */
        }
        for (int64_t j = whole; j < a->num_keys; j++) {
            const float weight = row[j] * factor;
            partial[j] = a->largest ? larger_or_nan(partial[j], weight) : partial[j] + weight;
        }
    }
}

/* Add to scores [num_keys] what the rows give to the first num_keys of their keys, or raise them to the largest of it. */
EXPORT void kvshelf_add_weights(float *logits, float *partials, float *scores, int64_t rows, int64_t width,
                                int64_t num_keys, int largest, int threads) {
    const int64_t parts = threads < rows ? threads : rows;
    const Windows a = {logits, partials, rows, width, num_keys, parts, largest};
    for_each(parts, threads, add_part, &a);
    for (int64_t p = 0; p < parts; p++)
        for (int64_t j = 0; j < num_keys; j++) {
            const float weight = partials[p * width + j];
            scores[j] = largest ? larger_or_nan(scores[j], weight) : scores[j] + weight;
        }
}
