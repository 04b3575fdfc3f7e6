/* Ranges in torch's profiler, under the names that users grep traces for (D-130). One dict lookup while no
 * profiler is on. */
#ifndef FSDP_TORCH_PROFILE_H
#define FSDP_TORCH_PROFILE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

int profile_init(void); /* 0, or -1 with an exception */

/* Open a range. NULL, without an exception, when no profiler is on or the range cannot be opened. */
PyObject *profile_begin(const char *name);

/* The same for a range directly inside one: whether a profiler is on is not asked anew. */
PyObject *profile_begin_inner(const char *name);

/* Close it; NULL is legal. A pending exception stays as it is. */
void profile_end(PyObject *range);

#endif
