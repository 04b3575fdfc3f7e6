/* Assertions of invariants, compiled in where FSDP_C_CHECK is defined: by FSDP_C_CHECK=1 or FSDP_C_SANITIZE
 * in the environment of setup.py, and in the native tests. Other builds pay nothing. A broken invariant is a
 * bug of this library: the process prints file, line and condition, and aborts. */
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
#define CHECKED(check) check /* `check` is a call of a component's `..._check()` */
#else
/* The condition is compiled, so that it cannot rot, and never evaluated. */
#define INVARIANT(condition) ((void)(0 && (condition)))
#define CHECKED(check)       ((void)0)
#endif

#endif
