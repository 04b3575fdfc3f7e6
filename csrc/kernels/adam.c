/* kernel_adamw: one step of AdamW over many contiguous tensors, in one pass over each.
 *
 * [Note: as torch's] In the arithmetic dtype, where a fused product is rounded once, with its sum:
 *
 *   grad         negated to maximize
 *   exp_avg      fused(1 - beta1, grad - exp_avg) + exp_avg, or for beta1 <= 0.5 fused(-beta1, grad - exp_avg) + grad
 *   exp_avg_sq   fused((1 - beta2) * grad, grad) + exp_avg_sq * beta2
 *   param        param * (1 - lr * weight_decay) + (-lr / (1 - beta1^step)) * exp_avg / denominator
 *   denominator  sqrt(exp_avg_sq or the largest so far) / sqrt(1 - beta2^step) + eps
 *
 * Those are the bits of torch's fused AdamW where its vectors have fused products, but for the elements that its vectors
 * leave over. Coefficients are computed in fp64. */
#include <math.h>
#include <stddef.h>

#include "kernels/blocks.h"
#include "kernels/loops.h"

enum { ADAM_OPERANDS = ADAM_MAX_EXP_AVG_SQ + 1 };

struct adam_context {
    const struct adam_tensor *tensor;
    struct adam_numbers numbers;
    enum dtype dtype; /* that the loop runs in: of all operands, or the arithmetic's */
    int64_t most;     /* elements at once: as many as scratch holds, where a dtype differs */
};

static struct adam_numbers adam_numbers_of(const struct adamw_options *options, double step) {
    double correction1 = 1.0 - pow(options->beta1, step);
    double correction2 = 1.0 - pow(options->beta2, step);
    return (struct adam_numbers){
        .decay = 1.0 - options->lr * options->weight_decay,
        .step_size = -(options->lr / correction1),
        .grad_weight = 1.0 - options->beta1,
        .beta2 = options->beta2,
        .square_weight = 1.0 - options->beta2,
        .correction2_sqrt = sqrt(correction2),
        .eps = options->eps,
        .maximize = options->maximize,
    };
}

/* Operands of other dtypes than the loop's go through scratch, and back but for the gradient. */
static void adam_block(const struct adam_context *adam, int64_t begin, int64_t numel) {
    union block scratch[ADAM_OPERANDS];
    void *operands[ADAM_OPERANDS];
    char *memory[ADAM_OPERANDS];
    for (int i = 0; i < ADAM_OPERANDS; i++) {
        const struct tensor_view *view = &adam->tensor->operands[i];
        memory[i] = view->data ? (char *)view->data + begin * dtype_nbytes(view->dtype) : NULL;
        operands[i] = memory[i];
        if (memory[i] && view->dtype != adam->dtype) {
            operands[i] = scratch[i].bytes;
            cast_block(operands[i], adam->dtype, memory[i], view->dtype, numel);
        }
    }
    loops_active()->adamw[adam->dtype](operands, numel, &adam->numbers);
    for (int i = 0; i < ADAM_OPERANDS; i++) {
        if (operands[i] != memory[i] && i != ADAM_GRAD) {
            cast_block(memory[i], adam->tensor->operands[i].dtype, operands[i], adam->dtype, numel);
        }
    }
}

static enum status adam_check(const struct adam_tensor *tensor) {
    for (int i = 0; i < ADAM_OPERANDS; i++) {
        const struct tensor_view *view = &tensor->operands[i];
        if (!view->data && i == ADAM_MAX_EXP_AVG_SQ) {
            continue;
        }
        if (!dtype_is_known(view->dtype)) {
            return STATUS_UNSUPPORTED;
        }
    }
    return tensor->numel < 0 || !(tensor->step >= 1) ? STATUS_INVALID : STATUS_OK;
}

static struct adam_context adam_context_of(const struct adam_tensor *tensor, const struct adamw_options *options) {
    enum dtype dtype = tensor->operands[ADAM_PARAM].dtype;
    struct adam_context context = {tensor, adam_numbers_of(options, tensor->step), dtype,
                                   tensor->numel > 0 ? tensor->numel : 1};
    for (int i = 0; i < ADAM_OPERANDS; i++) {
        if (tensor->operands[i].data && tensor->operands[i].dtype != dtype) {
            context.dtype = dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
            context.most = BLOCK_NUMEL;
        }
    }
    return context;
}

struct adamw {
    const struct adam_tensor *tensors;
    const struct adamw_options *options;
};

static int64_t adam_numel(const void *context, int64_t tensor) {
    const struct adamw *adamw = context;
    return adamw->tensors[tensor].numel;
}

static void adam_part(void *context, int64_t tensor, int64_t begin, int64_t end) {
    const struct adamw *adamw = context;
    struct adam_context adam = adam_context_of(&adamw->tensors[tensor], adamw->options);
    for (int64_t i = begin; i < end; i += adam.most) {
        adam_block(&adam, i, end - i < adam.most ? end - i : adam.most);
    }
}

enum status kernel_adamw(const struct adam_tensor *tensors, int64_t num_tensors, const struct adamw_options *options,
                         const struct kernel_stream *stream) {
    struct adamw adamw = {tensors, options};
    for (int64_t i = 0; i < num_tensors; i++) {
        enum status status = adam_check(&tensors[i]);
        if (status != STATUS_OK) {
            return status;
        }
    }
    group_for(stream, &(struct group){num_tensors, adam_numel, adam_part, &adamw}, GRAIN_NUMEL / 4);
    return STATUS_OK;
}
