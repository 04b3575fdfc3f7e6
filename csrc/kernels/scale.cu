/* Gradient clipping's multiplication of many tensors by one number, which the device reads itself. */
#include "kernels/cuda_elementwise.h"
#include "kernels/cuda_kernels.h"

__device__ static double read_number(const void *number, enum dtype dtype) {
    switch (dtype) {
    case DTYPE_FLOAT32:
        return *(const float *)number;
    case DTYPE_FLOAT64:
        return *(const double *)number;
    case DTYPE_BFLOAT16:
        return float_from_bfloat16(*(const bfloat16 *)number);
    default:
        return float_from_float16(*(const float16 *)number);
    }
}

/* The number is first rounded to the tensor's dtype, as a 0-dim tensor of it would be. */
template <typename T> struct scale_operation {
    static constexpr bool READS_OUTPUT = true;
    static constexpr bool READS_INPUT = false;
    const void *number;
    enum dtype dtype;
    arithmetic_of<T> factor;

    __device__ void begin() {
        factor = element<T>::load(converted<T>(read_number(number, dtype)));
    }
    __device__ T operator()(T value, T) const {
        return element<T>::store(element<T>::load(value) * factor);
    }
};

template <typename T>
static enum status scale_of_dtype(enum dtype dtype, const struct tensor_view *tensors, const int64_t *numels,
                                  int64_t num_tensors, const scale_operation<T> &operation,
                                  const struct kernel_stream *stream) {
    struct segment_table table;
    enum status status = STATUS_OK;
    table.count = 0;
    for (int64_t i = 0; i < num_tensors && status == STATUS_OK; i++) {
        if (tensors[i].dtype == dtype) {
            table_add(&table, tensors[i].data, nullptr, numels[i], 0);
        }
        if (table_is_full(&table)) {
            status = enqueue_elementwise<T, T>(&table, operation, stream);
        }
    }
    return status == STATUS_OK ? enqueue_elementwise<T, T>(&table, operation, stream) : status;
}

extern "C" enum status cuda_scale(const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                                  const void *coefficient, enum dtype coefficient_dtype,
                                  const struct kernel_stream *stream) {
    enum status status = (unsigned)coefficient_dtype < DTYPE_COUNT ? STATUS_OK : STATUS_UNSUPPORTED;
    for (int64_t i = 0; i < num_tensors; i++) {
        if ((unsigned)tensors[i].dtype >= DTYPE_COUNT) {
            return STATUS_UNSUPPORTED;
        }
    }
    device_guard guard(stream);
    status = status == STATUS_OK ? guard.status : status;
    for (int dtype = 0; dtype < DTYPE_COUNT && status == STATUS_OK; dtype++) {
        status = with_type((enum dtype)dtype, [&](auto type) {
            scale_operation<decltype(type)> operation = {coefficient, coefficient_dtype, 0};
            return scale_of_dtype((enum dtype)dtype, tensors, numels, num_tensors, operation, stream);
        });
    }
    return status;
}
