/* The loops for any processor of the architecture, with the compiler's generic vectors of 16 bytes. */
#include "kernels/loops.h"

#include <string.h>

#include "kernels/convert.h"

enum { FLOATS = 4 };
typedef float floats __attribute__((vector_size(16)));
typedef uint32_t float_bits __attribute__((vector_size(16)));
typedef uint16_t half_bits __attribute__((vector_size(8)));

/* ---- the conversions of convert.h, on vectors ---- */

static inline float_bits select_bits(float_bits mask, float_bits yes, float_bits no) {
    return (mask & yes) | (~mask & no);
}

static inline float_bits bits_load(const void *halves) {
    half_bits bits;
    memcpy(&bits, halves, sizeof bits);
    return __builtin_convertvector(bits, float_bits);
}

static inline void bits_store_halves(void *halves, float_bits bits) {
    half_bits narrow = __builtin_convertvector(bits, half_bits);
    memcpy(halves, &narrow, sizeof narrow);
}

static inline float_bits bfloat16_bits(floats values) {
    float_bits bits = (float_bits)values;
    float_bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return select_bits((float_bits)(values != values), (float_bits){0} + 0x7fc0u, rounded);
}

static inline floats floats_from_float16_bits(float_bits half) {
    float_bits sign = (half & 0x8000u) << 16;
    float_bits shifted = (half & 0x7fffu) << 13;
    float_bits exponent = shifted & 0x0f800000u;
    float_bits normal = shifted + (112u << 23);
    float_bits denormal = (float_bits)((floats)(normal + (1u << 23)) - float_of_bits(113u << 23));
    float_bits finite = select_bits((float_bits)(exponent == 0), denormal, normal);
    float_bits magnitude = select_bits((float_bits)(exponent == 0x0f800000u), normal + (112u << 23), finite);
    return (floats)(sign | magnitude);
}

static inline float_bits float16_bits(floats values) {
    float_bits bits = (float_bits)values;
    float_bits magnitude = bits & 0x7fffffffu;
    float_bits is_nan = (float_bits)(values != values);
    float_bits special = select_bits(is_nan, (float_bits){0} + 0x7e00u, (float_bits){0} + 0x7c00u);
    float_bits denormal = (float_bits)((floats)magnitude + float_of_bits(126u << 23)) - (126u << 23);
    float_bits normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    float_bits finite = select_bits((float_bits)(magnitude < (113u << 23)), denormal, normal);
    return ((bits >> 16) & 0x8000u) | select_bits((float_bits)(magnitude >= (143u << 23)), special, finite);
}

/* ---- load, round and store of a vector ---- */

static inline floats floats_of(float value) {
    return (floats){value, value, value, value};
}

static inline floats floats_load_float(const float *input) {
    floats values;
    memcpy(&values, input, sizeof values);
    return values;
}

static inline floats floats_load_bfloat16(const bfloat16 *input) {
    return (floats)(bits_load(input) << 16);
}

static inline floats floats_load_float16(const float16 *input) {
    return floats_from_float16_bits(bits_load(input));
}

static inline floats floats_round_bfloat16(floats values) {
    return (floats)(bfloat16_bits(values) << 16);
}

static inline floats floats_round_float16(floats values) {
    return floats_from_float16_bits(float16_bits(values));
}

static inline void floats_store_float(float *output, floats values) {
    memcpy(output, &values, sizeof values);
}

static inline void floats_store_bfloat16(bfloat16 *output, floats values) {
    bits_store_halves(output, bfloat16_bits(values));
}

static inline void floats_store_float16(float16 *output, floats values) {
    bits_store_halves(output, float16_bits(values));
}

#define LOOPS_TABLE loops_default
#define LOOPS_NAME  "default"
#include "kernels/loops_body.h"
