#define _DEFAULT_SOURCE /* madvise */
#include "base/pages.h"

#include <stdint.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#ifdef MADV_HUGEPAGE
enum { LARGE_PAGE_NBYTES = 2 * 1024 * 1024, WORTHWHILE_NBYTES = 2 * LARGE_PAGE_NBYTES };

void pages_prefer_large(void *start, size_t nbytes) {
    const size_t unaligned_nbytes = -(uintptr_t)start % LARGE_PAGE_NBYTES;
    if (!start || nbytes < WORTHWHILE_NBYTES)
        return;
    const size_t aligned_nbytes = (nbytes - unaligned_nbytes) / LARGE_PAGE_NBYTES * LARGE_PAGE_NBYTES;
    (void)madvise((char *)start + unaligned_nbytes, aligned_nbytes, MADV_HUGEPAGE);
}
#else
void pages_prefer_large(void *start, size_t nbytes) {
    (void)start;
    (void)nbytes;
}
#endif
