/* The ops over lists of tensors: byte ranges of some joined to others, checksums, AdamW. */
#include "torch/ops.h"

#include "base/pages.h"
#include "kernels/adam.h"
#include "torch/tensor.h"

#include <inttypes.h>

/* ---- byte ranges ---- */

/* Byte ranges of tensors: three numbers each, (source, start, nbytes). */
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

/* Copy `count` ranges from the `first` on, one behind the other. */
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

/* A tensor of these sizes for `count` ranges from the `first` on. */
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
    int64_t given = 0;
    for (size_t i = first; i < first + count; i++)
        given += op_int(numbers->items[3 * i + 2]);
    OP_CHECK(given == nbytes, "%s: ranges of %" PRId64 " bytes for a tensor of %" PRId64, call->name, given,
             nbytes);
    return op_empty(ndim, sizes, model.dtype_code, &model);
}

/* What the lists of fsdp_c::join_ranges say, checked: nothing reads beyond them afterwards. */
static void check_join(struct op_call *call, const struct op_list *counts, const struct op_list *likes,
                       const struct op_list *ndims, size_t num_sizes, size_t num_ranges) {
    OP_CHECK(counts->count == likes->count && ndims->count == likes->count,
             "%s: %zu counts, %zu ndims, but %zu tensors to be like", call->name, counts->count, ndims->count,
             likes->count);
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

/* fsdp_c::join_ranges: new tensors, each of byte ranges of the sources one behind the other. */
void op_join_ranges(StableIValue *stack, struct op_call *call) {
    OP_OWNED_LIST sources = op_list_of(stack[0], true);
    OP_OWNED_LIST numbers = op_list_of(stack[1], false);
    OP_OWNED_LIST counts = op_list_of(stack[2], false);
    OP_OWNED_LIST likes = op_list_of(stack[3], true);
    OP_OWNED_LIST ndims = op_list_of(stack[4], false);
    OP_OWNED_LIST sizes = op_list_of(stack[5], false);
    OP_OWNED_MEMORY struct op_operand *operands = NULL;
    OP_OWNED_LIST result = {.of_tensors = true}; /* until it is given away */
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

/* ---- checksums ---- */

/* Bytes of a contiguous tensor of any dtype. */
static struct byte_range read_bytes(struct op_call *call, struct op_operand *operand,
                                    AtenTensorHandle tensor) {
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

/* ---- AdamW ---- */

/* Contiguous, and of whole numbers of that size. */
static void read_integers(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                          size_t nbytes, const char *argument) {
    op_call_read_memory(call, operand, tensor, argument);
    bool is_integer = operand->view.dtype == DTYPE_OTHER &&
                      (size_t)torch_abi.aoti_torch_dtype_element_size(operand->dtype_code) == nbytes;
    OP_CHECK(is_integer && operand->is_contiguous, "%s: %s must be contiguous integers of %zu bits",
             call->name, argument, 8 * nbytes);
}

/* Contiguous operands of a step, one per parameter and of its size; codes, or numbers. */
static void read_adam_operands(struct op_call *call, const struct op_list *list, enum adam_operand operand,
                               struct adam_tensor *tensors, size_t count, bool is_coded,
                               const char *argument) {
    OP_CHECK(list->count == count, "%s: %zu params, but %zu %s", call->name, count, list->count, argument);
    for (size_t i = 0; i < count; i++) {
        struct op_operand read;
        if (is_coded)
            read_integers(call, &read, op_tensor(list->items[i]), sizeof(uint8_t), argument);
        else
            op_call_read_contiguous(call, &read, op_tensor(list->items[i]), argument);
        read.view.dtype = is_coded ? DTYPE_OTHER_1 : read.view.dtype;
        if (operand == ADAM_PARAM)
            tensors[i].numel = read.numel;
        OP_CHECK(read.numel == tensors[i].numel, "%s: params[%zu] has %" PRId64 " elements, %s[%zu] %" PRId64,
                 call->name, i, tensors[i].numel, argument, i, read.numel);
        tensors[i].operands[operand] = read.view;
    }
}

/* The low halves of masters, one of each parameter's size, or none at all. */
static void read_master_lows(struct op_call *call, const struct op_list *list, struct adam_tensor *tensors,
                             size_t count) {
    OP_CHECK(list->count == 0 || list->count == count, "%s: %zu params, but %zu master_lows", call->name,
             count, list->count);
    for (size_t i = 0; i < list->count; i++) {
        struct op_operand read;
        read_integers(call, &read, op_tensor(list->items[i]), sizeof(int16_t), "each of master_lows");
        OP_CHECK(read.numel == tensors[i].numel,
                 "%s: master_lows[%zu] must be of %" PRId64 " elements, as params[%zu]", call->name, i,
                 tensors[i].numel, i);
        OP_CHECK(tensors[i].operands[ADAM_PARAM].dtype == DTYPE_BFLOAT16,
                 "%s: params[%zu] must be bfloat16, as it has a master", call->name, i);
        tensors[i].master_low = read.view.data;
    }
}

/* One first index per parameter, and of stochastic rounding one stream; or none at all. */
static void read_streams(struct op_call *call, const struct op_list *streams, const struct op_list *indices,
                         struct adam_tensor *tensors, size_t count) {
    bool has_indices = indices->count == count || (indices->count == 0 && streams->count == 0);
    OP_CHECK(has_indices && (streams->count == count || streams->count == 0),
             "%s: %zu params, but %zu streams and %zu first_indices", call->name, count, streams->count,
             indices->count);
    for (size_t i = 0; i < indices->count; i++) {
        tensors[i].first_index = op_int(indices->items[i]);
        OP_CHECK(tensors[i].first_index >= 0, "%s: first_indices[%zu] must not be negative", call->name, i);
    }
    for (size_t i = 0; i < streams->count; i++) {
        OP_CHECK(!tensors[i].master_low, "%s: params[%zu] has a master, which is not rounded by chance",
                 call->name, i);
        tensors[i].is_stochastic = true;
        tensors[i].stream = (uint64_t)op_int(streams->items[i]);
    }
}

/* Of averages in 8 bits: those of all parameters for one list of averages after the other; or none at all. */
static void read_scales(struct op_call *call, const struct op_list *list, size_t num_averages,
                        struct adam_tensor *tensors, size_t count) {
    OP_CHECK(list->count == 0 || list->count == num_averages * count, "%s: %zu params, but %zu scales",
             call->name, count, list->count);
    for (size_t i = 0; i < list->count; i++) {
        struct op_operand read;
        struct adam_tensor *tensor = &tensors[i % count];
        int64_t num_blocks = adam_num_blocks(tensor->first_index, tensor->numel);
        op_call_read_contiguous(call, &read, op_tensor(list->items[i]), "each of scales");
        OP_CHECK(read.view.dtype == DTYPE_FLOAT32 && read.numel == num_blocks,
                 "%s: scales[%zu] must be float32 and of %" PRId64
                 " elements, one for each block of params[%zu]",
                 call->name, i, num_blocks, i % count);
        OP_CHECK(tensor->operands[ADAM_PARAM].dtype != DTYPE_FLOAT64,
                 "%s: params[%zu] must not be float64, as its averages are in 8 bits", call->name, i % count);
        tensor->scales[ADAM_EXP_AVG + i / count] = read.view.data;
    }
}

/* The steps taken so far, one float32 per parameter; the kernel counts them up. */
static void read_steps(struct op_call *call, const struct op_list *list, struct adam_tensor *tensors,
                       size_t count) {
    OP_CHECK(list->count == count, "%s: %zu params, but %zu steps", call->name, count, list->count);
    for (size_t i = 0; i < count; i++) {
        struct op_operand read;
        tensors[i].step = op_call_read_number(call, &read, op_tensor(list->items[i]), "each of steps");
    }
}

/* A learning rate in memory of the parameters' device, or none. */
static void read_lr(struct op_call *call, const struct op_list *list, struct adamw_options *options) {
    OP_CHECK(list->count <= 1, "%s: %zu learning rates", call->name, list->count);
    if (list->count == 1) {
        struct op_operand read;
        op_call_read(call, &read, op_tensor(list->items[0]), "lr");
        OP_CHECK(read.numel == 1, "%s: lr must have one element, not %" PRId64, call->name, read.numel);
        options->lr_memory = read.view.data;
        options->lr_dtype = read.view.dtype;
    }
}

/* fsdp_c::adamw_: a step of AdamW over every parameter that has elements; max_exp_avg_sqs is empty without
 * amsgrad, master_lows without masters, scales where averages are not in 8 bits, streams without stochastic
 * rounding, first_indices without both, lr_tensors where the learning rate is the number `lr`. */
void op_adamw(StableIValue *stack, struct op_call *call) {
    static const char *const names[] = {"params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"};
    enum { NUM_LISTS = sizeof names / sizeof names[0] };
    OP_OWNED_LIST params = op_list_of(stack[0], true);
    OP_OWNED_LIST grads = op_list_of(stack[1], true);
    OP_OWNED_LIST exp_avgs = op_list_of(stack[2], true);
    OP_OWNED_LIST exp_avg_sqs = op_list_of(stack[3], true);
    OP_OWNED_LIST max_exp_avg_sqs = op_list_of(stack[4], true);
    OP_OWNED_LIST low_list = op_list_of(stack[NUM_LISTS], true);
    OP_OWNED_LIST scale_list = op_list_of(stack[NUM_LISTS + 1], true);
    OP_OWNED_LIST step_list = op_list_of(stack[NUM_LISTS + 2], true);
    OP_OWNED_LIST lr_list = op_list_of(stack[NUM_LISTS + 3], true);
    OP_OWNED_MEMORY struct adam_tensor *tensors = NULL;
    struct op_list *const lists[NUM_LISTS] = {&params, &grads, &exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs};
    OP_READ_LISTS(&params, &grads, &exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs, &low_list, &scale_list,
                  &step_list, &lr_list);
    const StableIValue *numbers = stack + NUM_LISTS + 4;
    OP_OWNED_LIST streams = op_list_of(numbers[6], false);
    OP_OWNED_LIST first_indices = op_list_of(numbers[7], false);
    OP_READ_LISTS(&streams, &first_indices);
    struct adamw_options options = {
        .lr = op_float(numbers[0]),
        .beta1 = op_float(numbers[1]),
        .beta2 = op_float(numbers[2]),
        .eps = op_float(numbers[3]),
        .weight_decay = op_float(numbers[4]),
        .maximize = op_bool(numbers[5]),
    };
    tensors = op_alloc(params.count, sizeof *tensors);
    for (int i = 0; i < NUM_LISTS; i++)
        if (i != ADAM_MAX_EXP_AVG_SQ || lists[i]->count > 0)
            read_adam_operands(call, lists[i], (enum adam_operand)i, tensors, params.count,
                               i >= ADAM_EXP_AVG && scale_list.count > 0, names[i]);
    read_master_lows(call, &low_list, tensors, params.count);
    read_streams(call, &streams, &first_indices, tensors, params.count);
    read_scales(call, &scale_list, max_exp_avg_sqs.count > 0 ? 3 : 2, tensors, params.count);
    read_steps(call, &step_list, tensors, params.count);
    read_lr(call, &lr_list, &options);
    if (!call->is_meta && params.count > 0) {
        op_call_check(call,
                      op_call_kernels(call)->adamw(tensors, (int64_t)params.count, &options,
                                                   tensor_kernel_stream(&tensors[0].operands[ADAM_PARAM])));
    }
}
