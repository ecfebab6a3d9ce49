/* Euclidean norms of rows, each read once: it is memory that limits. */

#include "native.h"

/* Rows of a block, which is one thread's; and how many bytes memory is asked for in advance. */
enum { ROWS = 256, AHEAD = 2048 };

typedef struct {
    const char *states; /* [heads, rows, dim], strides in bytes */
    float *norms;       /* [heads, rows] */
    int64_t rows, dim, head_stride, row_stride;
    int type;
} Norms;

/* Eight sums, each product rounded before it is added, and then one sum after the other: so does torch on x86, and of
   rows of a multiple of 8 every bit is torch's. Repeated tokens have norms that differ in the last bit only, and some
   of them are kept by it. */
INLINE Eight add_squares(Eight sums, const Floats part) {
    const Floats squares = part * part;
    Eight low, high;
    halve(squares, &low, &high);
#ifdef __x86_64__
    __asm__("" : "+x"(low), "+x"(high)); /* nothing: but what has passed it is not fused with the sum */
#endif
    return sums + low + high;
}

INLINE float norm_of(const char *row, const int64_t dim, const int type) {
    const int64_t width = type == FP32 ? 4 : 2, whole = dim - dim % LANES;
    Eight sums = {0};
    for (int64_t c = 0; c < whole; c += LANES) sums = add_squares(sums, load(row, c, type));
    if (whole < dim) {
        char rest[LANES * 4] = {0};
        memcpy(rest, row + whole * width, (dim - whole) * width);
        sums = add_squares(sums, load(rest, 0, type));
    }
    float total = sums[0];
    for (int i = 1; i < 8; i++) total += sums[i];
    return sqrtf(total);
}

INLINE void norms_of(const Norms *a, const int64_t i, const int type) {
    const int64_t blocks = (a->rows + ROWS - 1) / ROWS, head = i / blocks, begin = i % blocks * ROWS;
    const int64_t end = begin + ROWS < a->rows ? begin + ROWS : a->rows;
    const int64_t width = a->dim * (type == FP32 ? 4 : 2), ahead = AHEAD / width * a->row_stride;
    const char *row = a->states + head * a->head_stride + begin * a->row_stride;
    for (int64_t r = begin; r < end; r++, row += a->row_stride) {
        for (int64_t line = 0; line < width; line += 64) __builtin_prefetch(row + ahead + line);
        a->norms[head * a->rows + r] = norm_of(row, a->dim, type);
    }
}

static void norms_of_block(const void *context, int64_t i) {
    const Norms *a = context;
    if (a->type == FP32)
        norms_of(a, i, FP32);
    else
        norms_of(a, i, BF16);
}

/* sizes: heads, rows and dim of the states, all at least 1, and their strides in bytes from head to head and from row
   to row. */
EXPORT void kvshelf_row_norms(const void *states, float *norms, const int64_t *sizes, int type, int threads) {
    const Norms a = {states, norms, sizes[1], sizes[2], sizes[3], sizes[4], type};
    for_each(sizes[0] * ((a.rows + ROWS - 1) / ROWS), threads, norms_of_block, &a);
}
