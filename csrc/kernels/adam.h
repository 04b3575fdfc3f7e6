/* What the CPU's and the GPU's AdamW share: the coefficients of a step and what is refused. adam.c gives the
 * formula. */
#ifndef FSDP_KERNELS_ADAM_H
#define FSDP_KERNELS_ADAM_H

#include <math.h>

#include "kernels/kernels.h"

enum { ADAM_OPERANDS = ADAM_MAX_EXP_AVG_SQ + 1 };

struct adam_numbers {
    double decay;
    double step_size;
    double grad_weight;
    double beta2;
    double square_weight;
    double correction2_sqrt;
    double eps;
    bool maximize;
};

/* Of step `step`, counted from 1. */
HOST_DEVICE static inline struct adam_numbers adam_numbers_of(const struct adamw_options *options, double lr,
                                                              double step) {
    struct adam_numbers numbers;
    double correction1 = 1.0 - pow(options->beta1, step);
    double correction2 = 1.0 - pow(options->beta2, step);
    numbers.decay = 1.0 - lr * options->weight_decay;
    numbers.step_size = -(lr / correction1);
    numbers.grad_weight = 1.0 - options->beta1;
    numbers.beta2 = options->beta2;
    numbers.square_weight = 1.0 - options->beta2;
    numbers.correction2_sqrt = sqrt(correction2);
    numbers.eps = options->eps;
    numbers.maximize = options->maximize;
    return numbers;
}

/* [Note: masters] A master in fp32 is two halves of 16 bits: the bf16 parameter, which is the master rounded
 * to nearest, and of two equally near the one further from zero (to even would take a 17th bit); and the low
 * half of the master's bits, which as a signed number is what the parameter's bits lack. A NaN is kept as
 * 0x7fc00000. */
HOST_DEVICE static inline uint32_t master_joined(uint16_t high, int16_t low) {
    return ((uint32_t)high << 16) + (uint32_t)low;
}
HOST_DEVICE static inline uint32_t master_kept(uint32_t bits) {
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
}
HOST_DEVICE static inline uint16_t master_high(uint32_t kept) {
    return (uint16_t)((kept + 0x8000u) >> 16);
}
HOST_DEVICE static inline int16_t master_low(uint32_t kept) {
    return (int16_t)(kept & 0xffffu);
}

static inline bool adam_has_operand(const struct adam_tensor *tensor, int operand) {
    return tensor->operands[operand].data || operand != ADAM_MAX_EXP_AVG_SQ;
}

static inline enum status adam_check(const struct adam_tensor *tensors, int64_t num_tensors,
                                     const struct adamw_options *options) {
    for (int64_t i = 0; i < num_tensors; i++) {
        for (int operand = 0; operand < ADAM_OPERANDS; operand++)
            if (adam_has_operand(&tensors[i], operand) &&
                (unsigned)tensors[i].operands[operand].dtype >= DTYPE_COUNT)
                return STATUS_UNSUPPORTED;
        if (tensors[i].master_low && tensors[i].operands[ADAM_PARAM].dtype != DTYPE_BFLOAT16)
            return STATUS_UNSUPPORTED;
        if (tensors[i].numel < 0 || !tensors[i].step)
            return STATUS_INVALID;
    }
    bool has_lr = num_tensors == 0 || !options->lr_memory || (unsigned)options->lr_dtype < DTYPE_COUNT;
    return has_lr ? STATUS_OK : STATUS_UNSUPPORTED;
}

#endif
