/* Traits and conversions of element types for the templates of device code. */
#ifndef FSDP_KERNELS_CUDA_TYPES_H
#define FSDP_KERNELS_CUDA_TYPES_H

#ifndef FSDP_CUDA_EMULATION
#include <cuda_runtime.h>
#endif
#include <stdint.h>
#include <string.h>

extern "C" {
#include "kernels/convert.h"
}

/* The arithmetic type of each element type, with load and store. Every narrowing rounds through fp32. */
template <typename T> struct element;

#define DEFINE_ELEMENT(type, arith, to_arithmetic, from_arithmetic)                                          \
    template <> struct element<type> {                                                                       \
        using arithmetic = arith;                                                                            \
        static __host__ __device__ arith load(type value) {                                                  \
            return to_arithmetic(value);                                                                     \
        }                                                                                                    \
        static __host__ __device__ type store(arith value) {                                                 \
            return from_arithmetic(value);                                                                   \
        }                                                                                                    \
    }
DEFINE_ELEMENT(float, float, float, float);
DEFINE_ELEMENT(double, double, double, double);
DEFINE_ELEMENT(bfloat16, float, float_from_bfloat16, bfloat16_from_float);
DEFINE_ELEMENT(float16, float, float_from_float16, float16_from_float);
#undef DEFINE_ELEMENT

template <typename T> using arithmetic_of = typename element<T>::arithmetic;

template <typename A, typename B> struct is_same_type {
    static constexpr bool value = false;
};
template <typename A> struct is_same_type<A, A> {
    static constexpr bool value = true;
};

/* Return `value` as To. A cast to the same type is a copy, even of a NaN. */
template <typename To, typename From> __host__ __device__ inline To converted(From value) {
    if constexpr (is_same_type<To, From>::value)
        return value;
    else
        return element<To>::store((arithmetic_of<To>)element<From>::load(value));
}

/* Call body with a value of the element type of `dtype`. */
template <typename Body> enum status with_type(enum dtype dtype, Body body) {
    switch (dtype) {
    case DTYPE_FLOAT32:
        return body(float());
    case DTYPE_FLOAT64:
        return body(double());
    case DTYPE_BFLOAT16:
        return body(bfloat16());
    case DTYPE_FLOAT16:
        return body(float16());
    default:
        return STATUS_UNSUPPORTED;
    }
}

template <typename Body> enum status with_types(enum dtype first, enum dtype second, Body body) {
    return with_type(first, [&](auto a) { return with_type(second, [&](auto b) { return body(a, b); }); });
}

#endif
