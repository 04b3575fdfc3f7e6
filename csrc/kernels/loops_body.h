/* One version of the loops: included once by each of loops_*.c, under its instruction set.
 *
 * The file before it defines `floats`, FLOATS elements in fp32, with load, round and store for each dtype that is computed in
 * fp32, and `words`, WORDS of 64 bits. What is left over by whole vectors goes element by element, with the same result. */

/* Elements of equal index may be the same memory, others are not. */
#ifdef __clang__
#pragma clang diagnostic ignored "-Wpass-failed" /* loops over vectors are what they should be already */
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

/* clang-format off */
#define EACH_NARROW(X) \
    X(float, float) X(float, bfloat16) X(float, float16) \
    X(bfloat16, float) X(bfloat16, bfloat16) X(bfloat16, float16) \
    X(float16, float) X(float16, bfloat16) X(float16, float16)

#define EACH_WIDE(X) \
    X(float, double) X(bfloat16, double) X(float16, double) X(double, double) \
    X(double, float) X(double, bfloat16) X(double, float16)

/* A cast of vectors rounds where the target cannot hold what the source can. */
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

/* Whole vectors, and then what is left. The cache lines that come next, above all those to be written, are asked for in time:
 * from memory beyond the caches this beats memcpy. A prefetch past the end does nothing. */
enum { AHEAD_NUMEL = 512 };
#define OVER_VECTORS                                                                                                   \
    int64_t i = 0;                                                                                                     \
    ELEMENTWISE for (; i + FLOATS <= numel; i += FLOATS)
#define OVER_REST for (; i < numel; i++)
#define ASK_AHEAD                                                                                                      \
    PREFETCH(source + i + AHEAD_NUMEL, 0);                                                                             \
    PREFETCH(target + i + AHEAD_NUMEL, 1)

#define DEFINE_CAST(to, from)                                                                                          \
    static void to##_cast_##from(void *output, const void *input, int64_t numel) {                                     \
        to *target = output;                                                                                           \
        const from *source = input;                                                                                    \
        OVER_VECTORS {                                                                                                 \
            ASK_AHEAD;                                                                                                 \
            floats_store_##to(target + i, floats_load_##from(source + i));                                             \
        }                                                                                                              \
        OVER_REST {                                                                                                    \
            target[i] = to##_from_##from(source[i]);                                                                   \
        }                                                                                                              \
    }

#define DEFINE_ADD(to, from)                                                                                           \
    static void to##_add_##from(void *accumulator, const void *input, int64_t numel) {                                 \
        to *target = accumulator;                                                                                      \
        const from *source = input;                                                                                    \
        OVER_VECTORS {                                                                                                 \
            ASK_AHEAD;                                                                                                 \
            floats addends = floats_##to##_from_##from(floats_load_##from(source + i));                                \
            floats_store_##to(target + i, floats_load_##to(target + i) + addends);                                     \
        }                                                                                                              \
        OVER_REST {                                                                                                    \
            target[i] = to##_store(to##_load(target[i]) + to##_load(to##_from_##from(source[i])));                     \
        }                                                                                                              \
    }

/* With either operator: cast, apply and round; apply and round, cast, add and round. */
#define DEFINE_FACTORED(to, from, verb, added, operator)                                                               \
    static void to##_cast_##verb##_##from(void *output, const void *input, int64_t numel, double number) {             \
        to *target = output;                                                                                           \
        const from *source = input;                                                                                    \
        const float operand = (float)number;                                                                           \
        const floats operands = floats_of(operand);                                                                    \
        OVER_VECTORS {                                                                                                 \
            ASK_AHEAD;                                                                                                 \
            floats values = floats_##to##_from_##from(floats_load_##from(source + i));                                 \
            floats_store_##to(target + i, values operator operands);                                                   \
        }                                                                                                              \
        OVER_REST {                                                                                                    \
            target[i] = to##_store(to##_load(to##_from_##from(source[i])) operator operand);                           \
        }                                                                                                              \
    }                                                                                                                  \
    static void to##_add_##added##_##from(void *accumulator, const void *input, int64_t numel, double number) {        \
        to *target = accumulator;                                                                                      \
        const from *source = input;                                                                                    \
        const float operand = (float)number;                                                                           \
        const floats operands = floats_of(operand);                                                                    \
        OVER_VECTORS {                                                                                                 \
            ASK_AHEAD;                                                                                                 \
            floats results = floats_round_##from(floats_load_##from(source + i) operator operands);                    \
            floats addends = floats_##to##_from_##from(results);                                                       \
            floats_store_##to(target + i, floats_load_##to(target + i) + addends);                                     \
        }                                                                                                              \
        OVER_REST {                                                                                                    \
            from result = from##_store(from##_load(source[i]) operator operand);                                       \
            target[i] = to##_store(to##_load(target[i]) + to##_load(to##_from_##from(result)));                        \
        }                                                                                                              \
    }

#define DEFINE_NARROW(to, from)                                                                                        \
    DEFINE_CAST(to, from)                                                                                              \
    DEFINE_ADD(to, from)                                                                                               \
    DEFINE_FACTORED(to, from, divide, divided, /)                                                                      \
    DEFINE_FACTORED(to, from, multiply, multiplied, *)
EACH_NARROW(DEFINE_NARROW)

/* Where fp64 takes part the compiler finds the vectors. */
#define DEFINE_WIDE_FACTORED(to, from, verb, added, operator)                                                          \
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

#define DEFINE_WIDE(to, from)                                                                                          \
    static void to##_cast_##from(void *output, const void *input, int64_t numel) {                                     \
        ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                              \
            ((to *)output)[i] = to##_from_##from(((const from *)input)[i]);                                            \
        }                                                                                                              \
    }                                                                                                                  \
    static void to##_add_##from(void *accumulator, const void *input, int64_t numel) {                                 \
        ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                              \
            to *sum = (to *)accumulator + i;                                                                           \
            *sum = to##_store(to##_load(*sum) + to##_load(to##_from_##from(((const from *)input)[i])));                \
        }                                                                                                              \
    }                                                                                                                  \
    DEFINE_WIDE_FACTORED(to, from, divide, divided, /)                                                                 \
    DEFINE_WIDE_FACTORED(to, from, multiply, multiplied, *)
EACH_WIDE(DEFINE_WIDE)

/* ---- inf and NaN ---- */

static bool any_is_nan(floats values) {
    float lanes[FLOATS];
    bool found = false;
    memcpy(lanes, &values, sizeof lanes);
    for (int lane = 0; lane < FLOATS; lane++) {
        found |= lanes[lane] != lanes[lane];
    }
    return found;
}

/* A finite number times zero is zero, inf or NaN times zero is NaN, and stays in the sum. */
#define DEFINE_UNSCALE(type)                                                                                           \
    static bool type##_unscale(void *tensor, int64_t numel, double number) {                                           \
        type *target = tensor;                                                                                         \
        const type *source = tensor;                                                                                   \
        const float factor = (float)number;                                                                            \
        const floats factors = floats_of(factor);                                                                      \
        floats zeros = floats_of(0.0f);                                                                                \
        float zero = 0.0f;                                                                                             \
        OVER_VECTORS {                                                                                                 \
            ASK_AHEAD;                                                                                                 \
            floats values = floats_load_##type(source + i);                                                            \
            zeros = floats_add_product(zeros, values, floats_of(0.0f));                                                \
            floats_store_##type(target + i, values * factors);                                                         \
        }                                                                                                              \
        OVER_REST {                                                                                                    \
            float value = type##_load(source[i]);                                                                      \
            zero += value * 0.0f;                                                                                      \
            target[i] = type##_store(value * factor);                                                                  \
        }                                                                                                              \
        return zero != zero || any_is_nan(zeros);                                                                      \
    }
DEFINE_UNSCALE(float)
DEFINE_UNSCALE(bfloat16)
DEFINE_UNSCALE(float16)

static bool double_unscale(void *tensor, int64_t numel, double factor) {
    uint64_t found = 0;
    for (int64_t i = 0; i < numel; i++) {
        double *element = (double *)tensor + i;
        uint64_t bits;
        memcpy(&bits, element, sizeof bits);
        found |= (bits & 0x7ff0000000000000u) == 0x7ff0000000000000u;
        *element *= factor;
    }
    return found != 0;
}

/* ---- norms ---- */

/* The width that sums of magnitudes are made with, whatever the processor's vectors; that of squares is in squares.h. */
enum { SUM_NBYTES = 32, SUMS_AT_ONCE = 4 };

/* squares: adds to each tensor's lanes, several tensors in turn because each sum waits for the one before. largest: of the
 * magnitudes as integers, whose order is that of the numbers with NaN above infinity. sum: of magnitudes, lane by lane, then
 * the lanes and the rest in fp64. */
#define DEFINE_SQUARES(type, vector)                                                                                   \
    static inline void type##_add_squared(vector *sums, const void *input, int64_t i) {                                \
        vector values;                                                                                                 \
        square_load_##type(&values, (const type *)input + i);                                                          \
        *sums += values * values;                                                                                      \
    }                                                                                                                  \
    static void type##_squares(void *lanes, const void *input, int64_t numel) {                                        \
        vector sums;                                                                                                   \
        memcpy(&sums, lanes, sizeof sums);                                                                             \
        for (int64_t i = 0; i < numel; i += (int64_t)(sizeof sums / sizeof sums[0])) {                                 \
            type##_add_squared(&sums, input, i);                                                                       \
        }                                                                                                              \
        memcpy(lanes, &sums, sizeof sums);                                                                             \
    }                                                                                                                  \
    static void type##_squares_of_four(void *const lanes[4], const void *const inputs[4], int64_t numel) {             \
        vector a, b, c, d;                                                                                             \
        memcpy(&a, lanes[0], sizeof a);                                                                                \
        memcpy(&b, lanes[1], sizeof b);                                                                                \
        memcpy(&c, lanes[2], sizeof c);                                                                                \
        memcpy(&d, lanes[3], sizeof d);                                                                                \
        for (int64_t i = 0; i < numel; i += (int64_t)(sizeof a / sizeof a[0])) {                                       \
            type##_add_squared(&a, inputs[0], i);                                                                      \
            type##_add_squared(&b, inputs[1], i);                                                                      \
            type##_add_squared(&c, inputs[2], i);                                                                      \
            type##_add_squared(&d, inputs[3], i);                                                                      \
        }                                                                                                              \
        memcpy(lanes[0], &a, sizeof a);                                                                                \
        memcpy(lanes[1], &b, sizeof b);                                                                                \
        memcpy(lanes[2], &c, sizeof c);                                                                                \
        memcpy(lanes[3], &d, sizeof d);                                                                                \
    }
DEFINE_SQUARES(float, square_floats)
DEFINE_SQUARES(bfloat16, square_floats)
DEFINE_SQUARES(float16, square_floats)
DEFINE_SQUARES(double, square_doubles)

#define DEFINE_NORM(type, integer, magnitude_mask)                                                                     \
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
    typedef type type##_sum_vector __attribute__((vector_size(SUM_NBYTES)));                                           \
    typedef integer type##_sum_bits __attribute__((vector_size(SUM_NBYTES)));                                          \
    static double type##_sum(const void *input, int64_t numel) {                                                       \
        const int64_t num_lanes = SUM_NBYTES / sizeof(type);                                                           \
        type##_sum_vector sums[SUMS_AT_ONCE] = {{0}};                                                                  \
        double sum = 0;                                                                                                \
        int64_t i = 0;                                                                                                 \
        for (; i + SUMS_AT_ONCE * num_lanes <= numel; i += SUMS_AT_ONCE * num_lanes) {                                 \
            for (int part = 0; part < SUMS_AT_ONCE; part++) {                                                          \
                type##_sum_bits bits;                                                                                  \
                memcpy(&bits, (const type *)input + i + part * num_lanes, sizeof bits);                                \
                sums[part] += (type##_sum_vector)(bits & magnitude_mask);                                              \
            }                                                                                                          \
        }                                                                                                              \
        sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);                                                           \
        for (int64_t lane = 0; lane < num_lanes; lane++) {                                                             \
            sum += (double)sums[0][lane];                                                                              \
        }                                                                                                              \
        for (; i < numel; i++) {                                                                                       \
            sum += fabs((double)((const type *)input)[i]);                                                             \
        }                                                                                                              \
        return sum;                                                                                                    \
    }                                                                                                                  \
    static void type##_whole_power(void *output, const void *input, int64_t numel, int64_t power) {                    \
        const type *source = input;                                                                                    \
        type *products = output;                                                                                       \
        ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                              \
            products[i] = source[i] * source[i];                                                                       \
        }                                                                                                              \
        for (int64_t factor = 2; factor < power; factor++) {                                                           \
            ELEMENTWISE for (int64_t i = 0; i < numel; i++) {                                                          \
                products[i] *= source[i];                                                                              \
            }                                                                                                          \
        }                                                                                                              \
    }
DEFINE_NORM(float, uint32_t, 0x7fffffffu)
DEFINE_NORM(double, uint64_t, 0x7fffffffffffffffu)

/* ---- checksum ---- */

static const uint64_t checksum_step = 0x9e3779b97f4a7c15u;

static inline uint64_t checksum_term(const void *data, int64_t i, uint64_t key) {
    uint64_t word;
    memcpy(&word, (const char *)data + i * (int64_t)sizeof word, sizeof word);
    word ^= key;
    return word + (word & 0xffffffffu) * (word >> 32);
}

static uint64_t checksum(const void *data, int64_t first_word, int64_t num_words) {
    uint64_t lanes[WORDS];
    uint64_t sum = 0;
    words keys;
    words sums = words_of(0);
    int64_t i = 0;
    for (int lane = 0; lane < WORDS; lane++) {
        lanes[lane] = (uint64_t)(first_word + lane + 1) * checksum_step;
    }
    memcpy(&keys, lanes, sizeof keys);
    for (; i + WORDS <= num_words; i += WORDS) {
        words values = words_load((const char *)data + i * (int64_t)sizeof *lanes) ^ keys;
        sums += values + words_multiply_halves(values);
        keys += words_of(WORDS * checksum_step);
    }
    memcpy(lanes, &sums, sizeof sums);
    for (int lane = 0; lane < WORDS; lane++) {
        sum += lanes[lane];
    }
    for (; i < num_words; i++) {
        sum += checksum_term(data, i, (uint64_t)(first_word + i + 1) * checksum_step);
    }
    return sum;
}

/* ---- the table ---- */

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

const struct loops LOOPS_TABLE = {
    .name = LOOPS_NAME,
    .cast = OF_PAIRS(cast),
    .cast_divide = OF_PAIRS(cast_divide),
    .cast_multiply = OF_PAIRS(cast_multiply),
    .add = OF_PAIRS(add),
    .add_divided = OF_PAIRS(add_divided),
    .add_multiplied = OF_PAIRS(add_multiplied),
    .unscale = {float_unscale, double_unscale, bfloat16_unscale, float16_unscale},
    .squares = {float_squares, double_squares, bfloat16_squares, float16_squares},
    .squares_of_four = {float_squares_of_four, double_squares_of_four, bfloat16_squares_of_four,
                        float16_squares_of_four},
    .largest = {float_largest, double_largest},
    .whole_power = {float_whole_power, double_whole_power},
    .sum = {float_sum, double_sum},
    .checksum = checksum,
};
