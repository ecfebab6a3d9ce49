/* Rows turned in planes of two channels each, read and written once. */

#include "rows.h"

typedef struct {
    States states;
    const float *cos, *sin;   /* [rows, dim], sin with its sign */
    const int64_t *partners;  /* [dim] */
    float *out;               /* [heads, rows, dim] */
    char aligned[MOST_PARTS]; /* whether the partners of a vector's channels follow each other as these do */
} Turn;

INLINE void turn_rows(const Turn *t, const int64_t i, const int type) {
    const States *a = &t->states;
    const int64_t head = i / blocks_of(a), begin = i % blocks_of(a) * BLOCK_ROWS, dim = a->dim;
    const int64_t end = begin + BLOCK_ROWS < a->rows ? begin + BLOCK_ROWS : a->rows;
    for (int64_t r = begin; r < end; r++) {
        const char *row = a->data + head * a->head_stride + r * a->row_stride;
        const float *cos = t->cos + r * dim, *sin = t->sin + r * dim;
        float *out = t->out + (head * a->rows + r) * dim, whole[MOST_PARTS * LANES];
        for (int64_t c = 0; c < dim; c += LANES) *(FloatsAnywhere *)(whole + c) = load(row, c, type);
        for (int64_t c = 0; c < dim; c += LANES) {
            const int64_t *partners = t->partners + c;
            Floats other;
            if (t->aligned[c / LANES])
                other = *(const FloatsAnywhere *)(whole + *partners);
            else
                for (int l = 0; l < LANES; l++) other[l] = whole[partners[l]];
            *(FloatsAnywhere *)(out + c) = *(const FloatsAnywhere *)(whole + c) * *(const FloatsAnywhere *)(cos + c) +
                                           other * *(const FloatsAnywhere *)(sin + c);
        }
    }
}

static void turn_block(const void *context, int64_t i) {
    const Turn *t = context;
    if (t->states.type == FP32)
        turn_rows(t, i, FP32);
    else
        turn_rows(t, i, BF16);
}

/* sizes: as of `kvshelf_row_norms`; dim is a multiple of 16, and 256 at most. */
EXPORT void kvshelf_rotate(const void *states, const float *cos, const float *sin, const int64_t *partners, float *out,
                           const int64_t *sizes, int type, int threads) {
    Turn t = {{states, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], type}, cos, sin, partners, out, {0}};
    for (int64_t p = 0; p < t.states.dim / LANES; p++) {
        const int64_t *of = partners + p * LANES;
        int l = 1;
        while (l < LANES && of[l] == of[0] + l) l++;
        t.aligned[p] = l == LANES;
    }
    for_each(t.states.heads * blocks_of(&t.states), threads, turn_block, &t);
}
