/* A few query rows over plain prefixes: a decode step.

   A run is a part of one head of one prefix. Its thread keeps the query rows beside a running softmax and goes through
   keys and values tile by tile; while it multiplies the keys of a tile it asks memory for the values, and the other way
   round, because it is memory that limits: with few rows a number that is read is used once or twice. */

#include "native.h"

enum { TILE = 32, MOST_ROWS = 8, MOST_PARTS = 16 };

/* Columns of an item; see plan.py. */
enum { TOKEN = 0, ROWS = 1, HEAD = 3, FIRST = 4, END = 5, RESULT = 6, KEYS = 7, VALUES = 10, COLUMNS = 17 };

typedef struct {
    const void *queries;  /* [N, kv_heads, group, D], contiguous */
    const int64_t *items; /* [n, COLUMNS] */
    float *outs;          /* [scratch rows, D] */
    float *lses;          /* [scratch rows] */
    int64_t kv_heads, group, dim, key_stride, value_stride;
    float scale;
    int type;
} Runs;

INLINE void attend(const Runs *a, const int64_t *item, const int rows, const int parts, const int type) {
    const int64_t dim = parts * LANES, key_stride = a->key_stride, value_stride = a->value_stride;
    const int width = type == FP32 ? 4 : 2;
    const char *keys = (const char *)item[KEYS], *values = (const char *)item[VALUES];
    Floats query[MOST_ROWS][MOST_PARTS], total[MOST_ROWS][MOST_PARTS];
    float top[MOST_ROWS], mass[MOST_ROWS];
    Floats weights[MOST_ROWS][TILE / LANES];
    for (int r = 0; r < rows; r++) {
        top[r] = -INFINITY;
        mass[r] = 0;
        const int64_t token = item[TOKEN] + r / a->group;
        const int64_t row = (token * a->kv_heads + item[HEAD]) * a->group + r % a->group;
        for (int p = 0; p < parts; p++) {
            query[r][p] = load(a->queries, row * dim + p * LANES, type) * (a->scale * LOG2_E);
            total[r][p] = (Floats){0};
        }
    }
    for (int64_t first = item[FIRST]; first < item[END]; first += TILE) {
        const int count = item[END] - first < TILE ? (int)(item[END] - first) : TILE;
        for (int j = 0; j < count; j++) {
            const int64_t key = (first + j) * key_stride;
            for (int line = 0; line < dim * width; line += 64)
                __builtin_prefetch(values + (first + j) * value_stride * width + line, 0, 2);
            Floats part[MOST_PARTS];
            for (int p = 0; p < parts; p++) part[p] = load(keys, key + p * LANES, type);
            for (int r = 0; r < rows; r++) {
                Floats product = query[r][0] * part[0];
                for (int p = 1; p < parts; p++) product += query[r][p] * part[p];
                ((float *)weights[r])[j] = sum(product);
            }
        }
        for (int r = 0; r < rows; r++) {
            float *logits = (float *)weights[r], highest = top[r];
            for (int j = count; j < TILE; j++) logits[j] = -INFINITY;
            for (int j = 0; j < count; j++) highest = logits[j] > highest ? logits[j] : highest;
            const float fade = exp2f(top[r] - highest);
            Floats tile_mass = (Floats){0};
            for (int t = 0; t < TILE / LANES; t++) tile_mass += weights[r][t] = power_of_2(weights[r][t] - highest);
            top[r] = highest;
            mass[r] = mass[r] * fade + sum(tile_mass);
            for (int p = 0; p < parts; p++) total[r][p] *= fade;
        }
        for (int j = 0; j < count; j++) {
            const int64_t value = (first + j) * value_stride;
            for (int line = 0; line < dim * width; line += 64)
                __builtin_prefetch(keys + (first + TILE + j) * key_stride * width + line, 0, 2);
            for (int p = 0; p < parts; p++) {
                Floats part = load(values, value + p * LANES, type);
                for (int r = 0; r < rows; r++) total[r][p] += part * ((float *)weights[r])[j];
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        const int64_t at = item[RESULT] + r;
        for (int p = 0; p < parts; p++) *(FloatsAnywhere *)(a->outs + at * dim + p * LANES) = total[r][p] / mass[r];
        a->lses[at] = top[r] * LN_2 + logf(mass[r]);
    }
}

/* The common shapes with their loops unrolled, so that rows and sums stay in registers. */
static void attend_item(const void *context, int64_t i) {
    const Runs *a = context;
    const int64_t *item = a->items + i * COLUMNS;
    const int rows = (int)item[ROWS], parts = (int)(a->dim / LANES);
#define SHAPE(R, P, T) \
    if (rows == R && parts == P && a->type == T) return attend(a, item, R, P, T);
#define SHAPES(P, T) SHAPE(1, P, T) SHAPE(2, P, T) SHAPE(4, P, T) SHAPE(8, P, T)
    SHAPES(4, FP32) SHAPES(8, FP32) SHAPES(4, BF16) SHAPES(8, BF16)
    if (a->type == FP32)
        attend(a, item, rows, parts, FP32);
    else
        attend(a, item, rows, parts, BF16);
}

EXPORT void kvshelf_attend_runs(const void *queries, const int64_t *items, int64_t count, float *outs, float *lses,
                                int64_t kv_heads, int64_t group, int64_t dim, int64_t key_stride, int64_t value_stride,
                                float scale, int type, int threads) {
    const Runs runs = {queries, items, outs, lses, kv_heads, group, dim, key_stride, value_stride, scale, type};
    for_each(count, threads, attend_item, &runs);
}

/* The union of what the runs of a token and query head found, for every one of them: out [N, kv_heads, group, D] and
   lse without D; 0 and -inf where there was no run. counts: the tokens of each share. shares: [shares, 1 + kv_heads],
   where the results of a share begin, and how many runs each head has; see plan.py. */
EXPORT void kvshelf_unite_runs(const float *outs, const float *lses, const int64_t *counts, const int64_t *shares,
                               int64_t num_shares, float *out, float *lse, int64_t kv_heads, int64_t group,
                               int64_t dim) {
    for (int64_t s = 0; s < num_shares; s++, shares += 1 + kv_heads) {
        const int64_t rows = counts[s] * group, step = kv_heads * rows;
        for (int64_t i = 0; i < counts[s] * kv_heads * group; i++, out += dim, lse++) {
            const int64_t token = i / group / kv_heads, head = i / group % kv_heads, runs = shares[1 + head];
            const int64_t from = shares[0] + head * rows + token * group + i % group;
            float top = -INFINITY, mass = 0;
            for (int64_t n = 0; n < runs; n++) top = fmaxf(top, lses[from + n * step]);
            memset(out, 0, dim * sizeof *out);
            for (int64_t n = 0; n < runs; n++) {
                const float weight = expf(lses[from + n * step] - top), *part = outs + (from + n * step) * dim;
                mass += weight;
                for (int64_t c = 0; c < dim; c++) out[c] += weight * part[c];
            }
            for (int64_t c = 0; c < dim && runs; c++) out[c] /= mass;
            *lse = runs ? top + logf(mass) : -INFINITY;
        }
    }
}
