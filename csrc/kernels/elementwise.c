/* The kernels over contiguous elements: kernel_cast_divide and kernel_accumulate. */
#include "kernels/blocks.h"

/* A run that is read and one that is written, and what makes the one of the other. */
struct runs {
    elementwise_block *block;
    char *output;
    const char *input;
    enum dtype output_dtype;
    enum dtype input_dtype;
    double divisor;
};

static void runs_range(int64_t begin, int64_t end, void *context) {
    const struct runs *runs = context;
    runs->block(runs->output + begin * dtype_nbytes(runs->output_dtype), runs->output_dtype,
                runs->input + begin * dtype_nbytes(runs->input_dtype), runs->input_dtype, end - begin,
                runs->divisor);
}

static enum status runs_make(elementwise_block *block, void *output, enum dtype output_dtype,
                             const void *input, enum dtype input_dtype, int64_t numel, double divisor,
                             const struct kernel_stream *stream) {
    struct runs context = {block, output, input, output_dtype, input_dtype, divisor};
    enum status status = elementwise_check(output, output_dtype, input, input_dtype, numel);
    if (status == STATUS_OK)
        stream_for(stream, numel, GRAIN_NUMEL, runs_range, &context);
    return status;
}

enum status kernel_cast_divide(void *output, enum dtype output_dtype, const void *input,
                               enum dtype input_dtype, int64_t numel, double divisor,
                               const struct kernel_stream *stream) {
    return runs_make(cast_divide_block, output, output_dtype, input, input_dtype, numel, divisor, stream);
}

/* A reduced shard onto the one accumulated before, with the post-division and the upcast on the way. */
enum status kernel_accumulate(void *accumulator, enum dtype accumulator_dtype, const void *input,
                              enum dtype input_dtype, int64_t numel, double divisor,
                              const struct kernel_stream *stream) {
    return runs_make(accumulate_block, accumulator, accumulator_dtype, input, input_dtype, numel, divisor,
                     stream);
}
