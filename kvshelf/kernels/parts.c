/* Parts of a forward pass, which one call runs one after the other. */

#include "phases.h"
#include "prefix_attention/attention.h"
#include "rowwise/program.h"

/* One of both; the other is 0. */
typedef struct {
    const RowProgram *program;
    const Attention *attention;
} Part;

typedef struct {
    const Part *parts;
    int64_t count;
} Parts;

static void run_each(Member *member, const void *context) {
    const Parts *a = context;
    for (const Part *part = a->parts; part < a->parts + a->count; part++)
        part->program ? run_rows(member, part->program) : run_attention(member, part->attention);
}

/* Parts in order, each on all threads. */
EXPORT void kvshelf_run(const Part *parts, int64_t count, int threads) {
    int64_t phases = 0;
    for (const Part *part = parts; part < parts + count; part++)
        phases += part->program ? phases_of_rows(part->program) : PHASES_OF_ATTENTION;
    const Parts all = {parts, count};
    run_phases(phases, threads, run_each, &all);
}
