#include "native.h"
#if defined(__AVX512F__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

static void take_turns(void *context) {
    Loop *loop = context;
    for (;;) {
        int64_t i = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED);
        if (i >= loop->count) return;
        loop->work(loop->context, i);
    }
}

int may_start(int threads) { return parallel && threads > 1; }

void start(int threads, void (*work)(void *), void *context) {
    if (may_start(threads))
        parallel(work, context, threads, 0);
    else
        work(context);
}

void for_each(int64_t count, int threads, void (*work)(const void *, int64_t), const void *context) {
    Loop loop = {work, context, count, 0};
    start(count > 1 ? threads : 1, take_turns, &loop);
}

/* How this CPU, and this process on it, multiplies bf16. Linux gives a process the 8 KB of tile registers when it asks
   (ARCH_REQ_XCOMP_PERM, XTILEDATA). */
static int look_for_products(void) {
#if defined(__AVX512F__) && defined(__linux__)
    unsigned a, b, c, d;
    const unsigned amx = 1u << 22 | 1u << 24, pairs = 1u << 5;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & amx) == amx && !syscall(SYS_arch_prctl, 0x1023, 18))
        return BF16_TILES;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && a & pairs) return BF16_PAIRS;
#endif
    return FP32_PRODUCTS;
}

int kvshelf_bf16_products(void) {
    static int products = -1; /* threads that look at once see the same */
    if (products < 0) products = look_for_products();
    return products;
}
