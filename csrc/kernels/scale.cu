/* Gradient clipping's multiplication of many tensors by one number, which the device reads itself. */
#include "kernels/cuda_elementwise.h"
#include "kernels/cuda_kernels.h"

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

extern "C" enum status cuda_scale(const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                                  const void *coefficient, enum dtype coefficient_dtype,
                                  const struct kernel_stream *stream) {
    if ((unsigned)coefficient_dtype >= DTYPE_COUNT)
        return STATUS_UNSUPPORTED;
    return enqueue_in_place(tensors, numels, num_tensors, stream, [&](auto type) {
        return scale_operation<decltype(type)>{coefficient, coefficient_dtype, 0};
    });
}
