/* From logits to what each key receives, a row at a time: its exponentials do not leave the first-level caches before they
   are summed and added up. */

#include "native.h"

typedef struct {
    float *logits;   /* [rows, width], written over */
    float *partials; /* [parts, width]: what each part of the rows gives to the keys */
    int64_t rows, width, num_keys, parts;
    int largest; /* instead of sums */
} Windows;

INLINE Floats at(const float *data) { return *(const FloatsAnywhere *)data; }

/* Softmax in place, but for the division; returns the factor that is left. `whole`: elements in whole vectors. */
static float exponentials(float *row, int64_t width, int64_t whole) {
    Floats highest = spread(-INFINITY), mass = (Floats){0};
    for (int64_t j = 0; j < whole; j += LANES) highest = larger(at(row + j), highest);
    float top = -INFINITY, rest = 0;
    for (int l = 0; l < LANES; l++) top = highest[l] > top ? highest[l] : top;
    for (int64_t j = whole; j < width; j++) top = row[j] > top ? row[j] : top;
    for (int64_t j = 0; j < whole; j += LANES) {
        const Floats power = power_of_2((at(row + j) - top) * LOG2_E);
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
            const Floats weight = at(row + j) * factor, old = at(partial + j);
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
