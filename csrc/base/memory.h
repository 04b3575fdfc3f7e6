/* Checked allocation of every array below the Python layers. Tests make each allocation fail once.
 *
 * Invariant: a product of sizes never wraps; a failure is NULL, never an exit. */
#ifndef FSDP_BASE_MEMORY_H
#define FSDP_BASE_MEMORY_H

#include <stddef.h>

/* Return a zeroed array of `count` elements of `size` bytes, to be freed with mem_free. NULL when memory is
 * out or count * size overflows. A count of 0 returns a valid, unusable pointer: NULL always means
 * failure. */
void *mem_new_array(size_t count, size_t size);
void mem_free(void *memory); /* NULL is legal */

#ifdef MEM_FAULTS /* tests only, not thread-safe; the shipped extension has no mutable state here */
/* Make the n-th allocation from now on fail, once. 1 is the next one; 0 disables. */
void mem_fail_at(size_t nth);
size_t mem_live_count(void); /* Return the number of allocations that are not freed. */
#endif

#endif
