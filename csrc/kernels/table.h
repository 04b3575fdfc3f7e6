/* The kernels of one device, behind one signature each: what stands beside each other as x.c and x.cu.
 *
 * Invariant: a caller picks the table by the device of the tensors and calls through it; each table but
 * no_kernels has every kernel. On a GPU a kernel is enqueued on the stream and has not run when the call
 * returns; it reads its arguments' memory then. */
#ifndef FSDP_KERNELS_TABLE_H
#define FSDP_KERNELS_TABLE_H

#include "kernels/kernels.h"

enum { KERNEL_TABLE_VERSION = 11 }; /* a library of another version is not loaded */

struct kernel_table {
    int32_t version;
    pack_kernel *pack;
    pack_add_kernel *pack_add;
    elementwise_kernel *cast_divide, *accumulate;
    const char *(*device_error)(void); /* what the device said when this thread last got STATUS_DEVICE */
    /* Of CUDA's alone. NULL: this device can run them. The text is the thread's own. */
    const char *(*unsupported_reason)(int32_t device_index);
};

extern const struct kernel_table cpu_kernels;
/* For tensors without memory, as FakeTensorMode makes them: what a handle calls, which does nothing. */
extern const struct kernel_table no_kernels;

/* The one symbol of the CUDA library. NULL, with the reason in *why, where no kernel can be launched. */
#define CUDA_KERNELS_SYMBOL "fsdp_c_cuda_kernels"
typedef const struct kernel_table *(*cuda_kernels_function)(const char **why);

#endif
