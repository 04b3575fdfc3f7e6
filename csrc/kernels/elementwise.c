/* The kernels over contiguous elements: kernel_cast_divide and kernel_accumulate. */
#include "kernels/blocks.h"

/* An operation on one contiguous input and one contiguous output, for the split over threads. */
struct elementwise_task {
    elementwise_block *block;
    char *output;
    const char *input;
    enum dtype output_dtype;
    enum dtype input_dtype;
    double divisor;
};

static void run_range(int64_t begin, int64_t end, void *context) {
    const struct elementwise_task *task = context;
    task->block(task->output + begin * dtype_nbytes(task->output_dtype), task->output_dtype,
                task->input + begin * dtype_nbytes(task->input_dtype), task->input_dtype, end - begin,
                task->divisor);
}

static enum status run_elementwise(elementwise_block *block, void *output, enum dtype output_dtype,
                                   const void *input, enum dtype input_dtype, int64_t numel, double divisor,
                                   const struct kernel_stream *stream) {
    struct elementwise_task task = {block, output, input, output_dtype, input_dtype, divisor};
    enum status status = elementwise_check(output, output_dtype, input, input_dtype, numel);
    if (status == STATUS_OK)
        stream_for(stream, numel, GRAIN_NUMEL, run_range, &task);
    return status;
}

enum status kernel_cast_divide(void *output, enum dtype output_dtype, const void *input,
                               enum dtype input_dtype, int64_t numel, double divisor,
                               const struct kernel_stream *stream) {
    return run_elementwise(cast_divide_block, output, output_dtype, input, input_dtype, numel, divisor,
                           stream);
}

/* Add a reduced shard to the accumulated one. Post-division and upcast happen in the same pass. */
enum status kernel_accumulate(void *accumulator, enum dtype accumulator_dtype, const void *input,
                              enum dtype input_dtype, int64_t numel, double divisor,
                              const struct kernel_stream *stream) {
    return run_elementwise(accumulate_block, accumulator, accumulator_dtype, input, input_dtype, numel,
                           divisor, stream);
}
