/* The loops for x86-64 with AVX2. Empty on other architectures. */
#include "kernels/loops.h"

#ifdef LOOPS_X86_64
#include <immintrin.h>
#include <string.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif
#include "kernels/convert.h"

enum { FLOATS = 8 };
typedef __m256 vector_floats;
typedef __m256i vector_bits;
#define OF_WIDTH(name) _mm256_##name

static inline __m128i halves_load(const void *halves) {
    return _mm_loadu_si128(halves);
}

static inline void halves_store(void *halves, __m128i bits) {
    _mm_storeu_si128(halves, bits);
}

static inline __m128i lower_halves(__m256i bits) {
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0xd8));
}

/* Return the nearest bfloat16 in the upper half of each element. The lower half is undefined. */
static inline __m256i round_to_bfloat16(__m256 values) {
    __m256i bits = _mm256_castps_si256(values);
    __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
}

#include "kernels/loops_x86.h"

#define LOOPS_TABLE loops_avx2
#define LOOPS_NAME  "avx2"
#include "kernels/loops_body.h"

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
