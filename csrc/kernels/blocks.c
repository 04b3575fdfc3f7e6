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
    loops_active()->run(LOOP_CAST, output, output_dtype, input, input_dtype, numel, 1.0);
}

void cast_divide_block(void *output, enum dtype output_dtype, const void *input, enum dtype input_dtype,
                       int64_t numel, double divisor) {
    run_loop *run = loops_active()->run;
    if (divisor == 1.0)
        cast_block(output, output_dtype, input, input_dtype, numel);
    else if (has_exact_inverse(divisor, output_dtype))
        run(LOOP_CAST_MULTIPLY, output, output_dtype, input, input_dtype, numel, 1.0 / divisor);
    else
        run(LOOP_CAST_DIVIDE, output, output_dtype, input, input_dtype, numel, divisor);
}

void accumulate_block(void *accumulator, enum dtype accumulator_dtype, const void *input,
                      enum dtype input_dtype, int64_t numel, double divisor) {
    run_loop *run = loops_active()->run;
    if (divisor == 1.0)
        run(LOOP_ADD, accumulator, accumulator_dtype, input, input_dtype, numel, divisor);
    else if (has_exact_inverse(divisor, input_dtype))
        run(LOOP_ADD_MULTIPLIED, accumulator, accumulator_dtype, input, input_dtype, numel, 1.0 / divisor);
    else
        run(LOOP_ADD_DIVIDED, accumulator, accumulator_dtype, input, input_dtype, numel, divisor);
}
