/* Units by their scores, the best until a budget of rows is full. */

#include "choose.h"
#include "ranks.h"

enum { MOST_WIDTH = 256 };

/* `count` numbers from element `at` of `data`, fewer than a vector has; the last ones of a table have nothing behind. */
static Floats few(const void *data, int64_t at, int64_t count, int type) {
    Floats numbers = {0};
    for (int64_t i = 0; i < count; i++) ((float *)&numbers)[i] = number_at(data, at + i, type);
    return numbers;
}

/* The rows of `count` queries of a head from query `first` on, and what span is multiplied with. */
static void features(const Choice *a, float scale, int64_t head, int64_t first, int64_t count, float *of_low,
                     float *of_span) {
    const float linear = (float)a->linear * scale, relu = (float)a->relu * scale;
    for (int64_t g = 0; g < count; g++)
        for (int64_t c = 0; c < a->width; c++) {
            const int64_t channel = a->columns ? a->columns[head * a->width + c] : c;
            const float q = number_at(a->queries, (head * a->group + first + g) * a->dim + channel, a->type);
            of_low[g * a->width + c] = q;
            of_span[g * a->width + c] = linear * q + (q > 0 ? relu * q : 0);
        }
}

/* The scores of units `from` to `to` for up to FEW_ROWS queries, joined with what is in `scores`. */
INLINE void score_as(const Choice *a, const Units *units, int64_t from, int64_t to, const float *of_low,
                     const float *of_span, const int count, const int type, const int has_span, const int mean,
                     float *scores) {
    const int64_t width = a->width;
    for (int64_t u = from; u < to; u++) {
        Floats total[FEW_ROWS];
        for (int g = 0; g < count; g++) total[g] = (Floats){0};
        for (int64_t c = 0; c < width; c += LANES) {
            const Floats low = load(units->low, u * width + c, type);
            const Floats span = has_span ? load(units->span, u * width + c, type) : (Floats){0};
            for (int g = 0; g < count; g++) {
                total[g] += low * *(const FloatsAnywhere *)(of_low + g * width + c);
                if (has_span) total[g] += span * *(const FloatsAnywhere *)(of_span + g * width + c);
            }
        }
        float joined = scores[u - from];
        for (int g = 0; g < count; g++) {
            const float score = sum(total[g]);
            joined = mean ? joined + score : score > joined || score != score ? score : joined;
        }
        scores[u - from] = joined;
    }
}

/* As `score_as`, with a unit in each lane. */
INLINE void score_columns_as(const Choice *a, const Units *units, int64_t from, int64_t to, const float *of_low,
                             const float *of_span, const int count, const int type, const int has_span, const int mean,
                             float *scores) {
    for (int64_t u = from; u < to; u += LANES) {
        Floats total[FEW_ROWS], joined;
        const int64_t left = to - u < LANES ? to - u : LANES;
        for (int g = 0; g < count; g++) total[g] = (Floats){0};
        for (int64_t c = 0; c < a->width; c++) {
            const int64_t at = c * units->all + u;
            const Floats low = left < LANES ? few(units->low, at, left, type) : load(units->low, at, type);
            Floats span = (Floats){0};
            if (has_span) span = left < LANES ? few(units->span, at, left, type) : load(units->span, at, type);
            for (int g = 0; g < count; g++) {
                total[g] += low * of_low[g * a->width + c];
                if (has_span) total[g] += span * of_span[g * a->width + c];
            }
        }
        memset(&joined, 0, sizeof joined);
        memcpy(&joined, scores + u - from, left * sizeof *scores);
        for (int g = 0; g < count; g++)
            joined = mean ? joined + total[g] : choose((total[g] > joined) | (total[g] != total[g]), total[g], joined);
        memcpy(scores + u - from, &joined, left * sizeof *scores);
    }
}

static void score(const Choice *a, const Units *units, int64_t head, int64_t from, int64_t to, float *scores) {
    float of_low[FEW_ROWS * MOST_WIDTH], of_span[FEW_ROWS * MOST_WIDTH];
    for (int64_t i = 0; i < to - from; i++) scores[i] = a->mean ? 0 : -INFINITY;
    for (int64_t first = 0; first < a->group; first += FEW_ROWS) {
        const int count = a->group - first < FEW_ROWS ? (int)(a->group - first) : FEW_ROWS;
        features(a, (float)units->scale, head, first, count, of_low, of_span);
#define FORM(HOW, G, T, S)                                                                       \
    if (count == G && units->type == T && (units->span != 0) == S) {                             \
        HOW(a, units, from, to, of_low, of_span, G, T, S, (int)a->mean, scores);                 \
        continue;                                                                                \
    }
#define FORMS(HOW, T, S) FORM(HOW, 1, T, S) FORM(HOW, 2, T, S) FORM(HOW, 4, T, S) FORM(HOW, 8, T, S)
        if (units->by_column) {
            FORMS(score_columns_as, FP32, 0) FORMS(score_columns_as, BF16, 0)
            score_columns_as(a, units, from, to, of_low, of_span, count, (int)units->type, units->span != 0,
                             (int)a->mean, scores);
            continue;
        }
        FORMS(score_as, FP32, 0) FORMS(score_as, FP32, 1) FORMS(score_as, BF16, 0) FORMS(score_as, BF16, 1)
#undef FORMS
#undef FORM
        score_as(a, units, from, to, of_low, of_span, count, (int)units->type, units->span != 0, (int)a->mean, scores);
    }
    for (int64_t i = 0; i < to - from && a->mean; i++) scores[i] /= (float)a->group;
}

INLINE int64_t rows_of(const Units *units, int64_t first, int64_t unit) {
    return units->ends[unit] - (unit > first ? units->ends[unit - 1] : 0);
}

/* Rows of the units of a head whose ranks are `least` or above: of none that is forced. */
static int64_t rows_from(const Choice *a, int64_t head, const int32_t *ranks, int32_t least) {
    int64_t total = 0;
    for (const Units *units = a->units; units < a->units + a->num_units; units++) {
        const int64_t first = units->begin[head], count = units->begin[head + 1] - first;
        if (units->size) total += units->size * count_from(ranks, count, least);
        for (int64_t i = 0; i < count && !units->size; i++)
            total += ranks[i] >= least ? rows_of(units, first, first + i) : 0;
        ranks += count;
    }
    return total;
}

/* The highest rank at which the units from it on have more rows than `room`; INT32_MIN if there is none: a bit at a
   time. */
static int32_t rank_beyond(const Choice *a, int64_t head, const int32_t *ranks, int64_t room) {
    uint32_t least = 0;
    for (uint32_t bit = (uint32_t)1 << 31; bit; bit >>= 1) {
        const uint32_t raised = least | bit;
        if (rows_from(a, head, ranks, (int32_t)(raised ^ 0x80000000)) > room) least = raised;
    }
    return (int32_t)(least ^ 0x80000000);
}

/* Take the units out of the choice whose parents are not of the better half. room: for the parents' ranks. */
static void keep_better_half(const Choice *a, const Units *units, int64_t head, int32_t *ranks, int32_t *room) {
    const Units *parents = units->parents;
    const int64_t first = parents->begin[head], count = parents->begin[head + 1] - first, kept = (count + 1) / 2;
    score(a, parents, head, first, first + count, (float *)room);
    for (int64_t p = 0; p < count; p++) {
        float score;
        memcpy(&score, room + p, sizeof score);
        room[p] = rank_of(score);
    }
    const int32_t least = rank_at(room, count, kept);
    int64_t tied = kept - (least < INT32_MAX ? count_from(room, count, least + 1) : 0);
    for (int64_t p = 0; p < count; p++) {
        const int better = room[p] > least || (room[p] == least && tied-- > 0);
        const int64_t end = (p + 1) * units->children, all = units->begin[head + 1] - units->begin[head];
        for (int64_t u = p * units->children; u < end && u < all && !better; u++) ranks[u] = INT32_MIN;
    }
}

/* Take the best units of a head whose ranks are made, until `room` has no place for the next. */
static void take(const Choice *a, int64_t head, const int32_t *ranks, int64_t room) {
    room = room < 0 ? 0 : room;
    const int32_t last = rank_beyond(a, head, ranks, room);
    int64_t left = room - (last < INT32_MAX ? rows_from(a, head, ranks, last + 1) : 0);
    const int32_t *own = ranks;
    for (const Units *units = a->units; units < a->units + a->num_units; units++) {
        const int64_t first = units->begin[head], end = units->begin[head + 1];
        int32_t *rows = units->rows + head * units->most;
        int64_t count = 0;
        for (int64_t u = first; u < end; u++, own++) {
            int64_t taken = rows_of(units, first, u);
            if (!units->forced[u]) {
                if (*own < last || *own == INT32_MIN) continue;
                if (*own == last) {
                    if (taken > left) {
                        taken = a->cut ? left : 0;
                        left = 0; /* and none that ranks below */
                    } else
                        left -= taken;
                }
            }
            const int32_t begin = units->ends[u] - (int32_t)rows_of(units, first, u);
            for (int64_t r = 0; r < taken; r++) rows[count++] = begin + (int32_t)r;
        }
        units->counts[head] = (int32_t)count;
    }
}

void choose_rows(const Choice *a, int64_t head) {
    int32_t *ranks = a->ranks + head * a->most_units, *own = ranks;
    int64_t room = a->budget;
    for (const Units *units = a->units; units < a->units + a->num_units; units++) {
        const int64_t first = units->begin[head], end = units->begin[head + 1];
        score(a, units, head, first, end, (float *)own);
        for (int64_t u = first; u < end; u++, own++) {
            float score;
            memcpy(&score, own, sizeof score);
            *own = units->forced[u] ? INT32_MIN : rank_of(score);
            room -= units->forced[u] ? rows_of(units, first, u) : 0;
        }
        if (units->parents) keep_better_half(a, units, head, own - (end - first), own);
    }
    take(a, head, ranks, room);
}

/* The guesses of query `g` of a head, units of one prefix after those of another. */
static void guess(const Choice *a, int64_t head, int64_t g, float *guesses) {
    float query[MOST_WIDTH] = {0};
    for (int64_t d = 0; d < a->dim; d++) {
        const int64_t at = (head * a->group + g) * a->dim + d;
        const float own = number_at(a->queries, at, a->type);
        for (int64_t c = 0; c < a->width; c++) query[c] += own * a->basis[at * a->width + c];
    }
    const Choice alone = {.queries = query, .group = 1, .dim = a->width, .width = a->width, .type = FP32};
    for (const Units *units = a->units; units < a->units + a->num_units; units++) {
        const int64_t first = units->begin[head], count = units->begin[head + 1] - first;
        Units own = *units;
        own.low = (const char *)units->low + g * a->width * units->all * (units->type == BF16 ? 2 : 4);
        score(&alone, &own, 0, first, first + count, guesses);
        guesses += count;
    }
}

/* The ranks of a head's units by how far their guess is below the largest, for the query that they fit best, and how
   many are critical. */
static void rank_guesses(const void *context, int64_t head) {
    const Choice *a = context;
    int32_t *ranks = a->ranks + 2 * head * a->most_units;
    float *margins = (float *)ranks, *guesses = margins + a->most_units;
    int64_t all = 0;
    for (const Units *units = a->units; units < a->units + a->num_units; units++)
        all += units->begin[head + 1] - units->begin[head];
    for (int64_t g = 0; g < a->group; g++) {
        guess(a, head, g, guesses);
        for (int64_t u = all; u % LANES; u++) guesses[u] = -INFINITY;
        Floats of_lanes = spread(-INFINITY);
        for (int64_t u = 0; u < all; u += LANES) of_lanes = larger(*(const FloatsAnywhere *)(guesses + u), of_lanes);
        float top = -INFINITY;
        for (int lane = 0; lane < LANES; lane++) top = of_lanes[lane] > top ? of_lanes[lane] : top;
        for (int64_t u = 0; u < all; u += LANES) {
            FloatsAnywhere *best = (FloatsAnywhere *)(margins + u);
            const Floats margin = *(const FloatsAnywhere *)(guesses + u) - top, old = *best;
            *best = g ? choose((margin > old) | (margin != margin), margin, old) : margin;
        }
    }
    for (int64_t u = 0; u < all; u++) {
        float margin;
        memcpy(&margin, ranks + u, sizeof margin);
        ranks[u] = rank_of(margin);
    }
    a->critical[head] = (float)a->alpha < INFINITY ? count_from(ranks, all, rank_of((float)-a->alpha)) : all;
}

static void take_guessed(const void *context, int64_t head) {
    const Choice *a = context;
    int64_t most = 0;
    for (int64_t i = 0; i < a->kv_heads; i++) most += a->critical[i];
    most = most < a->kv_heads ? 1 : most / a->kv_heads;
    take(a, head, a->ranks + 2 * head * a->most_units, most < a->budget ? most : a->budget);
}

static void choose_of(const void *context, int64_t head) { choose_rows(context, head); }

EXPORT void kvshelf_choose(const Choice *choice, int threads) {
    if (!choice->basis) {
        for_each(choice->kv_heads, threads, choose_of, choice);
        return;
    }
    for_each(choice->kv_heads, threads, rank_guesses, choice);
    for_each(choice->kv_heads, threads, take_guessed, choice);
}
