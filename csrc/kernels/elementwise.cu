/* The kernels of elementwise.c on the GPU, each an operation of cuda_elementwise.h. */
#include "kernels/cuda_elementwise.h"

/* ---- casts with an optional division, of one tensor or of many ---- */

enum status cuda_cast_segments(struct segment_table *table, enum dtype output_dtype, enum dtype input_dtype,
                               double divisor, const struct kernel_stream *stream) {
    return with_types(output_dtype, input_dtype, [&](auto out, auto in) {
        using Out = decltype(out);
        using In = decltype(in);
        cast_divide_operation<Out, In> operation = {division<Out>(divisor)};
        return enqueue_elementwise<Out, In>(table, operation, stream);
    });
}

/* `launch` what takes a table of one segment. */
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

/* ---- a reduced shard onto the one accumulated before, with the post-division and the upcast on the way ----
 */

/* The quotient in the input's dtype, then the cast, then the sum; each is rounded before the next. */
template <typename Out, typename In> struct accumulate_operation {
    static constexpr bool READS_OUTPUT = true;
    static constexpr bool READS_INPUT = true;
    division<In> divided;

    __device__ void begin() {
    }
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

/* ---- a gradient scaler's look for inf and NaN; what was found stays on the device ---- */

template <typename T> struct unscale_operation {
    static constexpr bool READS_OUTPUT = true;
    static constexpr bool READS_INPUT = false;
    const float *inverse_scale;
    float *found_inf;
    arithmetic_of<T> factor;

    __device__ void begin() {
        factor = (arithmetic_of<T>)*inverse_scale;
    }
    __device__ T operator()(T value, T) const {
        arithmetic_of<T> number = element<T>::load(value);
        if (number - number != 0)
            *found_inf = 1.0f; /* whoever else writes it writes the same */
        return element<T>::store(number * factor);
    }
};

/* The tensors of one dtype. */
template <typename T>
static enum status unscale_of_dtype(enum dtype dtype, const struct tensor_view *tensors,
                                    const int64_t *numels, int64_t num_tensors,
                                    const unscale_operation<T> &operation,
                                    const struct kernel_stream *stream) {
    struct segment_table table;
    enum status status = STATUS_OK;
    table.count = 0;
    for (int64_t i = 0; i < num_tensors && status == STATUS_OK; i++) {
        if (tensors[i].dtype == dtype)
            table_add(&table, tensors[i].data, nullptr, numels[i], 0);
        if (table_is_full(&table))
            status = enqueue_elementwise<T, T>(&table, operation, stream);
    }
    return status == STATUS_OK ? enqueue_elementwise<T, T>(&table, operation, stream) : status;
}

extern "C" enum status cuda_unscale(const struct tensor_view *tensors, const int64_t *numels,
                                    int64_t num_tensors, const float *inverse_scale, float *found_inf,
                                    const struct kernel_stream *stream) {
    for (int64_t i = 0; i < num_tensors; i++)
        if ((unsigned)tensors[i].dtype >= DTYPE_COUNT)
            return STATUS_UNSUPPORTED;
    device_guard guard(stream);
    enum status status = guard.status;
    for (int of = 0; of < DTYPE_COUNT && status == STATUS_OK; of++) {
        status = with_type((enum dtype)of, [&](auto type) {
            unscale_operation<decltype(type)> operation = {inverse_scale, found_inf, 0};
            return unscale_of_dtype((enum dtype)of, tensors, numels, num_tensors, operation, stream);
        });
    }
    return status;
}
