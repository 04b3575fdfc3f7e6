/* Symbol versions for wheels, which run on an older glibc than the one of the machine that builds them.
 * FSDP_C_OLD_GLIBC=1 includes this file before every source. glibc 2.34 moved the functions below into
 * libc.so under a new version; the oldest version of each is in every glibc for the processor. */

#pragma once

#if defined(__x86_64__) && defined(__linux__)
#define OLD_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__) && defined(__linux__)
#define OLD_GLIBC "GLIBC_2.17"
#endif

#ifdef OLD_GLIBC
__asm__(".symver dladdr,dladdr@" OLD_GLIBC);
__asm__(".symver dlerror,dlerror@" OLD_GLIBC);
__asm__(".symver dlopen,dlopen@" OLD_GLIBC);
__asm__(".symver dlsym,dlsym@" OLD_GLIBC);
__asm__(".symver pthread_once,pthread_once@" OLD_GLIBC);
#endif
