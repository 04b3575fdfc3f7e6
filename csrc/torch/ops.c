/* The ops of torch.ops.fsdp_c over plain tensors: their schemas, and what is registered for each device. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "torch/ops.h"

#include <string.h>

#include "torch/op_call.h"
#include "torch/ref.h"

/* clang-format off */
#define EACH_OP(X)                                                                                             \
    X(flatten, op_flatten, "(Tensor[] tensors, int aligned_numel, int padded_numel, ScalarType dtype) -> Tensor") \
    X(unflatten, op_unflatten, "(Tensor flat, int[] offsets, int[] numels) -> Tensor[]")                          \
    X(shard, op_shard, "(Tensor flat, int rank, int world_size, ScalarType dtype) -> Tensor")                     \
    X(pack_gradients, op_pack_gradients, "(Tensor(a!) out, Tensor[] grads, int[] offsets, float divisor) -> ()")  \
    X(cast_divide, op_cast_divide, "(Tensor input, float divisor, ScalarType dtype) -> Tensor")                   \
    X(accumulate_shard, op_accumulate_shard, "(Tensor(a!) accumulator, Tensor shard, float divisor) -> ()")       \
    X(join_ranges, op_join_ranges,                                                                                \
      "(Tensor[] sources, int[] ranges, int[] counts, Tensor[] likes, int[] ndims, int[] sizes) -> Tensor[]")   \
    X(checksums, op_checksums, "(Tensor[] tensors) -> Tensor")                                                    \
    X(adamw_, op_adamw,                                                                                           \
      "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "                \
      "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] master_lows, Tensor(f!)[] scales, Tensor(g!)[] steps, "      \
      "Tensor[] lr_tensors, float lr, float beta1, float beta2, float eps, float weight_decay, bool maximize, "                 \
      "int[] streams, int[] first_indices) -> ()")
/* clang-format on */

#define DEFINE_ON(function, op, body, ...)                                                                   \
    static void function(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {                   \
        (void)num_inputs;                                                                                    \
        (void)num_outputs;                                                                                   \
        body(stack, &(struct op_call){.name = "fsdp_c::" #op, __VA_ARGS__});                                 \
    }
#define DEFINE_BOXED(op, body, schema)                                                                       \
    DEFINE_ON(op##_on_cpu, op, body, .is_cpu = true)                                                         \
    DEFINE_ON(op##_elsewhere, op, body, .is_cpu = false)                                                     \
    DEFINE_ON(op##_on_meta, op, body, .is_cpu = true, .is_meta = true)
EACH_OP(DEFINE_BOXED)

#define SCHEMA(name, body, schema) #name schema,
static const char *const schemas[] = {EACH_OP(SCHEMA)};

#define KERNELS(name, body, schema)                                                                          \
    {"CPU", #name, name##_on_cpu}, {"Meta", #name, name##_on_meta}, {"CUDA", #name, name##_elsewhere},       \
        {"XPU", #name, name##_elsewhere}, {"MAIA", #name, name##_elsewhere},                                 \
        {"PrivateUse1", #name, name##_elsewhere},
static const struct op_kernel kernels[] = {EACH_OP(KERNELS)};

static struct op_library library = {.schemas = schemas,
                                    .kernels = kernels,
                                    .num_schemas = sizeof schemas / sizeof *schemas,
                                    .num_kernels = sizeof kernels / sizeof *kernels};

int ops_init(void) {
    return ops_register(&library);
}

/* ---- registration ---- */

/* Libraries live for ever: what they registered would go with them. One per kernel is as good as one per
 * key. */
static bool register_kernel(const struct op_kernel *kernel) {
    TorchLibraryHandle implementations = NULL;
    /* it copies with the host's memcpy; for other devices torch says that there is none */
    if (kernel->kernel == join_ranges_elsewhere)
        return true;
    return !torch_abi.aoti_torch_library_init_impl("fsdp_c", kernel->key, "fsdp_c", 0, &implementations) &&
           !torch_abi.torch_library_impl(implementations, kernel->name, kernel->kernel, TORCH_BUILD_VERSION);
}

static bool register_all(const struct op_library *ops) {
    TorchLibraryHandle definitions = NULL;
    bool done = !torch_abi.aoti_torch_library_init_fragment("fsdp_c", "fsdp_c", 0, &definitions);
    for (int i = 0; done && i < ops->num_schemas; i++)
        done = !torch_abi.aoti_torch_library_def(definitions, ops->schemas[i]);
    for (int i = 0; done && i < ops->num_kernels; i++)
        done = register_kernel(&ops->kernels[i]);
    return done;
}

int ops_register(struct op_library *ops) {
    if (ops->is_registered || register_all(ops)) {
        ops->is_registered = true;
        return 0;
    }
    return RAISED(PyExc_ImportError, "fsdp_c cannot register its operators: %s",
                  op_error_text("torch refused them"));
}
