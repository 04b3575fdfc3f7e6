/* The kernels as operators of torch, for every device that has no kernels of ours: fsdp_c/operator_kernels.py
 * says which.
 *
 * They may be called with the interpreter's lock or without it, and take it. What Python raised stays set for
 * a caller that has the lock; for one that has not, device_error() says it. */
#ifndef FSDP_TORCH_OPERATOR_KERNELS_H
#define FSDP_TORCH_OPERATOR_KERNELS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels/table.h"

extern const struct kernel_table operator_kernels;

void operator_kernels_bind(PyObject *module); /* whose functions they call, before any of them is called */

#endif
