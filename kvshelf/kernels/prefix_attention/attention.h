#ifndef KVSHELF_ATTENTION_H
#define KVSHELF_ATTENTION_H

#include "phases.h"

/* See the struct. */
typedef struct Attention Attention;

void run_attention(Member *member, const Attention *attention);
enum { PHASES_OF_ATTENTION = 4 };

#endif
