/* kernel_adamw: one step of AdamW over many contiguous tensors, in one pass over each.
 *
 * [Note: as torch's] In the arithmetic dtype, where a fused product is rounded once, with its sum:
 *
 *   grad         negated to maximize
 *   exp_avg      fused(1 - beta1, grad - exp_avg) + exp_avg,
 *                or for beta1 <= 0.5 fused(-beta1, grad - exp_avg) + grad
 *   exp_avg_sq   fused((1 - beta2) * grad, grad) + exp_avg_sq * beta2
 *   param        param * (1 - lr * weight_decay) + (-lr / (1 - beta1^step)) * exp_avg / denominator
 *   denominator  sqrt(exp_avg_sq or the largest so far) / sqrt(1 - beta2^step) + eps
 *
 * Those are the bits of torch's fused AdamW where its vectors have fused products, but for the elements that
 * its vectors leave over. Coefficients are computed in fp64. */
#include <stddef.h>
#include <string.h>

#include "kernels/adam.h"
#include "kernels/blocks.h"
#include "kernels/loops.h"

struct adam_context {
    const struct adam_tensor *tensor;
    struct adam_numbers numbers;
    enum dtype dtype; /* that the loop runs in: of all operands, or the arithmetic's */
    int64_t most;     /* elements at once: a block of averages in 8 bits, or what scratch holds */
    uint64_t key;     /* of stochastic rounding */
};

/* Elements of the first block of averages in 8 bits that lie before the tensor. */
static int64_t adam_before(const struct adam_tensor *tensor) {
    return tensor->scales[ADAM_EXP_AVG] ? tensor->first_index % STATE_BLOCK_NUMEL : 0;
}

/* Between the operand's memory and scratch, in which it has the loop's dtype, or its 8 bits. */
static void adam_load(const struct adam_context *adam, int operand, void *scratch, const void *memory,
                      int64_t begin, int64_t numel) {
    const struct adam_tensor *tensor = adam->tensor;
    enum dtype dtype = tensor->operands[operand].dtype;
    if (tensor->master_low && operand == ADAM_PARAM)
        loops_active()->join_masters(scratch, memory, tensor->master_low + begin, numel);
    else
        cast_block(scratch, tensor->scales[operand] ? dtype : adam->dtype, memory, dtype, numel);
}

static void adam_store(const struct adam_context *adam, int operand, void *memory, const void *scratch,
                       int64_t begin, int64_t numel) {
    const struct adam_tensor *tensor = adam->tensor;
    enum dtype dtype = tensor->operands[operand].dtype;
    if (tensor->master_low && operand == ADAM_PARAM)
        loops_active()->split_masters(memory, tensor->master_low + begin, scratch, numel);
    else if (tensor->is_stochastic && dtype == DTYPE_BFLOAT16)
        loops_active()->draw_bfloat16(memory, scratch, (int)numel, tensor->first_index + begin, adam->key,
                                      operand);
    else
        cast_block(memory, dtype, scratch, tensor->scales[operand] ? dtype : adam->dtype, numel);
}

/* Operands of other dtypes than the loop's, and masters, go through scratch, and back but for the gradient;
 * so do all of a part of a block of averages in 8 bits, with zeros behind. */
static void adam_block(const struct adam_context *adam, int64_t begin, int64_t numel) {
    const struct loops *loops = loops_active();
    const struct adam_tensor *tensor = adam->tensor;
    bool is_coded = tensor->scales[ADAM_EXP_AVG] != NULL;
    bool is_part = is_coded && numel < STATE_BLOCK_NUMEL;
    _Alignas(64) union block scratch[ADAM_OPERANDS];
    void *operands[ADAM_OPERANDS];
    char *memory[ADAM_OPERANDS];
    float *scales[ADAM_OPERANDS];
    for (int i = 0; i < ADAM_OPERANDS; i++) {
        const struct tensor_view *view = &tensor->operands[i];
        memory[i] = view->data ? (char *)view->data + begin * dtype_nbytes(view->dtype) : NULL;
        operands[i] = memory[i];
        scales[i] = tensor->scales[i];
        if (scales[i])
            scales[i] += (adam_before(tensor) + begin) / STATE_BLOCK_NUMEL;
        bool differs = view->dtype != adam->dtype && !tensor->scales[i];
        if (memory[i] && (differs || is_part)) {
            operands[i] = scratch[i].bytes;
            if (is_part)
                memset(operands[i], 0, STATE_BLOCK_NUMEL * sizeof(float));
            adam_load(adam, i, operands[i], memory[i], begin, numel);
        }
    }
    if (is_coded)
        loops->adamw_coded[adam->dtype](operands, scales, &adam->numbers);
    else if (tensor->is_stochastic && adam->dtype == DTYPE_BFLOAT16)
        loops->adamw_drawn(operands, numel, &adam->numbers, tensor->first_index + begin, adam->key);
    else
        loops->adamw[adam->dtype](operands, numel, &adam->numbers);
    for (int i = 0; i < ADAM_OPERANDS; i++)
        if (operands[i] != memory[i] && i != ADAM_GRAD)
            adam_store(adam, i, memory[i], operands[i], begin, numel);
}

static struct adam_context adam_context_of(const struct adam_tensor *tensor,
                                           const struct adamw_options *options, double lr) {
    double step = (double)*tensor->step;
    enum dtype dtype = tensor->operands[ADAM_PARAM].dtype;
    bool is_coded = tensor->scales[ADAM_EXP_AVG] != NULL;
    bool differs = tensor->master_low || (is_coded && (tensor->is_stochastic || dtype == DTYPE_FLOAT16));
    for (int i = 0; i < ADAM_OPERANDS; i++)
        if (tensor->operands[i].data && tensor->operands[i].dtype != dtype && !tensor->scales[i])
            differs = true;
    if (differs)
        dtype = dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
    return (struct adam_context){
        .tensor = tensor,
        .numbers = adam_numbers_of(options, lr, step + 1.0),
        .dtype = dtype,
        .most = is_coded            ? STATE_BLOCK_NUMEL
                : differs           ? BLOCK_NUMEL
                : tensor->numel > 0 ? tensor->numel
                                    : 1,
        .key = draw_key(tensor->stream, step),
    };
}

struct adamw {
    const struct adam_tensor *tensors;
    int64_t num_tensors;
    const struct adamw_options *options;
    double lr;
};

/* Where threads that meet at `position` do so, as no block of averages in 8 bits is divided. */
static int64_t adam_meeting(const struct adam_tensor *tensor, int64_t position) {
    int64_t before = adam_before(tensor);
    if (!tensor->scales[ADAM_EXP_AVG] || position == 0)
        return position;
    int64_t end = adam_num_blocks(before, position) * STATE_BLOCK_NUMEL - before;
    return end < tensor->numel ? end : tensor->numel;
}

static void adam_part(const struct adamw *adamw, const struct adam_tensor *tensor, int64_t begin,
                      int64_t end) {
    struct adam_context adam = adam_context_of(tensor, adamw->options, adamw->lr);
    end = adam_meeting(tensor, end);
    for (int64_t next, i = adam_meeting(tensor, begin); i < end; i = next) {
        next = i + adam.most - (adam_before(tensor) + i) % adam.most;
        next = next < end ? next : end;
        int64_t same_half = ((int64_t)1 << 32) - (uint32_t)(tensor->first_index + i);
        next = next - i > same_half ? i + same_half : next; /* for what is drawn */
        adam_block(&adam, i, next - i);
    }
}

/* Of all tensors as one range, so that threads share their elements and not the tensors. */
static void adam_range(int64_t begin, int64_t end, void *context) {
    const struct adamw *adamw = context;
    int64_t start = 0;
    for (int64_t i = 0; i < adamw->num_tensors && start < end; i++) {
        int64_t numel = adamw->tensors[i].numel;
        int64_t from = begin > start ? begin - start : 0;
        int64_t to = end - start < numel ? end - start : numel;
        if (from < to)
            adam_part(adamw, &adamw->tensors[i], from, to);
        start += numel;
    }
}

static bool adam_steps_are_counts(const struct adam_tensor *tensors, int64_t num_tensors) {
    for (int64_t i = 0; i < num_tensors; i++)
        if (!(*tensors[i].step >= 0))
            return false;
    return true;
}

static double adam_lr(const struct adamw_options *options) {
    double lr = options->lr;
    if (options->lr_memory)
        kernel_cast_divide(&lr, DTYPE_FLOAT64, options->lr_memory, options->lr_dtype, 1, 1.0, NULL);
    return lr;
}

enum status kernel_adamw(const struct adam_tensor *tensors, int64_t num_tensors,
                         const struct adamw_options *options, const struct kernel_stream *stream) {
    enum status status = adam_check(tensors, num_tensors, options);
    if (status != STATUS_OK || num_tensors == 0)
        return status;
    if (!adam_steps_are_counts(tensors, num_tensors))
        return STATUS_INVALID;
    struct adamw adamw = {tensors, num_tensors, options, adam_lr(options)};
    int64_t total = 0;
    for (int64_t i = 0; i < num_tensors; i++)
        total += tensors[i].numel;
    stream_for(stream, total, GRAIN_NUMEL / 4, adam_range, &adamw);
    for (int64_t i = 0; i < num_tensors; i++)
        *tensors[i].step += 1.0f;
    return STATUS_OK;
}
