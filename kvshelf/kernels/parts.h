/* Parts of a forward pass, which one call runs one after the other. */

#ifndef KVSHELF_PARTS_H
#define KVSHELF_PARTS_H

#include "native.h"

/* A phase of `kvshelf_run`: pieces that threads take as they come, and how many are done. Apart, so that threads that
   wait for one do not disturb the next. */
typedef struct {
    int64_t next, done;
    char apart[112];
} Phase;

/* A thread of several that go through the same phases. now: its next phase; 0 for a thread that is alone. */
typedef struct {
    Phase *now;
    int64_t number;
} Member;

/* As `for_each`, together with the other members, who call this with the same. Nobody leaves before all is done, but
   nobody waits for a member to come: while one is still asleep the others take its pieces. */
void phase(Member *member, int64_t count, void (*work)(const void *context, int64_t i), const void *context);

/* What `kvshelf_run` runs: see the structs of these names. */
typedef struct RowProgram RowProgram;
typedef struct Attention Attention;
void run_rows(Member *member, const RowProgram *program);
void run_attention(Member *member, const Attention *attention);
int64_t phases_of_rows(const RowProgram *program);
enum { PHASES_OF_ATTENTION = 4 };

/* One of both; the other is 0. */
typedef struct {
    const RowProgram *program;
    const Attention *attention;
} Part;

/* Parts in order, each on all threads. They start together once: starting them for each part, or each product, would
   wait each time for threads that have fallen asleep. */
EXPORT void kvshelf_run(const Part *parts, int64_t count, int threads);

#endif
