/* What a model computes for each token alone, between two attentions: a list of instructions over rows of fp32.

   With many rows each thread takes a block of them through all instructions, so that what lies between stays in its
   second-level cache. With few rows the threads divide the outputs of each product, because weights are then what has
   to be read. */

#include "codes.h"
#include "program.h"

/* Weights are [panels, inner, PANEL]: the outputs of a panel stand in the lanes of vectors. MOST: rows that are worked on
   together with WIDE vectors, as many as registers hold sums of beside a row's number and the vectors of weights. DEPTH:
   inputs whose weights stay in a first-level cache while all rows pass. FETCHED: inputs by which memory is prefetched in
   advance. PAGE: numbers of a page of memory. BESIDE: rows whose sums of a panel stand in one buffer. */
enum { PANEL = 32, DEPTH = 256, FETCHED = 64, PAGE = 1024, BESIDE = 128 };
#if defined(__AVX512F__)
enum { MOST = 12, WIDE = 2 };
#elif defined(__ARM_NEON)
enum { MOST = 5, WIDE = 4 };
#else
enum { MOST = 6, WIDE = 2 };
#endif

/* Narrow weights, BF16 and INT8: what is summed is the same whether they become fp32 as they are read, or rows before have
   left them as fp32. Those of a byte are whole numbers, and each output has a scale, which its sums are multiplied by at
   the end. With PAIRS both inputs and weights are pairs. */
enum { INT8 = 2 };

INLINE Floats load_weights(const void *panel, const int64_t at, const int type) {
    if (type != INT8) return load(panel, at, type == BF16 ? BF16 : FP32);
    const int8_t *bytes = (const int8_t *)panel + at;
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)bytes)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)bytes)));
#elif defined(__ARM_NEON)
    int32_t four;
    memcpy(&four, bytes, sizeof four);
    return (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
#else
    Floats whole;
    for (int l = 0; l < LANES; l++) whole[l] = bytes[l];
    return whole;
#endif
}

INLINE const void *at_weight(const void *panel, const int64_t at, const int type) {
    return (const char *)panel + at * (type == INT8 ? 1 : type == BF16 ? 2 : 4);
}

/* Add to y the products of `rows` rows with as many vectors of a panel, over `depth` inputs. One sum for each output,
   from the first input to the last, whatever the number of rows and wherever a depth ends: the answer of a row must not
   depend on its neighbours. ask: whether these weights come from memory. wide: where these weights are left as fp32; or
   0. */
INLINE void add_panel(const float *x, const int64_t x_step, const void *panel, const int type, float *y,
                      const int64_t y_step, const int64_t depth, const int rows, const int vectors, const int ask,
                      float *wide) {
    Floats sums[MOST][PANEL / LANES];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[r][v] = load(y, r * y_step + v * LANES, FP32);
    for (int64_t k = 0; k < depth; k++) {
        if (ask) __builtin_prefetch(at_weight(panel, (k + FETCHED) * PANEL, type));
        if (ask && (type == FP32 || type == PAIRS)) __builtin_prefetch(at_weight(panel, (k + FETCHED) * PANEL + 16, type));
        Floats weights[PANEL / LANES];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            weights[v] = load_weights(panel, k * PANEL + v * LANES, type);
            if (wide) *(Floats *)(wide + k * PANEL + v * LANES) = weights[v];
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const Floats number = spread(x[r * x_step + k]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sums[r][v] = added(sums[r][v], weights[v], number, type);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) *(FloatsAnywhere *)(y + r * y_step + v * LANES) = sums[r][v];
}

/* As `add_panel`, with all of a panel's outputs, for up to MOST rows. The weights of one row or two are only read, and
   more vectors of them keep the units busy. */
INLINE void add_wide(const float *x, const int64_t x_step, const float *panel, const int type, float *y,
                     const int64_t y_step, const int64_t depth, const int64_t rows, int ask) {
    if (rows == 1) return add_panel(x, x_step, panel, type, y, y_step, depth, 1, PANEL / LANES, 1, 0);
    if (rows == 2) return add_panel(x, x_step, panel, type, y, y_step, depth, 2, PANEL / LANES, 1, 0);
    for (int at = 0; at < PANEL; at += WIDE * LANES, ask = 0)
        switch (rows) {
#define SOME(R)                                                                                    \
    case R:                                                                                        \
        if (ask)                                                                                   \
            add_panel(x, x_step, panel + at, type, y + at, y_step, depth, R, WIDE, 1, 0);          \
        else                                                                                       \
            add_panel(x, x_step, panel + at, type, y + at, y_step, depth, R, WIDE, 0, 0);          \
        break;
#define EACH_SOME SOME(3) SOME(4) SOME(5) MORE
#if defined(__AVX512F__)
#define MORE SOME(6) SOME(7) SOME(8) SOME(9) SOME(10) SOME(11) SOME(12)
#elif defined(__ARM_NEON)
#define MORE
#else
#define MORE SOME(6)
#endif
            EACH_SOME
#undef SOME
        }
}

static void add_floats(const float *x, int64_t x_step, const float *panel, float *y, int64_t y_step, int64_t depth,
                       int64_t rows, int ask) {
    add_wide(x, x_step, panel, FP32, y, y_step, depth, rows, ask);
}

static void add_pairs(const float *x, int64_t x_step, const float *panel, float *y, int64_t y_step, int64_t depth,
                      int64_t rows, int ask) {
#if defined(__AVX512F__)
    add_wide(x, x_step, panel, PAIRS, y, y_step, depth, rows, ask);
#endif
}

/* As `add_wide`, of narrow weights. From three rows on they are left in `wide` as fp32, for rows that follow: that is
   hidden behind the sums of these. */
INLINE void add_narrow(const float *x, const int64_t x_step, const void *panel, const int type, float *y,
                       const int64_t y_step, const int64_t depth, const int64_t rows, float *wide) {
    if (rows == 1) return add_panel(x, x_step, panel, type, y, y_step, depth, 1, PANEL / LANES, 1, 0);
    if (rows == 2) return add_panel(x, x_step, panel, type, y, y_step, depth, 2, PANEL / LANES, 1, 0);
    for (int at = 0; at < PANEL; at += WIDE * LANES) {
        const void *part = at_weight(panel, at, type);
        switch (rows) {
#define SOME(R) case R: add_panel(x, x_step, part, type, y + at, y_step, depth, R, WIDE, 1, wide + at); break;
            EACH_SOME
#undef SOME
        }
    }
}

static void add_bytes(const float *x, int64_t x_step, const void *panel, float *y, int64_t y_step, int64_t depth,
                      int64_t rows, float *wide) {
    add_narrow(x, x_step, panel, INT8, y, y_step, depth, rows, wide);
}

static void add_halves(const float *x, int64_t x_step, const void *panel, float *y, int64_t y_step, int64_t depth,
                       int64_t rows, float *wide) {
    add_narrow(x, x_step, panel, BF16, y, y_step, depth, rows, wide);
}

/* A packed weight of a type. scales: of its outputs, where that is INT8; else 0. bias: of its outputs, or 0. */
typedef struct {
    const void *numbers;
    const float *scales, *bias;
    int64_t type;
} Weight;

/* Rows of similar numbers go together: a single one left behind would read all weights for itself. */
static void sum_rows(const float *x, int64_t x_step, const Weight *panel, float *y, int64_t y_step, int64_t inner,
                          int64_t rows) {
    float wide[DEPTH * PANEL] __attribute__((aligned(64)));
    const int64_t groups = (rows + MOST - 1) / MOST, depths = (inner + DEPTH - 1) / DEPTH;
    const int type = panel->type;
    for (int64_t r = 0; r < rows; r++)
        if (panel->bias && type != INT8)
            memcpy(y + r * y_step, panel->bias, PANEL * sizeof *y);
        else
            memset(y + r * y_step, 0, PANEL * sizeof *y);
    for (int64_t d = 0; d < depths; d++)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t from = g * rows / groups, some = (g + 1) * rows / groups - from;
            const int64_t k = d * inner / depths, depth = (d + 1) * inner / depths - k;
            const float *part = x + from * x_step + k;
            const void *numbers = at_weight(panel->numbers, k * PANEL, type);
            if (type == FP32 || type == PAIRS)
                (type == FP32 ? add_floats : add_pairs)(part, x_step, numbers, y + from * y_step, y_step, depth, some, !g);
            else if (g == 0)
                (type == INT8 ? add_bytes : add_halves)(part, x_step, numbers, y, y_step, depth, some, wide);
            else
                add_floats(part, x_step, wide, y + from * y_step, y_step, depth, some, 0);
        }
    for (int64_t r = 0; r < rows && type == INT8; r++)
        for (int at = 0; at < PANEL; at += LANES) {
            Floats scaled = load(y, r * y_step + at, FP32) * load(panel->scales, at, FP32);
            if (panel->bias) scaled += load(panel->bias, at, FP32);
            *(FloatsAnywhere *)(y + r * y_step + at) = scaled;
        }
}

/* Rows whole pages apart, as logits often are, share a few sets of each cache: their sums stand side by side until they
   are whole. */
static void multiply_rows(const float *x, int64_t x_step, const Weight *panel, float *y, int64_t y_step, int64_t inner,
                          int64_t rows) {
    float sums[BESIDE * PANEL] __attribute__((aligned(64)));
    if (y_step % PAGE || rows <= MOST) return sum_rows(x, x_step, panel, y, y_step, inner, rows);
    for (int64_t r = 0; r < rows; r += BESIDE) {
        const int64_t some = rows - r < BESIDE ? rows - r : BESIDE;
        sum_rows(x + r * x_step, x_step, panel, sums, PANEL, inner, some);
        for (int64_t i = 0; i < some; i++) memcpy(y + (r + i) * y_step, sums + i * PANEL, PANEL * sizeof *y);
    }
}

enum { LINEAR, MUL, ADD, SUB, COPY, SILU, GELU, GELU_TANH, TANH, RELU, RSQRT, MEAN, NARROW };

/* Where a value lies: elements of a row, from `offset` on, in a buffer. */
typedef struct {
    int64_t buffer, offset, strides[3];
} Value;

/* sizes: of a row of the result, of MEAN of what it is the mean of, of LINEAR the panels and the inputs. weight: of
   LINEAR alone. What NARROW leaves is bf16, in a buffer of its own. */
typedef struct {
    int64_t op, sizes[3];
    Value out, a, b;
    Weight weight;
} Instruction;

/* A value that outlives the list, or a constant: `base`, and elements from row to row. Any other: 0, the elements of a
   row, and where it begins among those of a block, in elements of a row. */
typedef struct {
    float *base;
    int64_t row_step, begin;
} Buffer;

/* Instructions in order, over `rows` rows. scratch: room for blocks of `block_rows` rows of `scratch_row` elements, one
   a thread if there are several blocks. */
struct RowProgram {
    const Instruction *instructions;
    const Buffer *buffers;
    int64_t count, rows, block_rows;
    float *scratch;
    int64_t scratch_row; /* elements of all values of a block that do not outlive it, for one row */
};

/* A block of rows, and where those of its values lie that do not outlive it. */
typedef struct {
    const RowProgram *program;
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
    Floats results = a;
    for (int i = 0; i < LANES && op != COPY; i++)
        results[i] = op == RSQRT ? 1 / sqrtf(a[i]) : 0.5f * a[i] * (1 + erff(a[i] * 0.707106781f));
    return results;
}

/* `count` numbers with a step; a step of 0 repeats one. */
INLINE Floats some(const float *data, const int64_t step, const int64_t count) {
    if (step == 0) return spread(*data);
    if (step == 1 && count >= LANES) return load(data, 0, FP32);
    Floats numbers = {0};
    for (int64_t i = 0; i < count && i < LANES; i++) numbers[i] = data[i * step];
    return numbers;
}

INLINE void map_line(const int op, float *out, const float *a, const float *b, const Instruction *now) {
    const int64_t count = now->sizes[2], out_step = now->out.strides[2];
    const int64_t a_step = now->a.strides[2], b_step = now->b.strides[2];
    const int two = op == MUL || op == ADD || op == SUB;
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats results = computed(op, some(a + i * a_step, a_step, count - i),
                                      two ? some(b + i * b_step, b_step, count - i) : (Floats){0});
        if (out_step == 1 && count - i >= LANES)
            *(FloatsAnywhere *)(out + i) = results;
        else
            for (int64_t j = 0; j < count - i && j < LANES; j++) out[(i + j) * out_step] = results[j];
    }
}

INLINE void mean_line(float *out, const float *a, const Instruction *now) {
    Floats sums[4] = {{0}};
    const int64_t count = now->sizes[2];
    for (int64_t i = 0; i < count; i += LANES) sums[i / LANES % 4] += some(a + i, 1, count - i);
    *out = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / count;
}

/* fp32 to the nearest bf16. */
INLINE void narrow_line(uint16_t *out, const float *a, const Instruction *now) {
    const int64_t count = now->sizes[2], out_step = now->out.strides[2], a_step = now->a.strides[2];
    for (int64_t i = 0; i < count; i += LANES) {
        const Ints bits = (Ints)nearest_bf16(some(a + i * a_step, a_step, count - i)) >> 16;
        if (out_step == 1 && count - i >= LANES)
            *(HalvesAnywhere *)(out + i) = __builtin_convertvector(bits, HalvesAnywhere);
        else
            for (int64_t j = 0; j < count - i && j < LANES; j++) out[(i + j) * out_step] = (uint16_t)bits[j];
    }
}

INLINE void map_rows(const Block *block, const Instruction *now, const int64_t from, const int64_t to, const int op) {
    int64_t out_row, a_row, b_row;
    float *out = at(block, &now->out, &out_row);
    const float *a = at(block, &now->a, &a_row), *b = at(block, &now->b, &b_row);
    for (int64_t r = from; r < to; r++)
        for (int64_t i = 0; i < now->sizes[0]; i++)
            for (int64_t j = 0; j < now->sizes[1]; j++) {
                float *y = out + r * out_row + i * now->out.strides[0] + j * now->out.strides[1];
                const float *x = a + r * a_row + i * now->a.strides[0] + j * now->a.strides[1];
                if (op == MEAN)
                    mean_line(y, x, now);
                else if (op == NARROW)
                    narrow_line((uint16_t *)(out + r * out_row) + (y - out - r * out_row), x, now);
                else
                    map_line(op, y, x, b + r * b_row + i * now->b.strides[0] + j * now->b.strides[1], now);
            }
}

static void multiply_block(const Block *block, const Instruction *now, int64_t first, int64_t end) {
    int64_t x_row, y_row;
    const float *x = at(block, &now->a, &x_row);
    float *y = at(block, &now->out, &y_row);
    const int64_t inner = now->sizes[1];
    const Weight *of = &now->weight;
    for (int64_t p = first; p < end; p++) {
        const int64_t from = p * PANEL;
        const Weight panel = {at_weight(of->numbers, from * inner, of->type), of->scales ? of->scales + from : 0,
                              of->bias ? of->bias + from : 0, of->type};
        multiply_rows(x, x_row, &panel, y + from, y_row, inner, block->rows);
    }
}

/* One instruction for the rows of a block from `from` to `to`. */
static void map(const Block *block, const Instruction *now, int64_t from, int64_t to) {
    switch (now->op) {
#define MAP(OP) case OP: return map_rows(block, now, from, to, OP);
        MAP(MUL) MAP(ADD) MAP(SUB) MAP(COPY) MAP(SILU) MAP(GELU) MAP(GELU_TANH) MAP(TANH) MAP(RELU) MAP(RSQRT) MAP(MEAN)
        MAP(NARROW)
    }
}

/* Many rows: each member has scratch of its own, and takes block after block. */
typedef struct {
    const RowProgram *rows;
    float *scratch;
} Blocks;

static void take_block(const void *context, int64_t i) {
    const Blocks *a = context;
    const int64_t first = i * a->rows->block_rows, left = a->rows->rows - first;
    const Block block = {a->rows, first, left < a->rows->block_rows ? left : a->rows->block_rows, a->scratch};
    for (const Instruction *now = a->rows->instructions; now < a->rows->instructions + a->rows->count; now++) {
        if (now->op == LINEAR)
            multiply_block(&block, now, 0, now->sizes[0]);
        else
            map(&block, now, 0, block.rows);
    }
}

/* Instructions of one kind, one after the other: products of the same rows, or what is computed number by number. */
typedef struct {
    const Block *block;
    const Instruction *first;
    int64_t count, panels, pieces;
} Stretch;

/* Pieces of the panels of a stretch of products, so that no thread waits long for another's last one. */
enum { PIECES = 16, ROWS_OF_A_PIECE = 4 };

/* Of the panels of all products together, piece `i`. */
static void multiply_piece(const void *context, int64_t i) {
    const Stretch *a = context;
    int64_t from = i * a->panels / a->pieces, to = (i + 1) * a->panels / a->pieces;
    for (const Instruction *now = a->first; now < a->first + a->count && to > 0; now++) {
        const int64_t own = now->sizes[0];
        if (from < own) multiply_block(a->block, now, from > 0 ? from : 0, to < own ? to : own);
        from -= own, to -= own;
    }
}

static void map_piece(const void *context, int64_t i) {
    const Stretch *a = context;
    const int64_t from = i * ROWS_OF_A_PIECE, end = from + ROWS_OF_A_PIECE;
    const int64_t to = end < a->block->rows ? end : a->block->rows;
    for (const Instruction *now = a->first; now < a->first + a->count; now++) map(a->block, now, from, to);
}

static Stretch stretch_from(const Block *block, const Instruction *first, const Instruction *end) {
    Stretch stretch = {block, first, 0, 0, 0};
    for (const Instruction *now = first; now < end && (now->op == LINEAR) == (first->op == LINEAR); now++) {
        if (now->op == LINEAR && (now->a.buffer != first->a.buffer || now->a.offset != first->a.offset)) break;
        stretch.count++;
        stretch.panels += now->op == LINEAR ? now->sizes[0] : 0;
    }
    stretch.pieces = stretch.panels ? (stretch.panels < PIECES ? stretch.panels : PIECES)
                                    : (block->rows + ROWS_OF_A_PIECE - 1) / ROWS_OF_A_PIECE;
    return stretch;
}

int64_t phases_of_rows(const RowProgram *a) { return a->rows > a->block_rows ? 1 : a->count; }

/* Few rows, a single block: members divide the outputs of its products, because weights are what has to be read. */
void run_rows(Member *member, const RowProgram *a) {
    if (a->rows > a->block_rows) {
        const Blocks blocks = {a, a->scratch + member->number * a->block_rows * a->scratch_row};
        phase(member, (a->rows + a->block_rows - 1) / a->block_rows, take_block, &blocks);
        return;
    }
    const Block whole = {a, 0, a->rows, a->scratch};
    for (const Instruction *now = a->instructions, *end = now + a->count; now < end;) {
        const Stretch stretch = stretch_from(&whole, now, end);
        phase(member, stretch.pieces, stretch.panels ? multiply_piece : map_piece, &stretch);
        now += stretch.count;
    }
}

/* Products with weights as models have them, [outputs, inputs]: of a head that is the embedding, too. LINES: outputs that
   are worked on together; MOST_TALL: rows beside them. A sum for each lane of inputs and then the sum of these, whatever
   the number of rows. */
enum { LINES = 4, MOST_TALL = LANES == 8 ? 3 : 6 };

typedef struct {
    const float *x, *weight;
    float *y;
    int64_t rows, outputs, inputs, pieces;
} Lines;

/* The sums of four vectors. */
INLINE void store_sums(float *y, const Floats *of) {
#ifdef __AVX2__
    Eight halves[LINES];
    for (int i = 0; i < LINES; i++) {
        halves[i] = eight_of(of[i], 0);
        for (int at = 8; at < LANES; at += 8) halves[i] += eight_of(of[i], at);
    }
    const __m256 both = _mm256_hadd_ps(_mm256_hadd_ps(halves[0], halves[1]), _mm256_hadd_ps(halves[2], halves[3]));
    _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
#else
    for (int i = 0; i < LINES; i++) y[i] = sum(of[i]);
#endif
}

INLINE void multiply_lines(const Lines *a, const float *x, const float *lines, float *y, const int rows,
                           const int groups, const int ask) {
    const int64_t inputs = a->inputs;
    Floats sums[MOST_TALL][2 * LINES] = {{{0}}};
    for (int64_t k = 0; k < inputs; k += LANES) {
        Floats own[MOST_TALL];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) own[r] = load(x, r * inputs + k, FP32);
#pragma GCC unroll 8
        for (int i = 0; i < groups * LINES; i++) {
            if (ask) __builtin_prefetch(lines + (groups * LINES + i) * inputs + k);
            const Floats weights = load(lines, i * inputs + k, FP32);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) sums[r][i] += weights * own[r];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) store_sums(y + r * a->outputs + g * LINES, sums[r] + g * LINES);
}

/* All rows with LINES outputs, or twice as many of a single row. */
static void multiply_group(const Lines *a, int64_t first, int groups) {
    const float *lines = a->weight + first * a->inputs;
    const int64_t parts = (a->rows + MOST_TALL - 1) / MOST_TALL;
    if (groups == 2) return multiply_lines(a, a->x, lines, a->y + first, 1, 2, 1);
    for (int64_t p = 0; p < parts; p++) {
        const int64_t from = p * a->rows / parts, rows = (p + 1) * a->rows / parts - from;
        const float *x = a->x + from * a->inputs;
        float *y = a->y + from * a->outputs + first;
        switch (rows) {
#define TALL(R)                                          \
    case R:                                              \
        if (p)                                           \
            multiply_lines(a, x, lines, y, R, 1, 0);     \
        else                                             \
            multiply_lines(a, x, lines, y, R, 1, 1);     \
        break;
            TALL(1) TALL(2) TALL(3)
#if LANES != 8
            TALL(4) TALL(5) TALL(6)
#endif
        }
    }
}

static void multiply_some_lines(const void *context, int64_t i) {
    const Lines *a = context;
    const int64_t groups = a->outputs / LINES;
    int64_t from = i * groups / a->pieces, to = (i + 1) * groups / a->pieces;
    for (; a->rows == 1 && from + 2 <= to; from += 2) multiply_group(a, from * LINES, 2);
    for (; from < to; from++) multiply_group(a, from * LINES, 1);
}

/* x [rows, inputs] times a weight [outputs, inputs], into y [rows, outputs]. sizes: rows, outputs, a multiple of 4, and
   inputs, a multiple of 16. */
EXPORT void kvshelf_multiply_lines(const float *x, const float *weight, float *y, const int64_t *sizes, int threads) {
    const Lines lines = {x, weight, y, sizes[0], sizes[1], sizes[2], PIECES * threads};
    for_each(lines.pieces, threads, multiply_some_lines, &lines);
}

static void run_product(Member *member, const void *context) { run_rows(member, context); }

/* x [rows, inputs] times a packed weight, and the bias, into y. sizes: rows, panels, inputs, the rows of a block, and the
   type of the weight. */
EXPORT void kvshelf_multiply(float *x, const void *packed, const float *scales, const float *bias, float *y,
                             const int64_t *sizes, int threads) {
    const Value from = {.buffer = 0}, to = {.buffer = 1};
    const Instruction product = {LINEAR, {sizes[1], sizes[2], 1}, to, from, from, {packed, scales, bias, sizes[4]}};
    const Buffer buffers[] = {{x, sizes[2], 0}, {y, sizes[1] * PANEL, 0}};
    const RowProgram rows = {&product, buffers, 1, sizes[0], sizes[3], 0, 0};
    run_phases(phases_of_rows(&rows), threads, run_product, &rows);
}
