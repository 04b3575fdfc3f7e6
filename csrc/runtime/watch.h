/* Whoever looks at gradients before they are reduced (fsdp_c.debug). Nobody does in the usual step: the test of a pointer. */
#ifndef FSDP_RUNTIME_WATCH_H
#define FSDP_RUNTIME_WATCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyObject *watcher; /* owned; NULL where nobody watches */

void watch_set(PyObject *function); /* Py_None: nobody */

struct unit;

/* Call watcher(handle, gradients): a tuple of one gradient or None per parameter (behind the node's context) when they are
 * received, None when the unit is about to be reduced, which all ranks of its groups do. 0 or -1. */
int watch_call(const struct unit *unit, PyObject *gradients);

static inline int watch_unit(const struct unit *unit, PyObject *gradients) {
    return watcher ? watch_call(unit, gradients) : 0;
}

#endif
