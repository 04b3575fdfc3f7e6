/* Selection of the kernels of a device. The CPU has the kernels of this module; CUDA those of the library in
 * the same folder, which is loaded on first use. torch's operators serve all other devices, devices that the
 * library has no code for, and every device with FSDP_C_KERNELS=torch in the environment.
 *
 * Tests name a different library by FSDP_C_CUDA_KERNELS=path. */
#ifndef FSDP_TORCH_KERNEL_LIBRARY_H
#define FSDP_TORCH_KERNEL_LIBRARY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels/table.h"

/* Return the kernels of a device, and in *reason the reason why they are torch's operators, else NULL. Never
 * returns NULL, never raises, never takes the GIL. */
const struct kernel_table *kernels_of(enum device_kind device, int32_t device_index, const char **reason);

bool kernels_use_torch_operators(void); /* Return true for FSDP_C_KERNELS=torch. */

/* The kernels as operators of torch, which fsdp_c/operator_kernels.py calls; in operator_kernels.c.
 *
 * Callers may hold the GIL or not; the kernels take it. An exception stays set for a caller that holds the
 * GIL; other callers get its text from device_error(). */
extern const struct kernel_table operator_kernels;

void operator_kernels_bind(PyObject *module); /* Set the module of Python functions, before the first call. */

#endif
