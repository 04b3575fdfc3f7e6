/* Moving elements without conversion, and padding. */
#include "kernels/cuda_elementwise.h"
#include "kernels/cuda_kernels.h"

template <typename T> struct copy_operation {
    static constexpr bool READS_OUTPUT = false;
    static constexpr bool READS_INPUT = true;

    __device__ void begin() {
    }
    __device__ T operator()(T, T value) const {
        return value;
    }
};

template <typename T>
static enum status copy_ranges(T *output, const struct copy_range *ranges, int64_t num_ranges,
                               const struct kernel_stream *stream) {
    struct segment_table table;
    enum status status = STATUS_OK;
    table.count = 0;
    for (int64_t i = 0; i < num_ranges && status == STATUS_OK; i++) {
        const struct copy_range &range = ranges[i];
        if (range.numel > 0) {
            table_add(&table, output + range.output_offset, (const T *)range.input + range.input_offset, range.numel,
                      0);
        }
        if (table_is_full(&table))
            status = enqueue_elementwise<T, T>(&table, copy_operation<T>(), stream);
    }
    return status == STATUS_OK ? enqueue_elementwise<T, T>(&table, copy_operation<T>(), stream) : status;
}

extern "C" enum status cuda_copy_ranges(void *output, enum dtype dtype, const struct copy_range *ranges,
                                        int64_t num_ranges, const struct kernel_stream *stream) {
    device_guard guard(stream);
    if (guard.status != STATUS_OK)
        return guard.status;
    switch (dtype) { /* as integers of their size: a copy never changes a NaN */
    case DTYPE_BFLOAT16:
    case DTYPE_FLOAT16:
        return copy_ranges((uint16_t *)output, ranges, num_ranges, stream);
    case DTYPE_FLOAT32:
        return copy_ranges((uint32_t *)output, ranges, num_ranges, stream);
    case DTYPE_FLOAT64:
        return copy_ranges((uint64_t *)output, ranges, num_ranges, stream);
    default:
        return STATUS_UNSUPPORTED;
    }
}

template <typename T> struct fill_operation {
    static constexpr bool READS_OUTPUT = false;
    static constexpr bool READS_INPUT = false;
    T value;

    __device__ void begin() {
    }
    __device__ T operator()(T, T) const {
        return value;
    }
};

extern "C" enum status cuda_fill(void *output, enum dtype dtype, int64_t numel, double value,
                                 const struct kernel_stream *stream) {
    device_guard guard(stream);
    if (guard.status != STATUS_OK)
        return guard.status;
    return with_type(dtype, [&](auto out) {
        using Out = decltype(out);
        struct segment_table table;
        fill_operation<Out> operation = {converted<Out>(value)};
        table.count = 0;
        table_add(&table, output, nullptr, numel > 0 ? numel : 0, 0);
        return enqueue_elementwise<Out, Out>(&table, operation, stream);
    });
}
