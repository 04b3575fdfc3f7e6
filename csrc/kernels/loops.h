/* The loops behind the kernels, compiled once per instruction set: single threads over contiguous elements.
 *
 * Invariant: every version gives the same bits. No product and sum is fused. loops_default.c, loops_avx2.c and
 * loops_avx512.c hold one version each. */
#ifndef FSDP_KERNELS_LOOPS_H
#define FSDP_KERNELS_LOOPS_H

#include "kernels/kernels.h"

/* Two dtypes of a pair stand in the order output, input. An output may be the input when the dtypes are
 * equal. */
struct loops {
    const char *name;
    /* of unequal dtypes */
    void (*cast[DTYPE_COUNT][DTYPE_COUNT])(void *output, const void *input, int64_t numel);

    /* In two or three steps instead where one of the dtypes alone is fp64: NULL there.
     * output = cast(input) / divisor, and the same with a product */
    void (*cast_divide[DTYPE_COUNT][DTYPE_COUNT])(void *output, const void *input, int64_t numel,
                                                  double divisor);
    void (*cast_multiply[DTYPE_COUNT][DTYPE_COUNT])(void *output, const void *input, int64_t numel,
                                                    double factor);

    /* accumulator += cast(input), of the quotient, of the product */
    void (*add[DTYPE_COUNT][DTYPE_COUNT])(void *accumulator, const void *input, int64_t numel);
    void (*add_divided[DTYPE_COUNT][DTYPE_COUNT])(void *accumulator, const void *input, int64_t numel,
                                                  double divisor);
    void (*add_multiplied[DTYPE_COUNT][DTYPE_COUNT])(void *accumulator, const void *input, int64_t numel,
                                                     double factor);
};

/* The version in use: the widest one that the processor has, unless another was asked for. */
const struct loops *loops_active(void);

/* Version `index` of those this processor has, the widest first; NULL past the last. */
const struct loops *loops_version(int index);

/* Use the version called `name`; NULL is the widest. False when the processor has none of this name. */
bool loops_use(const char *name);

/* Those that are compiled for this architecture. */
#if defined(__x86_64__) && defined(__GNUC__)
#define LOOPS_X86_64
extern const struct loops loops_avx512;
extern const struct loops loops_avx2;
#endif
extern const struct loops loops_default;

#endif
