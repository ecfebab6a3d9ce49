#include "native.h"

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

static Parallel parallel;

/* `run` is GOMP_parallel of the OpenMP library that torch has loaded; without it everything runs on one thread. */
EXPORT void kvshelf_use_threads(Parallel run) { parallel = run; }

typedef struct {
    void (*work)(const void *, int64_t);
    const void *context;
    int64_t count;
    int64_t next;
} Loop;

static void take_turns(void *given) {
    Loop *loop = given;
    for (;;) {
        int64_t i = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED);
        if (i >= loop->count) return;
        loop->work(loop->context, i);
    }
}

int may_start(int threads) { return parallel && threads > 1; }

void start(int threads, void (*work)(void *), void *given) {
    if (may_start(threads))
        parallel(work, given, threads, 0);
    else
        work(given);
}

void for_each(int64_t count, int threads, void (*work)(const void *, int64_t), const void *context) {
    Loop loop = {work, context, count, 0};
    start(count > 1 ? threads : 1, take_turns, &loop);
}
