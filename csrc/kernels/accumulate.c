/* kernel_accumulate: add a reduced shard to the one accumulated before, with the post-division and the upcast on the way. */
#include "kernels/blocks.h"

struct accumulate_context {
    char *accumulator;
    const char *input;
    enum dtype accumulator_dtype;
    enum dtype input_dtype;
    double divisor;
};

static void accumulate_range(int64_t begin, int64_t end, void *context) {
    const struct accumulate_context *add = context;
    accumulate_block(add->accumulator + begin * dtype_nbytes(add->accumulator_dtype), add->accumulator_dtype,
                     add->input + begin * dtype_nbytes(add->input_dtype), add->input_dtype, end - begin, add->divisor);
}

enum status kernel_accumulate(void *accumulator, enum dtype accumulator_dtype, const void *input,
                              enum dtype input_dtype, int64_t numel, double divisor,
                              const struct kernel_stream *stream) {
    if (!dtype_is_known(accumulator_dtype) || !dtype_is_known(input_dtype))
        return STATUS_UNSUPPORTED;
    if (numel < 0)
        return STATUS_INVALID;
    struct accumulate_context context = {accumulator, input, accumulator_dtype, input_dtype, divisor};
    stream_for(stream, numel, GRAIN_NUMEL, accumulate_range, &context);
    return STATUS_OK;
}
