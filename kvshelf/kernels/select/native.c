/* Top-k of rows of scores by bisection, and the copy of what was chosen. */

#include "ranks.h"

typedef struct {
    const float *scores;      /* [rows, length] */
    const uint8_t *protected; /* [length] */
    const int64_t *counts;    /* [rows]: entries to keep, protected ones included */
    uint8_t *mask;            /* [rows, length] */
    int32_t *ranks;           /* [rows, length] */
    int64_t length, held;     /* held: protected entries */
} Rows;

static void select_row(const void *context, int64_t row) {
    const Rows *a = context;
    const float *scores = a->scores + row * a->length;
    int32_t *ranks = a->ranks + row * a->length;
    uint8_t *mask = a->mask + row * a->length;
    const int64_t wanted = a->counts[row] - a->held;
    memcpy(mask, a->protected, a->length);
    if (wanted <= 0) return;
    for (int64_t i = 0; i < a->length; i++) {
        const int32_t rank = rank_of(scores[i]);
        ranks[i] = a->protected[i] ? INT32_MIN : rank;
    }
    const int32_t least = rank_at(ranks, a->length, wanted);
    int64_t tied = wanted - (least < INT32_MAX ? count_from(ranks, a->length, least + 1) : 0);
    for (int64_t i = 0; i < a->length; i++) mask[i] |= ranks[i] > least;
    for (int64_t i = 0; tied; i++)
        if (ranks[i] == least) {
            mask[i] = 1;
            tied--;
        }
}

static int64_t count(const uint8_t *mask, int64_t length) {
    int64_t total = 0;
    for (int64_t i = 0; i < length; i++) total += mask[i] != 0;
    return total;
}

/* mask becomes 1 where an entry is kept. counts: of each row, from the protected entries to all. */
EXPORT void kvshelf_select(const float *scores, const uint8_t *protected, const int64_t *counts, uint8_t *mask,
                           int32_t *ranks, int64_t rows, int64_t length, int threads) {
    const Rows a = {scores, protected, counts, mask, ranks, length, count(protected, length)};
    for_each(rows, threads, select_row, &a);
}

typedef struct {
    const uint8_t *mask;  /* [heads, length] */
    const int64_t *begin; /* [heads + 1]: where each head's entries go */
    int32_t *positions;
    int64_t length;
    struct States {
        const char *from;
        char *to;
        int64_t head, row, width; /* bytes from head to head, from row to row, and of a row */
    } states[2];
} Packing;

enum { ROWS_AHEAD = 16 }; /* kept rows lie apart, and memory does not guess where the next one is */

static void pack_head(const void *context, int64_t head) {
    const Packing *a = context;
    const uint8_t *mask = a->mask + head * a->length;
    const int64_t begin = a->begin[head], count = a->begin[head + 1] - begin;
    int32_t *positions = a->positions + begin;
    for (int64_t i = 0, n = 0; n < count; i++) {
        positions[n] = (int32_t)i;
        n += mask[i] != 0;
    }
    for (int s = 0; s < 2; s++) {
        const struct States states = a->states[s];
        const char *from = states.from + head * states.head;
        char *to = states.to + begin * states.width;
        for (int64_t n = 0; n < count; n++, to += states.width) {
            const char *row = from + positions[n] * states.row;
            const char *later = from + positions[n + ROWS_AHEAD < count ? n + ROWS_AHEAD : n] * states.row;
            for (int64_t line = 0; line < states.width; line += 64) __builtin_prefetch(later + line);
            if (states.width % 64) {
                memcpy(to, row, states.width);
                continue;
            }
            for (int64_t at = 0; at < states.width; at += 4 * LANES) /* inline: calls cost as much as copies of 128 bytes */
                *(FloatsAnywhere *)(to + at) = *(const FloatsAnywhere *)(row + at);
        }
    }
}

/* strides: of keys, then of values: bytes from head to head, from row to row, and of a row. */
EXPORT void kvshelf_pack(const void *keys, const void *values, const uint8_t *mask, const int64_t *begin,
                         const int64_t *strides, void *packed_keys, void *packed_values, int32_t *positions,
                         int64_t heads, int64_t length, int threads) {
    const Packing a = {mask, begin, positions, length,
                       {{keys, packed_keys, strides[0], strides[1], strides[2]},
                        {values, packed_values, strides[3], strides[4], strides[5]}}};
    for_each(heads, threads, pack_head, &a);
}

typedef struct {
    Rows rows;
    Packing packing;
    float *importance; /* [entries] */
} Keeping;

static void keep_head(const void *context, int64_t head) {
    const Keeping *a = context;
    const Packing *packing = &a->packing;
    const float *scores = a->rows.scores + head * a->rows.length;
    select_row(&a->rows, head);
    pack_head(packing, head);
    for (int64_t n = packing->begin[head]; n < packing->begin[head + 1]; n++) {
        const int32_t position = packing->positions[n];
        const int finite = rank_of(scores[position]) != INT32_MAX;
        a->importance[n] = a->rows.protected[position] ? INFINITY : finite ? scores[position] : NAN;
    }
}

/* kvshelf_select and kvshelf_pack, and the importance of what is kept. Returns 0, and has done nothing, where a head
   keeps fewer than are protected. mask, ranks: room to work in, as of kvshelf_select. */
EXPORT int kvshelf_keep_best(const void *keys, const void *values, const float *scores, const uint8_t *protected,
                             const int64_t *counts, const int64_t *begin, const int64_t *strides, uint8_t *mask,
                             int32_t *ranks, void *packed_keys, void *packed_values, int32_t *positions,
                             float *importance, int64_t heads, int64_t length, int threads) {
    const int64_t held = count(protected, length);
    for (int64_t head = 0; head < heads; head++)
        if (counts[head] < held) return 0;
    const Keeping a = {{scores, protected, counts, mask, ranks, length, held},
                       {mask, begin, positions, length,
                        {{keys, packed_keys, strides[0], strides[1], strides[2]},
                         {values, packed_values, strides[3], strides[4], strides[5]}}},
                       importance};
    for_each(heads, threads, keep_head, &a);
    return 1;
}
