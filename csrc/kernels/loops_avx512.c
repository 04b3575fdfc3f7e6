/* The loops for x86-64 with AVX-512. Empty on other architectures. */
#include "kernels/loops.h"

#ifdef LOOPS_X86_64
#include <immintrin.h>
#include <string.h>
#ifdef __clang__
#pragma clang attribute push(                                                                                \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2"))),                    \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#endif
#include "kernels/convert.h"

enum { FLOATS = 16 };
typedef __m512 vector_floats;
typedef __m512i vector_bits;
#define OF_WIDTH(name) _mm512_##name

static inline __m256i halves_load(const void *halves) {
    return _mm256_loadu_si256(halves);
}

static inline void halves_store(void *halves, __m256i bits) {
    _mm256_storeu_si256(halves, bits);
}

#define lower_halves _mm512_cvtepi32_epi16

/* Return the nearest bfloat16 in the upper half of each element. The lower half is undefined. */
static inline __m512i round_to_bfloat16(__m512 values) {
    __m512i bits = _mm512_castps_si512(values);
    __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i half = _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff));
    __mmask16 is_number = _mm512_cmp_ps_mask(values, values, _CMP_ORD_Q);
    return _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), is_number, bits, half);
}

#include "kernels/loops_x86.h"

#define LOOPS_TABLE loops_avx512
#define LOOPS_NAME  "avx512"
#include "kernels/loops_body.h"

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
