/* Which kernels run on a device: those of this module, or those of the CUDA library beside it, loaded when first wanted.
 *
 * FSDP_C_CUDA_KERNELS=path in the environment names another library, for tests. */
#ifndef FSDP_TORCH_KERNEL_LIBRARY_H
#define FSDP_TORCH_KERNEL_LIBRARY_H

#include "kernels/table.h"

/* Never raises, and takes no lock of the interpreter. NULL where there are none, with the reason in *why. */
const struct kernel_table *kernels_of(enum device_kind device, const char **why);

#endif
