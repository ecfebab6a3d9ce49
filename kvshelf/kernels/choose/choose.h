/* Which rows of prefixes a query reads; see `kvshelf.kernels.choose`. */

#ifndef KVSHELF_CHOOSE_H
#define KVSHELF_CHOOSE_H

#include "native.h"

/* The units of one prefix, and room for the rows chosen. low, span: [units, width], or by column [width, units], where
   `all` are the units of all heads; span is 0 where there is none. size: rows of each unit that is not forced; 0 if they
   differ. parents: coarser units, each of `children` of these, of which the better half counts; 0: none. ends, forced:
   [units]. begin: [kv_heads + 1], the first unit of each head. rows: [kv_heads, most]; counts: [kv_heads]. */
typedef struct Units {
    const void *low, *span;
    const int32_t *ends;
    const uint8_t *forced;
    const int64_t *begin;
    int32_t *rows, *counts;
    int64_t most, all, by_column, size, type; /* type: of low and span */
    double scale;                             /* of span */
    const struct Units *parents;
    int64_t children;
} Units;

/* The choice of one token. queries: [q_heads, dim], of `type`. columns: [kv_heads, width], or 0. ranks: room,
   [kv_heads, most_units]. basis: [q_heads, dim, width], of guesses, or 0; then each unit has a summary for each query
   head of its KV head, by column [group * width, all], ranks has room twice, and critical: room, [kv_heads];
   alpha: how far a critical guess may be below the largest. */
typedef struct {
    const Units *units;
    int64_t num_units;
    const void *queries;
    const int64_t *columns;
    int32_t *ranks;
    const float *basis;
    int64_t *critical;
    int64_t most_units, kv_heads, group, dim, width, budget, type, mean, cut;
    double linear, relu, alpha;
} Choice;

/* For KV head `head`, of a choice without guesses. */
void choose_rows(const Choice *choice, int64_t head);

#endif
