/* Streams of asymmetric numeral systems, decoded several runs at a time: one symbol depends on the one before it, so
   that a single stream leaves most of the processor idle. */

#include "native.h"

enum { LANES_OF_RUNS = 4, SHIFT = 12, PRECISION = 24, ESCAPE = INT32_MIN };

static const uint32_t ENTRIES = 1u << 31;

/* What a value of the state's upper bits of precision stands for: `share` is freq << 16 | distance from its start. */
typedef struct {
    int32_t value;
    uint32_t share;
} Slot;

typedef struct {
    uint64_t state;
    const uint32_t *words, *next; /* read from the last to the first */
    const uint8_t *escapes_begin, *escapes, *escapes_end;
    const uint32_t *flags, *entries; /* entries: 4 for each word of flags but the first; NULL: none */
    float *out;
    int64_t rows;
    int bad;
} Run;

typedef struct {
    const uint8_t *data;
    const int64_t *starts; /* [runs + 1], bytes */
    const int64_t *rows;   /* [runs + 1], row at which each begins */
    const int32_t *order;  /* [channels] */
    const Slot *slots;     /* [tables, 4096] */
    float *out;            /* [channels, rows] */
    int64_t runs, channels;
    int *bad;              /* [runs] */
} Job;

static __attribute__((noinline)) float escaped(Run *r) {
    uint64_t value = 0;
    for (int shift = 0; shift < 35; shift += 7) {
        if (r->escapes == r->escapes_end) break;
        uint8_t byte = *r->escapes++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) return (float)(int32_t)((value >> 1) ^ -(value & 1));
    }
    r->bad = 1;
    return 0;
}

/* Rows `first` to `end` of one channel of `count` runs. What changes with each symbol is in local variables: in `runs`,
   the compiler would write it back after every symbol. */
INLINE void channel(Run *runs, const int count, const Slot *slots, const int64_t first, const int64_t end) {
    uint64_t state[LANES_OF_RUNS];
    const uint32_t *next[LANES_OF_RUNS];
    for (int l = 0; l < count; l++) state[l] = runs[l].state, next[l] = runs[l].next;
    for (int64_t t = first; t < end; t++)
#pragma GCC unroll 4
        for (int l = 0; l < count; l++) {
            const uint64_t s = state[l];
            const Slot slot = slots[(s >> SHIFT) & ((1 << SHIFT) - 1)];
            const uint64_t low = (uint64_t)(slot.share & 0xffff) << SHIFT | (s & ((1 << SHIFT) - 1));
            const uint64_t after = ((uint64_t)(slot.share >> 16) << SHIFT) * (s >> PRECISION) + low;
            const int refill = (after < (1ull << 32)) & (next[l] > runs[l].words);
            next[l] -= refill;
            state[l] = refill ? after << 32 | *next[l] : after;
            runs[l].out[t] = __builtin_expect(slot.value == ESCAPE, 0) ? escaped(&runs[l]) : (float)slot.value;
        }
    for (int l = 0; l < count; l++) runs[l].state = state[l], runs[l].next = next[l];
}

/* The channel of all runs: side by side as far as the shortest goes, for the last run of a document is shorter. */
static void channels(Run *runs, const int count, const Slot *slots, const int64_t shortest) {
    switch (count) {
    case 4: channel(runs, 4, slots, 0, shortest); break;
    case 3: channel(runs, 3, slots, 0, shortest); break;
    case 2: channel(runs, 2, slots, 0, shortest); break;
    default: channel(runs, 1, slots, 0, shortest);
    }
    for (int l = 0; l < count; l++) channel(&runs[l], 1, slots, shortest, runs[l].rows);
}

/* Whether a run stands at channel c where its entry says, if it has one for this channel. */
static int stands(const Run *r, int64_t c) {
    if (!r->entries || c % 32 || !c) return 1;
    const uint32_t *entry = r->entries + 4 * (c / 32 - 1);
    return r->state == ((uint64_t)entry[1] << 32 | entry[0]) && r->next - r->words == entry[2] &&
           r->escapes - r->escapes_begin == entry[3];
}

static int has(const Run *r, int64_t c) { return r->flags[c / 32] >> (c % 32) & 1; }

static void open_run(const Job *j, int64_t i, Run *r) {
    const uint32_t *head = (const uint32_t *)(j->data + j->starts[i]);
    const int64_t words = (j->starts[i + 1] - j->starts[i]) / 4, flags = (j->channels + 31) / 32;
    *r = (Run){.rows = j->rows[i + 1] - j->rows[i], .out = j->out + j->rows[i]};
    const int64_t escapes = words > flags ? head[0] & ~ENTRIES : 0;
    const int64_t entries = words > flags && head[0] & ENTRIES ? 4 * (flags - 1) : 0;
    const int64_t heads = 1 + flags + entries, begin = heads + (escapes + 3) / 4;
    if (words < 1 + flags || begin > words || (begin < words && !head[words - 1])) { /* no stream ends in a zero */
        r->bad = 1;
        return;
    }
    r->flags = head + 1;
    r->entries = entries ? head + 1 + flags : NULL;
    r->escapes = r->escapes_begin = (const uint8_t *)(head + heads);
    r->escapes_end = r->escapes + escapes;
    r->words = head + begin;
    r->next = head + words;
    if (r->next > r->words) r->state = *--r->next;
    if (r->next > r->words) r->state = r->state << 32 | *--r->next;
}

static void decode_group(const void *context, int64_t group) {
    const Job *j = context;
    const int64_t total = j->rows[j->runs], first = group * LANES_OF_RUNS;
    const int count = (int)(j->runs - first < LANES_OF_RUNS ? j->runs - first : LANES_OF_RUNS);
    Run runs[LANES_OF_RUNS];
    int64_t shortest = INT64_MAX;
    for (int l = 0; l < count; l++) {
        open_run(j, first + l, &runs[l]);
        if (runs[l].rows < shortest) shortest = runs[l].rows;
    }
    for (int64_t c = 0; c < j->channels; c++) {
        const Slot *slots = j->slots + ((int64_t)j->order[c] << SHIFT);
        int all = 1;
        for (int l = 0; l < count; l++) {
            if (!runs[l].bad) runs[l].bad = !stands(&runs[l], c);
            all = all && !runs[l].bad && has(&runs[l], c);
        }
        if (all)
            channels(runs, count, slots, shortest);
        else
            for (int l = 0; l < count; l++) {
                if (runs[l].bad) continue;
                if (has(&runs[l], c))
                    channel(&runs[l], 1, slots, 0, runs[l].rows);
                else
                    memset(runs[l].out, 0, runs[l].rows * sizeof(float));
            }
        for (int l = 0; l < count; l++) runs[l].out += total;
    }
    for (int l = 0; l < count; l++) {
        const Run *r = &runs[l];
        j->bad[first + l] = r->bad || r->state || r->next != r->words || r->escapes != r->escapes_end;
    }
}

/* Decodes every run and says in `bad` which of them are not what an encoder writes. counts: runs, channels. */
EXPORT void kvshelf_ans_decode(const uint8_t *data, const int64_t *starts, const int64_t *rows, const int32_t *order,
                               const void *slots, float *out, int *bad, const int64_t *counts, int threads) {
    Job job = {data, starts, rows, order, slots, out, counts[0], counts[1], bad};
    for_each((job.runs + LANES_OF_RUNS - 1) / LANES_OF_RUNS, threads, decode_group, &job);
}
