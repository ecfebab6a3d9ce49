/* Query rows over plain prefixes, whose softmax runs along.

   A run is a part of one head of one prefix. With few rows, those of a decode step, it is memory that limits, for a
   number that is read is used once or twice: while a thread multiplies the keys of a tile it asks memory for the values,
   and the other way round. With the many rows of a question it is products, and rows stand in the lanes of vectors. */

#include "tiles.h"

enum { TILE = 32, FEW_ROWS = 8, MOST_PARTS = 16 };

/* Columns of an item; see plan.py. */
enum { TOKEN = 0, ALL_ROWS = 1, FIRST_ROW = 2, HEAD = 3, FIRST = 4, END = 5, RESULT = 6, KEYS = 7, VALUES = 10, COLUMNS = 17 };

typedef struct {
    const void *queries;  /* [N, kv_heads, group, D], contiguous */
    const int64_t *items; /* [n, COLUMNS] */
    float *outs;          /* [scratch rows, D] */
    float *lses;          /* [scratch rows] */
    int64_t kv_heads, group, dim, key_stride, value_stride;
    float scale;
    int type;
} Runs;

/* Where row `r` of an item's share and head lies among the queries. */
INLINE int64_t query_at(const Runs *a, const int64_t *item, int64_t r) {
    return (((item[TOKEN] + r / a->group) * a->kv_heads + item[HEAD]) * a->group + r % a->group) * a->dim;
}

INLINE void attend_few(const Runs *a, const int64_t *item, const int rows, const int parts, const int type) {
    const int64_t dim = parts * LANES, key_stride = a->key_stride, value_stride = a->value_stride;
    const int width = type == FP32 ? 4 : 2;
    const char *keys = (const char *)item[KEYS], *values = (const char *)item[VALUES];
    Floats query[FEW_ROWS][MOST_PARTS], total[FEW_ROWS][MOST_PARTS];
    float top[FEW_ROWS], mass[FEW_ROWS];
    Floats weights[FEW_ROWS][TILE / LANES];
    for (int r = 0; r < rows; r++) {
        top[r] = -INFINITY;
        mass[r] = 0;
        const int64_t at = query_at(a, item, r);
        for (int p = 0; p < parts; p++) {
            query[r][p] = load(a->queries, at + p * LANES, type) * (a->scale * LOG2_E);
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

/* Logits of 32 rows and the keys from `first` on, to the base 2; -inf for those that are not there. */
static void multiply(const float *keys, int64_t stride, int64_t dim, int count, const OfRows *query, OfRows logits[TILE]) {
    float copy[TILE * MOST_PARTS * LANES];
    if (count < TILE) { /* what lies behind the last one may be no memory */
        memset(copy, 0, TILE * dim * sizeof *copy);
        for (int j = 0; j < count; j++) memcpy(copy + j * dim, keys + j * stride, dim * sizeof *copy);
        keys = copy;
        stride = dim;
    }
    memset(logits, 0, TILE * sizeof *logits);
    for (int j = 0; j < TILE; j += ABREAST) add_products(logits + j, keys + j * stride, stride, 1, query, dim);
    for (int j = count; j < TILE; j++) logits[j][0] = logits[j][1] = spread(-INFINITY);
}

/* Up to 32 rows of fp32. */
static void attend_many(const Runs *a, const int64_t *item) {
    const int64_t dim = a->dim, left = item[ALL_ROWS] - item[FIRST_ROW], rows = left < ROWS ? left : ROWS;
    OfRows query[MOST_PARTS * LANES], total[MOST_PARTS * LANES], weights[TILE];
    OfRows top = {spread(-INFINITY), spread(-INFINITY)}, mass = {0};
    memset(query, 0, dim * sizeof *query);
    memset(total, 0, dim * sizeof *total);
    for (int64_t r = 0; r < rows; r++) {
        const float *own = (const float *)a->queries + query_at(a, item, item[FIRST_ROW] + r);
        for (int64_t c = 0; c < dim; c++) ((float *)query[c])[r] = own[c] * (a->scale * LOG2_E);
    }
    for (int64_t first = item[FIRST]; first < item[END]; first += TILE) {
        const int count = item[END] - first < TILE ? (int)(item[END] - first) : TILE;
        multiply((const float *)item[KEYS] + first * a->key_stride, a->key_stride, dim, count, query, weights);
        for (int half = 0; half < 2; half++) {
            Floats highest = top[half];
            for (int j = 0; j < TILE; j++) highest = larger(weights[j][half], highest);
            const Floats fade = power_of_2(top[half] - highest);
            mass[half] *= fade;
            for (int j = 0; j < TILE; j++) mass[half] += weights[j][half] = power_of_2(weights[j][half] - highest);
            if (any(highest > top[half]))
                for (int64_t c = 0; c < dim; c++) total[c][half] *= fade;
            top[half] = highest;
        }
        const float *values = (const float *)item[VALUES] + first * a->value_stride;
        for (int64_t c = 0; c < dim; c += ABREAST)
            add_products(total + c, values + c, 1, a->value_stride, weights, count);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = item[RESULT] + item[FIRST_ROW] + r;
        const float one = ((float *)mass)[r];
        for (int64_t c = 0; c < dim; c++) a->outs[at * dim + c] = ((float *)total[c])[r] / one;
        a->lses[at] = ((float *)top)[r] * LN_2 + logf(one);
    }
}

/* The common shapes of few rows with their loops unrolled, so that rows and sums stay in registers. */
static void attend_item(const void *context, int64_t i) {
    const Runs *a = context;
    const int64_t *item = a->items + i * COLUMNS;
    if (item[ALL_ROWS] > FEW_ROWS) return attend_many(a, item);
    const int rows = (int)item[ALL_ROWS], parts = (int)(a->dim / LANES);
#define SHAPE(R, P, T) \
    if (rows == R && parts == P && a->type == T) return attend_few(a, item, R, P, T);
#define SHAPES(P, T) SHAPE(1, P, T) SHAPE(2, P, T) SHAPE(4, P, T) SHAPE(8, P, T)
    SHAPES(4, FP32) SHAPES(8, FP32) SHAPES(4, BF16) SHAPES(8, BF16)
    if (a->type == FP32)
        attend_few(a, item, rows, parts, FP32);
    else
        attend_few(a, item, rows, parts, BF16);
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
