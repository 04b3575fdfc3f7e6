/* The ops over one flat tensor: flatten, unflatten, shard, pack, cast and accumulate. */
#include "torch/ops.h"
#include "torch/tensor.h"

#include <inttypes.h>

static int64_t align_up(int64_t value, int64_t alignment) {
    int64_t excess = alignment > 1 ? value % alignment : 0;
    return excess ? value + alignment - excess : value;
}

/* fsdp_c::flatten: align each tensor to aligned_numel elements; zero the gaps and the end up to
 * padded_numel. */
void op_flatten(StableIValue *stack, struct op_call *call) {
    OP_OWNED_LIST tensors = op_list_of(stack[0], true);
    OP_OWNED_MEMORY struct pack_source *sources = NULL;
    OP_OWNED output = NULL;
    op_read_list(&tensors);
    int64_t aligned_numel = op_int(stack[1]);
    int64_t padded_numel = op_int(stack[2]);
    int32_t dtype = op_call_read_dtype(call, stack[3]);
    OP_CHECK(tensors.count > 0, "%s: tensors must not be empty", call->name);
    OP_CHECK(aligned_numel >= 0, "%s: aligned_numel must not be negative, not %" PRId64, call->name,
             aligned_numel);
    sources = op_alloc(tensors.count, sizeof *sources);
    int64_t end = 0;
    for (size_t i = 0; i < tensors.count; i++) {
        struct op_operand operand;
        op_call_read(call, &operand, op_tensor(tensors.items[i]), "each of tensors");
        sources[i] = (struct pack_source){
            .view = operand.view, .numel = operand.numel, .offset = align_up(end, aligned_numel)};
        end = sources[i].offset + operand.numel;
    }
    OP_CHECK(padded_numel >= end, "%s: padded_numel is %" PRId64 ", but the tensors end at %" PRId64,
             call->name, padded_numel, end);
    struct op_operand like = {0};
    op_read_operand(&like, op_tensor(tensors.items[0]));
    output = op_empty(1, &padded_numel, dtype, &like);
    struct op_operand flat;
    op_read_operand(&flat, output);
    op_call_pack(call, &flat, sources, tensors.count, 1.0);
    stack[0] = op_move(&output);
}

/* Copy `numel` elements of a flat tensor, from `start` on, into a new zero-padded tensor of
 * `numel_padded`. */
static AtenTensorHandle copy_part(struct op_call *call, const struct op_operand *flat, int64_t start,
                                  int64_t numel, int64_t numel_padded, int32_t dtype) {
    OP_OWNED part = op_empty(1, &numel_padded, dtype, flat);
    struct op_operand output;
    op_read_operand(&output, part);
    struct pack_source source = {.view = flat->view, .numel = numel};
    source.view.sizes = &numel;
    if (!call->is_meta && flat->view.data)
        source.view.data = (char *)flat->view.data + start * dtype_nbytes(flat->view.dtype);
    op_call_pack(call, &output, &source, 1, 1.0);
    return op_tensor(op_move(&part));
}

/* fsdp_c::unflatten: copy each segment into a new 1-D tensor. */
void op_unflatten(StableIValue *stack, struct op_call *call) {
    OP_OWNED tensor = op_tensor(stack[0]);
    OP_OWNED_LIST offsets = op_list_of(stack[1], false);
    OP_OWNED_LIST numels = op_list_of(stack[2], false);
    OP_OWNED_LIST result = {.of_tensors = true}; /* owned until it is the output */
    OP_READ_LISTS(&offsets, &numels);
    struct op_operand flat;
    op_call_read_flat(call, &flat, tensor, "flat");
    OP_CHECK(offsets.count == numels.count, "%s: %zu offsets, but %zu numels", call->name, offsets.count,
             numels.count);
    for (size_t i = 0; i < offsets.count; i++)
        op_call_check_range(call, op_int(offsets.items[i]), op_int(numels.items[i]), flat.numel, "flat");
    OP_CALL(torch_abi.torch_new_list_reserve_size(offsets.count, &result.list));
    for (size_t i = 0; i < offsets.count; i++) {
        int64_t numel = op_int(numels.items[i]);
        AtenTensorHandle part =
            copy_part(call, &flat, op_int(offsets.items[i]), numel, numel, flat.dtype_code);
        op_push(result.list, &part);
    }
    stack[0] = (StableIValue)(uintptr_t)result.list;
    result.list = NULL;
}

/* fsdp_c::shard: cast this rank's chunk and zero-pad it on the right to the size of rank 0's chunk. */
void op_shard(StableIValue *stack, struct op_call *call) {
    OP_OWNED tensor = op_tensor(stack[0]);
    int64_t rank = op_int(stack[1]);
    int64_t world_size = op_int(stack[2]);
    int32_t dtype = op_call_read_dtype(call, stack[3]);
    struct op_operand flat;
    op_call_read_flat(call, &flat, tensor, "flat");
    OP_CHECK(world_size > 0, "%s: world_size must be positive, not %" PRId64, call->name, world_size);
    OP_CHECK(rank >= 0 && rank < world_size, "%s: rank %" PRId64 " is outside of a world of %" PRId64,
             call->name, rank, world_size);
    int64_t shard_numel = (flat.numel + world_size - 1) / world_size;
    int64_t start = shard_numel * rank < flat.numel ? shard_numel * rank : flat.numel;
    int64_t valid_numel = flat.numel - start < shard_numel ? flat.numel - start : shard_numel;
    OP_OWNED output = copy_part(call, &flat, start, valid_numel, shard_numel, dtype);
    stack[0] = op_move(&output);
}

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
    op_call_read_flat(call, &out, tensor, "out");
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
