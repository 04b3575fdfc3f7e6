#include "torch/ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/pages.h"
#include "torch/kernel_library.h"
#include "torch/op_stack.h"
#include "torch/ref.h"
#include "torch/tensor.h"

/* ---- registration ---- */

static const char *const keys[] = {"Meta", "CPU", "CUDA", "XPU", "MAIA", "PrivateUse1"};

/* The libraries are never freed: that would unregister the kernels. */
static bool register_op(const struct op *op) {
    TorchLibraryHandle definitions = NULL, implementations = NULL;
    char schema[256];
    snprintf(schema, sizeof schema, "%s%s", op->name, op->arguments);
    bool success = !torch_abi.aoti_torch_library_init_fragment("fsdp_c", "fsdp_c", 0, &definitions) &&
                   !torch_abi.aoti_torch_library_def(definitions, schema);
    for (int i = 0; success && i < (int)op->devices; i++)
        success = !torch_abi.aoti_torch_library_init_impl("fsdp_c", keys[i], "fsdp_c", 0, &implementations) &&
                  !torch_abi.torch_library_impl(implementations, op->name, op->kernel, TORCH_BUILD_VERSION);
    return success;
}

int ops_register(struct op *ops, int count) {
    for (int i = 0; i < count; i++) {
        if (!ops[i].is_registered && !register_op(&ops[i]))
            return RAISED(PyExc_ImportError, "fsdp_c cannot register its operators: %s",
                          op_error_text("torch gave no reason"));
        ops[i].is_registered = true;
    }
    return 0;
}

/* ---- operands of kernels ---- */

/* Read a contiguous or strided operand of a kernel of `op`: not freed, of a known dtype, and on the device of
 * `output`. */
static void read_operand(const char *op, struct op_operand *operand, AtenTensorHandle tensor,
                         const struct op_operand *output, const char *argument) {
    op_read_operand(operand, tensor);
    OP_CHECK(operand->view.device == output->view.device &&
                 (operand->view.device == DEVICE_CPU || operand->device_index == output->device_index),
             "%s: %s must be on the device of the output", op, argument);
    OP_CHECK(operand->numel == 0 || operand->view.data, "%s: the storage of %s is freed", op, argument);
    OP_CHECK(dtype_is_known(operand->view.dtype), "%s: %s must be float32, float64, bfloat16 or float16", op,
             argument);
}

static void read_contiguous(const char *op, struct op_operand *operand, AtenTensorHandle tensor,
                            const struct op_operand *output, const char *argument) {
    read_operand(op, operand, tensor, output, argument);
    OP_CHECK(operand->is_contiguous, "%s: %s must be contiguous", op, argument);
}

static double read_divisor(const char *op, StableIValue slot) {
    double divisor;
    memcpy(&divisor, &slot, sizeof divisor);
    OP_CHECK(divisor > 0, "%s: divisor must be positive, not %g", op, divisor);
    return divisor;
}

static const struct kernel_table *kernels_for(const struct op_operand *output) {
    const char *reason = NULL;
    return kernels_of(output->view.device, output->device_index, &reason);
}

/* Raise the error of a kernel's status. */
static void check_status(const char *op, const struct op_operand *output, enum status status) {
    OP_CHECK(status != STATUS_UNSUPPORTED, "%s: no kernel for these dtypes", op);
    OP_CHECK(status != STATUS_DEVICE, "%s: the device refused: %s", op, kernels_for(output)->device_error());
    OP_CHECK(status == STATUS_OK, "%s: an argument is out of its domain", op);
}

static void check_range(const char *op, int64_t offset, int64_t numel, int64_t total, const char *argument) {
    OP_CHECK(offset >= 0 && numel >= 0 && offset <= total && numel <= total - offset,
             "%s: elements [%" PRId64 ", %" PRId64 ") lie outside of %s, which has %" PRId64, op, offset,
             offset + numel, argument, total);
}

/* ---- the operators ---- */

/* Cast, divide and flatten gradients in one pass; zero the elements without a gradient. Offsets ascend without
 * overlap. */
static void pack_gradients(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {
    static const char op[] = "fsdp_c::pack_gradients";
    OP_OWNED tensor = op_tensor(stack[0]);
    OP_OWNED_LIST grads = op_list_of(stack[1], true);
    OP_OWNED_LIST offsets = op_list_of(stack[2], false);
    OP_OWNED_MEMORY struct pack_source *sources = NULL;
    struct op_operand out;
    int64_t end = 0;
    if (op_is_meta(tensor))
        return;
    OP_READ_LISTS(&grads, &offsets);
    double divisor = read_divisor(op, stack[3]);
    read_contiguous(op, &out, tensor, &out, "out");
    OP_CHECK(out.view.ndim == 1, "%s: out must have one dimension, not %d", op, (int)out.view.ndim);
    OP_CHECK(grads.count == offsets.count, "%s: %zu grads, but %zu offsets", op, grads.count, offsets.count);
    sources = op_alloc(grads.count, sizeof *sources);
    for (size_t i = 0; i < grads.count; i++) {
        struct op_operand grad;
        read_operand(op, &grad, op_tensor(grads.items[i]), &out, "each of grads");
        int64_t offset = op_int(offsets.items[i]);
        OP_CHECK(offset >= end,
                 "%s: grad %zu begins at %" PRId64 ", before the end of the previous grad at %" PRId64, op, i,
                 offset, end);
        check_range(op, offset, grad.numel, out.numel, "out");
        sources[i] = (struct pack_source){.view = grad.view, .numel = grad.numel, .offset = offset};
        end = offset + grad.numel;
    }
    check_status(op, &out,
                 kernels_for(&out)->pack(out.view.data, out.view.dtype, out.numel, sources,
                                         (int64_t)grads.count, divisor, tensor_kernel_stream(&out.view)));
}

/* accumulator += shard / divisor; the quotient is rounded to the shard's dtype. */
static void accumulate_shard(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {
    static const char op[] = "fsdp_c::accumulate_shard";
    OP_OWNED target = op_tensor(stack[0]);
    OP_OWNED addend = op_tensor(stack[1]);
    struct op_operand accumulator, shard;
    if (op_is_meta(target))
        return;
    double divisor = read_divisor(op, stack[2]);
    read_contiguous(op, &accumulator, target, &accumulator, "accumulator");
    read_contiguous(op, &shard, addend, &accumulator, "shard");
    OP_CHECK(accumulator.numel == shard.numel, "%s: accumulator has %" PRId64 " elements, shard %" PRId64, op,
             accumulator.numel, shard.numel);
    check_status(op, &accumulator,
                 kernels_for(&accumulator)
                     ->accumulate(accumulator.view.data, accumulator.view.dtype, shard.view.data,
                                  shard.view.dtype, shard.numel, divisor, tensor_kernel_stream(&shard.view)));
}

/* Read a contiguous CPU tensor of any dtype, and return its bytes. */
static int64_t read_bytes(const char *op, struct op_operand *operand, AtenTensorHandle tensor,
                          const char *argument) {
    op_read_operand(operand, tensor);
    OP_CHECK(operand->view.device == DEVICE_CPU, "%s: %s must be on the CPU", op, argument);
    OP_CHECK(operand->is_contiguous, "%s: %s must be contiguous", op, argument);
    return operand->numel * (int64_t)torch_abi.aoti_torch_dtype_element_size(operand->dtype_code);
}

/* Fill each output with its number of byte ranges of the sources, back to back. A range is three numbers:
 * source, start, nbytes. */
static void join_ranges(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {
    static const char op[] = "fsdp_c::join_ranges";
    OP_OWNED_LIST outputs = op_list_of(stack[0], true);
    OP_OWNED_LIST sources = op_list_of(stack[1], true);
    OP_OWNED_LIST ranges = op_list_of(stack[2], false);
    OP_OWNED_LIST counts = op_list_of(stack[3], false);
    OP_OWNED_MEMORY struct joined_source {
        const char *data;
        int64_t nbytes;
    } *read = NULL;
    struct op_operand operand;
    size_t next = 0;
    OP_READ_LISTS(&outputs, &sources, &ranges, &counts);
    if (outputs.count && op_is_meta(op_tensor(outputs.items[0])))
        return;
    OP_CHECK(ranges.count % 3 == 0, "%s: a range is three numbers, but there are %zu", op, ranges.count);
    OP_CHECK(counts.count == outputs.count, "%s: %zu outputs, but %zu counts", op, outputs.count,
             counts.count);
    read = op_alloc(sources.count, sizeof *read);
    for (size_t i = 0; i < sources.count; i++) {
        read[i].nbytes = read_bytes(op, &operand, op_tensor(sources.items[i]), "each of sources");
        read[i].data = operand.view.data;
    }
    for (size_t i = 0; i < outputs.count; i++) {
        int64_t rest = read_bytes(op, &operand, op_tensor(outputs.items[i]), "each of outputs");
        char *output = operand.view.data;
        OP_CHECK(op_int(counts.items[i]) >= 0 && (size_t)op_int(counts.items[i]) <= ranges.count / 3 - next,
                 "%s: more ranges counted than given", op);
        const size_t end = next + (size_t)op_int(counts.items[i]);
        pages_prefer_large(output, (size_t)rest);
        for (; next < end; next++) {
            const int64_t source = op_int(ranges.items[3 * next]), start = op_int(ranges.items[3 * next + 1]),
                          nbytes = op_int(ranges.items[3 * next + 2]);
            OP_CHECK(source >= 0 && (size_t)source < sources.count,
                     "%s: range %zu is of source %" PRId64 " of %zu", op, next, source, sources.count);
            check_range(op, start, nbytes, read[source].nbytes, "its source in bytes");
            OP_CHECK(nbytes <= rest,
                     "%s: range %zu has %" PRId64 " bytes, but output %zu has %" PRId64 " left", op, next,
                     nbytes, i, rest);
            if (nbytes > 0) {
                memcpy(output, read[source].data + start, (size_t)nbytes);
                output += nbytes;
                rest -= nbytes;
            }
        }
        OP_CHECK(rest == 0, "%s: the ranges leave %" PRId64 " bytes of output %zu unwritten", op, rest, i);
    }
    OP_CHECK(next == ranges.count / 3, "%s: ranges are left over", op);
}

static struct op ops[] = {
    {"pack_gradients", "(Tensor(a!) out, Tensor[] grads, int[] offsets, float divisor) -> ()", pack_gradients,
     OP_ON_ALL_DEVICES, false},
    {"accumulate_shard", "(Tensor(a!) accumulator, Tensor shard, float divisor) -> ()", accumulate_shard,
     OP_ON_ALL_DEVICES, false},
    {"join_ranges", "(Tensor(a!)[] outputs, Tensor[] sources, int[] ranges, int[] counts) -> ()", join_ranges,
     OP_ON_CPU, false},
};

int ops_init(void) {
    return ops_register(ops, sizeof ops / sizeof *ops);
}
