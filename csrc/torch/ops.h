/* torch.ops.fsdp_c.*: the kernels as custom ops, visible to the dispatcher, the profiler, opcheck and
 * torch.compile. How ops are registered, and what those over plain tensors share: each has one body for all
 * devices and Meta: read, check, make the output, and, but for Meta, run the kernel, on the device's current
 * stream there.
 *
 * Invariant: an op that writes in place does not bump the version counter: it is called on detached tensors.
 * What is refused is raised as the op's error, and does not come back. */
#ifndef FSDP_TORCH_OPS_H
#define FSDP_TORCH_OPS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "torch/kernel_library.h"
#include "torch/op_stack.h"
#include "torch/torch_abi.h"

/* ---- registration ---- */

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

/* ---- one call of an op over plain tensors ---- */

/* Where a body runs, and the name its messages begin with. */
struct op_call {
    const char *name;
    bool is_meta;
    bool is_cpu;
    bool has_device;         /* an operand was read, and said which */
    enum device_kind device; /* of an accelerator's op, from then on */
    int32_t device_index;
};

const struct kernel_table *op_call_kernels(struct op_call *call);
void op_call_check(struct op_call *call, enum status status); /* what a kernel returned */

/* Memory a kernel can read: on the op's one device (or Meta), not freed and of a known dtype; contiguous; of
 * one dimension. */
void op_call_read(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                  const char *argument);
void op_call_read_contiguous(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                             const char *argument);
void op_call_read_flat(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                       const char *argument);

int32_t op_call_read_dtype(struct op_call *call, StableIValue slot);
double op_call_read_divisor(struct op_call *call, StableIValue slot);
void op_call_check_range(struct op_call *call, int64_t offset, int64_t numel, int64_t total,
                         const char *what);

/* Pack sources into the output, one pass; nothing to do on Meta. */
void op_call_pack(struct op_call *call, const struct op_operand *output, const struct pack_source *sources,
                  size_t count, double divisor);

/* ---- the bodies; their schemas are in ops.c ---- */

/* op_flat.c */
void op_flatten(StableIValue *stack, struct op_call *call);
void op_unflatten(StableIValue *stack, struct op_call *call);
void op_shard(StableIValue *stack, struct op_call *call);
void op_pack_gradients(StableIValue *stack, struct op_call *call);
void op_cast_divide(StableIValue *stack, struct op_call *call);
void op_accumulate_shard(StableIValue *stack, struct op_call *call);

/* op_lists.c */
void op_join_ranges(StableIValue *stack, struct op_call *call);

#endif
