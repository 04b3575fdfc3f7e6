/* The kernels of elementwise.c for CUDA, as operations of cuda_elementwise.h. */
#include "kernels/cuda_elementwise.h"

/* ---- casts with an optional division ---- */

enum status cuda_cast_segments(struct segment_table *table, enum dtype output_dtype, enum dtype input_dtype,
                               double divisor, const struct kernel_stream *stream) {
    return with_types(output_dtype, input_dtype, [&](auto out, auto in) {
        using Out = decltype(out);
        using In = decltype(in);
        cast_divide_operation<Out, In> operation = {division<Out>(divisor)};
        return enqueue_elementwise<Out, In>(table, operation, stream);
    });
}

/* Check the arguments and call `launch` with a table of one segment. */
template <typename Launch>
static enum status run(void *output, enum dtype output_dtype, const void *input, enum dtype input_dtype,
                       int64_t numel, const struct kernel_stream *stream, Launch launch) {
    enum status status = elementwise_check(output, output_dtype, input, input_dtype, numel);
    if (status != STATUS_OK)
        return status;
    device_guard guard(stream);
    struct segment_table table;
    table.count = 0;
    table_add(&table, output, input, numel, 0);
    return guard.status == STATUS_OK ? launch(&table) : guard.status;
}

extern "C" enum status cuda_cast_divide(void *output, enum dtype output_dtype, const void *input,
                                        enum dtype input_dtype, int64_t numel, double divisor,
                                        const struct kernel_stream *stream) {
    return run(output, output_dtype, input, input_dtype, numel, stream, [&](struct segment_table *table) {
        return cuda_cast_segments(table, output_dtype, input_dtype, divisor, stream);
    });
}

/* ---- accumulation of a reduced shard, with post-division and upcast ---- */

/* Divide in the input's dtype, cast, then add. Each result is rounded before the next step. */
template <typename Out, typename In> struct accumulate_operation {
    static constexpr bool READS_OUTPUT = true;
    division<In> divided;

    __device__ Out operator()(Out sum, In value) const {
        Out addend = converted<Out>(divided(value));
        return element<Out>::store(element<Out>::load(sum) + element<Out>::load(addend));
    }
};

extern "C" enum status cuda_accumulate(void *accumulator, enum dtype accumulator_dtype, const void *input,
                                       enum dtype input_dtype, int64_t numel, double divisor,
                                       const struct kernel_stream *stream) {
    return run(accumulator, accumulator_dtype, input, input_dtype, numel, stream,
               [&](struct segment_table *table) {
                   return with_types(accumulator_dtype, input_dtype, [&](auto out, auto in) {
                       using Out = decltype(out);
                       using In = decltype(in);
                       accumulate_operation<Out, In> operation = {division<In>(divisor)};
                       return enqueue_elementwise<Out, In>(table, operation, stream);
                   });
               });
}
