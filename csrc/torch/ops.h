/* torch.ops.fsdp_c.*: the kernels as custom ops, visible to the dispatcher, the profiler, opcheck and
 * torch.compile. This header has the registration of ops and the helpers of ops over plain tensors. One body
 * serves all devices and Meta: read and check the inputs, make the output and, except on Meta, run the kernel
 * on the device's current stream.
 *
 * Invariant: an in-place op does not bump the version counter; it is called on detached tensors. A failed
 * check raises the op's error and does not return. */
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

/* Register a library, once per process, after torch_abi_init(). 0, or -1 with ImportError. */
int ops_register(struct op_library *ops);

/* Register the ops over plain tensors, once per process, after torch_abi_init(). 0, or -1 with
 * ImportError. */
int ops_init(void);

/* ---- one call of an op over plain tensors ---- */

/* The state of one call of an op. */
struct op_call {
    const char *name; /* begins each error message */
    bool is_meta;
    bool is_cpu;
    bool has_device;         /* true once an operand has set device and device_index */
    enum device_kind device; /* device of all operands */
    int32_t device_index;
};

const struct kernel_table *op_call_kernels(struct op_call *call);
void op_call_check(struct op_call *call, enum status status); /* Raise the error of a kernel's status. */

/* Read an operand and check that a kernel can use its memory: on the device of the other operands (or Meta),
 * not freed, of a known dtype. `_contiguous` also requires a contiguous tensor. */
void op_call_read(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                  const char *argument);
void op_call_read_contiguous(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                             const char *argument);

int32_t op_call_read_dtype(struct op_call *call, StableIValue slot);
double op_call_read_divisor(struct op_call *call, StableIValue slot);
void op_call_check_range(struct op_call *call, int64_t offset, int64_t numel, int64_t total,
                         const char *argument);

/* Pack the sources into the output in one pass; no effect on Meta. */
void op_call_pack(struct op_call *call, const struct op_operand *output, const struct pack_source *sources,
                  size_t count, double divisor);

/* ---- the bodies of the schemas in ops.c ---- */

/* op_flat.c */
void op_pack_gradients(StableIValue *stack, struct op_call *call);
void op_cast_divide(StableIValue *stack, struct op_call *call);
void op_accumulate_shard(StableIValue *stack, struct op_call *call);

/* op_lists.c */
void op_join_ranges(StableIValue *stack, struct op_call *call);

#endif
