/* What the CPU's and the GPU's AdamW share: the coefficients of a step and what is refused. adam.c gives the
 * formula. */
#ifndef FSDP_KERNELS_ADAM_H
#define FSDP_KERNELS_ADAM_H

#include <math.h>

#include "kernels/checksum.h"
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

/* [Note: stochastic rounding] A number goes to either bf16 beside it, to the nearer one with the higher
 * probability, so that a sum of many small steps is right on average: 16 drawn bits are added to the half
 * that is cut off. What is drawn for an element follows from its index in the whole, the tensor's stream, the
 * step and the operand, and from nothing else: ranks, threads and vectors may divide a tensor in any way.
 *
 * Stream, step and operand make a key of 64 bits, as splitmix64 makes its numbers. The index goes through a
 * permutation of 32 bits after either half of the key: lowbias32, of the search for hash functions with
 * little bias in hash-prospector. */
HOST_DEVICE static inline uint64_t draw_key(uint64_t stream, double step, int operand) {
    uint64_t counter = (uint64_t)step * ADAM_OPERANDS + (uint64_t)operand;
    return checksum_mixed(checksum_mixed(stream + 1) + counter * CHECKSUM_STEP);
}
HOST_DEVICE static inline uint32_t draw_permuted(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
/* 16 bits for the element whose index has these halves of 32. */
HOST_DEVICE static inline uint32_t draw_bits(uint32_t index_low, uint32_t index_high, uint64_t key) {
    uint32_t x = draw_permuted(index_low ^ (uint32_t)key);
    return draw_permuted(x + ((uint32_t)(key >> 32) ^ index_high)) >> 16;
}
/* The bf16 for a number of these bits. Infinities stay, a NaN is 0x7fc0. */
HOST_DEVICE static inline uint16_t draw_rounded(uint32_t bits, uint32_t drawn) {
    bool is_finite = (bits & 0x7f800000u) != 0x7f800000u;
    return (uint16_t)((master_kept(bits) + (is_finite ? drawn : 0)) >> 16);
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
        if (tensors[i].is_stochastic &&
            (tensors[i].master_low || tensors[i].operands[ADAM_PARAM].dtype == DTYPE_FLOAT64))
            return STATUS_UNSUPPORTED;
        if (tensors[i].numel < 0 || !tensors[i].step)
            return STATUS_INVALID;
    }
    bool has_lr = num_tensors == 0 || !options->lr_memory || (unsigned)options->lr_dtype < DTYPE_COUNT;
    return has_lr ? STATUS_OK : STATUS_UNSUPPORTED;
}

#endif
