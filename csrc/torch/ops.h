/* torch.ops.fsdp_c.*: operators that the dispatcher, the profiler, opcheck and torch.compile see. This header
 * has their registration; ops.c the operators over plain tensors, which write to given outputs.
 *
 * Invariant: an op does not bump the version counter; it is called on detached tensors. A failed check raises
 * the op's error and does not return. */
#ifndef FSDP_TORCH_OPS_H
#define FSDP_TORCH_OPS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "torch/torch_abi.h"

/* Number of dispatch keys of an operator, in the order of `keys` in ops.c. */
enum op_devices { OP_ON_CPU = 2, OP_ON_CPU_AND_CUDA = 3, OP_ON_ALL_DEVICES = 6 };

struct op {
    const char *name, *arguments; /* the schema without a namespace */
    boxed_kernel kernel;          /* for all devices, and Meta */
    enum op_devices devices;
    bool is_registered;
};

/* Register operators, once per process, after torch_abi_init(). 0, or -1 with ImportError. */
int ops_register(struct op *ops, int count);
int ops_init(void); /* Register the operators over plain tensors in the same way. */

#endif
