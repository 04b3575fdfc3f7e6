/* The inner loops of the CPU kernels: one thread, contiguous elements. loops_body.h is compiled once per
 * instruction set.
 *
 * Invariant: every version gives the same bits. No product is fused with a sum. */
#ifndef FSDP_KERNELS_LOOPS_H
#define FSDP_KERNELS_LOOPS_H

#include "kernels/kernels.h"

/* The loops of one version, indexed by [output dtype][input dtype]. Equal dtypes may work in place. */
struct loops {
    const char *name;
    /* output = cast(input); NULL for equal dtypes */
    void (*cast[DTYPE_COUNT][DTYPE_COUNT])(void *output, const void *input, int64_t numel);

    /* The tables below are NULL where exactly one dtype is fp64: the kernels then take two or three steps. */

    /* output = cast(input) / divisor, output = cast(input) * factor */
    void (*cast_divide[DTYPE_COUNT][DTYPE_COUNT])(void *output, const void *input, int64_t numel,
                                                  double divisor);
    void (*cast_multiply[DTYPE_COUNT][DTYPE_COUNT])(void *output, const void *input, int64_t numel,
                                                    double factor);

    /* accumulator += cast(input), += cast(input / divisor), += cast(input * factor) */
    void (*add[DTYPE_COUNT][DTYPE_COUNT])(void *accumulator, const void *input, int64_t numel);
    void (*add_divided[DTYPE_COUNT][DTYPE_COUNT])(void *accumulator, const void *input, int64_t numel,
                                                  double divisor);
    void (*add_multiplied[DTYPE_COUNT][DTYPE_COUNT])(void *accumulator, const void *input, int64_t numel,
                                                     double factor);
};

/* Return the version in use: the one that loops_use() set, by default the widest that the processor
 * supports. */
const struct loops *loops_active(void);

/* Return version `index` of those that the processor supports, widest first; NULL past the last. */
const struct loops *loops_version(int index);

/* Use the version called `name`, NULL for the widest. Return false when the processor supports no such
 * version. */
bool loops_use(const char *name);

#endif
