/* Cosines of rows with the mean of their directions, in two passes: the mean comes before any cosine. */

#include "rows.h"

typedef struct {
    States states;
    float *inverses;  /* [heads, rows]: of the norms */
    float *sums;      /* [heads, blocks, dim]: of the directions of a block's rows */
    const float *axes; /* [heads, dim]: the unit vector of the mean direction */
    float *cosines;   /* [heads, rows] */
} Cosines;

/* Of a row as short as this there is no direction, and its cosine is about 0. */
#define SHORTEST 1e-12f

INLINE void each_row(const Cosines *t, const int64_t i, const int type, const int second) {
    const States *a = &t->states;
    const int64_t head = i / blocks_of(a), begin = i % blocks_of(a) * BLOCK_ROWS, dim = a->dim;
    const int64_t end = begin + BLOCK_ROWS < a->rows ? begin + BLOCK_ROWS : a->rows;
    const int64_t width = dim * (type == FP32 ? 4 : 2);
    const char *row = a->data + head * a->head_stride + begin * a->row_stride;
    Floats parts[MOST_PARTS] = {0};
    if (second)
        for (int64_t p = 0; p * LANES < dim; p++)
            parts[p] = part_of((const char *)(t->axes + head * dim), p * LANES, dim, FP32);
    for (int64_t r = begin; r < end; r++, row += a->row_stride) {
        look_ahead(row, a->row_stride, width);
        float *inverse = t->inverses + head * a->rows + r;
        if (second) {
            Floats product = {0};
            for (int64_t p = 0; p * LANES < dim; p++) product += parts[p] * part_of(row, p * LANES, dim, type);
            t->cosines[head * a->rows + r] = sum(product) * *inverse;
        } else {
            const float norm = norm_of(row, dim, type);
            *inverse = 1 / (norm < SHORTEST ? SHORTEST : norm);
            for (int64_t p = 0; p * LANES < dim; p++) parts[p] += part_of(row, p * LANES, dim, type) * *inverse;
        }
    }
    if (!second) memcpy(t->sums + i * dim, parts, dim * sizeof *t->sums);
}

static void pass_over_block(const void *context, int64_t i) {
    const Cosines *t = context;
#define FORM(TYPE, SECOND) \
    if (t->states.type == TYPE && (t->axes != 0) == SECOND) return each_row(t, i, TYPE, SECOND);
    FORM(FP32, 0) FORM(FP32, 1) FORM(BF16, 0) FORM(BF16, 1)
#undef FORM
}

/* The first pass, where `axes` is null, and the second. sizes: as of `kvshelf_row_norms`, of at most 256 channels. */
EXPORT void kvshelf_mean_cosines(const void *states, float *inverses, float *sums, const float *axes, float *cosines,
                                 const int64_t *sizes, int type, int threads) {
    const Cosines t = {{states, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], type}, inverses, sums, axes, cosines};
    for_each(t.states.heads * blocks_of(&t.states), threads, pass_over_block, &t);
}
