/* For wheels, which run with an older C library than that of the machine that builds them: included before every source by
 * FSDP_C_OLD_GLIBC=1. These functions have newer versions since glibc 2.29 and 2.34, which differ in where they live and how
 * they report errors; the old versions are in every glibc for x86-64. */

#pragma once

#if defined(__x86_64__) && defined(__linux__)
__asm__(".symver dladdr,dladdr@GLIBC_2.2.5");
__asm__(".symver dlerror,dlerror@GLIBC_2.2.5");
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver pow,pow@GLIBC_2.2.5");
__asm__(".symver pthread_once,pthread_once@GLIBC_2.2.5");
#endif
