/* kernel_accumulate: add a reduced shard to the one accumulated before, with the post-division and the upcast on the way. */
#include "kernels/blocks.h"

struct accumulate_context {
    char *accumulator;
    const char *input;
    enum dtype accumulator_dtype;
    enum dtype input_dtype;
    double divisor;
};

/* One block: the quotient in the input's dtype, then the cast, then the sum; each result is rounded before the next. */
static void accumulate_block(const struct accumulate_context *add, void *accumulator, const void *input,
                             int64_t numel) {
    union block quotient;
    union block converted;
    if (add->divisor != 1.0) {
        divide_block(quotient.bytes, input, add->input_dtype, numel, add->divisor);
        input = quotient.bytes;
    }
    if (add->accumulator_dtype != add->input_dtype) {
        cast_block(converted.bytes, add->accumulator_dtype, input, add->input_dtype, numel);
        input = converted.bytes;
    }
    add_block(accumulator, input, add->accumulator_dtype, numel);
}

static void accumulate_range(int64_t begin, int64_t end, void *context) {
    const struct accumulate_context *add = context;
    int64_t accumulator_nbytes = dtype_nbytes(add->accumulator_dtype);
    int64_t input_nbytes = dtype_nbytes(add->input_dtype);
    for (int64_t i = begin; i < end; i += BLOCK_NUMEL) {
        int64_t numel = end - i < BLOCK_NUMEL ? end - i : BLOCK_NUMEL;
        accumulate_block(add, add->accumulator + i * accumulator_nbytes, add->input + i * input_nbytes, numel);
    }
}

enum status kernel_accumulate(void *accumulator, enum dtype accumulator_dtype, const void *input,
                              enum dtype input_dtype, int64_t numel, double divisor,
                              const struct kernel_stream *stream) {
    if (!dtype_is_known(accumulator_dtype) || !dtype_is_known(input_dtype)) {
        return STATUS_UNSUPPORTED;
    }
    if (numel < 0) {
        return STATUS_INVALID;
    }
    struct accumulate_context context = {accumulator, input, accumulator_dtype, input_dtype, divisor};
    stream_for(stream, numel, GRAIN_NUMEL, accumulate_range, &context);
    return STATUS_OK;
}
