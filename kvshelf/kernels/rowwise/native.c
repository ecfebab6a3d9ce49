/* What a model computes for each token alone, between two attentions: a list of instructions over rows of fp32.

   With many rows each thread takes a block of them through all instructions, so that what lies between stays in its
   second-level cache. With few rows the threads divide the outputs of each product, because weights are then what has
   to be read. */

#include "native.h"

/* Weights are [panels, inner, PANEL]: the outputs of a panel stand in the lanes of vectors. MOST: rows whose sums the
   registers hold. */
enum { PANEL = 32, VECTORS = PANEL / LANES };
#ifdef __AVX512F__
enum { MOST = 12 };
#else
enum { MOST = 3 };
#endif

/* Sums of `rows` rows with one panel. One sum for each output, from the first input to the last, whatever the number of
   rows: the answer of a row must not depend on its neighbours. */
INLINE void multiply_panel(const float *x, const int64_t x_step, const float *panel, const float *bias, float *y,
                           const int64_t y_step, const int64_t inner, const int rows) {
    Floats sums[MOST][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = bias ? load(bias, v * LANES, FP32) : (Floats){0};
    for (int64_t k = 0; k < inner; k++) {
        Floats weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = load(panel, k * PANEL + v * LANES, FP32);
        if (rows <= 2) __builtin_prefetch(panel + (k + 32) * PANEL), __builtin_prefetch(panel + (k + 32) * PANEL + 16);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] += weights[v] * x[r * x_step + k];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) *(FloatsAnywhere *)(y + r * y_step + v * LANES) = sums[r][v];
}

static void multiply_rows(const float *x, int64_t x_step, const float *panel, const float *bias, float *y,
                          int64_t y_step, int64_t inner, int64_t rows) {
    for (; rows >= MOST; rows -= MOST, x += MOST * x_step, y += MOST * y_step)
        multiply_panel(x, x_step, panel, bias, y, y_step, inner, MOST);
#define LEFT(R) case R: return multiply_panel(x, x_step, panel, bias, y, y_step, inner, R);
    switch (rows) {
        LEFT(1) LEFT(2)
#ifdef __AVX512F__
        LEFT(3) LEFT(4) LEFT(5) LEFT(6) LEFT(7) LEFT(8) LEFT(9) LEFT(10) LEFT(11)
#endif
    }
}

enum { LINEAR, MUL, ADD, SUB, COPY, SILU, GELU, GELU_TANH, TANH, RELU, RSQRT, MEAN };

/* Where a value lies: elements of a row, from `offset` on, in a buffer. */
typedef struct {
    int64_t buffer, offset, strides[3];
} Value;

/* sizes: of a row of the result, of MEAN of what it is the mean of, of LINEAR the panels and the inputs. weight, bias:
   addresses, of LINEAR alone; bias may be 0. */
typedef struct {
    int64_t op, sizes[3];
    Value out, a, b;
    int64_t weight, bias;
} Instruction;

/* A value that outlives the list, or a constant: `base`, and elements from row to row. Any other: 0, the elements of a
   row, and where it begins among those of a block, in elements of a row. */
typedef struct {
    float *base;
    int64_t row_step, begin;
} Buffer;

typedef struct {
    const Instruction *instructions;
    const Buffer *buffers;
    int64_t count, rows, block_rows;
    float *scratch;
    int64_t scratch_row; /* elements of all values of a block that do not outlive it, for one row */
    int64_t workers;
} Program;

/* A block of rows, and where those of its values lie that do not outlive it. */
typedef struct {
    const Program *program;
    int64_t first, rows;
    float *scratch;
} Block;

INLINE float *at(const Block *b, const Value *value, int64_t *row_step) {
    const Buffer *buffer = b->program->buffers + value->buffer;
    *row_step = buffer->row_step;
    if (buffer->base) return buffer->base + b->first * buffer->row_step + value->offset;
    return b->scratch + buffer->begin * b->rows + value->offset;
}

INLINE Floats sigmoid(const Floats x) { return 1 / (1 + power_of_2(x * -LOG2_E)); }

INLINE Floats computed(const int op, const Floats a, const Floats b) {
    switch (op) {
        case MUL: return a * b;
        case ADD: return a + b;
        case SUB: return a - b;
        case SILU: return a * sigmoid(a);
        case GELU_TANH: return a * sigmoid(1.59576912f * (a + 0.044715f * a * a * a));
        case TANH: return 2 * sigmoid(2 * a) - 1;
        case RELU: return larger(a, (Floats){0});
        default: break;
    }
    Floats found = a;
    for (int i = 0; i < LANES && op != COPY; i++)
        found[i] = op == RSQRT ? 1 / sqrtf(a[i]) : 0.5f * a[i] * (1 + erff(a[i] * 0.707106781f));
    return found;
}

/* `count` numbers with a step; a step of 0 repeats one. */
INLINE Floats some(const float *data, const int64_t step, const int64_t count) {
    if (step == 0) return spread(*data);
    if (step == 1 && count >= LANES) return load(data, 0, FP32);
    Floats found = {0};
    for (int64_t i = 0; i < count && i < LANES; i++) found[i] = data[i * step];
    return found;
}

INLINE void map_line(const int op, float *out, const float *a, const float *b, const Instruction *now) {
    const int64_t count = now->sizes[2], out_step = now->out.strides[2];
    const int64_t a_step = now->a.strides[2], b_step = now->b.strides[2];
    const int two = op == MUL || op == ADD || op == SUB;
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats found = computed(op, some(a + i * a_step, a_step, count - i),
                                      two ? some(b + i * b_step, b_step, count - i) : (Floats){0});
        if (out_step == 1 && count - i >= LANES)
            *(FloatsAnywhere *)(out + i) = found;
        else
            for (int64_t j = 0; j < count - i && j < LANES; j++) out[(i + j) * out_step] = found[j];
    }
}

INLINE void mean_line(float *out, const float *a, const Instruction *now) {
    Floats sums[4] = {{0}};
    const int64_t count = now->sizes[2];
    for (int64_t i = 0; i < count; i += LANES) sums[i / LANES % 4] += some(a + i, 1, count - i);
    *out = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / count;
}

INLINE void map_rows(const Block *block, const Instruction *now, const int op) {
    int64_t out_row, a_row, b_row;
    float *out = at(block, &now->out, &out_row);
    const float *a = at(block, &now->a, &a_row), *b = at(block, &now->b, &b_row);
    for (int64_t r = 0; r < block->rows; r++)
        for (int64_t i = 0; i < now->sizes[0]; i++)
            for (int64_t j = 0; j < now->sizes[1]; j++) {
                float *to = out + r * out_row + i * now->out.strides[0] + j * now->out.strides[1];
                const float *from = a + r * a_row + i * now->a.strides[0] + j * now->a.strides[1];
                if (op == MEAN)
                    mean_line(to, from, now);
                else
                    map_line(op, to, from, b + r * b_row + i * now->b.strides[0] + j * now->b.strides[1], now);
            }
}

static void multiply_block(const Block *block, const Instruction *now, int64_t first, int64_t end) {
    int64_t x_row, y_row;
    const float *x = at(block, &now->a, &x_row), *weights = (const float *)now->weight;
    float *y = at(block, &now->out, &y_row);
    const int64_t inner = now->sizes[1];
    for (int64_t p = first; p < end; p++) {
        const float *bias = now->bias ? (const float *)now->bias + p * PANEL : 0;
        multiply_rows(x, x_row, weights + p * inner * PANEL, bias, y + p * PANEL, y_row, inner, block->rows);
    }
}

static void execute(const Block *block, const Instruction *now) {
    switch (now->op) {
        case LINEAR: return multiply_block(block, now, 0, now->sizes[0]);
#define MAP(OP) case OP: return map_rows(block, now, OP);
        MAP(MUL) MAP(ADD) MAP(SUB) MAP(COPY) MAP(SILU) MAP(GELU) MAP(GELU_TANH) MAP(TANH) MAP(RELU) MAP(RSQRT) MAP(MEAN)
    }
}

/* A worker has scratch of its own, and takes every `workers`-th block. */
static void take_blocks(const void *context, int64_t worker) {
    const Program *a = context;
    Block block = {a, 0, a->block_rows, a->scratch + worker * a->block_rows * a->scratch_row};
    for (block.first = worker * a->block_rows; block.first < a->rows; block.first += a->workers * a->block_rows) {
        const int64_t left = a->rows - block.first;
        block.rows = left < a->block_rows ? left : a->block_rows;
        for (int64_t i = 0; i < a->count; i++) execute(&block, a->instructions + i);
    }
}

/* Products of the same rows, one instruction after the other. */
typedef struct {
    const Block *block;
    const Instruction *first;
    int64_t count, panels, parts;
} Products;

/* Of the panels of all products together, the `part`-th of `parts`. */
static void multiply_part(const void *context, int64_t part) {
    const Products *a = context;
    int64_t from = part * a->panels / a->parts, to = (part + 1) * a->panels / a->parts;
    for (int64_t i = 0; i < a->count && to > 0; i++) {
        const int64_t own = a->first[i].sizes[0];
        if (from < own) multiply_block(a->block, a->first + i, from > 0 ? from : 0, to < own ? to : own);
        from -= own, to -= own;
    }
}

static Products products_from(const Block *block, const Instruction *first, const Instruction *end, int64_t parts) {
    Products found = {block, first, 0, 0, parts};
    for (const Instruction *now = first; now < end && now->op == LINEAR; now++, found.count++) {
        if (now->a.buffer != first->a.buffer || now->a.offset != first->a.offset) break;
        found.panels += now->sizes[0];
    }
    return found;
}

/* Instructions in order, over `rows` rows. scratch: room for `workers` blocks of `block_rows` rows of `scratch_row`
   elements; with a single block for all rows, the threads divide its products. */
EXPORT void kvshelf_run_rows(const Instruction *instructions, int64_t count, const Buffer *buffers, int64_t rows,
                             int64_t block_rows, float *scratch, int64_t scratch_row, int threads) {
    const Program a = {instructions, buffers, count, rows, block_rows, scratch, scratch_row, threads};
    if (rows > block_rows) {
        for_each(threads, threads, take_blocks, &a);
        return;
    }
    const Block whole = {&a, 0, rows, scratch};
    for (const Instruction *now = instructions, *end = now + count; now < end;) {
        const Products products = products_from(&whole, now, end, 2 * threads);
        if (products.count && threads > 1)
            for_each(products.parts, threads, multiply_part, &products);
        else
            for (int64_t i = 0; i < products.count || i == 0; i++) execute(&whole, now + i);
        now += products.count ? products.count : 1;
    }
}
