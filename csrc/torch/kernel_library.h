/* Which kernels run on a device: those of this module, or those of the CUDA library beside it, loaded when
 * first wanted; on any other device, where that library does not fit, and where FSDP_C_KERNELS=torch in the
 * environment says so, torch's operators.
 *
 * FSDP_C_CUDA_KERNELS=path in the environment names another library, for tests. */
#ifndef FSDP_TORCH_KERNEL_LIBRARY_H
#define FSDP_TORCH_KERNEL_LIBRARY_H

#include "kernels/table.h"

/* Never NULL, never raises, and takes no lock of the interpreter. *why says why they are not ours, or is
 * NULL. */
const struct kernel_table *kernels_of(enum device_kind device, int32_t device_index, const char **why);

bool kernels_are_wanted_of_torch(void); /* FSDP_C_KERNELS=torch */

#endif
