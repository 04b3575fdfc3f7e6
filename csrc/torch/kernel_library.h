/* Which kernels run on a device: those of this module, or those of the CUDA library beside it, loaded when
 * first wanted; on any other device, where that library does not fit, and where FSDP_C_KERNELS=torch in the
 * environment says so, torch's operators.
 *
 * FSDP_C_CUDA_KERNELS=path in the environment names another library, for tests. */
#ifndef FSDP_TORCH_KERNEL_LIBRARY_H
#define FSDP_TORCH_KERNEL_LIBRARY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels/table.h"

/* Never NULL, never raises, and takes no lock of the interpreter. *why says why they are not ours, or is
 * NULL. */
const struct kernel_table *kernels_of(enum device_kind device, int32_t device_index, const char **why);

bool kernels_use_torch_operators(void); /* FSDP_C_KERNELS=torch */

/* operator_kernels.c: the kernels as operators of torch. fsdp_c/operator_kernels.py says which.
 *
 * They may be called with the interpreter's lock or without it, and take it. What Python raised stays set for
 * a caller that has the lock; for one that has not, device_error() says it. */
extern const struct kernel_table operator_kernels;

void operator_kernels_bind(PyObject *module); /* whose functions they call, before any of them is called */

#endif
