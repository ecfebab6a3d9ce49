#include "phases.h"

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
    void (*work)(Member *, const void *);
    const void *context;
    Phase *phases;
    int64_t members;
} Run;

static void run_as_member(void *context) {
    Run *run = context;
    Member member = {run->phases, __atomic_fetch_add(&run->members, 1, __ATOMIC_RELAXED)};
    run->work(&member, run->context);
}

void run_phases(int64_t phases, int threads, void (*work)(Member *, const void *), const void *context) {
    Run run = {work, context, may_start(threads) ? calloc(phases, sizeof(Phase)) : 0, 0};
    start(run.phases ? threads : 1, run_as_member, &run);
    free(run.phases);
}
