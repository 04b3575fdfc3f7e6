/* Element types on the device, with the conversions of convert.h: by one instruction there, by its bits
 * elsewhere.
 *
 * [Note: two ways to convert] The instructions round as the bit operations do and differ in one thing: the
 * payload of a NaN is lost. That is also what torch does on CUDA. Elsewhere is the emulation of the tests,
 * where these files are plain C++. */
#ifndef FSDP_KERNELS_CUDA_TYPES_H
#define FSDP_KERNELS_CUDA_TYPES_H

#ifndef FSDP_CUDA_EMULATION
#include <cuda_runtime.h>
#endif
#include <stdint.h>
#include <string.h>

extern "C" {
#include "kernels/kernels.h"
}

#ifdef __CUDA_ARCH__
#define BFLOAT16_NAN 0x7fffu /* the instruction's, which GPUs before sm_80 lack */
#else
#define BFLOAT16_NAN 0x7fc0u
#endif

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

__host__ __device__ inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

__host__ __device__ inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

__host__ __device__ inline bfloat16 bfloat16_from_float(float value) {
    bfloat16 result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    result.bits = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? BFLOAT16_NAN : rounded);
#endif
    return result;
}

__host__ __device__ inline float float_from_bfloat16(bfloat16 value) {
    return float_of_bits((uint32_t)value.bits << 16);
}

__host__ __device__ inline float float_from_float16(float16 value) {
#ifdef __CUDA_ARCH__
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
#else
    uint32_t sign = ((uint32_t)value.bits & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)value.bits & 0x7fffu;
    if (magnitude >= 0x7c00u)
        return float_of_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 13) * 0x1p112f)); /* exact */
#endif
}

__host__ __device__ inline float16 float16_from_float(float value) {
    float16 result;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
    uint32_t bits = bits_of_float(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x47800000u) /* 2^16 and above, infinity, NaN */
        magnitude = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    else if (magnitude < 0x38800000u) /* denormals: rounded by an addition at their last place */
        magnitude = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
    else
        magnitude = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    result.bits = (uint16_t)(sign | magnitude);
#endif
    return result;
}

/* For each type: its arithmetic, and the way there and back. Every narrowing goes through fp32. */
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

/* A cast to the same type is a copy, of a NaN too. */
template <typename To, typename From> __host__ __device__ inline To converted(From value) {
    if constexpr (is_same_type<To, From>::value)
        return value;
    else
        return element<To>::store((arithmetic_of<To>)element<From>::load(value));
}

/* Call body(type) with a value of the type of a dtype below DTYPE_COUNT. A body is of the side that calls. */
#pragma nv_exec_check_disable
template <typename Body> __host__ __device__ inline auto with_known_type(int dtype, Body body) {
    switch (dtype) {
    case DTYPE_FLOAT32:
        return body(float());
    case DTYPE_FLOAT64:
        return body(double());
    case DTYPE_BFLOAT16:
        return body(bfloat16());
    default:
        return body(float16());
    }
}

template <typename Body> enum status with_type(enum dtype dtype, Body body) {
    return (unsigned)dtype < DTYPE_COUNT ? with_known_type(dtype, body) : STATUS_UNSUPPORTED;
}

/* One number of any dtype, on the device. */
__device__ inline double read_number(const void *number, enum dtype dtype) {
    return with_known_type(dtype, [&](auto type) {
        using T = decltype(type);
        return (double)element<T>::load(*(const T *)number);
    });
}

template <typename Body> enum status with_types(enum dtype first, enum dtype second, Body body) {
    return with_type(first, [&](auto a) { return with_type(second, [&](auto b) { return body(a, b); }); });
}

#endif
