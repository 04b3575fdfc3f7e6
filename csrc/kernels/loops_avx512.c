/* The loops for x86-64 with AVX-512; nothing on other architectures. */
#include "kernels/checksum.h"
#include "kernels/loops.h"

#ifdef LOOPS_X86_64
#include <immintrin.h>
#include <math.h>
#include <string.h>
#ifdef __clang__
#pragma clang attribute push(                                                                                \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2"))),                    \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#endif
#include "kernels/convert.h"

enum { FLOATS = 16, WORDS = 8 };
typedef __m512 floats;
typedef uint64_t words __attribute__((vector_size(64)));

static inline floats floats_of(float value) {
    return _mm512_set1_ps(value);
}

static inline floats floats_load_float(const float *input) {
    return _mm512_loadu_ps(input);
}

static inline floats floats_load_bfloat16(const bfloat16 *input) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)input));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline floats floats_load_float16(const float16 *input) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)input));
}

/* The nearest bfloat16 in the upper half of each element, with something below it. */
static inline __m512i round_to_bfloat16(floats values) {
    __m512i bits = _mm512_castps_si512(values);
    __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i half = _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff));
    __mmask16 is_number = _mm512_cmp_ps_mask(values, values, _CMP_ORD_Q);
    return _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), is_number, bits, half);
}

static inline floats floats_round_bfloat16(floats values) {
    return _mm512_castsi512_ps(_mm512_and_si512(round_to_bfloat16(values), _mm512_set1_epi32(-0x10000)));
}

static inline floats floats_round_float16(floats values) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline void floats_store_float(float *output, floats values) {
    _mm512_storeu_ps(output, values);
}

static inline void floats_store_bfloat16(bfloat16 *output, floats values) {
    __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bfloat16(values), 16));
    _mm256_storeu_si256((__m256i *)(void *)output, halves);
}

static inline void floats_store_float16(float16 *output, floats values) {
    _mm256_storeu_si256((__m256i *)(void *)output,
                        _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* sum + a * b, rounded once. */
static inline floats floats_fused(floats sum, floats a, floats b) {
    return _mm512_fmadd_ps(a, b, sum);
}

#define floats_add_product floats_fused

static inline floats floats_root(floats values) {
    return _mm512_sqrt_ps(values);
}

static inline floats floats_larger(floats a, floats b) {
    __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(_mm512_max_ps(a, b), is_nan, a); /* the second, where one is NaN */
}

#define PREFETCH(address, for_writing) __builtin_prefetch(address, for_writing)

static inline words words_of(uint64_t value) {
    return (words)_mm512_set1_epi64((long long)value);
}

static inline words words_load(const void *input) {
    return (words)_mm512_loadu_si512(input);
}

static inline words words_multiply_halves(words values) {
    return (words)_mm512_mul_epu32((__m512i)values, _mm512_srli_epi64((__m512i)values, 32));
}

#define LOOPS_TABLE loops_avx512
#define LOOPS_NAME  "avx512"
#include "kernels/loops_body.h"

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
