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

void for_each(int64_t count, int threads, void (*work)(const void *, int64_t), const void *context) {
    Loop loop = {work, context, count, 0};
    if (parallel && threads > 1 && count > 1)
        parallel(take_turns, &loop, threads, 0);
    else
        take_turns(&loop);
}
