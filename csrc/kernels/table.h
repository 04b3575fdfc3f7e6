/* Tables of the kernels of one device. The files x.c and x.cu have one signature per kernel.
 *
 * Invariant: a caller selects the table by the device of the tensors and calls through it; every table has
 * every kernel. A CUDA kernel is enqueued on the stream: it may read its arguments' memory after the call has
 * returned. */
#ifndef FSDP_KERNELS_TABLE_H
#define FSDP_KERNELS_TABLE_H

#include "kernels/kernels.h"

enum { KERNEL_TABLE_VERSION = 11 }; /* a library of a different version is refused */

struct kernel_table {
    int32_t version;
    pack_kernel *pack;
    pack_add_kernel *pack_add;
    elementwise_kernel *cast_divide, *accumulate;
    const char *(*device_error)(void); /* text of this thread's last STATUS_DEVICE */
    /* CUDA only: the reason why this device cannot run the kernels, in a thread-local buffer; NULL if it
     * can */
    const char *(*unsupported_reason)(int32_t device_index);
};

extern const struct kernel_table cpu_kernels;
extern const struct kernel_table no_kernels; /* no-ops, for tensors without memory (FakeTensorMode) */

/* The exported function of the CUDA library. Returns NULL, and the reason in *reason, when no kernel can
 * launch. */
#define CUDA_KERNELS_SYMBOL "fsdp_c_cuda_kernels"
typedef const struct kernel_table *(*cuda_kernels_function)(const char **reason);

#endif
