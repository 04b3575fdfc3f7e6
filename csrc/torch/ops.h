/* torch.ops.fsdp_c.*: the kernels as custom ops, visible to the dispatcher, the profiler, opcheck and
 * torch.compile. */
#ifndef FSDP_TORCH_OPS_H
#define FSDP_TORCH_OPS_H

#include <stdbool.h>

#include "torch/torch_abi.h"

/* A kernel of an operator for one dispatch key. */
struct op_kernel {
    const char *key, *name;
    boxed_kernel kernel;
};

struct op_library {
    const char *const *schemas;
    const struct op_kernel *kernels;
    int num_schemas, num_kernels;
    bool is_registered;
};

/* Register all of it, once per process. 0, or -1 with ImportError. Needs torch_abi_init. */
int ops_register(struct op_library *ops);

/* Register the schemas with their CPU and Meta kernels, once per process. 0, or -1 with ImportError. Needs
 * torch_abi_init. */
int ops_init(void);

#endif
