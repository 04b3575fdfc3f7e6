#include "torch/op_call.h"

#include <inttypes.h>

#include "torch/tensor.h"

const struct kernel_table *op_call_kernels(struct op_call *call) {
    const char *why = NULL;
    return kernels_of(call->device, call->device_index, &why);
}

void op_call_check(struct op_call *call, enum status status) {
    OP_CHECK(status != STATUS_UNSUPPORTED, "%s: no kernel for these dtypes", call->name);
    OP_CHECK(status != STATUS_DEVICE, "%s: the device refused: %s", call->name,
             op_call_kernels(call)->device_error());
    OP_CHECK(status == STATUS_OK, "%s: an argument is out of its domain", call->name);
}

void op_call_read_memory(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                         const char *argument) {
    op_read_operand(operand, tensor);
    bool has_memory = operand->numel == 0 || operand->view.data;
    bool is_there = (operand->view.device == DEVICE_CPU) == call->is_cpu &&
                    (call->is_cpu || !call->has_device ||
                     (operand->view.device == call->device && operand->device_index == call->device_index));
    OP_CHECK(call->is_meta || is_there, "%s: %s must be on %s", call->name, argument,
             call->is_cpu ? "the CPU" : "the device that the other arguments are on");
    OP_CHECK(call->is_meta || has_memory, "%s: the storage of %s is freed", call->name, argument);
    call->has_device = true;
    call->device = operand->view.device;
    call->device_index = operand->device_index;
}

void op_call_read(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                  const char *argument) {
    op_call_read_memory(call, operand, tensor, argument);
    OP_CHECK(dtype_is_known(operand->view.dtype), "%s: %s must be float32, float64, bfloat16 or float16",
             call->name, argument);
}

void op_call_read_contiguous(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                             const char *argument) {
    op_call_read(call, operand, tensor, argument);
    OP_CHECK(operand->is_contiguous, "%s: %s must be contiguous", call->name, argument);
}

void op_call_read_flat(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                       const char *argument) {
    op_call_read_contiguous(call, operand, tensor, argument);
    OP_CHECK(operand->view.ndim == 1, "%s: %s must have one dimension, not %d", call->name, argument,
             (int)operand->view.ndim);
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

float *op_call_read_number(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                           const char *argument) {
    op_call_read(call, operand, tensor, argument);
    OP_CHECK(operand->view.dtype == DTYPE_FLOAT32 && operand->numel == 1, "%s: %s must be one float32",
             call->name, argument);
    return operand->view.data;
}

void op_call_check_range(struct op_call *call, int64_t offset, int64_t numel, int64_t total,
                         const char *what) {
    OP_CHECK(offset >= 0 && numel >= 0 && offset <= total && numel <= total - offset,
             "%s: elements "
             "[%" PRId64 ", %" PRId64 ") lie outside of %s, which has %" PRId64,
             call->name, offset, offset + numel, what, total);
}
