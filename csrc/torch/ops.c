/* The ops of torch.ops.fsdp_c over plain tensors: their schemas, and what is registered for each device. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "torch/ops.h"

#include <string.h>

#include "torch/op_call.h"

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
    X(norms, op_norms, "(Tensor[] tensors, float p) -> Tensor")                                                   \
    X(clip_, op_clip, "(Tensor(a!)[] tensors, Tensor coefficient) -> ()")                                         \
    X(unscale_, op_unscale, "(Tensor(a!)[] tensors, Tensor(b!) found_inf, Tensor inverse_scale) -> ()")           \
    X(checksums, op_checksums, "(Tensor[] tensors) -> Tensor")                                                    \
    X(adamw_, op_adamw,                                                                                           \
      "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "                \
      "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] steps, Tensor[] lr_tensors, float lr, float beta1, "         \
      "float beta2, float eps, float weight_decay, bool maximize) -> ()")
/* clang-format on */

#define DEFINE_BOXED(name, body, schema)                                                                               \
    static void name##_on_cpu(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {                        \
        (void)num_inputs;                                                                                              \
        (void)num_outputs;                                                                                             \
        body(stack, &(struct op_call){"fsdp_c::" #name, false, DEVICE_CPU, false, 0});                                 \
    }                                                                                                                  \
    static void name##_on_cuda(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {                       \
        (void)num_inputs;                                                                                              \
        (void)num_outputs;                                                                                             \
        body(stack, &(struct op_call){"fsdp_c::" #name, false, DEVICE_CUDA, false, 0});                                \
    }                                                                                                                  \
    static void name##_on_meta(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {                       \
        (void)num_inputs;                                                                                              \
        (void)num_outputs;                                                                                             \
        body(stack, &(struct op_call){"fsdp_c::" #name, true, DEVICE_CPU, false, 0});                                  \
    }
EACH_OP(DEFINE_BOXED)

struct op_entry {
    const char *name;
    const char *schema;
    boxed_kernel cpu;
    boxed_kernel cuda;
    boxed_kernel meta;
};

#define OP_ENTRY(name, body, schema) {#name, #name schema, name##_on_cpu, name##_on_cuda, name##_on_meta},
static const struct op_entry entries[] = {EACH_OP(OP_ENTRY)};
enum { ENTRY_COUNT = sizeof entries / sizeof entries[0] };

/* join_ranges copies with the host's memcpy; on CUDA torch says that there is none. */
static bool is_on_cuda(const char *name) {
    return strcmp(name, "join_ranges") != 0;
}

/* Libraries live for ever: what they registered would go with them. */
static bool register_all(void) {
    TorchLibraryHandle schemas = NULL;
    TorchLibraryHandle cpu = NULL;
    TorchLibraryHandle cuda = NULL;
    TorchLibraryHandle meta = NULL;
    bool failed = torch_abi.aoti_torch_library_init_fragment("fsdp_c", "fsdp_c", 0, &schemas) != 0 ||
                  torch_abi.aoti_torch_library_init_impl("fsdp_c", "CPU", "fsdp_c", 0, &cpu) != 0 ||
                  torch_abi.aoti_torch_library_init_impl("fsdp_c", "CUDA", "fsdp_c", 0, &cuda) != 0 ||
                  torch_abi.aoti_torch_library_init_impl("fsdp_c", "Meta", "fsdp_c", 0, &meta) != 0;
    for (int i = 0; !failed && i < ENTRY_COUNT; i++) {
        failed = torch_abi.aoti_torch_library_def(schemas, entries[i].schema) != 0 ||
                 torch_abi.torch_library_impl(cpu, entries[i].name, entries[i].cpu, TORCH_BUILD_VERSION) != 0 ||
                 (is_on_cuda(entries[i].name) &&
                  torch_abi.torch_library_impl(cuda, entries[i].name, entries[i].cuda, TORCH_BUILD_VERSION) != 0) ||
                 torch_abi.torch_library_impl(meta, entries[i].name, entries[i].meta, TORCH_BUILD_VERSION) != 0;
    }
    return !failed;
}

int ops_init(void) {
    static bool registered = false;
    if (!registered && !register_all()) {
        PyErr_Format(PyExc_ImportError, "fsdp_c cannot register its operators: %s",
                     op_error_text("torch refused them"));
        return -1;
    }
    registered = true;
    return 0;
}
