/* One version of the loops. loops.c includes this file once per instruction set, and defines before:
 *
 *   LOOPS_NAME   the version's name, the end of its functions' names: V(name)
 *   FLOATS       number of fp32 elements of a vector: 1 for any processor, 8 with AVX2, 16 with AVX-512
 *
 * The dtypes and the loop are constants where the functions are called, so that a loop without branches is
 * compiled for each. */

#define V(name)            V_(name, LOOPS_NAME)
#define V_(name, version)  V__(name, version)
#define V__(name, version) name##_##version
#define STRING(name)       STRING_(name)
#define STRING_(name)      #name

#if FLOATS == 1
typedef float V(vector);
#else
typedef float V(vector) __attribute__((vector_size(4 * FLOATS)));
typedef uint32_t V(vector_bits) __attribute__((vector_size(4 * FLOATS)));
#define float_bits V(vector_bits)
#endif
#define floats V(vector)

/* ---- a vector of each dtype: load, round and store, as convert.h does for one element ---- */

#if FLOATS == 1 /* the compiler makes the vectors */
static inline floats V(floats_of)(float value) {
    return value;
}

static inline floats V(load_bfloat16)(const bfloat16 *input) {
    return float_from_bfloat16(*input);
}

static inline floats V(load_float16)(const float16 *input) {
    return float_from_float16(*input);
}

static inline floats V(nearest_bfloat16)(floats values) {
    return float_from_bfloat16(bfloat16_from_float(values));
}

static inline floats V(nearest_float16)(floats values) {
    return float_from_float16(float16_from_float(values));
}

static inline void V(store_bfloat16)(bfloat16 *output, floats values) {
    *output = bfloat16_from_float(values);
}

static inline void V(store_float16)(float16 *output, floats values) {
    *output = float16_from_float(values);
}

#else
#if FLOATS == 8
#define OF_WIDTH(name) _mm256_##name

static inline __m128i V(halves_load)(const void *halves) {
    return _mm_loadu_si128(halves);
}

static inline void V(halves_store)(void *halves, __m128i bits) {
    _mm_storeu_si128(halves, bits);
}

static inline __m128i V(lower_halves)(float_bits bits) {
    __m256i packed = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8));
}

/* Return the nearest bfloat16 in the upper half of each element. The lower half is undefined. */
static inline __m256i V(round_to_bfloat16)(__m256 values) {
    __m256i bits = _mm256_castps_si256(values);
    __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
}

#else
#define OF_WIDTH(name) _mm512_##name

static inline __m256i V(halves_load)(const void *halves) {
    return _mm256_loadu_si256(halves);
}

static inline void V(halves_store)(void *halves, __m256i bits) {
    _mm256_storeu_si256(halves, bits);
}

static inline __m256i V(lower_halves)(float_bits bits) {
    return _mm512_cvtepi32_epi16((__m512i)bits);
}

/* Return the nearest bfloat16 in the upper half of each element. The lower half is undefined. */
static inline __m512i V(round_to_bfloat16)(__m512 values) {
    __m512i bits = _mm512_castps_si512(values);
    __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i half = _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff));
    __mmask16 is_number = _mm512_cmp_ps_mask(values, values, _CMP_ORD_Q);
    return _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), is_number, bits, half);
}

#endif

static inline floats V(floats_of)(float value) {
    return OF_WIDTH(set1_ps)(value);
}

static inline floats V(load_bfloat16)(const bfloat16 *input) {
    return (floats)OF_WIDTH(slli_epi32)(OF_WIDTH(cvtepu16_epi32)(V(halves_load)(input)), 16);
}

static inline floats V(load_float16)(const float16 *input) {
    return OF_WIDTH(cvtph_ps)(V(halves_load)(input));
}

static inline floats V(nearest_bfloat16)(floats values) {
    return (floats)((float_bits)V(round_to_bfloat16)(values) & 0xffff0000u);
}

static inline floats V(nearest_float16)(floats values) {
    return OF_WIDTH(cvtph_ps)(OF_WIDTH(cvtps_ph)(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline void V(store_bfloat16)(bfloat16 *output, floats values) {
    V(halves_store)(output, V(lower_halves)((float_bits)V(round_to_bfloat16)(values) >> 16));
}

static inline void V(store_float16)(float16 *output, floats values) {
    V(halves_store)(output, OF_WIDTH(cvtps_ph)(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#undef OF_WIDTH
#endif

/* Return `values`, which are in arithmetic of fp32, as elements of `dtype` would hold them. */
ALWAYS_INLINE floats V(rounded)(enum dtype dtype, floats values) {
    return dtype == DTYPE_BFLOAT16  ? V(nearest_bfloat16)(values)
           : dtype == DTYPE_FLOAT16 ? V(nearest_float16)(values)
                                    : values;
}

ALWAYS_INLINE floats V(cast)(enum dtype to, enum dtype from, floats values) {
    return to == from ? values : V(rounded)(to, values);
}

ALWAYS_INLINE floats V(load)(enum dtype dtype, const void *input, int64_t i) {
    floats values;
    if (dtype == DTYPE_BFLOAT16)
        return V(load_bfloat16)((const bfloat16 *)input + i);
    if (dtype == DTYPE_FLOAT16)
        return V(load_float16)((const float16 *)input + i);
    memcpy(&values, (const float *)input + i, sizeof values);
    return values;
}

/* Round and store. */
ALWAYS_INLINE void V(store)(enum dtype dtype, void *output, int64_t i, floats values) {
    if (dtype == DTYPE_BFLOAT16)
        V(store_bfloat16)((bfloat16 *)output + i, values);
    else if (dtype == DTYPE_FLOAT16)
        V(store_float16)((float16 *)output + i, values);
    else
        memcpy((float *)output + i, &values, sizeof values);
}

/* ---- the loops ---- */

ALWAYS_INLINE void V(step)(enum loop loop, void *output, enum dtype to, const void *input, enum dtype from,
                           int64_t i, floats number) {
    floats values = V(load)(from, input, i);
    switch (loop) {
    case LOOP_CAST:
        break;
    case LOOP_CAST_DIVIDE:
        values = V(cast)(to, from, values) / number;
        break;
    case LOOP_CAST_MULTIPLY:
        values = V(cast)(to, from, values) * number;
        break;
    case LOOP_ADD:
        values = V(load)(to, output, i) + V(cast)(to, from, values);
        break;
    case LOOP_ADD_DIVIDED:
        values = V(load)(to, output, i) + V(cast)(to, from, V(rounded)(from, values / number));
        break;
    case LOOP_ADD_MULTIPLIED:
        values = V(load)(to, output, i) + V(cast)(to, from, V(rounded)(from, values * number));
        break;
    }
    V(store)(to, output, i, values);
}

/* As above for one element of any dtype, in arithmetic of fp64. */
ALWAYS_INLINE void V(step_one)(enum loop loop, void *output, enum dtype to, const void *input,
                               enum dtype from, int64_t i, double number) {
    double value = double_load(from, input, i);
    switch (loop) {
    case LOOP_CAST:
        break;
    case LOOP_CAST_DIVIDE:
        value = double_computed(to, double_rounded(to, value) / double_computed(to, number));
        break;
    case LOOP_CAST_MULTIPLY:
        value = double_computed(to, double_rounded(to, value) * double_computed(to, number));
        break;
    case LOOP_ADD:
        value = double_computed(to, double_load(to, output, i) + double_rounded(to, value));
        break;
    case LOOP_ADD_DIVIDED:
        value = double_rounded(from, double_computed(from, value / double_computed(from, number)));
        value = double_computed(to, double_load(to, output, i) + double_rounded(to, value));
        break;
    case LOOP_ADD_MULTIPLIED:
        value = double_rounded(from, double_computed(from, value * double_computed(from, number)));
        value = double_computed(to, double_load(to, output, i) + double_rounded(to, value));
        break;
    }
    double_store(to, output, i, value);
}

/* Prefetching the next cache lines, above all those of the output, is faster than memcpy beyond the caches. A
 * prefetch past the end has no effect. */
ALWAYS_INLINE void V(run_dtypes)(enum loop loop, void *output, enum dtype to, const void *input,
                                 enum dtype from, int64_t numel, double number) {
    int64_t i = 0;
    if (to == DTYPE_FLOAT64 || from == DTYPE_FLOAT64) {
        ELEMENTWISE for (; i < numel; i++) V(step_one)(loop, output, to, input, from, i, number);
        return;
    }
    const floats operand = V(floats_of)((float)number);
    ELEMENTWISE for (; i + FLOATS <= numel; i += FLOATS) {
#if FLOATS > 1
        __builtin_prefetch((const char *)input + (i + PREFETCH_NUMEL) * dtype_nbytes(from), 0);
        __builtin_prefetch((const char *)output + (i + PREFETCH_NUMEL) * dtype_nbytes(to), 1);
#endif
        V(step)(loop, output, to, input, from, i, operand);
    }
    for (; i < numel && one_by_one(); i++)
        V(step_one)(loop, output, to, input, from, i, number);
}

/* ---- the loop for arguments that are no constants ---- */

ALWAYS_INLINE void V(run_to)(enum loop loop, void *output, enum dtype to, const void *input, enum dtype from,
                             int64_t numel, double number) {
    if (from == DTYPE_FLOAT32)
        V(run_dtypes)(loop, output, to, input, DTYPE_FLOAT32, numel, number);
    else if (from == DTYPE_BFLOAT16)
        V(run_dtypes)(loop, output, to, input, DTYPE_BFLOAT16, numel, number);
    else if (from == DTYPE_FLOAT16)
        V(run_dtypes)(loop, output, to, input, DTYPE_FLOAT16, numel, number);
    else
        V(run_dtypes)(loop, output, to, input, DTYPE_FLOAT64, numel, number);
}

ALWAYS_INLINE void V(run_one)(enum loop loop, void *output, enum dtype to, const void *input, enum dtype from,
                              int64_t numel, double number) {
    if (to == DTYPE_FLOAT32)
        V(run_to)(loop, output, DTYPE_FLOAT32, input, from, numel, number);
    else if (to == DTYPE_BFLOAT16)
        V(run_to)(loop, output, DTYPE_BFLOAT16, input, from, numel, number);
    else if (to == DTYPE_FLOAT16)
        V(run_to)(loop, output, DTYPE_FLOAT16, input, from, numel, number);
    else
        V(run_to)(loop, output, DTYPE_FLOAT64, input, from, numel, number);
}

static void V(run)(enum loop loop, void *output, enum dtype to, const void *input, enum dtype from,
                   int64_t numel, double number) {
    switch (loop) {
    case LOOP_CAST:
        V(run_one)(LOOP_CAST, output, to, input, from, numel, number);
        break;
    case LOOP_CAST_DIVIDE:
        V(run_one)(LOOP_CAST_DIVIDE, output, to, input, from, numel, number);
        break;
    case LOOP_CAST_MULTIPLY:
        V(run_one)(LOOP_CAST_MULTIPLY, output, to, input, from, numel, number);
        break;
    case LOOP_ADD:
        V(run_one)(LOOP_ADD, output, to, input, from, numel, number);
        break;
    case LOOP_ADD_DIVIDED:
        V(run_one)(LOOP_ADD_DIVIDED, output, to, input, from, numel, number);
        break;
    case LOOP_ADD_MULTIPLIED:
        V(run_one)(LOOP_ADD_MULTIPLIED, output, to, input, from, numel, number);
        break;
    }
}

static const struct loops V(loops) = {STRING(LOOPS_NAME), V(run)};

#undef FLOATS
#undef LOOPS_NAME
