/* Query rows over prefixes, plain or quantized, and over their own suffixes, whose softmax runs along.

   A run is a part of the keys and values of one head. With few rows, those of a decode step, bandwidth is the limit,
   because each number read is used once or twice: while a thread multiplies the keys of a tile it prefetches the
   values, and vice versa. With the many rows of a question products are the limit, and rows stand in the lanes of
   vectors.

   Rows are dequantized a tile at a time, in the first-level cache: only their codes come from memory. */

#include "choose/choose.h"
#include "codes.h"
#include "attention.h"
#include "tiles.h"

enum { TILE = 32 };

/* What all runs of a call have in common. outs, lses: where results go, `outs` [rows, D], one after the other. */
typedef struct {
    const void *queries; /* [N, kv_heads, group, D], contiguous */
    float *outs, *lses;
    int64_t kv_heads, group, dim;
    Layout key_layout, value_layout;
    float scale;
    int type;             /* of queries, and of rows that are not quantized */
    int pairs;            /* whether many rows are multiplied in pairs of bf16 */
    float softcap;        /* of logits to the base 2; 0: none */
    const int32_t *since; /* [N]: the first key that a token sees, from the first of its suffix on; 0: all */
    const float *sinks;   /* [kv_heads, group], natural logarithms; 0: none */
} Call;

/* Query rows `row` to `row + rows`, counted from those of `token`, at one head, over keys and values from `first` to
   `end`. result: the place of row 0 among the results; -1 for a suffix: its rows continue the softmax that stands in
   their place, the same as in the queries, and token t sees the first `visible + t` keys. before: keys before those of
   a suffix that the run counts. chosen: the rows of the head that the run's keys are, ascending; 0: all of them. channels:
   those of the queries that pruned keys have; 0: all of them. scales: where given, the chosen rows are classes, and their
   keys stand for several, their slots; [SLOTS, scale_step], the factor of each slot's key, NaN where there is none. */
typedef struct {
    HeadRows keys, values;
    int64_t first, end, token, head, row, rows, result, visible, before;
    const int32_t *chosen, *channels;
    const float *scales;
    int64_t scale_step;
} Run;

/* Slots of a row; `SLOTS_PER_ROW` of slots.py. */
enum { SLOTS = 8 };

/* The place of a run's row among the rows of queries, and among results. */
INLINE int64_t query_of(const Call *a, const Run *run, int64_t r) {
    const int64_t token = run->token + (run->row + r) / a->group;
    return (token * a->kv_heads + run->head) * a->group + (run->row + r) % a->group;
}

INLINE int64_t result_of(const Call *a, const Run *run, int64_t r) {
    return run->result < 0 ? query_of(a, run, r) : run->result + run->row + r;
}

/* The first key that a row of a suffix does not see. */
INLINE int64_t limit_of(const Call *a, const Run *run, int64_t r) {
    return run->result < 0 ? run->visible + (run->row + r) / a->group : run->end;
}

/* The first key that a row sees. */
INLINE int64_t begin_of(const Call *a, const Run *run, int64_t r) {
    const int64_t begin = a->since ? a->since[run->token + (run->row + r) / a->group] + run->before : 0;
    return begin > 0 ? begin : 0;
}

/* The run from the first key on that any of its rows sees. */
static Run seen_of(const Call *a, Run run) {
    int64_t begin = run.end;
    for (int64_t r = 0; r < run.rows; r++) begin = begin_of(a, &run, r) < begin ? begin_of(a, &run, r) : begin;
    run.first = run.first < begin ? begin : run.first;
    return run;
}

/* The mass of a row of a suffix once its sink has joined, against the new `*top`; `*fade`: what became of its own. */
INLINE float sunk(const Call *a, const Run *run, int64_t r, float *top, float mass, float *fade) {
    const float sink = a->sinks[run->head * a->group + (run->row + r) % a->group] * LOG2_E;
    const float highest = sink > *top ? sink : *top;
    *fade = exp2f(*top - highest);
    *top = highest;
    return mass * *fade + exp2f(sink - highest);
}

/* Logits under a cap. Apart, because its constants take the registers of those of the softmax. */
static __attribute__((noinline)) void cap_logits(Floats *logits, int64_t count, float cap) {
    const Floats slope = spread(-2 * LOG2_E / cap), twice = spread(2 * cap), once = spread(cap);
    for (int64_t i = 0; i < count; i++) logits[i] = twice / (1 + power_of_2(logits[i] * slope)) - once;
}

/* log2 of numbers from 1 on: the exponent, and 2 / ln 2 * artanh((m - 1) / (m + 1)) of the mantissa m in seven terms. */
INLINE Floats log_2(Floats x) {
    const Ints bits = (Ints)x, exponent = (bits >> 23) - 127;
    const Floats m = (Floats)((bits & 0x7fffff) | 0x3f800000), t = (m - 1) / (m + 1), square = t * t;
    Floats sum = spread(1.0f / 13);
    for (int n = 11; n > 0; n -= 2) sum = sum * square + 1.0f / n;
    return __builtin_convertvector(exponent, Floats) + 2 * LOG2_E * t * sum;
}

/* The logits of classes, from those of their keys: log2 of the sum of 2^(logit) over the slots. So a class is one key to
   what follows, and its value is multiplied once. */
static __attribute__((noinline)) Floats join_slots(Floats logit, const Floats scales[SLOTS], float cap) {
    Floats slots[SLOTS], top = spread(-INFINITY), mass = {0};
    for (int s = 0; s < SLOTS; s++) slots[s] = logit * scales[s];
    if (cap > 0) cap_logits(slots, SLOTS, cap);
    for (int s = 0; s < SLOTS; s++) {
        slots[s] = choose(scales[s] == scales[s], slots[s], spread(-INFINITY));
        top = larger(slots[s], top);
    }
    for (int s = 0; s < SLOTS; s++) mass += power_of_2(slots[s] - top);
    return choose(top == -INFINITY, top, top + log_2(mass));
}

/* `join_slots` of a tile's rows; logits: [rows, TILE]. */
static void join_slots_of_few(const Call *a, const Run *run, int64_t first, int count, Floats *logits, int rows) {
    Floats scales[TILE / LANES][SLOTS];
    for (int s = 0; s < SLOTS; s++)
        for (int j = 0; j < TILE; j++)
            ((float *)&scales[j / LANES][s])[j % LANES] = j < count ? run->scales[s * run->scale_step + first + j] : NAN;
    for (int i = 0; i < rows * (TILE / LANES); i++)
        logits[i] = join_slots(logits[i], scales[i % (TILE / LANES)], a->softcap);
}

/* The logits of a tile become 2^(logit - shift of its row); their sums. Apart, as `cap_logits`. */
static __attribute__((noinline)) void raise_logits(Floats *logits, const float *shift, float *sums, int rows) {
    for (int r = 0; r < rows; r++) {
        Floats total = {0};
        for (int t = 0; t < TILE / LANES; t++, logits++) total += *logits = power_of_2(*logits - shift[r]);
        sums[r] = sum(total);
    }
}

/* Rows of a tile, as they lie in memory or made out of codes. `stride`: elements from row to row. */
typedef struct {
    const char *data;
    int64_t stride;
} Tile;

/* `dim` numbers of bf16 as fp32, and zeros behind them up to whole vectors. */
static void widen(const uint16_t *row, int64_t dim, float *made) {
    int64_t c = 0;
    for (; c + LANES <= dim; c += LANES) *(FloatsAnywhere *)(made + c) = load(row, c, BF16);
    for (; c < whole(dim); c++) made[c] = c < dim ? number_at(row, c, BF16) : 0;
}

/* Rows `first` to `first + count` of a head, in whole vectors, as rows `at` and following of `made`. wide: in fp32. */
static void copy_rows(const Call *a, const HeadRows *rows, const Layout *layout, int64_t first, int count, int64_t at,
                      float *made, int wide) {
    const int64_t width = a->type == FP32 ? 4 : 2, bytes = layout->dim * width, step = whole(layout->dim);
    if (layout->bits) return dequantize(rows, layout, first, count, a->type, made + at * step);
    for (int r = 0; r < count && wide && width == 2; r++)
        widen((const uint16_t *)rows->data + (first + r) * layout->stride, layout->dim, made + (at + r) * step);
    for (int r = 0; r < count && !(wide && width == 2); r++) {
        char *to = (char *)made + (at + r) * step * width;
        memcpy(to, (const char *)rows->data + (first + r) * layout->stride * width, bytes);
        memset(to + bytes, 0, step * width - bytes);
    }
}

static int are_neighbours(const int32_t *chosen, int count) {
    for (int j = 1; j < count; j++)
        if (chosen[j] != chosen[0] + j) return 0;
    return 1;
}

/* Rows that lie apart, one behind the other. Neighbours among them are dequantized together. */
static void gather(const Call *a, const HeadRows *rows, const Layout *layout, const int32_t *chosen, int count,
                   float *made, int wide) {
    for (int from = 0, to; from < count; from = to) {
        for (to = from + 1; to < count && chosen[to] == chosen[to - 1] + 1;) to++;
        copy_rows(a, rows, layout, chosen[from], to - from, from, made, wide);
    }
}

/* Ask memory for one row of a head, with its scales and zeros. */
INLINE void ask_for_row(const Call *a, const HeadRows *rows, const Layout *layout, int64_t row) {
    const int64_t width = layout->bits ? 1 : a->type == FP32 ? 4 : 2, step = layout->stride * width;
    const int64_t bytes = layout->bits ? step : layout->dim * width;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch((const char *)rows->data + row * step + line);
    if (!layout->bits) return;
    const int64_t groups = layout->by_tokens ? layout->dim : (layout->dim + layout->group - 1) / layout->group;
    const int64_t at = (layout->by_tokens ? row / layout->group : row) * groups;
    for (int64_t g = 0; g < groups; g += 32) {
        __builtin_prefetch(rows->scales + at + g);
        __builtin_prefetch(rows->zeros + at + g);
    }
}

/* Ask memory for the chosen rows from `first` on, as many as a tile has: they lie apart, and nothing guesses where. */
static void ask_for_chosen(const Call *a, const Run *run, int64_t first) {
    for (int64_t j = first; j < first + TILE && j < run->end; j++) {
        ask_for_row(a, &run->keys, &a->key_layout, run->chosen[j]);
        ask_for_row(a, &run->values, &a->value_layout, run->chosen[j]);
    }
}

/* The tile of `count` rows from `first` on, those that `chosen` names where it is given. made: room for it, in fp32,
   where rows are codes, lie apart, or are no whole vectors. wide: in fp32, also of rows in bf16. */
INLINE Tile tile_of(const Call *a, const HeadRows *rows, const Layout *layout, const int32_t *chosen, int64_t first,
                    int count, float *made, const int wide) {
    const int64_t width = a->type == FP32 ? 4 : 2;
    const int together = !chosen || are_neighbours(chosen + first, count);
    if (together && chosen) first = chosen[first];
    if (together && !layout->bits && layout->dim % LANES == 0 && !(wide && width == 2))
        return (Tile){(const char *)rows->data + first * layout->stride * width, layout->stride};
    if (together)
        copy_rows(a, rows, layout, first, count, 0, made, wide);
    else
        gather(a, rows, layout, chosen + first, count, made, wide);
    return (Tile){(const char *)made, whole(layout->dim)};
}

/* The query of a row as fp32, with the channels that the keys have, and zeros behind them up to whole vectors. */
static void read_query(const Call *a, const Run *run, int64_t r, float *query) {
    const int64_t from = query_of(a, run, r) * a->dim, dim = a->key_layout.dim;
    int64_t c = 0;
    for (; c + LANES <= dim && !run->channels; c += LANES) *(FloatsAnywhere *)(query + c) = load(a->queries, from + c, a->type);
    for (; c < whole(dim); c++) {
        const int64_t at = from + (c < dim && run->channels ? run->channels[c] : c);
        query[c] = c < dim ? number_at(a->queries, at, a->type) : 0;
    }
}

/* key_parts, parts: vectors of a key and of a value. type: of the rows of tiles; fp32 where they are made out of
   codes. */
INLINE void attend_few(const Call *a, const Run *run, const int rows, const int key_parts, const int parts,
                       const int type, const int quantized) {
    const int64_t dim = parts * LANES;
    const int width = type == FP32 ? 4 : 2;
    float made[2][TILE * MOST_PARTS * LANES];
    Floats query[FEW_ROWS][MOST_PARTS], total[FEW_ROWS][MOST_PARTS];
    float pruned[MOST_PARTS * LANES];
    float top[FEW_ROWS], mass[FEW_ROWS];
    Floats weights[FEW_ROWS][TILE / LANES];
    for (int r = 0; r < rows; r++) {
        const int64_t from = query_of(a, run, r), to = result_of(a, run, r);
        const int goes_on = run->result < 0;
        top[r] = goes_on ? a->lses[to] * LOG2_E : -INFINITY;
        mass[r] = goes_on;
        if (run->channels) read_query(a, run, r, pruned);
        for (int p = 0; p < key_parts; p++)
            query[r][p] = run->channels ? load(pruned, p * LANES, FP32) : load(a->queries, from * dim + p * LANES, a->type);
        for (int p = 0; p < parts; p++) {
            total[r][p] = goes_on ? load(a->outs, to * dim + p * LANES, FP32) : (Floats){0};
        }
    }
    for (int64_t first = run->first; first < run->end; first += TILE) {
        const int count = run->end - first < TILE ? (int)(run->end - first) : TILE;
        if (run->chosen) ask_for_chosen(a, run, first + TILE);
        const Tile keys = tile_of(a, &run->keys, &a->key_layout, run->chosen, first, count, made[0], 0);
        const Tile values = tile_of(a, &run->values, &a->value_layout, run->chosen, first, count, made[1], 0);
        for (int j = 0; j < count; j++) {
            for (int line = 0; line < dim * width && !quantized; line += 64)
                __builtin_prefetch(values.data + j * values.stride * width + line, 0, 2);
            Floats part[MOST_PARTS];
            for (int p = 0; p < key_parts; p++) part[p] = load(keys.data, j * keys.stride + p * LANES, type);
            for (int r = 0; r < rows; r++) ((float *)weights[r])[j] = dot(query[r], part, key_parts);
        }
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < TILE / LANES; t++) weights[r][t] *= a->scale * LOG2_E;
        if (run->scales)
            join_slots_of_few(a, run, first, count, weights[0], rows);
        else if (a->softcap > 0)
            cap_logits(weights[0], rows * (TILE / LANES), a->softcap);
        float shift[FEW_ROWS], fade[FEW_ROWS], tile_mass[FEW_ROWS];
        for (int r = 0; r < rows; r++) {
            float *logits = (float *)weights[r], highest = top[r];
            const int64_t seen = limit_of(a, run, r) - first, begin = begin_of(a, run, r) - first;
            for (int j = 0; j < begin && j < count; j++) logits[j] = -INFINITY;
            for (int j = seen < 0 ? 0 : seen < count ? (int)seen : count; j < TILE; j++) logits[j] = -INFINITY;
            for (int j = 0; j < count; j++) highest = logits[j] > highest ? logits[j] : highest;
            shift[r] = highest == -INFINITY ? 0 : highest; /* such a row has seen nothing yet */
            fade[r] = exp2f(top[r] - shift[r]);
            top[r] = highest;
        }
        raise_logits(weights[0], shift, tile_mass, rows);
        for (int r = 0; r < rows; r++) {
            mass[r] = mass[r] * fade[r] + tile_mass[r];
            for (int p = 0; p < parts; p++) total[r][p] *= fade[r];
        }
        for (int j = 0; j < count; j++) {
            for (int line = 0; line < key_parts * LANES * width && !quantized; line += 64)
                __builtin_prefetch(keys.data + (TILE + j) * keys.stride * width + line, 0, 2);
            for (int p = 0; p < parts; p++) {
                Floats part = load(values.data, j * values.stride + p * LANES, type);
                for (int r = 0; r < rows; r++) total[r][p] += part * ((float *)weights[r])[j];
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        const int64_t to = result_of(a, run, r);
        float fade = 1;
        if (run->result < 0 && a->sinks) mass[r] = sunk(a, run, r, &top[r], mass[r], &fade);
        const float share = top[r] == -INFINITY ? 0 : fade / mass[r];
        for (int p = 0; p < parts; p++) *(FloatsAnywhere *)(a->outs + to * dim + p * LANES) = total[r][p] * share;
        a->lses[to] = top[r] * LN_2 + logf(mass[r]);
    }
}

/* Products of 32 rows with the keys from `keys` on, times `scale`; -inf for missing keys. The product is scaled and not
   the rows: rounding every channel of a row would triple the error of a large logit. dim, stride: in numbers, or in
   pairs. */
INLINE void multiply(const float *keys, int64_t stride, int64_t dim, int count, const OfRows *query, float scale,
                     OfRows logits[TILE], const int type) {
    float copy[TILE * MOST_PARTS * LANES];
    if (count < TILE) { /* what lies behind the last one may be no memory */
        memset(copy, 0, TILE * dim * sizeof *copy);
        for (int j = 0; j < count; j++) memcpy(copy + j * dim, keys + j * stride, dim * sizeof *copy);
        keys = copy;
        stride = dim;
    }
    memset(logits, 0, TILE * sizeof *logits);
    add_products(logits, TILE, keys, stride, 1, query, dim, type);
    for (int j = 0; j < TILE; j++)
        for (int v = 0; v < VECTORS; v++) logits[j][v] = j < count ? logits[j][v] * scale : spread(-INFINITY);
}

/* Ask memory for rows that the next products read: these begin with eight rows at once, far apart. */
INLINE void ask_for(const char *states, int64_t stride, int64_t bytes) {
    for (int j = 0; j < TILE; j++)
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(states + j * stride + line, 0, 2);
}

/* Numbers of two lanes, rounded to bf16, as pairs. */
INLINE Floats paired(const Floats low, const Floats high) {
#if defined(__AVX512F__)
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, order = lane | (lane + LANES) << 16;
    __m512i both;
    __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(low), "v"(high));
    return (Floats)_mm512_permutexvar_epi16((__m512i)order, both);
#else
    return low; /* not called */
#endif
}

/* Rows of bf16 two by two, as pairs: `dim` of rows 0 and 1, then of rows 2 and 3. A last one has zeros beside it. */
static void pair_rows(Tile rows, int64_t dim, int count, float *pairs) {
    static const uint16_t none[MOST_PARTS * LANES];
    const uint16_t *row = (const uint16_t *)rows.data;
    for (int j = 0; j < count; j += 2, row += 2 * rows.stride, pairs += dim) {
        const uint16_t *next = j + 1 < count ? row + rows.stride : none;
        for (int64_t c = 0; c < dim; c += LANES) {
            *(IntsAnywhere *)(pairs + c) = load_halves(row, c) | load_halves(next, c) << 16;
        }
    }
}

/* Logits of what a row does not see become -inf. `first`: the key of the first of them. */
static void hide(const Call *a, const Run *run, int64_t first, OfRows logits[TILE]) {
    for (int64_t r = 0; r < run->rows; r++) {
        const int64_t seen = limit_of(a, run, r) - first, begin = begin_of(a, run, r) - first;
        for (int64_t j = 0; j < begin && j < TILE; j++) ((float *)logits[j])[r] = -INFINITY;
        for (int64_t j = seen < 0 ? 0 : seen; j < TILE; j++) ((float *)logits[j])[r] = -INFINITY;
    }
}

/* `join_slots` of a tile's rows. */
static void join_slots_of_many(const Call *a, const Run *run, int64_t first, int count, OfRows logits[TILE]) {
    for (int j = 0; j < count; j++) {
        Floats scales[SLOTS];
        for (int s = 0; s < SLOTS; s++) scales[s] = spread(run->scales[s * run->scale_step + first + j]);
        for (int v = 0; v < VECTORS; v++) logits[j][v] = join_slots(logits[j][v], scales, a->softcap);
    }
}

/* Up to 32 rows. Those of bf16 become fp32 in the first-level cache; or with PAIRS stay so, and weights are rounded to
   it: half the products, of whose sums these are the only rounding. */
INLINE void attend_many(const Call *a, const Run *run, const int type) {
    const int64_t dim = a->dim, key_dim = a->key_layout.dim;
    const int in_word = type == PAIRS ? 2 : 1, width = 4 / in_word;
    OfRows query[MOST_PARTS * LANES], total[MOST_PARTS * LANES], weights[TILE];
    float made[2][TILE * MOST_PARTS * LANES], pairs[TILE / 2 * MOST_PARTS * LANES];
    OfRows top, mass = {0};
    for (int v = 0; v < VECTORS; v++) top[v] = spread(-INFINITY);
    memset(query, 0, key_dim * sizeof *query);
    memset(total, 0, dim * sizeof *total);
    for (int64_t r = 0; r < run->rows; r++) {
        float own[MOST_PARTS * LANES];
        read_query(a, run, r, own);
        for (int64_t c = 0; c < key_dim; c++)
            memcpy((char *)query[c / in_word] + 4 * r + width * (c % in_word), (char *)(own + c) + 4 - width, width);
        const int64_t to = result_of(a, run, r);
        if (run->result >= 0 || a->lses[to] == -INFINITY) continue; /* it has seen nothing yet */
        ((float *)top)[r] = a->lses[to] * LOG2_E;
        ((float *)mass)[r] = 1;
        for (int64_t c = 0; c < dim; c++) ((float *)total[c])[r] = a->outs[to * dim + c];
    }
    for (int64_t first = run->first; first < run->end; first += TILE) {
        const int count = run->end - first < TILE ? (int)(run->end - first) : TILE;
        const Tile keys = tile_of(a, &run->keys, &a->key_layout, run->chosen, first, count, made[0], type == FP32);
        const Tile values = tile_of(a, &run->values, &a->value_layout, run->chosen, first, count, made[1], type == FP32);
        ask_for(values.data, values.stride * width, dim * width);
        multiply((const float *)keys.data, keys.stride / in_word, (key_dim + in_word - 1) / in_word, count, query,
                 a->scale * LOG2_E, weights, type);
        if (run->scales)
            join_slots_of_many(a, run, first, count, weights);
        else if (a->softcap > 0)
            cap_logits(weights[0], TILE * VECTORS, a->softcap);
        if (a->since || a->softcap > 0 || limit_of(a, run, 0) < first + count) hide(a, run, first, weights);
        for (int v = 0; v < VECTORS; v++) {
            Floats highest = top[v];
            for (int j = 0; j < TILE; j++) highest = larger(weights[j][v], highest);
            const Floats shift = a->since ? choose(highest == -INFINITY, (Floats){0}, highest) : highest;
            const Floats fade = power_of_2(top[v] - shift);
            mass[v] *= fade;
            for (int j = 0; j < TILE; j++) mass[v] += weights[j][v] = power_of_2(weights[j][v] - shift);
            for (int j = 0; j < TILE && type == PAIRS; j += 2) weights[j / 2][v] = paired(weights[j][v], weights[j + 1][v]);
            if (any(highest > top[v]))
                for (int64_t c = 0; c < dim; c++) total[c][v] *= fade;
            top[v] = highest;
        }
        ask_for(keys.data + TILE * keys.stride * width, keys.stride * width, key_dim * width);
        if (type == PAIRS) {
            pair_rows(values, dim, count, pairs);
            add_products(total, dim, pairs, 1, dim, weights, (count + 1) / 2, PAIRS);
        } else
            add_products(total, dim, (const float *)values.data, 1, values.stride, weights, count, FP32);
    }
    for (int64_t r = 0; r < run->rows; r++) {
        const int64_t to = result_of(a, run, r);
        float highest = ((float *)top)[r], one = ((float *)mass)[r], fade = 1;
        if (run->result < 0 && a->sinks) one = sunk(a, run, r, &highest, one, &fade);
        const float share = highest == -INFINITY ? 0 : fade / one;
        for (int64_t c = 0; c < dim; c++) a->outs[to * dim + c] = ((float *)total[c])[r] * share;
        a->lses[to] = highest * LN_2 + logf(one);
    }
}

static void attend_floats(const Call *a, const Run *run) { attend_many(a, run, FP32); }
static void attend_pairs(const Call *a, const Run *run) { attend_many(a, run, PAIRS); }

/* Whether tiles are made out of codes: of keys and values, or of neither. */
static int is_quantized(const Call *a) { return a->key_layout.bits != 0; }

/* The shares that the rows of a suffix gave to its keys, once their log-sum-exps are known: `into` [rows, step]. */
static void weigh(const Call *a, const Run *run, float *into, int64_t step) {
    const int64_t parts = a->dim / LANES, stride = a->key_layout.stride;
    Floats query[ROWS][MOST_PARTS], key[MOST_PARTS];
    for (int64_t r = 0; r < run->rows; r++) {
        const int64_t from = query_of(a, run, r) * a->dim;
        for (int64_t p = 0; p < parts; p++) query[r][p] = load(a->queries, from + p * LANES, a->type);
    }
    for (int64_t j = 0; j < run->end; j++) {
        for (int64_t p = 0; p < parts; p++) key[p] = load(run->keys.data, j * stride + p * LANES, a->type);
        for (int64_t r = 0; r < run->rows; r++) into[r * step + j] = dot(query[r], key, (int)parts);
    }
    for (int64_t r = 0; r < run->rows; r++) {
        const float lse = a->lses[result_of(a, run, r)] * LOG2_E;
        for (int64_t j = 0; j < run->end; j += TILE) {
            Floats logits[TILE / LANES] = {{0}};
            const int64_t bytes = (run->end - j < TILE ? run->end - j : TILE) * (int64_t)sizeof(float);
            memcpy(logits, into + r * step + j, bytes);
            for (int t = 0; t < TILE / LANES; t++) logits[t] *= a->scale * LOG2_E;
            if (a->softcap > 0) cap_logits(logits, TILE / LANES, a->softcap);
            for (int t = 0; t < TILE / LANES; t++) logits[t] = power_of_2(logits[t] - lse);
            memcpy(into + r * step + j, logits, bytes);
        }
    }
}

/* The common shapes of few rows with their loops unrolled, so that rows and sums stay in registers. */
static void attend(const Call *a, const Run *run, int few) {
    if (!few) return (a->pairs ? attend_pairs : attend_floats)(a, run);
    const int rows = (int)run->rows, parts = (int)(a->dim / LANES), quantized = is_quantized(a);
    const int key_parts = (int)(whole(a->key_layout.dim) / LANES);
    const int type = quantized ? FP32 : a->type;
#define SHAPE(R, P, T, Q) \
    if (rows == R && key_parts == P && parts == P && type == T && quantized == Q) \
        return attend_few(a, run, R, P, P, T, Q);
#define SHAPES(P, T, Q) SHAPE(1, P, T, Q) SHAPE(2, P, T, Q) SHAPE(4, P, T, Q) SHAPE(8, P, T, Q)
#define SIZES(D) SHAPES(D / LANES, FP32, 0) SHAPES(D / LANES, BF16, 0) SHAPES(D / LANES, FP32, 1)
    SIZES(64) SIZES(128)
    if (type == FP32)
        attend_few(a, run, rows, key_parts, parts, FP32, quantized);
    else
        attend_few(a, run, rows, key_parts, parts, BF16, 0);
}

/* Columns of an item; see work.py. */
enum { TOKEN = 0, ALL_ROWS = 1, FIRST_ROW = 2, HEAD = 3, FIRST = 4, END = 5, RESULT = 6, KEYS = 7, VALUES = 10 };
enum { CHOSEN = 13, NUMBER = 14, OF_HEAD = 17, CHANNELS = 18 };
enum { CLASSES = 13, SCALES = 14, SCALE_STEP = 15, BOUNDS = 16 };
enum { COLUMNS = 19 };

/* Runs of prefixes that lie alike in memory. items: [count, COLUMNS]. merged: whether rows are classes with slots. */
typedef struct {
    const int64_t *items;
    int64_t count, merged;
    Layout key_layout, value_layout;
} Launch;

/* Suffixes that lie in one pair of tensors [rows, kv_heads, capacity, D]. strides: elements, of keys and then of values,
   but the last. table: [rows, 2], the first token of each, or -1, and how long its suffix is, with its `new` tokens.
   weights: [rows, kv_heads, group, step], where the `observed` rows get the weights that their one new token gave to
   each key; 0: none is. Such rows see all of their suffix. */
typedef struct {
    char *keys, *values;
    int64_t strides[6];
    const int32_t *table;
    int64_t rows, new;
    float *weights;
    int64_t step;
    const int32_t *observed;
} Suffixes;

/* The attention of one layer: over prefixes, whose runs leave results in `outs` and `lses` until they are united; then
   over suffixes, which go on from `out` [N, kv_heads, group, D] and `lse`. Without shares these hold what the prefixes
   gave. keys, values: of the call's tokens, [N, kv_heads, D] with a step from token to token in elements, to be appended
   to the suffixes; 0 where they are there. shares: [shares, 1 + kv_heads], where the results of a share begin, and how
   many runs each head has; places: [N, 3], the share of a token, its place there, and the tokens of the share; see
   work.py. softcap, since, sinks: see `LogitRules`; a softcap of 0 is none. choices: made first, each by the queries
   of its token. */
struct Attention {
    const void *queries;
    const char *keys, *values;
    int64_t key_step, value_step, tokens, kv_heads, group, dim;
    const Launch *launches;
    int64_t num_launches;
    float *outs, *lses;
    const int64_t *shares;
    const int32_t *places;
    const Suffixes *suffixes;
    int64_t num_suffixes;
    float *out, *lse;
    double scale, softcap;
    const int32_t *since;
    const float *sinks;
    int64_t type;
    const Choice *choices;
    const int64_t *choosers;
    int64_t num_choices;
};

static Call call_of(const Attention *a, const Layout *key_layout, const Layout *value_layout, float *outs, float *lses) {
    const int pairs = a->type == BF16 && !key_layout->bits && !value_layout->bits && key_layout->stride % 2 == 0 &&
                      kvshelf_bf16_products() != FP32_PRODUCTS;
    return (Call){a->queries, outs, lses, a->kv_heads, a->group, a->dim, *key_layout, *value_layout, (float)a->scale,
                  (int)a->type, pairs, (float)a->softcap * LOG2_E, a->since, a->sinks};
}

/* Three columns: the address of a head's rows, of its scales and of its zeros. */
static HeadRows head_rows(const int64_t *columns) {
    return (HeadRows){(const void *)columns[0], (const void *)columns[1], (const void *)columns[2]};
}

static void attend_item(const Attention *a, const Launch *launch, int64_t i) {
    const Call call = call_of(a, &launch->key_layout, &launch->value_layout, a->outs, a->lses);
    const int64_t *item = launch->items + i * COLUMNS, left = item[ALL_ROWS] - item[FIRST_ROW];
    Run run = {
        .keys = head_rows(item + KEYS), .values = head_rows(item + VALUES), .first = item[FIRST], .end = item[END],
        .token = item[TOKEN], .head = item[HEAD], .row = item[FIRST_ROW], .rows = left < ROWS ? left : ROWS,
        .result = item[RESULT], .before = item[OF_HEAD], .chosen = (const int32_t *)item[CHOSEN],
        .channels = (const int32_t *)item[CHANNELS],
    };
    int64_t most = run.end;
    if (launch->merged) {
        const int64_t *bounds = (const int64_t *)item[BOUNDS];
        run.chosen = (const int32_t *)item[CLASSES] + bounds[0];
        run.scales = (const float *)item[SCALES] + bounds[0];
        run.scale_step = item[SCALE_STEP];
        most = bounds[1] - bounds[0];
    } else if (run.chosen)
        most = *(const int32_t *)item[NUMBER];
    if (run.end > most) run.end = most;
    const Run seen = seen_of(&call, run);
    attend(&call, &seen, item[ALL_ROWS] <= FEW_ROWS);
}

/* The new keys and values of one row of a batch behind its suffix. */
static void append(const Attention *a, const Suffixes *s, int64_t row) {
    const int64_t width = a->type == FP32 ? 4 : 2, first = s->table[2 * row];
    for (int64_t t = 0; t < s->new && first >= 0; t++)
        for (int64_t head = 0; head < a->kv_heads; head++) {
            const int64_t at = s->table[2 * row + 1] - s->new + t, own = head * a->dim;
            const int64_t key = row * s->strides[0] + head * s->strides[1] + at * s->strides[2];
            const int64_t value = row * s->strides[3] + head * s->strides[4] + at * s->strides[5];
            memcpy(s->keys + key * width, a->keys + ((first + t) * a->key_step + own) * width, a->dim * width);
            memcpy(s->values + value * width, a->values + ((first + t) * a->value_step + own) * width, a->dim * width);
        }
}

/* Piece `i` of all choices and KV heads. */
static void choose_one(const void *context, int64_t i) {
    const Attention *a = context;
    const int64_t which = i / a->kv_heads, width = a->type == FP32 ? 4 : 2;
    Choice choice = a->choices[which];
    choice.queries = (const char *)a->queries + a->choosers[which] * a->kv_heads * a->group * a->dim * width;
    choose_rows(&choice, i % a->kv_heads);
}

/* Piece `i` of all rows that are appended to, and of all runs: these read nothing that is appended. */
static void append_or_attend(const void *context, int64_t i) {
    const Attention *a = context;
    for (const Suffixes *s = a->suffixes; a->keys && s < a->suffixes + a->num_suffixes; i -= s->rows, s++)
        if (i < s->rows) return append(a, s, i);
    const Launch *launch = a->launches;
    for (; i >= launch->count; launch++) i -= launch->count;
    attend_item(a, launch, i);
}

/* The union of what the runs found for each query head of a token; 0 and -inf where there was no run. */
static void unite_runs(const void *context, int64_t token) {
    const Attention *a = context;
    const int64_t *share = a->shares + a->places[3 * token] * (1 + a->kv_heads), dim = a->dim;
    const int64_t rows = a->places[3 * token + 2] * a->group, step = a->kv_heads * rows;
    for (int64_t i = 0; i < a->kv_heads * a->group; i++) {
        const int64_t head = i / a->group, runs = share[1 + head];
        const int64_t from = share[0] + head * rows + a->places[3 * token + 1] * a->group + i % a->group;
        float top = -INFINITY, mass = 0, *out = a->out + (token * a->kv_heads * a->group + i) * dim;
        for (int64_t n = 0; n < runs; n++) top = fmaxf(top, a->lses[from + n * step]);
        const int any = top > -INFINITY;
        memset(out, 0, dim * sizeof *out);
        for (int64_t n = 0; n < runs && any; n++) {
            const float weight = expf(a->lses[from + n * step] - top), *part = a->outs + (from + n * step) * dim;
            mass += weight;
            for (int64_t c = 0; c < dim; c++) out[c] += weight * part[c];
        }
        for (int64_t c = 0; c < dim && any; c++) out[c] /= mass;
        a->lse[token * a->kv_heads * a->group + i] = any ? top + logf(mass) : -INFINITY;
    }
}

/* Query rows of a KV head are taken ROWS at a time. */
static int64_t blocks_of(const Attention *a, const Suffixes *s) { return (s->new * a->group + ROWS - 1) / ROWS; }

/* Block `i` of the rows and heads of suffixes. */
static void attend_suffix(const Attention *a, const Suffixes *s, int64_t i) {
    const int64_t width = a->type == FP32 ? 4 : 2, *steps = s->strides, blocks = blocks_of(a, s);
    const int64_t head = i / blocks % a->kv_heads, row = i / blocks / a->kv_heads;
    const int64_t all = s->new * a->group, begin = i % blocks * ROWS, left = all - begin;
    const int64_t token = s->table[2 * row], visible = s->table[2 * row + 1] - s->new + 1;
    if (token < 0) return;
    const Call call = call_of(a, &(Layout){.stride = steps[2], .dim = a->dim},
                              &(Layout){.stride = steps[5], .dim = a->dim}, a->out, a->lse);
    Run run = {
        .keys = {s->keys + (row * steps[0] + head * steps[1]) * width},
        .values = {s->values + (row * steps[3] + head * steps[4]) * width},
        .token = token, .head = head, .row = begin, .rows = left < ROWS ? left : ROWS, .result = -1, .visible = visible,
    };
    run.end = limit_of(&call, &run, run.rows - 1);
    const Run seen = seen_of(&call, run);
    attend(&call, &seen, all <= FEW_ROWS);
    if (s->weights && s->observed[row])
        weigh(&call, &run, s->weights + ((row * a->kv_heads + head) * a->group + begin) * s->step, s->step);
}

static void attend_suffixes(const void *context, int64_t i) {
    const Attention *a = context;
    const Suffixes *s = a->suffixes;
    for (int64_t own; i >= (own = s->rows * a->kv_heads * blocks_of(a, s)); s++) i -= own;
    attend_suffix(a, s, i);
}

void run_attention(Member *member, const Attention *a) {
    int64_t appended = 0, blocks = 0, runs = 0;
    for (const Suffixes *s = a->suffixes; s < a->suffixes + a->num_suffixes; s++) {
        appended += a->keys ? s->rows : 0;
        blocks += s->rows * a->kv_heads * blocks_of(a, s);
    }
    for (const Launch *launch = a->launches; launch < a->launches + a->num_launches; launch++) runs += launch->count;
    phase(member, a->num_choices * a->kv_heads, choose_one, a);
    phase(member, appended + runs, append_or_attend, a);
    phase(member, a->shares ? a->tokens : 0, unite_runs, a);
    phase(member, blocks, attend_suffixes, a);
}
