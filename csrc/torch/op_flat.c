/* The ops over one flat tensor: pack, cast and accumulate. */
#include "torch/ops.h"
#include "torch/tensor.h"

#include <inttypes.h>

/* Read each gradient with its offset into an output of `numel` elements. Offsets ascend without overlap. */
static void read_gradients(struct op_call *call, const struct op_list *grads, const struct op_list *offsets,
                           int64_t numel, struct pack_source *sources) {
    int64_t end = 0;
    for (size_t i = 0; i < grads->count; i++) {
        struct op_operand grad;
        op_call_read(call, &grad, op_tensor(grads->items[i]), "each of grads");
        int64_t offset = op_int(offsets->items[i]);
        OP_CHECK(offset >= end,
                 "%s: grad %zu begins at %" PRId64 ", before the end of the previous grad at %" PRId64,
                 call->name, i, offset, end);
        op_call_check_range(call, offset, grad.numel, numel, "out");
        sources[i] = (struct pack_source){.view = grad.view, .numel = grad.numel, .offset = offset};
        end = offset + grad.numel;
    }
}

/* fsdp_c::pack_gradients: cast, divide and flatten in one pass; zero the elements without a gradient. */
void op_pack_gradients(StableIValue *stack, struct op_call *call) {
    OP_OWNED tensor = op_tensor(stack[0]);
    OP_OWNED_LIST grads = op_list_of(stack[1], true);
    OP_OWNED_LIST offsets = op_list_of(stack[2], false);
    OP_OWNED_MEMORY struct pack_source *sources = NULL;
    OP_READ_LISTS(&grads, &offsets);
    double divisor = op_call_read_divisor(call, stack[3]);
    struct op_operand out;
    op_call_read_contiguous(call, &out, tensor, "out");
    OP_CHECK(out.view.ndim == 1, "%s: out must have one dimension, not %d", call->name, (int)out.view.ndim);
    OP_CHECK(grads.count == offsets.count, "%s: %zu grads, but %zu offsets", call->name, grads.count,
             offsets.count);
    sources = op_alloc(grads.count, sizeof *sources);
    read_gradients(call, &grads, &offsets, out.numel, sources);
    op_call_pack(call, &out, sources, grads.count, divisor);
}

/* fsdp_c::cast_divide: cast and divide into a new contiguous tensor of the same shape. */
void op_cast_divide(StableIValue *stack, struct op_call *call) {
    OP_OWNED tensor = op_tensor(stack[0]);
    OP_OWNED output = NULL;
    double divisor = op_call_read_divisor(call, stack[1]);
    int32_t dtype = op_call_read_dtype(call, stack[2]);
    struct op_operand input;
    op_call_read(call, &input, tensor, "input");
    output = op_empty(input.view.ndim, input.view.sizes, dtype, &input);
    struct op_operand result;
    op_read_operand(&result, output);
    struct pack_source source = {.view = input.view, .numel = input.numel};
    op_call_pack(call, &result, &source, 1, divisor);
    stack[0] = op_move(&output);
}

/* fsdp_c::accumulate_shard: accumulator += shard / divisor; the quotient is rounded to the shard's dtype. */
void op_accumulate_shard(StableIValue *stack, struct op_call *call) {
    OP_OWNED target = op_tensor(stack[0]);
    OP_OWNED addend = op_tensor(stack[1]);
    double divisor = op_call_read_divisor(call, stack[2]);
    struct op_operand accumulator;
    op_call_read_contiguous(call, &accumulator, target, "accumulator");
    struct op_operand input;
    op_call_read_contiguous(call, &input, addend, "shard");
    OP_CHECK(accumulator.numel == input.numel, "%s: accumulator has %" PRId64 " elements, shard %" PRId64,
             call->name, accumulator.numel, input.numel);
    if (!call->is_meta) {
        op_call_check(call, op_call_kernels(call)->accumulate(accumulator.view.data, accumulator.view.dtype,
                                                              input.view.data, input.view.dtype, input.numel,
                                                              divisor, tensor_kernel_stream(&input.view)));
    }
}
