/* Phases of a forward pass, which several threads go through together. */

#ifndef KVSHELF_PHASES_H
#define KVSHELF_PHASES_H

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

/* Lets `threads` threads do `work` together, which goes through `phases` phases. They start together once: starting them
   for each part, or each product, would wait each time for threads that have fallen asleep. */
void run_phases(int64_t phases, int threads, void (*work)(Member *member, const void *context), const void *context);

#endif
