/* How the system backs memory with pages. */
#ifndef FSDP_BASE_PAGES_H
#define FSDP_BASE_PAGES_H

#include <stddef.h>

/* Ask for large pages under fresh memory, before it is first written: mapping it in 4 KiB pages takes longer
 * than filling it. Only pages that lie wholly inside are meant, so that nothing more is held. A hint: never
 * fails, does nothing for small memory and where the system has no such pages. */
void pages_prefer_large(void *start, size_t nbytes);

#endif
