/* Checked allocation: every array below the Python layers comes from here, so that each allocation can be
 * made to fail once. Invariant: a product of sizes never wraps; a failure is NULL, never an exit. */
#ifndef FSDP_BASE_MEMORY_H
#define FSDP_BASE_MEMORY_H

#include <stddef.h>

/* A zeroed array of `count` elements of `size` bytes, to be freed with mem_free. NULL when there is no memory
 * or when count * size overflows. A count of 0 gives a valid, unusable pointer: NULL always means failure. */
void *mem_new_array(size_t count, size_t size);
void mem_free(void *memory); /* NULL is legal */

#ifdef MEM_FAULTS /* tests only: the shipped extension has no mutable state here. Not thread-safe. */
/* The n-th allocation from now on (1: the next one) fails, once. 0: none. */
void mem_fail_at(size_t nth);
size_t mem_live_count(void); /* allocations not freed yet */
#endif

#endif
