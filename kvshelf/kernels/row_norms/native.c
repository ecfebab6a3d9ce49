/* Euclidean norms of rows, each read once. */

#include "rows.h"

typedef struct {
    States states;
    float *norms; /* [heads, rows] */
} Norms;

INLINE void norms_of(const Norms *n, const int64_t i, const int type) {
    const States *a = &n->states;
    const int64_t head = i / blocks_of(a), begin = i % blocks_of(a) * BLOCK_ROWS;
    const int64_t end = begin + BLOCK_ROWS < a->rows ? begin + BLOCK_ROWS : a->rows;
    const int64_t width = a->dim * (type == FP32 ? 4 : 2);
    const char *row = a->data + head * a->head_stride + begin * a->row_stride;
    for (int64_t r = begin; r < end; r++, row += a->row_stride) {
        look_ahead(row, a->row_stride, width);
        n->norms[head * a->rows + r] = norm_of(row, a->dim, type);
    }
}

static void norms_of_block(const void *context, int64_t i) {
    const Norms *n = context;
    if (n->states.type == FP32)
        norms_of(n, i, FP32);
    else
        norms_of(n, i, BF16);
}

/* sizes: heads, rows and dim of the states, all at least 1, and their strides in bytes from head to head and from row
   to row. */
EXPORT void kvshelf_row_norms(const void *states, float *norms, const int64_t *sizes, int type, int threads) {
    const Norms n = {{states, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], type}, norms};
    for_each(n.states.heads * blocks_of(&n.states), threads, norms_of_block, &n);
}
