/* Module functions over layout/: partitions and boxes, for state dicts and checkpoints. */
#ifndef FSDP_PYTHON_LAYOUT_FUNCTIONS_H
#define FSDP_PYTHON_LAYOUT_FUNCTIONS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Add them to `module`. 0, or -1 with an exception. */
int layout_functions_add(PyObject *module);

#endif
