/* What the CPU's and the GPU's AdamW share: the coefficients of a step and what is refused. adam.c gives the
 * formula. */
#ifndef FSDP_KERNELS_ADAM_H
#define FSDP_KERNELS_ADAM_H

#include <math.h>

#include "kernels/checksum.h"
#include "kernels/convert.h"

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
 * Stream and step make a key of 64 bits, as splitmix64 makes its numbers. The index goes through a
 * permutation of 32 bits after either half of the key: lowbias32, of the search for hash functions with
 * little bias in hash-prospector. Of that word the parameter takes the lower half, the exponential average
 * the upper one, and the squares the upper ones of products by odd numbers, of which each is as independent
 * of any other half as numbers show. */
HOST_DEVICE static inline uint64_t draw_key(uint64_t stream, double step) {
    return checksum_mixed(checksum_mixed(stream + 1) + (uint64_t)step * CHECKSUM_STEP);
}
/* Of 32 bits, or of a vector of them. */
#define DEFINE_PERMUTED(type, name)                                                                          \
    HOST_DEVICE static inline type name(type x) {                                                            \
        x = (x ^ (x >> 16)) * 0x7feb352du;                                                                   \
        x = (x ^ (x >> 15)) * 0x846ca68bu;                                                                   \
        return x ^ (x >> 16);                                                                                \
    }
DEFINE_PERMUTED(uint32_t, draw_permuted)
/* For the element whose index has these halves of 32 bits. */
HOST_DEVICE static inline uint32_t draw_word(uint32_t index_low, uint32_t index_high, uint64_t key) {
    return draw_permuted(draw_permuted(index_low ^ (uint32_t)key) + ((uint32_t)(key >> 32) ^ index_high));
}
/* The operand's 16 bits of it, or of a vector of them. */
#define DRAW_FACTOR(operand)                                                                                 \
    ((operand) == ADAM_PARAM        ? 0x10000u                                                               \
     : (operand) == ADAM_EXP_AVG    ? 1u                                                                     \
     : (operand) == ADAM_EXP_AVG_SQ ? 0xb5297a4du                                                            \
                                    : 0xed5ad4bbu)
#define DRAW_BITS(word, operand) (((word) * DRAW_FACTOR(operand)) >> 16)
HOST_DEVICE static inline uint32_t draw_bits(uint32_t word, int operand) {
    return DRAW_BITS(word, operand);
}
/* The bf16 for a number of these bits. Infinities stay, a NaN is 0x7fc0. */
HOST_DEVICE static inline uint16_t draw_rounded(uint32_t bits, uint32_t drawn) {
    bool is_finite = (bits & 0x7f800000u) != 0x7f800000u;
    return (uint16_t)((master_kept(bits) + (is_finite ? drawn : 0)) >> 16);
}

/* [Note: states in 8 bits] An average is kept in blocks of 256 elements, counted by index in the whole; of a
 * block that lies in two tensors either has its part. A block has a scale, its element of the largest
 * magnitude with that one's sign, and each element the code of its quotient by the scale. So the largest is
 * 1, and what was once in 8 bits comes back to the same bits.
 *
 * The codes are those of the dynamic map in "8-bit Optimizers via Block-wise Quantization" (Dettmers et al.,
 * 2022): a cell of even width in its decade, for which its middle stands. Zero and 1 have codes of their own.
 *
 *   magnitude      1e-7     1e-6     1e-5   ...   0.01      0.1        1
 *   cells            |   2    |    4   |            |   64   |   128   |      half as many with signs
 *   numbered from        2         4                    64       128
 *
 * A square below 1e-7 that is not zero has the first cell, so that no step is divided by eps alone. A scale
 * without a normal number's exponent is zero; of a block with an inf or NaN all is NaN. */
enum { STATE_BLOCK_NUMEL = 256 };

HOST_DEVICE static inline int64_t adam_num_blocks(int64_t first_index, int64_t numel) {
    int64_t before = first_index % STATE_BLOCK_NUMEL;
    return numel > 0 ? (before + numel + STATE_BLOCK_NUMEL - 1) / STATE_BLOCK_NUMEL : 0;
}

HOST_DEVICE static inline bool adam_has_sign(int operand) {
    return operand == ADAM_EXP_AVG;
}

/* Of a number's bits: higher for larger magnitudes, and for the positive one of two. */
HOST_DEVICE static inline uint32_t state_rank(uint32_t bits) {
    return (bits << 1 | bits >> 31) ^ 1u;
}
/* Bits of the scale of a block in which this rank is the highest. */
HOST_DEVICE static inline uint32_t state_scale(uint32_t rank) {
    uint32_t bits = (rank ^ 1u) >> 1 | (rank ^ 1u) << 31;
    return rank >= 0xff000000u ? 0x7fc00000u : rank < 0x01000000u ? 0 : bits;
}
/* What makes quotients of a block's elements. */
HOST_DEVICE static inline float state_inverse(float scale) {
    return scale < 0.0f || scale > 0.0f ? 1.0f / scale : 0.0f;
}

/* By decade the number of its first cell, and its end. Over magnitudes the number of a cell is a line in each
 * decade, and the lowest of all lines. */
#define STATE_DECADES(X) X(2, 1e-6) X(4, 1e-5) X(8, 1e-4) X(16, 1e-3) X(32, 1e-2) X(64, 1e-1) X(128, 1.0)
#define STATE_WIDTH(first, end)  (float)(0.9 * end / first),
#define STATE_CELLS(first, end)  (float)(first / (0.9 * end)),
#define STATE_BEFORE(first, end) (float)(first * (8 / 9.0)),

/* By a third of a magnitude's exponent: a factor of 8, in which one decade at most ends. From 2^-22 to 1 they
 * are 35 to 42, of which the last three bits count. */
#define STATE_UPPER(X)                                                                                       \
    X(32, 1e-2) X(64, 1e-1) X(128, 1.0) X(2, 1e-6) X(4, 1e-5) X(8, 1e-4) X(16, 1e-3) X(16, 1e-3)
#define STATE_LOWER(X)                                                                                       \
    X(64, 1e-1) X(128, 1.0) X(128, 1.0) X(4, 1e-5) X(8, 1e-4) X(16, 1e-3) X(16, 1e-3) X(32, 1e-2)
HOST_DEVICE static inline uint32_t state_third(uint32_t exponent) {
    return (exponent > 105 ? exponent : 105) * 43u >> 7;
}

static inline bool adam_has_operand(const struct adam_tensor *tensor, int operand) {
    return tensor->operands[operand].data || operand != ADAM_MAX_EXP_AVG_SQ;
}

/* All averages are in 8 bits or none, and then of parameters that are computed in fp32. */
static inline bool adam_has_dtype(const struct adam_tensor *tensor, int operand) {
    enum dtype dtype = tensor->operands[operand].dtype;
    bool has_scale = tensor->scales[operand] || tensor->numel == 0;
    if (operand >= ADAM_EXP_AVG && tensor->operands[ADAM_EXP_AVG].dtype == DTYPE_OTHER_1)
        return dtype == DTYPE_OTHER_1 && has_scale && tensor->operands[ADAM_PARAM].dtype != DTYPE_FLOAT64;
    return dtype_is_known(dtype);
}

static inline enum status adam_check(const struct adam_tensor *tensors, int64_t num_tensors,
                                     const struct adamw_options *options) {
    for (int64_t i = 0; i < num_tensors; i++) {
        for (int operand = 0; operand < ADAM_OPERANDS; operand++)
            if (adam_has_operand(&tensors[i], operand) && !adam_has_dtype(&tensors[i], operand))
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
