#ifndef KVSHELF_ROW_PROGRAM_H
#define KVSHELF_ROW_PROGRAM_H

#include "phases.h"

/* See the struct. */
typedef struct RowProgram RowProgram;

void run_rows(Member *member, const RowProgram *program);
int64_t phases_of_rows(const RowProgram *program);

#endif
