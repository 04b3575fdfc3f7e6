/* kernel_cast_divide: a contiguous cast and an optional division, in one pass. */
#include "kernels/blocks.h"

struct cast_context {
    char *output;
    const char *input;
    enum dtype output_dtype;
    enum dtype input_dtype;
    double divisor;
};

static void cast_divide_range(int64_t begin, int64_t end, void *context) {
    const struct cast_context *cast = context;
    cast_divide_block(cast->output + begin * dtype_nbytes(cast->output_dtype), cast->output_dtype,
                      cast->input + begin * dtype_nbytes(cast->input_dtype), cast->input_dtype, end - begin,
                      cast->divisor);
}

enum status kernel_cast_divide(void *output, enum dtype output_dtype, const void *input, enum dtype input_dtype,
                               int64_t numel, double divisor, const struct kernel_stream *stream) {
    if (!dtype_is_known(output_dtype) || !dtype_is_known(input_dtype))
        return STATUS_UNSUPPORTED;
    if (numel < 0 || (output == input && output_dtype != input_dtype && numel > 0))
        return STATUS_INVALID;
    struct cast_context context = {output, input, output_dtype, input_dtype, divisor};
    stream_for(stream, numel, GRAIN_NUMEL, cast_divide_range, &context);
    return STATUS_OK;
}
