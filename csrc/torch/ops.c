/* The ops of torch.ops.fsdp_c over plain tensors: schemas, registration per device, checks that bodies
 * share. */
#include "torch/ops.h"

#include <inttypes.h>
#include <string.h>

#include "torch/ref.h"
#include "torch/tensor.h"

/* clang-format off */
#define EACH_OP(X)                                                                                             \
    X(pack_gradients, op_pack_gradients, "(Tensor(a!) out, Tensor[] grads, int[] offsets, float divisor) -> ()")  \
    X(cast_divide, op_cast_divide, "(Tensor input, float divisor, ScalarType dtype) -> Tensor")                   \
    X(accumulate_shard, op_accumulate_shard, "(Tensor(a!) accumulator, Tensor shard, float divisor) -> ()")       \
    X(join_ranges, op_join_ranges,                                                                                \
      "(Tensor[] sources, int[] ranges, int[] counts, Tensor[] likes, int[] ndims, int[] sizes) -> Tensor[]")
/* clang-format on */

#define DEFINE_OP_ON(function, op, body, ...)                                                                \
    static void function(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {                   \
        body(stack, &(struct op_call){.name = "fsdp_c::" #op, __VA_ARGS__});                                 \
    }
#define DEFINE_BOXED(op, body, schema)                                                                       \
    DEFINE_OP_ON(op##_on_cpu, op, body, .is_cpu = true)                                                      \
    DEFINE_OP_ON(op##_on_device, op, body, .is_cpu = false)                                                  \
    DEFINE_OP_ON(op##_on_meta, op, body, .is_cpu = true, .is_meta = true)
EACH_OP(DEFINE_BOXED)

#define SCHEMA(name, body, schema) #name schema,
static const char *const schemas[] = {EACH_OP(SCHEMA)};

#define KERNELS(name, body, schema)                                                                          \
    {"CPU", #name, name##_on_cpu}, {"Meta", #name, name##_on_meta}, {"CUDA", #name, name##_on_device},       \
        {"XPU", #name, name##_on_device}, {"MAIA", #name, name##_on_device},                                 \
        {"PrivateUse1", #name, name##_on_device},
static const struct op_kernel kernels[] = {EACH_OP(KERNELS)};

static struct op_library library = {.schemas = schemas,
                                    .kernels = kernels,
                                    .num_schemas = sizeof schemas / sizeof *schemas,
                                    .num_kernels = sizeof kernels / sizeof *kernels};

int ops_init(void) {
    return ops_register(&library);
}

/* ---- registration ---- */

/* Register one kernel. Its library is never freed: that would unregister the kernel. */
static bool register_kernel(const struct op_kernel *kernel) {
    TorchLibraryHandle implementations = NULL;
    /* join_ranges uses memcpy; torch raises its own error for devices without a kernel */
    if (kernel->kernel == join_ranges_on_device)
        return true;
    return !torch_abi.aoti_torch_library_init_impl("fsdp_c", kernel->key, "fsdp_c", 0, &implementations) &&
           !torch_abi.torch_library_impl(implementations, kernel->name, kernel->kernel, TORCH_BUILD_VERSION);
}

static bool register_all(const struct op_library *ops) {
    TorchLibraryHandle definitions = NULL;
    bool success = !torch_abi.aoti_torch_library_init_fragment("fsdp_c", "fsdp_c", 0, &definitions);
    for (int i = 0; success && i < ops->num_schemas; i++)
        success = !torch_abi.aoti_torch_library_def(definitions, ops->schemas[i]);
    for (int i = 0; success && i < ops->num_kernels; i++)
        success = register_kernel(&ops->kernels[i]);
    return success;
}

int ops_register(struct op_library *ops) {
    if (ops->is_registered || register_all(ops)) {
        ops->is_registered = true;
        return 0;
    }
    return RAISED(PyExc_ImportError, "fsdp_c cannot register its operators: %s",
                  op_error_text("torch gave no reason"));
}

/* ---- one call ---- */

const struct kernel_table *op_call_kernels(struct op_call *call) {
    const char *reason = NULL;
    return kernels_of(call->device, call->device_index, &reason);
}

void op_call_check(struct op_call *call, enum status status) {
    OP_CHECK(status != STATUS_UNSUPPORTED, "%s: no kernel for these dtypes", call->name);
    OP_CHECK(status != STATUS_DEVICE, "%s: the device refused: %s", call->name,
             op_call_kernels(call)->device_error());
    OP_CHECK(status == STATUS_OK, "%s: an argument is out of its domain", call->name);
}

void op_call_read(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                  const char *argument) {
    op_read_operand(operand, tensor);
    bool has_memory = operand->numel == 0 || operand->view.data;
    bool is_on_op_device =
        (operand->view.device == DEVICE_CPU) == call->is_cpu &&
        (call->is_cpu || !call->has_device ||
         (operand->view.device == call->device && operand->device_index == call->device_index));
    OP_CHECK(call->is_meta || is_on_op_device, "%s: %s must be on %s", call->name, argument,
             call->is_cpu ? "the CPU" : "the device that the other arguments are on");
    OP_CHECK(call->is_meta || has_memory, "%s: the storage of %s is freed", call->name, argument);
    call->has_device = true;
    call->device = operand->view.device;
    call->device_index = operand->device_index;
    OP_CHECK(dtype_is_known(operand->view.dtype), "%s: %s must be float32, float64, bfloat16 or float16",
             call->name, argument);
}

void op_call_read_contiguous(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                             const char *argument) {
    op_call_read(call, operand, tensor, argument);
    OP_CHECK(operand->is_contiguous, "%s: %s must be contiguous", call->name, argument);
}

int32_t op_call_read_dtype(struct op_call *call, StableIValue slot) {
    int32_t code = (int32_t)slot;
    OP_CHECK(dtype_is_known(op_dtype(code)), "%s: dtype must be float32, float64, bfloat16 or float16",
             call->name);
    return code;
}

double op_call_read_divisor(struct op_call *call, StableIValue slot) {
    double divisor = op_float(slot);
    OP_CHECK(divisor > 0, "%s: divisor must be positive, not %g", call->name, divisor);
    return divisor;
}

void op_call_pack(struct op_call *call, const struct op_operand *output, const struct pack_source *sources,
                  size_t count, double divisor) {
    if (!call->is_meta) {
        op_call_check(call, op_call_kernels(call)->pack(output->view.data, output->view.dtype, output->numel,
                                                        sources, (int64_t)count, divisor,
                                                        tensor_kernel_stream(&output->view)));
    }
}

void op_call_check_range(struct op_call *call, int64_t offset, int64_t numel, int64_t total,
                         const char *argument) {
    OP_CHECK(offset >= 0 && numel >= 0 && offset <= total && numel <= total - offset,
             "%s: elements "
             "[%" PRId64 ", %" PRId64 ") lie outside of %s, which has %" PRId64,
             call->name, offset, offset + numel, argument, total);
}
