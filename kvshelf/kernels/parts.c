#include "parts.h"

#include <sched.h>
#include <stdlib.h>

/* Looks at a number that is about to change, before a thread lets others run. */
enum { PATIENCE = 4096 };

INLINE void rest(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

void phase(Member *member, int64_t count, void (*work)(const void *, int64_t), const void *context) {
    if (!member->now) {
        for (int64_t i = 0; i < count; i++) work(context, i);
        return;
    }
    Phase *now = member->now++;
    for (int64_t i; (i = __atomic_fetch_add(&now->next, 1, __ATOMIC_RELAXED)) < count;) {
        work(context, i);
        __atomic_fetch_add(&now->done, 1, __ATOMIC_RELEASE);
    }
    for (int64_t looks = 1; __atomic_load_n(&now->done, __ATOMIC_ACQUIRE) < count; looks++) {
        if (looks % PATIENCE)
            rest();
        else
            sched_yield();
    }
}

typedef struct {
    const Part *parts;
    int64_t count;
    Phase *phases;
    int64_t members;
} Run;

static void run_as_member(void *given) {
    Run *run = given;
    Member member = {run->phases, __atomic_fetch_add(&run->members, 1, __ATOMIC_RELAXED)};
    for (const Part *part = run->parts; part < run->parts + run->count; part++)
        part->program ? run_rows(&member, part->program) : run_attention(&member, part->attention);
}

EXPORT void kvshelf_run(const Part *parts, int64_t count, int threads) {
    int64_t phases = 0;
    for (const Part *part = parts; part < parts + count; part++)
        phases += part->program ? phases_of_rows(part->program) : PHASES_OF_ATTENTION;
    Run run = {parts, count, may_start(threads) ? calloc(phases, sizeof(Phase)) : 0, 0};
    start(run.phases ? threads : 1, run_as_member, &run);
    free(run.phases);
}
