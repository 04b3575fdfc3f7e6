#include "kernels/blocks.h"

#include <math.h>
#include <string.h>

#include "kernels/loops.h"

/* [Note: exact inverse] Division by a power of two gives the same bits as multiplication by its inverse, and
 * takes longer. */
static bool has_exact_inverse(double divisor, enum dtype dtype) {
    int exponent = 0;
    /* exponents at which neither the divisor nor its inverse is denormal */
    int max_exponent = dtype == DTYPE_FLOAT64 ? 1000 : 120;
    return frexp(divisor, &exponent) == 0.5 && exponent > -max_exponent && exponent < max_exponent;
}

void cast_block(void *output, enum dtype output_dtype, const void *input, enum dtype input_dtype,
                int64_t numel) {
    if (numel <= 0 || (output == input && output_dtype == input_dtype))
        return;
    if (output_dtype == input_dtype) {
        memcpy(output, input, (size_t)(numel * dtype_nbytes(output_dtype)));
        return;
    }
    loops_active()->cast[output_dtype][input_dtype](output, input, numel);
}

/* Cast, then divide: no loop exists for this pair of dtypes. */
static void cast_then_divide(char *output, enum dtype output_dtype, const char *input, enum dtype input_dtype,
                             int64_t numel, double divisor) {
    for (int64_t i = 0; i < numel; i += BLOCK_NUMEL) {
        int64_t count = numel - i < BLOCK_NUMEL ? numel - i : BLOCK_NUMEL;
        char *block = output + i * dtype_nbytes(output_dtype);
        cast_block(block, output_dtype, input + i * dtype_nbytes(input_dtype), input_dtype, count);
        cast_divide_block(block, output_dtype, block, output_dtype, count, divisor);
    }
}

void cast_divide_block(void *output, enum dtype output_dtype, const void *input, enum dtype input_dtype,
                       int64_t numel, double divisor) {
    const struct loops *loops = loops_active();
    if (divisor == 1.0)
        cast_block(output, output_dtype, input, input_dtype, numel);
    else if (!loops->cast_divide[output_dtype][input_dtype])
        cast_then_divide(output, output_dtype, input, input_dtype, numel, divisor);
    else if (has_exact_inverse(divisor, output_dtype))
        loops->cast_multiply[output_dtype][input_dtype](output, input, numel, 1.0 / divisor);
    else
        loops->cast_divide[output_dtype][input_dtype](output, input, numel, divisor);
}

/* Divide, cast and add in three steps: no loop exists for this pair of dtypes. */
static void divide_cast_and_add(char *accumulator, enum dtype accumulator_dtype, const char *input,
                                enum dtype input_dtype, int64_t numel, double divisor) {
    union block quotient;
    union block converted;
    for (int64_t i = 0; i < numel; i += BLOCK_NUMEL) {
        int64_t count = numel - i < BLOCK_NUMEL ? numel - i : BLOCK_NUMEL;
        cast_divide_block(quotient.bytes, input_dtype, input + i * dtype_nbytes(input_dtype), input_dtype,
                          count, divisor);
        cast_block(converted.bytes, accumulator_dtype, quotient.bytes, input_dtype, count);
        accumulate_block(accumulator + i * dtype_nbytes(accumulator_dtype), accumulator_dtype,
                         converted.bytes, accumulator_dtype, count, 1.0);
    }
}

void accumulate_block(void *accumulator, enum dtype accumulator_dtype, const void *input,
                      enum dtype input_dtype, int64_t numel, double divisor) {
    const struct loops *loops = loops_active();
    if (!loops->add[accumulator_dtype][input_dtype])
        divide_cast_and_add(accumulator, accumulator_dtype, input, input_dtype, numel, divisor);
    else if (divisor == 1.0)
        loops->add[accumulator_dtype][input_dtype](accumulator, input, numel);
    else if (has_exact_inverse(divisor, input_dtype))
        loops->add_multiplied[accumulator_dtype][input_dtype](accumulator, input, numel, 1.0 / divisor);
    else
        loops->add_divided[accumulator_dtype][input_dtype](accumulator, input, numel, divisor);
}
