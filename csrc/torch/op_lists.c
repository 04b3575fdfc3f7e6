/* The op over lists of tensors: join byte ranges of sources into new tensors. */
#include "torch/ops.h"

#include "base/pages.h"
#include "torch/tensor.h"

#include <inttypes.h>

/* ---- byte ranges ---- */

/* Byte ranges of tensors: three numbers per range, (source, start, nbytes). */
struct byte_ranges {
    const struct op_list *numbers;
    const struct op_operand *sources;
    size_t num_sources;
};

static void check_range(struct op_call *call, const struct byte_ranges *ranges, size_t index) {
    const int64_t source = op_int(ranges->numbers->items[3 * index]);
    OP_CHECK(source >= 0 && (size_t)source < ranges->num_sources,
             "%s: range %zu is of source %" PRId64 " of %zu", call->name, index, source, ranges->num_sources);
    const struct op_operand *operand = &ranges->sources[source];
    const int64_t element_nbytes = (int64_t)torch_abi.aoti_torch_dtype_element_size(operand->dtype_code);
    op_call_check_range(call, op_int(ranges->numbers->items[3 * index + 1]),
                        op_int(ranges->numbers->items[3 * index + 2]), operand->numel * element_nbytes,
                        "its source in bytes");
}

/* Copy `count` ranges, from index `first` on, back to back. */
static void copy_bytes(char *output, const struct byte_ranges *ranges, size_t first, size_t count) {
    for (size_t i = first; i < first + count; i++) {
        const char *source = ranges->sources[op_int(ranges->numbers->items[3 * i])].view.data;
        const int64_t nbytes = op_int(ranges->numbers->items[3 * i + 2]);
        if (nbytes > 0) {
            memcpy(output, source + op_int(ranges->numbers->items[3 * i + 1]), (size_t)nbytes);
            output += nbytes;
        }
    }
}

/* Return a new tensor of `sizes` for `count` ranges from index `first` on, whose bytes must fill the
 * tensor. */
static AtenTensorHandle new_joined(struct op_call *call, const struct op_list *numbers, size_t first,
                                   size_t count, const int64_t *sizes, int64_t ndim, AtenTensorHandle like) {
    struct op_operand model;
    op_read_operand(&model, like);
    int64_t nbytes = (int64_t)torch_abi.aoti_torch_dtype_element_size(model.dtype_code);
    for (int64_t dim = 0; dim < ndim; dim++) {
        OP_CHECK(sizes[dim] >= 0 && (sizes[dim] == 0 || nbytes <= INT64_MAX / sizes[dim]),
                 "%s: sizes out of range", call->name);
        nbytes *= sizes[dim];
    }
    int64_t range_nbytes = 0;
    for (size_t i = first; i < first + count; i++)
        range_nbytes += op_int(numbers->items[3 * i + 2]);
    OP_CHECK(range_nbytes == nbytes, "%s: ranges of %" PRId64 " bytes for a tensor of %" PRId64, call->name,
             range_nbytes, nbytes);
    return op_empty(ndim, sizes, model.dtype_code, &model);
}

/* Check the lists of fsdp_c::join_ranges, so that later reads stay inside them. */
static void check_join(struct op_call *call, const struct op_list *counts, const struct op_list *likes,
                       const struct op_list *ndims, size_t num_sizes, size_t num_ranges) {
    OP_CHECK(counts->count == likes->count && ndims->count == likes->count,
             "%s: counts has %zu elements and ndims %zu, but likes has %zu tensors", call->name,
             counts->count, ndims->count, likes->count);
    int64_t ranges = 0, sizes = 0;
    for (size_t i = 0; i < counts->count; i++) {
        const int64_t count = op_int(counts->items[i]), ndim = op_int(ndims->items[i]);
        OP_CHECK(count >= 0 && count <= (int64_t)num_ranges - ranges, "%s: more ranges counted than given",
                 call->name);
        OP_CHECK(ndim >= 0 && ndim <= OP_MAX_NDIM && ndim <= (int64_t)num_sizes - sizes,
                 "%s: more dimensions counted than sizes given", call->name);
        ranges += count;
        sizes += ndim;
    }
    OP_CHECK(ranges == (int64_t)num_ranges && sizes == (int64_t)num_sizes,
             "%s: ranges or sizes are left over", call->name);
}

/* fsdp_c::join_ranges: join byte ranges of the sources, back to back, into new tensors. */
void op_join_ranges(StableIValue *stack, struct op_call *call) {
    OP_OWNED_LIST sources = op_list_of(stack[0], true);
    OP_OWNED_LIST numbers = op_list_of(stack[1], false);
    OP_OWNED_LIST counts = op_list_of(stack[2], false);
    OP_OWNED_LIST likes = op_list_of(stack[3], true);
    OP_OWNED_LIST ndims = op_list_of(stack[4], false);
    OP_OWNED_LIST sizes = op_list_of(stack[5], false);
    OP_OWNED_MEMORY struct op_operand *operands = NULL;
    OP_OWNED_LIST result = {.of_tensors = true}; /* owned until it is the output */
    OP_READ_LISTS(&sources, &numbers, &counts, &likes, &ndims, &sizes);
    OP_CHECK(numbers.count % 3 == 0, "%s: a range is three numbers, but there are %zu", call->name,
             numbers.count);
    check_join(call, &counts, &likes, &ndims, sizes.count, numbers.count / 3);
    operands = op_alloc(sources.count, sizeof *operands);
    for (size_t i = 0; i < sources.count; i++) {
        op_read_operand(&operands[i], op_tensor(sources.items[i]));
        OP_CHECK(operands[i].is_contiguous, "%s: each of sources must be contiguous", call->name);
        OP_CHECK(call->is_meta || operands[i].view.device == DEVICE_CPU,
                 "%s: each of sources must be on the CPU", call->name);
    }
    const struct byte_ranges ranges = {&numbers, operands, sources.count};
    for (size_t i = 0; i < numbers.count / 3; i++)
        check_range(call, &ranges, i);
    OP_CALL(torch_abi.torch_new_list_reserve_size(likes.count, &result.list));
    size_t first = 0, dim = 0;
    for (size_t i = 0; i < likes.count; i++) {
        const size_t count = (size_t)op_int(counts.items[i]);
        OP_OWNED joined = new_joined(call, &numbers, first, count, (const int64_t *)sizes.items + dim,
                                     op_int(ndims.items[i]), op_tensor(likes.items[i]));
        if (!call->is_meta) {
            struct op_operand output;
            op_read_operand(&output, joined);
            pages_prefer_large(output.view.data,
                               (size_t)output.numel *
                                   torch_abi.aoti_torch_dtype_element_size(output.dtype_code));
            copy_bytes(output.view.data, &ranges, first, count);
        }
        op_push(result.list, &joined);
        first += count;
        dim += (size_t)op_int(ndims.items[i]);
    }
    stack[0] = (StableIValue)(uintptr_t)result.list;
    result.list = NULL;
}
