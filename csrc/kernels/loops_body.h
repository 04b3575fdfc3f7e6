/* One version of the loops: included once by each of loops_*.c, under its instruction set. */
#include <math.h>
#include <string.h>

#include "kernels/convert.h"
#include "kernels/loops.h"

/* Elements of equal index may be the same memory, others are not. */
#ifdef __clang__
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

/* clang-format off */
#define EACH_DTYPE(X)                      \
    X(DTYPE_FLOAT32, float)                \
    X(DTYPE_FLOAT64, double)               \
    X(DTYPE_BFLOAT16, bfloat16)            \
    X(DTYPE_FLOAT16, float16)

#define EACH_ARITHMETIC(X)                                                  \
    X(DTYPE_FLOAT32, float, uint32_t, 0x7fffffffu)                          \
    X(DTYPE_FLOAT64, double, uint64_t, 0x7fffffffffffffffu)

#define EACH_CAST(X)                                                        \
    X(float, double) X(float, bfloat16) X(float, float16)                   \
    X(double, float) X(double, bfloat16) X(double, float16)                 \
    X(bfloat16, float) X(bfloat16, double) X(bfloat16, float16)             \
    X(float16, float) X(float16, double) X(float16, bfloat16)

#define EACH_PAIR(X) EACH_CAST(X) X(float, float) X(double, double) X(bfloat16, bfloat16) X(float16, float16)
/* clang-format on */

#define DEFINE_CAST(to, from)                                                                                          \
    static void to##_cast_##from(void *restrict output, const void *restrict input, int64_t numel) {                   \
        for (int64_t i = 0; i < numel; i++) {                                                                          \
            ((to *)output)[i] = to##_from_##from(((const from *)input)[i]);                                            \
        }                                                                                                              \
    }
EACH_CAST(DEFINE_CAST)

/* With either operator: cast, apply and round; apply and round, cast, add and round. */
#define DEFINE_FACTORED(to, from, verb, added, operator)                                                               \
    static void to##_cast_##verb##_##from(void *output, const void *input, int64_t numel, double number) {             \
        const to##_arith operand = (to##_arith)number;                                                                 \
        ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                              \
            to value = to##_from_##from(((const from *)input)[i]);                                                     \
            ((to *)output)[i] = to##_store(to##_load(value) operator operand);                                         \
        }                                                                                                              \
    }                                                                                                                  \
    static void to##_add_##added##_##from(void *accumulator, const void *input, int64_t numel, double number) {        \
        const from##_arith operand = (from##_arith)number;                                                             \
        ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                              \
            from addend = from##_store(from##_load(((const from *)input)[i]) operator operand);                        \
            to *sum = (to *)accumulator + i;                                                                           \
            *sum = to##_store(to##_load(*sum) + to##_load(to##_from_##from(addend)));                                  \
        }                                                                                                              \
    }

#define DEFINE_PAIR(to, from)                                                                                          \
    static void to##_add_##from(void *accumulator, const void *input, int64_t numel) {                                 \
        ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                              \
            to *sum = (to *)accumulator + i;                                                                           \
            *sum = to##_store(to##_load(*sum) + to##_load(to##_from_##from(((const from *)input)[i])));                \
        }                                                                                                              \
    }                                                                                                                  \
    DEFINE_FACTORED(to, from, divide, divided, /)                                                                      \
    DEFINE_FACTORED(to, from, multiply, multiplied, *)
EACH_PAIR(DEFINE_PAIR)

#define DEFINE_UNSCALE(dtype, type)                                                                                    \
    static bool type##_unscale(void *tensor, int64_t numel, double number) {                                           \
        const type##_arith factor = (type##_arith)number;                                                              \
        type##_bits found = 0;                                                                                         \
        for (int64_t i = 0; i < numel; i++) {                                                                          \
            type *element = (type *)tensor + i;                                                                        \
            type##_bits bits;                                                                                          \
            memcpy(&bits, element, sizeof bits);                                                                       \
            found |= (bits & type##_exponent) == type##_exponent;                                                      \
            *element = type##_store(type##_load(*element) * factor);                                                   \
        }                                                                                                              \
        return found != 0;                                                                                             \
    }
EACH_DTYPE(DEFINE_UNSCALE)

/* squares: adds a multiple of the lanes to them. largest: of the magnitudes as integers, whose order is that of the numbers
 * with NaN above infinity. sum: lane by lane, then the lanes and the rest in fp64. */
enum { SQUARE_NBYTES = 32, SUM_NBYTES = 64 };
#define DEFINE_NORM(dtype, type, integer, magnitude_mask)                                                              \
    typedef type type##_squares_vector __attribute__((vector_size(SQUARE_NBYTES)));                                    \
    static void type##_squares(void *lanes, const void *input, int64_t numel) {                                        \
        type##_squares_vector sums;                                                                                    \
        memcpy(&sums, lanes, sizeof sums);                                                                             \
        for (int64_t i = 0; i < numel; i += SQUARE_NBYTES / (int64_t)sizeof(type)) {                                   \
            type##_squares_vector values;                                                                              \
            memcpy(&values, (const type *)input + i, sizeof values);                                                   \
            sums += values * values;                                                                                   \
        }                                                                                                              \
        memcpy(lanes, &sums, sizeof sums);                                                                             \
    }                                                                                                                  \
    static void type##_largest(void *largest, const void *input, int64_t numel) {                                      \
        integer bits;                                                                                                  \
        memcpy(&bits, largest, sizeof bits);                                                                           \
        for (int64_t i = 0; i < numel; i++) {                                                                          \
            integer value;                                                                                             \
            memcpy(&value, (const type *)input + i, sizeof value);                                                     \
            value &= magnitude_mask;                                                                                   \
            bits = value > bits ? value : bits;                                                                        \
        }                                                                                                              \
        memcpy(largest, &bits, sizeof bits);                                                                           \
    }                                                                                                                  \
    static void type##_magnitudes(void *restrict output, const void *restrict input, int64_t numel) {                  \
        for (int64_t i = 0; i < numel; i++) {                                                                          \
            integer bits;                                                                                              \
            memcpy(&bits, (const type *)input + i, sizeof bits);                                                       \
            bits &= magnitude_mask;                                                                                    \
            memcpy((type *)output + i, &bits, sizeof bits);                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    static void type##_whole_power(void *magnitudes, int64_t numel, int64_t power) {                                   \
        for (int64_t i = 0; i < numel; i++) {                                                                          \
            type magnitude = ((type *)magnitudes)[i];                                                                  \
            type product = magnitude;                                                                                  \
            for (int64_t factor = 1; factor < power; factor++) {                                                       \
                product *= magnitude;                                                                                  \
            }                                                                                                          \
            ((type *)magnitudes)[i] = product;                                                                         \
        }                                                                                                              \
    }                                                                                                                  \
    typedef type type##_sum_vector __attribute__((vector_size(SUM_NBYTES)));                                           \
    static double type##_sum(const void *input, int64_t numel) {                                                       \
        const int64_t num_lanes = SUM_NBYTES / sizeof(type);                                                           \
        type##_sum_vector sums = {0};                                                                                  \
        double sum = 0;                                                                                                \
        int64_t i = 0;                                                                                                 \
        for (; i + num_lanes <= numel; i += num_lanes) {                                                               \
            type##_sum_vector values;                                                                                  \
            memcpy(&values, (const type *)input + i, sizeof values);                                                   \
            sums += values;                                                                                            \
        }                                                                                                              \
        for (int64_t lane = 0; lane < num_lanes; lane++) {                                                             \
            sum += (double)sums[lane];                                                                                 \
        }                                                                                                              \
        for (; i < numel; i++) {                                                                                       \
            sum += (double)((const type *)input)[i];                                                                   \
        }                                                                                                              \
        return sum;                                                                                                    \
    }
EACH_ARITHMETIC(DEFINE_NORM)

static uint64_t checksum(const void *words, int64_t first_word, int64_t num_words) {
    const uint64_t step = 0x9e3779b97f4a7c15u;
    uint64_t sum = 0;
    for (int64_t i = 0; i < num_words; i++) {
        uint64_t word;
        memcpy(&word, (const char *)words + i * (int64_t)sizeof word, sizeof word);
        word ^= (uint64_t)(first_word + i + 1) * step;
        sum += word + (word & 0xffffffffu) * (word >> 32);
    }
    return sum;
}

#define OF_PAIRS(name)                                                                                                 \
    {                                                                                                                  \
        [DTYPE_FLOAT32] = {float_##name##_float, float_##name##_double, float_##name##_bfloat16,                       \
                           float_##name##_float16},                                                                    \
        [DTYPE_FLOAT64] = {double_##name##_float, double_##name##_double, double_##name##_bfloat16,                    \
                           double_##name##_float16},                                                                   \
        [DTYPE_BFLOAT16] = {bfloat16_##name##_float, bfloat16_##name##_double, bfloat16_##name##_bfloat16,             \
                            bfloat16_##name##_float16},                                                                \
        [DTYPE_FLOAT16] = {float16_##name##_float, float16_##name##_double, float16_##name##_bfloat16,                 \
                           float16_##name##_float16},                                                                  \
    }
#define float_cast_float       NULL
#define double_cast_double     NULL
#define bfloat16_cast_bfloat16 NULL
#define float16_cast_float16   NULL

const struct loops LOOPS_TABLE = {
    .name = LOOPS_NAME,
    .cast = OF_PAIRS(cast),
    .cast_divide = OF_PAIRS(cast_divide),
    .cast_multiply = OF_PAIRS(cast_multiply),
    .add = OF_PAIRS(add),
    .add_divided = OF_PAIRS(add_divided),
    .add_multiplied = OF_PAIRS(add_multiplied),
    .unscale = {float_unscale, double_unscale, bfloat16_unscale, float16_unscale},
    .squares = {float_squares, double_squares},
    .largest = {float_largest, double_largest},
    .magnitudes = {float_magnitudes, double_magnitudes},
    .whole_power = {float_whole_power, double_whole_power},
    .sum = {float_sum, double_sum},
    .checksum = checksum,
};
