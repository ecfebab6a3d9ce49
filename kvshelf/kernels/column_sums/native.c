/* Column sums of one query head's causal attention, 32 keys by 32 rows at a time: the logits of such a tile never leave
   the cache.

   One pass computes the log-sum-exp of every row, unless given; the other multiplies again and computes the sum of
   every key: kept logits of 8k keys would not fit the cache. Logits and log-sum-exps are to the base 2.

   Products are fp32 fused multiply-adds or, where a CPU has them, those of AMX or AVX512-BF16: bf16 in, fp32 out, which
   is exact. */

#include "tiles.h"

enum { KEYS = 32, MOST_DIM = 256 };

/* Tiles that are worked on together, so that what they share is in the first-level cache: 32 KB of rows at 128 channels
   of bf16, and 16 KB of running sums. */
enum { ROW_TILES = 4, KEY_TILES = 8 };

typedef struct {
    const void *queries; /* [tiles, dim, 32] fp32, [tiles, dim / 2, 32, 2] bf16, [tiles, 2, dim / 2, 16, 2] for AMX */
    const void *keys;    /* [num_keys, dim], of the same dtype, keys_row elements from row to row */
    const int32_t *limits;       /* [tiles, 32]: how many keys each row sees, ascending; 0 for rows that are padding */
    const int32_t *least, *most; /* [tiles]: of each tile's limits */
    float *lses;                 /* [tiles, 32] */
    float *sums;                 /* [num_keys]: added to */
    int64_t tiles, dim, num_keys, keys_row;
    float scale; /* times log2(e) */
    int products;
} Columns;

/* The keys of a tile, one row after the other: where they lie if they do so, else copied, with zeros for those that are
   not there. */
static const void *tile_of(const Columns *a, int64_t first, char copy[KEYS * MOST_DIM * 4]) {
    const int64_t width = a->products == FP32_PRODUCTS ? 4 : 2, row = a->dim * width, left = a->num_keys - first;
    const char *keys = (const char *)a->keys + first * a->keys_row * width;
    if (left >= KEYS && a->keys_row == a->dim) return keys;
    for (int64_t k = 0; k < KEYS; k++)
        if (k < left)
            memcpy(copy + k * row, keys + k * a->keys_row * width, row);
        else
            memset(copy + k * row, 0, row);
    return copy;
}

INLINE void multiply_rows(const float *keys, const OfRows *rows, const int64_t dim, OfRows out[KEYS], const int type) {
    memset(out, 0, KEYS * sizeof *out);
    add_products(out, KEYS, keys, dim, 1, rows, dim, type);
}

#if defined(__AVX512F__) && defined(__linux__)
#define AMX __attribute__((target("amx-tile,amx-bf16")))

/* Eight tiles of 16 rows of 64 bytes: 0 to 3 are 16 keys by 16 fp32 sums each, 4 and 5 keys, 6 and 7 rows. Static,
   because GCC before 13 believes that only the first 8 bytes are read. */
AMX static void begin_amx(void) {
    static const struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}

AMX static void end_amx(void) { _tile_release(); }

AMX static void multiply_amx(const uint16_t *keys, const uint16_t *queries, int64_t dim, OfRows out[KEYS]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t c = 0; c < dim; c += 32) {
        _tile_loadd(4, keys + c, dim * 2);
        _tile_loadd(6, queries + c * LANES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, queries + (dim + c) * LANES, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, keys + LANES * dim + c, dim * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, &out[0][0], 128);
    _tile_stored(1, &out[0][1], 128);
    _tile_stored(2, &out[LANES][0], 128);
    _tile_stored(3, &out[LANES][1], 128);
}

#else
static void begin_amx(void) {}
static void end_amx(void) {}
static void multiply_amx(const uint16_t *keys, const uint16_t *queries, int64_t dim, OfRows out[KEYS]) {}
#endif

/* Logits of the keys and rows of a tile, not yet scaled. */
static void multiply(const Columns *a, const void *keys, int64_t tile, OfRows out[KEYS]) {
    const int64_t dim = a->dim, at = tile * dim * ROWS;
    if (a->products == BF16_TILES) return multiply_amx(keys, (const uint16_t *)a->queries + at, dim, out);
    const OfRows *rows = (const OfRows *)((const char *)a->queries + at * (a->products == FP32_PRODUCTS ? 4 : 2));
    if (a->products == BF16_PAIRS)
        multiply_rows(keys, rows, dim / 2, out, PAIRS);
    else if (dim == 64)
        multiply_rows(keys, rows, 64, out, FP32); /* known distances leave no address to compute */
    else if (dim == 128)
        multiply_rows(keys, rows, 128, out, FP32);
    else
        multiply_rows(keys, rows, dim, out, FP32);
}

/* Logits of what a row does not see become -inf. */
static void hide(const Columns *a, int64_t tile, int64_t first, OfRows logits[KEYS]) {
    for (int v = 0; v < VECTORS; v++) {
        const Ints limits = *(const IntsAnywhere *)(a->limits + tile * ROWS + v * LANES);
        for (int k = 0; k < KEYS; k++)
            logits[k][v] = choose(limits > (int32_t)(first + k) - (Ints){0}, logits[k][v], spread(-INFINITY));
    }
}

/* A running sum of 2^(logit - top). `top` is the largest logit of the first keys, and is raised only where the sum
   nears the limit of fp32. */
typedef struct {
    Floats top, mass;
} Row;

static void add_to_row(Row *row, OfRows logits[KEYS], int v, int begun) {
    Floats mass = row->mass, highest = row->top;
    if (begun) {
        for (int k = 0; k < KEYS; k++) mass += power_of_2(logits[k][v] - highest);
        if (!any(mass > 0x1p100f)) {
            row->mass = mass;
            return;
        }
    } else {
        highest = spread(-INFINITY);
    }
    for (int k = 0; k < KEYS; k++) highest = larger(logits[k][v], highest);
    mass = begun ? row->mass * power_of_2(row->top - highest) : (Floats){0};
    for (int k = 0; k < KEYS; k++) mass += power_of_2(logits[k][v] - highest);
    *row = (Row){highest, mass};
}

/* The log-sum-exps of ROW_TILES tiles of rows. */
static void sum_rows(const void *context, int64_t i) {
    const Columns *a = context;
    const int64_t begin = i * ROW_TILES, end = begin + ROW_TILES < a->tiles ? begin + ROW_TILES : a->tiles;
    char copy[KEYS * MOST_DIM * 4];
    Row rows[ROW_TILES][VECTORS] = {0};
    OfRows logits[KEYS];
    if (a->products == BF16_TILES) begin_amx();
    for (int64_t first = 0; first < a->most[end - 1]; first += KEYS) {
        const void *keys = tile_of(a, first, copy);
        for (int64_t t = begin; t < end; t++) {
            if (a->most[t] <= first) continue;
            multiply(a, keys, t, logits);
            for (int k = 0; k < KEYS; k++)
                for (int v = 0; v < VECTORS; v++) logits[k][v] *= a->scale;
            if (a->least[t] < first + KEYS) hide(a, t, first, logits);
            for (int v = 0; v < VECTORS; v++) add_to_row(&rows[t - begin][v], logits, v, first > 0);
        }
    }
    if (a->products == BF16_TILES) end_amx();
    for (int64_t t = begin; t < end; t++)
        for (int r = 0; r < ROWS; r++) {
            const Row *row = &rows[t - begin][r / LANES];
            const float lse = row->top[r % LANES] + log2f(row->mass[r % LANES]);
            a->lses[t * ROWS + r] = a->limits[t * ROWS + r] ? lse : 0; /* of padding: no NaN */
        }
}

/* The sums of KEY_TILES tiles of keys. */
static void sum_columns(const void *context, int64_t i) {
    const Columns *a = context;
    const int64_t span = KEYS * KEY_TILES, begin = i * span;
    const int64_t end = begin + span < a->num_keys ? begin + span : a->num_keys;
    char copy[KEYS * MOST_DIM * 4];
    Floats total[KEY_TILES][KEYS] = {0};
    OfRows logits[KEYS];
    if (a->products == BF16_TILES) begin_amx();
    for (int64_t last = a->tiles; last > 0 && a->most[last - 1] > begin; last -= ROW_TILES)
        for (int64_t first = begin; first < end; first += KEYS) {
            const void *keys = tile_of(a, first, copy);
            Floats *own = total[(first - begin) / KEYS];
            for (int64_t t = last - 1; t >= 0 && t >= last - ROW_TILES && a->most[t] > first; t--) {
                Floats lse[VECTORS];
                memcpy(lse, a->lses + t * ROWS, sizeof lse);
                multiply(a, keys, t, logits);
                if (a->least[t] < first + KEYS) hide(a, t, first, logits);
                for (int k = 0; k < KEYS; k++)
                    for (int v = 0; v < VECTORS; v++) own[k] += power_of_2(logits[k][v] * a->scale - lse[v]);
            }
        }
    if (a->products == BF16_TILES) end_amx();
    for (int64_t k = begin; k < end; k++)
        a->sums[k] += sum(total[(k - begin) / KEYS][(k - begin) % KEYS]);
}

/* lses are to the base 2; without with_lses they are computed here. sizes: the four from `tiles` on, in their order. */
EXPORT void kvshelf_column_sums(const void *queries, const void *keys, const int32_t *limits, const int32_t *least,
                                const int32_t *most, float *lses, int with_lses, float *sums, const int64_t *sizes,
                                float scale, int products, int threads) {
    const Columns a = {queries, keys, limits, least, most, lses, sums, sizes[0], sizes[1], sizes[2], sizes[3],
                       scale, products};
    const int64_t span = KEYS * KEY_TILES;
    if (!with_lses) for_each((a.tiles + ROW_TILES - 1) / ROW_TILES, threads, sum_rows, &a);
    for_each((a.num_keys + span - 1) / span, threads, sum_columns, &a);
}
