/* One version of the loops. loops.c includes this file once per instruction set, and defines before:
 *
 *   LOOPS_NAME   the version's name, the end of its functions' names: V(name)
 *   FLOATS       number of fp32 elements of a vector: 1 for any processor, 8 with AVX2, 16 with AVX-512
 *
 * Elements after the last whole vector are processed one by one, with the same result. */

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

/* ---- load, round and store of a vector, as convert.h does for one element ---- */

static inline floats V(floats_load_float)(const float *input) {
    floats values;
    memcpy(&values, input, sizeof values);
    return values;
}

static inline void V(floats_store_float)(float *output, floats values) {
    memcpy(output, &values, sizeof values);
}

#if FLOATS == 1 /* the compiler makes the vectors */
static inline floats V(floats_of)(float value) {
    return value;
}

static inline floats V(floats_load_bfloat16)(const bfloat16 *input) {
    return float_from_bfloat16(*input);
}

static inline floats V(floats_load_float16)(const float16 *input) {
    return float_from_float16(*input);
}

static inline floats V(floats_round_bfloat16)(floats values) {
    return float_from_bfloat16(bfloat16_from_float(values));
}

static inline floats V(floats_round_float16)(floats values) {
    return float_from_float16(float16_from_float(values));
}

static inline void V(floats_store_bfloat16)(bfloat16 *output, floats values) {
    *output = bfloat16_from_float(values);
}

static inline void V(floats_store_float16)(float16 *output, floats values) {
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

static inline floats V(floats_load_bfloat16)(const bfloat16 *input) {
    return (floats)OF_WIDTH(slli_epi32)(OF_WIDTH(cvtepu16_epi32)(V(halves_load)(input)), 16);
}

static inline floats V(floats_load_float16)(const float16 *input) {
    return OF_WIDTH(cvtph_ps)(V(halves_load)(input));
}

static inline floats V(floats_round_bfloat16)(floats values) {
    return (floats)((float_bits)V(round_to_bfloat16)(values) & 0xffff0000u);
}

static inline floats V(floats_round_float16)(floats values) {
    return OF_WIDTH(cvtph_ps)(OF_WIDTH(cvtps_ph)(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline void V(floats_store_bfloat16)(bfloat16 *output, floats values) {
    V(halves_store)(output, V(lower_halves)((float_bits)V(round_to_bfloat16)(values) >> 16));
}

static inline void V(floats_store_float16)(float16 *output, floats values) {
    V(halves_store)(output, OF_WIDTH(cvtps_ph)(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#undef OF_WIDTH
#endif

/* Input and output may alias element by element, never at different indices. */
#ifdef __clang__
#pragma clang diagnostic ignored "-Wpass-failed" /* clang warns of loops that are vectors already */
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

/* clang-format off */
#define EACH_NARROW(X) \
    X(float, float) X(float, bfloat16) X(float, float16) \
    X(bfloat16, float) X(bfloat16, bfloat16) X(bfloat16, float16) \
    X(float16, float) X(float16, bfloat16) X(float16, float16)

#define EACH_WIDE_CAST(X)                                                    \
    X(float, double) X(bfloat16, double) X(float16, double)                  \
    X(double, float) X(double, bfloat16) X(double, float16)

/* A cast of vectors rounds where the target dtype cannot hold all values of the source dtype. */
#define floats_float_from_float(values) (values)
#define floats_float_from_bfloat16(values) (values)
#define floats_float_from_float16(values) (values)
#define floats_bfloat16_from_float floats_rounded_bfloat16
#define floats_bfloat16_from_bfloat16(values) (values)
#define floats_bfloat16_from_float16 floats_rounded_bfloat16
#define floats_float16_from_float floats_rounded_float16
#define floats_float16_from_bfloat16 floats_rounded_float16
#define floats_float16_from_float16(values) (values)
#define floats_rounded_float(values) (values)
#define floats_rounded_bfloat16(values) V(floats_round_bfloat16)(values)
#define floats_rounded_float16(values) V(floats_round_float16)(values)
/* clang-format on */

/* ---- cast, divide, multiply, add ---- */

/* Process whole vectors, then the rest. Prefetching the next cache lines, above all those of the output, is
 * faster than memcpy beyond the caches. A prefetch past the end has no effect. */
#define PREFETCH_NUMEL                 512
#define PREFETCH(address, for_writing) (FLOATS > 1 ? __builtin_prefetch(address, for_writing) : (void)0)

/* Keep the compiler from vectorising the rest loops, which are shorter than a vector: most of the code
 * size. */
static inline bool V(one_by_one)(void) {
    __asm__ volatile("");
    return true;
}

#define OVER_VECTORS                                                                                         \
    int64_t i = 0;                                                                                           \
    ELEMENTWISE for (; i + FLOATS <= numel; i += FLOATS)
#define OVER_REST for (; i < numel && V(one_by_one)(); i++)
#define PREFETCH_BOTH                                                                                        \
    PREFETCH(source + i + PREFETCH_NUMEL, 0);                                                                \
    PREFETCH(target + i + PREFETCH_NUMEL, 1)

#define DEFINE_CAST(to, from)                                                                                \
    static void V(to##_cast_##from)(void *output, const void *input, int64_t numel) {                        \
        to *target = output;                                                                                 \
        const from *source = input;                                                                          \
        OVER_VECTORS {                                                                                       \
            PREFETCH_BOTH;                                                                                   \
            V(floats_store_##to)(target + i, V(floats_load_##from)(source + i));                             \
        }                                                                                                    \
        OVER_REST {                                                                                          \
            target[i] = to##_from_##from(source[i]);                                                         \
        }                                                                                                    \
    }

#define DEFINE_ADD(to, from)                                                                                 \
    static void V(to##_add_##from)(void *accumulator, const void *input, int64_t numel) {                    \
        to *target = accumulator;                                                                            \
        const from *source = input;                                                                          \
        OVER_VECTORS {                                                                                       \
            PREFETCH_BOTH;                                                                                   \
            floats addends = floats_##to##_from_##from(V(floats_load_##from)(source + i));                   \
            V(floats_store_##to)(target + i, V(floats_load_##to)(target + i) + addends);                     \
        }                                                                                                    \
        OVER_REST {                                                                                          \
            target[i] = to##_store(to##_load(target[i]) + to##_load(to##_from_##from(source[i])));           \
        }                                                                                                    \
    }

/* Two loops per operator: cast, apply and round; and apply and round, cast, add and round. */
#define DEFINE_FACTORED(to, from, verb, added, operator)                                                     \
    static void V(to##_cast_##verb##_##from)(void *output, const void *input, int64_t numel,                 \
                                             double number) {                                                \
        to *target = output;                                                                                 \
        const from *source = input;                                                                          \
        const float operand = (float)number;                                                                 \
        const floats operands = V(floats_of)(operand);                                                       \
        OVER_VECTORS {                                                                                       \
            PREFETCH_BOTH;                                                                                   \
            floats values = floats_##to##_from_##from(V(floats_load_##from)(source + i));                    \
            V(floats_store_##to)(target + i, values operator operands);                                      \
        }                                                                                                    \
        OVER_REST {                                                                                          \
            target[i] = to##_store(to##_load(to##_from_##from(source[i])) operator operand);                 \
        }                                                                                                    \
    }                                                                                                        \
    static void V(to##_add_##added##_##from)(void *accumulator, const void *input, int64_t numel,            \
                                             double number) {                                                \
        to *target = accumulator;                                                                            \
        const from *source = input;                                                                          \
        const float operand = (float)number;                                                                 \
        const floats operands = V(floats_of)(operand);                                                       \
        OVER_VECTORS {                                                                                       \
            PREFETCH_BOTH;                                                                                   \
            floats results = floats_rounded_##from(V(floats_load_##from)(source + i) operator operands);     \
            floats addends = floats_##to##_from_##from(results);                                             \
            V(floats_store_##to)(target + i, V(floats_load_##to)(target + i) + addends);                     \
        }                                                                                                    \
        OVER_REST {                                                                                          \
            from result = from##_store(from##_load(source[i]) operator operand);                             \
            target[i] = to##_store(to##_load(target[i]) + to##_load(to##_from_##from(result)));              \
        }                                                                                                    \
    }

#define DEFINE_NARROW(to, from)                                                                              \
    DEFINE_CAST(to, from)                                                                                    \
    DEFINE_ADD(to, from)                                                                                     \
    DEFINE_FACTORED(to, from, divide, divided, /)                                                            \
    DEFINE_FACTORED(to, from, multiply, multiplied, *)
EACH_NARROW(DEFINE_NARROW)

/* Loops with fp64 are vectorised by the compiler. */
#define DEFINE_WIDE_CAST(to, from)                                                                           \
    static void V(to##_cast_##from)(void *output, const void *input, int64_t numel) {                        \
        ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                    \
            ((to *)output)[i] = to##_from_##from(((const from *)input)[i]);                                  \
        }                                                                                                    \
    }
EACH_WIDE_CAST(DEFINE_WIDE_CAST)

static void V(double_add_double)(void *accumulator, const void *input, int64_t numel) {
    ELEMENTWISE for (int64_t i = 0; i < numel; i++) {
        ((double *)accumulator)[i] += ((const double *)input)[i];
    }
}

#define DEFINE_DOUBLE(verb, added, operator)                                                                 \
    static void V(double_cast_##verb##_double)(void *output, const void *input, int64_t numel,               \
                                               double number) {                                              \
        ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                    \
            ((double *)output)[i] = ((const double *)input)[i] operator number;                              \
        }                                                                                                    \
    }                                                                                                        \
    static void V(double_add_##added##_double)(void *accumulator, const void *input, int64_t numel,          \
                                               double number) {                                              \
        ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                    \
            ((double *)accumulator)[i] += ((const double *)input)[i] operator number;                        \
        }                                                                                                    \
    }
DEFINE_DOUBLE(divide, divided, /)
DEFINE_DOUBLE(multiply, multiplied, *)

/* ---- the table ---- */

#define OF_NARROW(to, name)                                                                                  \
    [DTYPE_FLOAT32] = V(to##_##name##_float), [DTYPE_BFLOAT16] = V(to##_##name##_bfloat16),                  \
    [DTYPE_FLOAT16] = V(to##_##name##_float16)
#define OF_PAIRS(name)                                                                                       \
    {                                                                                                        \
        [DTYPE_FLOAT32] = {OF_NARROW(float, name)},                                                          \
        [DTYPE_FLOAT64] = {[DTYPE_FLOAT64] = V(double_##name##_double)},                                     \
        [DTYPE_BFLOAT16] = {OF_NARROW(bfloat16, name)},                                                      \
        [DTYPE_FLOAT16] = {OF_NARROW(float16, name)},                                                        \
    }
#define OF_CASTS                                                                                             \
    {                                                                                                        \
        [DTYPE_FLOAT32] = {OF_NARROW(float, cast), [DTYPE_FLOAT64] = V(float_cast_double)},                  \
        [DTYPE_FLOAT64] = {OF_NARROW(double, cast)},                                                         \
        [DTYPE_BFLOAT16] = {OF_NARROW(bfloat16, cast), [DTYPE_FLOAT64] = V(bfloat16_cast_double)},           \
        [DTYPE_FLOAT16] = {OF_NARROW(float16, cast), [DTYPE_FLOAT64] = V(float16_cast_double)},              \
    }

static const struct loops V(loops) = {
    .name = STRING(LOOPS_NAME),
    .cast = OF_CASTS,
    .cast_divide = OF_PAIRS(cast_divide),
    .cast_multiply = OF_PAIRS(cast_multiply),
    .add = OF_PAIRS(add),
    .add_divided = OF_PAIRS(add_divided),
    .add_multiplied = OF_PAIRS(add_multiplied),
};

#undef FLOATS
#undef LOOPS_NAME
