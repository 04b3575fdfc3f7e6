#include "base/memory.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef MEM_FAULTS
static size_t allocations_until_failure;
static size_t live_count;

void mem_fail_at(size_t nth) {
    allocations_until_failure = nth;
}

size_t mem_live_count(void) {
    return live_count;
}

static bool must_fail(void) {
    return allocations_until_failure != 0 && --allocations_until_failure == 0;
}
#define COUNT_NEW(memory)  (live_count += (memory) != NULL)
#define COUNT_FREE(memory) (live_count -= (memory) != NULL)
#else
static bool must_fail(void) {
    return false;
}
#define COUNT_NEW(memory)  ((void)0)
#define COUNT_FREE(memory) ((void)0)
#endif

void *mem_new_array(size_t count, size_t size) {
    if (must_fail() || (size != 0 && count > SIZE_MAX / size))
        return NULL;
    /* calloc(0) may return NULL, which means failure here */
    void *memory = count == 0 || size == 0 ? calloc(1, 1) : calloc(count, size);
    COUNT_NEW(memory);
    return memory;
}

void mem_free(void *memory) {
    COUNT_FREE(memory);
    free(memory);
}
