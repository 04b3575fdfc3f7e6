/* The loops for x86-64 with AVX2; nothing on other architectures. */
#include "kernels/checksum.h"
#include "kernels/loops.h"

#ifdef LOOPS_X86_64
#include <immintrin.h>
#include <math.h>
#include <string.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif
#include "kernels/convert.h"

enum { FLOATS = 8, WORDS = 4 };
typedef __m256 floats;
typedef uint64_t words __attribute__((vector_size(32)));

static inline floats floats_of(float value) {
    return _mm256_set1_ps(value);
}

static inline floats floats_load_float(const float *input) {
    return _mm256_loadu_ps(input);
}

static inline floats floats_load_bfloat16(const bfloat16 *input) {
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)input));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

static inline floats floats_load_float16(const float16 *input) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)input));
}

/* The nearest bfloat16 in the upper half of each element, with something below it. */
static inline __m256i round_to_bfloat16(floats values) {
    __m256i bits = _mm256_castps_si256(values);
    __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
}

static inline floats floats_round_bfloat16(floats values) {
    return _mm256_castsi256_ps(_mm256_and_si256(round_to_bfloat16(values), _mm256_set1_epi32(-0x10000)));
}

static inline floats floats_round_float16(floats values) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline void floats_store_float(float *output, floats values) {
    _mm256_storeu_ps(output, values);
}

static inline void floats_store_bfloat16(bfloat16 *output, floats values) {
    __m256i halves = _mm256_srli_epi32(round_to_bfloat16(values), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0xd8);
    _mm_storeu_si128((__m128i *)(void *)output, _mm256_castsi256_si128(packed));
}

static inline void floats_store_float16(float16 *output, floats values) {
    _mm_storeu_si128((__m128i *)(void *)output,
                     _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* sum + a * b, rounded once. */
static inline floats floats_fused(floats sum, floats a, floats b) {
    return _mm256_fmadd_ps(a, b, sum);
}

#define floats_add_product floats_fused

static inline floats floats_root(floats values) {
    return _mm256_sqrt_ps(values);
}

static inline floats floats_larger(floats a, floats b) {
    __m256 is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, is_nan); /* the second, where one is NaN */
}

#define PREFETCH(address, for_writing) __builtin_prefetch(address, for_writing)

static inline words words_of(uint64_t value) {
    return (words)_mm256_set1_epi64x((long long)value);
}

static inline words words_load(const void *input) {
    return (words)_mm256_loadu_si256((const __m256i *)input);
}

static inline words words_multiply_halves(words values) {
    return (words)_mm256_mul_epu32((__m256i)values, _mm256_srli_epi64((__m256i)values, 32));
}

#define LOOPS_TABLE loops_avx2
#define LOOPS_NAME  "avx2"
#include "kernels/loops_body.h"

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
