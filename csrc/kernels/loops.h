/* The inner loops of the CPU kernels: one thread, contiguous elements. loops_body.h is compiled once per
 * instruction set.
 *
 * Invariant: every version gives the same bits. No product is fused with a sum. */
#ifndef FSDP_KERNELS_LOOPS_H
#define FSDP_KERNELS_LOOPS_H

#include "kernels/kernels.h"

/* What a loop sets. Each step is rounded to the dtype it is in. */
enum loop {
    LOOP_CAST,           /* output = cast(input) */
    LOOP_CAST_DIVIDE,    /* output = cast(input) / number */
    LOOP_CAST_MULTIPLY,  /* output = cast(input) * number */
    LOOP_ADD,            /* output += cast(input) */
    LOOP_ADD_DIVIDED,    /* output += cast(input / number) */
    LOOP_ADD_MULTIPLIED, /* output += cast(input * number) */
};

/* Run a loop over `numel` elements. Equal dtypes may work in place. */
typedef void run_loop(enum loop loop, void *output, enum dtype output_dtype, const void *input,
                      enum dtype input_dtype, int64_t numel, double number);

/* The loops of one instruction set. */
struct loops {
    const char *name;
    run_loop *run;
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
