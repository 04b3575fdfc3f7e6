/* Invariants that are asserted where FSDP_C_CHECK is defined: with FSDP_C_CHECK=1 or FSDP_C_SANITIZE in the
 * environment of setup.py, and in the native tests. Elsewhere they cost nothing. One that does not hold is a
 * bug of this library's, so the process ends, with the place and the condition. */
#ifndef FSDP_BASE_CHECK_H
#define FSDP_BASE_CHECK_H

#ifdef FSDP_C_CHECK
#include <stdio.h>
#include <stdlib.h>

#define INVARIANT(condition)                                                                                 \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s: broken invariant: %s\n", __FILE__, __LINE__, __func__, #condition);  \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)
#define CHECKED(check) check /* a call of a component's `..._check()` */
#else
/* compiled, and never asked */
#define INVARIANT(condition) ((void)(0 && (condition)))
#define CHECKED(check)       ((void)0)
#endif

#endif
