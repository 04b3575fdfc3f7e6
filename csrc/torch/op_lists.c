/* The ops over lists of tensors: checksums, AdamW. */
#include "torch/ops.h"

#include "kernels/adam.h"
#include "torch/tensor.h"

#include <inttypes.h>

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
