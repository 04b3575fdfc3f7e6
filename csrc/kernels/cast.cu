/* Casts with an optional division, of one tensor or of many. */
#include "kernels/cuda_elementwise.h"
#include "kernels/cuda_kernels.h"

enum status cuda_cast_segments(struct segment_table *table, enum dtype output_dtype, enum dtype input_dtype,
                               double divisor, const struct kernel_stream *stream) {
    return with_types(output_dtype, input_dtype, [&](auto out, auto in) {
        using Out = decltype(out);
        using In = decltype(in);
        cast_divide_operation<Out, In> operation = {division<Out>(divisor)};
        return enqueue_elementwise<Out, In>(table, operation, stream);
    });
}

extern "C" enum status cuda_cast_divide(void *output, enum dtype output_dtype, const void *input,
                                        enum dtype input_dtype, int64_t numel, double divisor,
                                        const struct kernel_stream *stream) {
    struct segment_table table;
    if ((unsigned)output_dtype >= DTYPE_COUNT || (unsigned)input_dtype >= DTYPE_COUNT)
        return STATUS_UNSUPPORTED;
    if (numel < 0 || (output == input && output_dtype != input_dtype && numel > 0))
        return STATUS_INVALID;
    device_guard guard(stream);
    if (guard.status != STATUS_OK)
        return guard.status;
    table.count = 0;
    table_add(&table, output, input, numel, 0);
    return cuda_cast_segments(&table, output_dtype, input_dtype, divisor, stream);
}
