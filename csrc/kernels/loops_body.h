/* One version of the loops. Each loops_*.c includes this file once, under its instruction set.
 *
 * The including file defines `floats`, a vector of FLOATS fp32 elements, with load, round and store for each
 * dtype whose arithmetic is fp32. Elements after the last whole vector are processed one by one, with the
 * same result. */

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
#define floats_bfloat16_from_float(values) floats_round_bfloat16(values)
#define floats_bfloat16_from_bfloat16(values) (values)
#define floats_bfloat16_from_float16(values) floats_round_bfloat16(values)
#define floats_float16_from_float(values) floats_round_float16(values)
#define floats_float16_from_bfloat16(values) floats_round_float16(values)
#define floats_float16_from_float16(values) (values)
#define floats_round_float(values) (values)
/* clang-format on */

/* ---- cast, divide, multiply, add ---- */

/* Process whole vectors, then the rest. Prefetching the next cache lines, above all those of the output, is
 * faster than memcpy beyond the caches. A prefetch past the end has no effect. */
enum { PREFETCH_NUMEL = 512 };
#define PREFETCH(address, for_writing) __builtin_prefetch(address, for_writing)

/* Keep the compiler from vectorising the rest loops, which are shorter than a vector: most of the code
 * size. */
static inline bool one_by_one(void) {
    __asm__ volatile("");
    return true;
}

#define OVER_VECTORS                                                                                         \
    int64_t i = 0;                                                                                           \
    ELEMENTWISE for (; i + FLOATS <= numel; i += FLOATS)
#define OVER_REST for (; i < numel && one_by_one(); i++)
#define PREFETCH_BOTH                                                                                        \
    PREFETCH(source + i + PREFETCH_NUMEL, 0);                                                                \
    PREFETCH(target + i + PREFETCH_NUMEL, 1)

#define DEFINE_CAST(to, from)                                                                                \
    static void to##_cast_##from(void *output, const void *input, int64_t numel) {                           \
        to *target = output;                                                                                 \
        const from *source = input;                                                                          \
        OVER_VECTORS {                                                                                       \
            PREFETCH_BOTH;                                                                                   \
            floats_store_##to(target + i, floats_load_##from(source + i));                                   \
        }                                                                                                    \
        OVER_REST {                                                                                          \
            target[i] = to##_from_##from(source[i]);                                                         \
        }                                                                                                    \
    }

#define DEFINE_ADD(to, from)                                                                                 \
    static void to##_add_##from(void *accumulator, const void *input, int64_t numel) {                       \
        to *target = accumulator;                                                                            \
        const from *source = input;                                                                          \
        OVER_VECTORS {                                                                                       \
            PREFETCH_BOTH;                                                                                   \
            floats addends = floats_##to##_from_##from(floats_load_##from(source + i));                      \
            floats_store_##to(target + i, floats_load_##to(target + i) + addends);                           \
        }                                                                                                    \
        OVER_REST {                                                                                          \
            target[i] = to##_store(to##_load(target[i]) + to##_load(to##_from_##from(source[i])));           \
        }                                                                                                    \
    }

/* Two loops per operator: cast, apply and round; and apply and round, cast, add and round. */
#define DEFINE_FACTORED(to, from, verb, added, operator)                                                     \
    static void to##_cast_##verb##_##from(void *output, const void *input, int64_t numel, double number) {   \
        to *target = output;                                                                                 \
        const from *source = input;                                                                          \
        const float operand = (float)number;                                                                 \
        const floats operands = floats_of(operand);                                                          \
        OVER_VECTORS {                                                                                       \
            PREFETCH_BOTH;                                                                                   \
            floats values = floats_##to##_from_##from(floats_load_##from(source + i));                       \
            floats_store_##to(target + i, values operator operands);                                         \
        }                                                                                                    \
        OVER_REST {                                                                                          \
            target[i] = to##_store(to##_load(to##_from_##from(source[i])) operator operand);                 \
        }                                                                                                    \
    }                                                                                                        \
    static void to##_add_##added##_##from(void *accumulator, const void *input, int64_t numel,               \
                                          double number) {                                                   \
        to *target = accumulator;                                                                            \
        const from *source = input;                                                                          \
        const float operand = (float)number;                                                                 \
        const floats operands = floats_of(operand);                                                          \
        OVER_VECTORS {                                                                                       \
            PREFETCH_BOTH;                                                                                   \
            floats results = floats_round_##from(floats_load_##from(source + i) operator operands);          \
            floats addends = floats_##to##_from_##from(results);                                             \
            floats_store_##to(target + i, floats_load_##to(target + i) + addends);                           \
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
    static void to##_cast_##from(void *output, const void *input, int64_t numel) {                           \
        ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                    \
            ((to *)output)[i] = to##_from_##from(((const from *)input)[i]);                                  \
        }                                                                                                    \
    }
EACH_WIDE_CAST(DEFINE_WIDE_CAST)

static void double_add_double(void *accumulator, const void *input, int64_t numel) {
    ELEMENTWISE for (int64_t i = 0; i < numel; i++) {
        ((double *)accumulator)[i] += ((const double *)input)[i];
    }
}

#define DEFINE_DOUBLE(verb, added, operator)                                                                 \
    static void double_cast_##verb##_double(void *output, const void *input, int64_t numel, double number) { \
        ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                    \
            ((double *)output)[i] = ((const double *)input)[i] operator number;                              \
        }                                                                                                    \
    }                                                                                                        \
    static void double_add_##added##_double(void *accumulator, const void *input, int64_t numel,             \
                                            double number) {                                                 \
        ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                    \
            ((double *)accumulator)[i] += ((const double *)input)[i] operator number;                        \
        }                                                                                                    \
    }
DEFINE_DOUBLE(divide, divided, /)
DEFINE_DOUBLE(multiply, multiplied, *)

/* ---- the table ---- */

#define OF_NARROW(to, name)                                                                                  \
    [DTYPE_FLOAT32] = to##_##name##_float, [DTYPE_BFLOAT16] = to##_##name##_bfloat16,                        \
    [DTYPE_FLOAT16] = to##_##name##_float16
#define OF_PAIRS(name)                                                                                       \
    {                                                                                                        \
        [DTYPE_FLOAT32] = {OF_NARROW(float, name)},                                                          \
        [DTYPE_FLOAT64] = {[DTYPE_FLOAT64] = double_##name##_double},                                        \
        [DTYPE_BFLOAT16] = {OF_NARROW(bfloat16, name)},                                                      \
        [DTYPE_FLOAT16] = {OF_NARROW(float16, name)},                                                        \
    }
#define OF_CASTS                                                                                             \
    {                                                                                                        \
        [DTYPE_FLOAT32] = {OF_NARROW(float, cast), [DTYPE_FLOAT64] = float_cast_double},                     \
        [DTYPE_FLOAT64] = {OF_NARROW(double, cast)},                                                         \
        [DTYPE_BFLOAT16] = {OF_NARROW(bfloat16, cast), [DTYPE_FLOAT64] = bfloat16_cast_double},              \
        [DTYPE_FLOAT16] = {OF_NARROW(float16, cast), [DTYPE_FLOAT64] = float16_cast_double},                 \
    }

const struct loops LOOPS_TABLE = {
    .name = LOOPS_NAME,
    .cast = OF_CASTS,
    .cast_divide = OF_PAIRS(cast_divide),
    .cast_multiply = OF_PAIRS(cast_multiply),
    .add = OF_PAIRS(add),
    .add_divided = OF_PAIRS(add_divided),
    .add_multiplied = OF_PAIRS(add_multiplied),
};
