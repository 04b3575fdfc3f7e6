/* Hints to the system about the pages that back memory. */
#ifndef FSDP_BASE_PAGES_H
#define FSDP_BASE_PAGES_H

#include <stddef.h>

/* Request large pages for fresh memory, before the first write: mapping 4 KiB pages takes longer than filling
 * them. Large pages that exceed the memory are not requested, so no more memory is held. Never fails. No
 * effect on small memory and on systems without large pages. */
void pages_prefer_large(void *start, size_t nbytes);

#endif
