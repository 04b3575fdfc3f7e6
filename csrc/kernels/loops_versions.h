/* The versions of the loops that are compiled for this architecture. */
#ifndef FSDP_KERNELS_LOOPS_VERSIONS_H
#define FSDP_KERNELS_LOOPS_VERSIONS_H

#include "kernels/checksum.h"
#include "kernels/loops.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define LOOPS_X86_64
extern const struct loops loops_avx512;
extern const struct loops loops_avx2;
#endif
extern const struct loops loops_default;

#endif
