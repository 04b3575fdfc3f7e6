/* For wheels, which run with an older C library than that of the machine that builds them: included before
 * every source by FSDP_C_OLD_GLIBC=1. These functions have newer versions since glibc 2.34, which differ in
 * where they live; the first ones are in every glibc for the processor. */

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
