/* Element types and their conversions on the CPU and the GPU.
 *
 * Invariant: conversions give torch's bits. Each narrowing rounds through fp32, always to nearest even. One
 * exception: torch's default kernels for aarch64 round once from fp64 to fp16, an instruction of the
 * processor. The kernels for SVE round through fp32 as well, except for strided elements, which FSDP1 never
 * casts.
 *
 * Function bodies have no branches, only selects, so that the compiler can vectorise the loops that call
 * them.
 *
 * [Note: two ways to convert] A GPU has instructions for conversions, which round as the bit operations do
 * but lose the payload of a NaN, as torch does on CUDA. The emulation of the tests compiles these files as
 * plain C++ and gets the CPU's conversions. */
#ifndef FSDP_KERNELS_CONVERT_H
#define FSDP_KERNELS_CONVERT_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"

#ifdef __CUDA_ARCH__
#define BFLOAT16_NAN 0x7fffu /* result of the GPU's instruction, which GPUs before sm_80 lack */
#else
#define BFLOAT16_NAN 0x7fc0u
#endif

typedef struct {
    uint16_t bits;
} bfloat16;
typedef struct {
    uint16_t bits;
} float16;

HOST_DEVICE static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

HOST_DEVICE static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

HOST_DEVICE static inline float float_from_bfloat16(bfloat16 value) {
    return float_of_bits((uint32_t)value.bits << 16);
}

/* Add half of the last kept place to round to nearest even, except to a NaN: the sum could carry to
 * infinity. */
HOST_DEVICE static inline bfloat16 bfloat16_from_float(float value) {
    bfloat16 result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    result.bits = (uint16_t)(is_nan ? BFLOAT16_NAN : rounded);
#endif
    return result;
}

/* Rebase the exponent from 15 to 127. An exact subtraction normalises denormals. */
HOST_DEVICE static inline float float_from_float16(float16 value) {
#ifdef __CUDA_ARCH__
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
#else
    uint32_t sign = ((uint32_t)value.bits & 0x8000u) << 16;
    uint32_t shifted = ((uint32_t)value.bits & 0x7fffu) << 13;
    uint32_t exponent = shifted & 0x0f800000u;
    uint32_t normal = shifted + (112u << 23);
    uint32_t special = normal + (112u << 23);
    uint32_t denormal = bits_of_float(float_of_bits(normal + (1u << 23)) - float_of_bits(113u << 23));
    uint32_t magnitude = exponent == 0x0f800000u ? special : exponent == 0 ? denormal : normal;
    return float_of_bits(sign | magnitude);
#endif
}

/* Below 2^-14, add a power of two: the processor then rounds at the last place of the denormal. */
HOST_DEVICE static inline float16 float16_from_float(float value) {
    float16 result;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
    uint32_t bits = bits_of_float(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t denormal = bits_of_float(float_of_bits(magnitude) + float_of_bits(126u << 23)) - (126u << 23);
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t half = magnitude >= (143u << 23) ? special : magnitude < (113u << 23) ? denormal : normal;
    result.bits = (uint16_t)(sign | half);
#endif
    return result;
}

/* ---- with fp64, on the CPU only ---- */

#ifndef __cplusplus
#ifdef __aarch64__
extern bool rounds_once_to_float16; /* set at import, by the CPU capability that torch reports */
#endif

static inline float16 float16_from_double(double value) {
#ifdef __aarch64__
    if (rounds_once_to_float16) {
        __fp16 half = (__fp16)value;
        float16 result;
        memcpy(&result, &half, sizeof result);
        return result;
    }
#endif
    return float16_from_float((float)value);
}

static inline double double_load(enum dtype dtype, const void *input, int64_t i) {
    switch (dtype) {
    case DTYPE_FLOAT32:
        return ((const float *)input)[i];
    case DTYPE_BFLOAT16:
        return float_from_bfloat16(((const bfloat16 *)input)[i]);
    case DTYPE_FLOAT16:
        return float_from_float16(((const float16 *)input)[i]);
    default:
        return ((const double *)input)[i];
    }
}

/* Round and store. */
static inline void double_store(enum dtype dtype, void *output, int64_t i, double value) {
    switch (dtype) {
    case DTYPE_FLOAT32:
        ((float *)output)[i] = (float)value;
        break;
    case DTYPE_BFLOAT16:
        ((bfloat16 *)output)[i] = bfloat16_from_float((float)value);
        break;
    case DTYPE_FLOAT16:
        ((float16 *)output)[i] = float16_from_double(value);
        break;
    default:
        ((double *)output)[i] = value;
    }
}

/* Return `value` as an element of `dtype` holds it. */
static inline double double_rounded(enum dtype dtype, double value) {
    switch (dtype) {
    case DTYPE_FLOAT32:
        return (float)value;
    case DTYPE_BFLOAT16:
        return float_from_bfloat16(bfloat16_from_float((float)value));
    case DTYPE_FLOAT16:
        return float_from_float16(float16_from_double(value));
    default:
        return value;
    }
}

/* Return the result of an operation on elements of `dtype`, which fp32 computes for all but fp64. An fp64 operation
 * on fp32 operands, rounded, is the fp32 operation. */
static inline double double_computed(enum dtype dtype, double result) {
    return dtype == DTYPE_FLOAT64 ? result : (double)(float)result;
}

#endif
#endif
