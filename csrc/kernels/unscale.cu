/* A gradient scaler's look for inf and NaN with the multiplication by the inverse scale. What was found stays on the device. */
#include "kernels/cuda_elementwise.h"
#include "kernels/cuda_kernels.h"

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

extern "C" enum status cuda_unscale(const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                                    const float *inverse_scale, float *found_inf, const struct kernel_stream *stream) {
    return enqueue_in_place(tensors, numels, num_tensors, stream,
                            [&](auto type) { return unscale_operation<decltype(type)>{inverse_scale, found_inf, 0}; });
}
