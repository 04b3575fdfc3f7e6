/* The ops over lists of tensors: unscaling, checksums. */
#include "torch/op_call.h"
#include "torch/tensor.h"

#include <inttypes.h>

/* Views and sizes of contiguous tensors, in two arrays that the caller owns. */
static void read_all(struct op_call *call, const struct op_list *list, struct tensor_view *views, int64_t *numels) {
    for (size_t i = 0; i < list->count; i++) {
        struct op_operand operand;
        op_call_read_contiguous(call, &operand, op_tensor(list->items[i]), "each of tensors");
        views[i] = operand.view;
        numels[i] = operand.numel;
    }
}

/* fsdp_c::unscale_: every tensor times one number, and 1 into found_inf if an element was inf or NaN. */
void op_unscale(StableIValue *stack, struct op_call *call) {
    OP_OWNED_LIST tensors = op_list_of(stack[0], true);
    OP_OWNED found = op_tensor(stack[1]);
    OP_OWNED inverse = op_tensor(stack[2]);
    OP_OWNED_MEMORY struct tensor_view *views = NULL;
    OP_OWNED_MEMORY int64_t *numels = NULL;
    op_read_list(&tensors);
    struct op_operand found_inf;
    struct op_operand inverse_scale;
    float *found_number = op_call_read_number(call, &found_inf, found, "found_inf");
    const float *factor = op_call_read_number(call, &inverse_scale, inverse, "inverse_scale");
    views = op_alloc(tensors.count, sizeof *views);
    numels = op_alloc(tensors.count, sizeof *numels);
    read_all(call, &tensors, views, numels);
    if (!call->is_meta) {
        op_call_check(call, op_call_kernels(call)->unscale(views, numels, (int64_t)tensors.count, factor, found_number,
                                                           tensor_kernel_stream(&found_inf.view)));
    }
}

/* Bytes of a contiguous tensor of any dtype. */
static struct byte_range read_bytes(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor) {
    op_call_read_memory(call, operand, tensor, "each of tensors");
    OP_CHECK(operand->is_contiguous, "%s: each of tensors must be contiguous", call->name);
    int64_t element_nbytes = (int64_t)torch_abi.aoti_torch_dtype_element_size(operand->dtype_code);
    return (struct byte_range){operand->view.data, operand->numel * element_nbytes};
}

/* fsdp_c::checksums: 64 bits over the memory of each tensor, as int64 on its device, and the same on any. */
void op_checksums(StableIValue *stack, struct op_call *call) {
    OP_OWNED_LIST tensors = op_list_of(stack[0], true);
    OP_OWNED_MEMORY struct byte_range *ranges = NULL;
    OP_OWNED output = NULL;
    struct op_operand operand = {0};
    op_read_list(&tensors);
    OP_CHECK(tensors.count > 0, "%s: tensors must not be empty", call->name);
    ranges = op_alloc(tensors.count, sizeof *ranges);
    for (size_t i = 0; i < tensors.count; i++)
        ranges[i] = read_bytes(call, &operand, op_tensor(tensors.items[i]));
    int64_t count = (int64_t)tensors.count;
    output = op_empty(1, &count, torch_abi.aoti_torch_dtype_int64(), &operand);
    if (!call->is_meta) {
        struct op_operand result;
        op_read_operand(&result, output);
        op_call_check(call, op_call_kernels(call)->checksums(result.view.data, ranges, count,
                                                             tensor_kernel_stream(&operand.view)));
    }
    stack[0] = op_give(&output);
}
