/* One version of the loops: included once by each of loops_*.c, under its instruction set.
 *
 * The file before it defines `floats`, FLOATS elements in fp32, with load, round and store for each dtype
 * that is computed in fp32, and `words`, WORDS of 64 bits. What is left over by whole vectors goes element by
 * element, with the same result. */

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

#define EACH_WIDE_CAST(X)                                                    \
    X(float, double) X(bfloat16, double) X(float16, double)                  \
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

/* Whole vectors, and then what is left. The cache lines that come next, above all those to be written, are
 * asked for in time: from memory beyond the caches this beats memcpy. A prefetch past the end does
 * nothing. */
enum { PREFETCH_NUMEL = 512 };
#define PREFETCH(address, for_writing) __builtin_prefetch(address, for_writing)

/* Keeps the compiler from making vectors of what is too short for one, which would be most of the code. */
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

/* With either operator: cast, apply and round; apply and round, cast, add and round. */
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

/* Where fp64 takes part the compiler finds the vectors. */
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

/* ---- AdamW ---- */

/* Element `i` of every operand, or a vector from there on: `type` and the verbs after it say which, `element`
 * the dtype in memory. See [Note: as torch's]. */
#define ADAMW_STEP(element, type, spread, load, store, fused, root, larger)                                  \
    do {                                                                                                     \
        type grad = load(element, grads) * sign;                                                             \
        type average = load(element, averages);                                                              \
        type square = load(element, squares);                                                                \
        average = fused(is_small ? average : grad, spread(weight), grad - average);                          \
        square = fused(square * beta2, grad * square_weight, grad);                                          \
        store(element, averages, average);                                                                   \
        store(element, squares, square);                                                                     \
        if (maxima) {                                                                                        \
            square = larger(load(element, maxima), square);                                                  \
            store(element, maxima, square);                                                                  \
        }                                                                                                    \
        type denominator = root(square) / correction + eps;                                                  \
        store(element, params, load(element, params) * decay + average * step_size / denominator);           \
    } while (0)

/* The operands and coefficients under the names above; the weight is what the exponential average moves
 * by. */
#define ADAMW_NUMBERS(type, state_type, arithmetic)                                                          \
    type *params = operands[ADAM_PARAM];                                                                     \
    const type *grads = operands[ADAM_GRAD];                                                                 \
    state_type *averages = operands[ADAM_EXP_AVG];                                                           \
    state_type *squares = operands[ADAM_EXP_AVG_SQ];                                                         \
    state_type *maxima = operands[ADAM_MAX_EXP_AVG_SQ];                                                      \
    const arithmetic sign = numbers->maximize ? -1 : 1;                                                      \
    const arithmetic grad_weight = (arithmetic)numbers->grad_weight;                                         \
    const bool is_small = grad_weight < (arithmetic)0.5;                                                     \
    const arithmetic weight = is_small ? grad_weight : grad_weight - 1;                                      \
    const arithmetic beta2 = (arithmetic)numbers->beta2;                                                     \
    const arithmetic square_weight = (arithmetic)numbers->square_weight;                                     \
    const arithmetic correction = (arithmetic)numbers->correction2_sqrt;                                     \
    const arithmetic eps = (arithmetic)numbers->eps;                                                         \
    const arithmetic decay = (arithmetic)numbers->decay;                                                     \
    const arithmetic step_size = (arithmetic)numbers->step_size

/* A single element, by the names of a vector. */
#define SINGLE(value)                  (value)
#define SINGLE_FUSED_float(sum, a, b)  fmaf(a, b, sum)
#define SINGLE_FUSED_double(sum, a, b) fma(a, b, sum)
#define SINGLE_LARGER(a, b)            ((a) > (b) || (a) != (a) ? (a) : (b))
#define DEFINE_SINGLE(type)                                                                                  \
    static inline type##_arith single_load_##type(const type *element) {                                     \
        return type##_load(*element);                                                                        \
    }                                                                                                        \
    static inline void single_store_##type(type *element, type##_arith value) {                              \
        *element = type##_store(value);                                                                      \
    }
DEFINE_SINGLE(float)
DEFINE_SINGLE(double)
DEFINE_SINGLE(bfloat16)
DEFINE_SINGLE(float16)

#define LOAD_VECTOR(element, name)         floats_load_##element(name + i)
#define STORE_VECTOR(element, name, value) floats_store_##element(name + i, value)
#define LOAD_SINGLE(element, name)         single_load_##element(name + i)
#define STORE_SINGLE(element, name, value) single_store_##element(name + i, value)

#define VECTOR_STEP(element, load, store)                                                                    \
    ADAMW_STEP(element, floats, floats_of, load, store, floats_fused, floats_root, floats_larger)
#define SINGLE_STEP(element, load, store)                                                                    \
    ADAMW_STEP(element, float, SINGLE, load, store, SINGLE_FUSED_float, sqrtf, SINGLE_LARGER)
#define PREFETCH_OPERANDS                                                                                    \
    PREFETCH(params + i + PREFETCH_NUMEL, 1);                                                                \
    PREFETCH(grads + i + PREFETCH_NUMEL, 0);                                                                 \
    PREFETCH(averages + i + PREFETCH_NUMEL, 1);                                                              \
    PREFETCH(squares + i + PREFETCH_NUMEL, 1)

#define DEFINE_ADAMW(type)                                                                                   \
    static void type##_adamw(void *const operands[], int64_t numel, const struct adam_numbers *numbers) {    \
        ADAMW_NUMBERS(type, type, float);                                                                    \
        OVER_VECTORS {                                                                                       \
            PREFETCH_OPERANDS;                                                                               \
            VECTOR_STEP(type, LOAD_VECTOR, STORE_VECTOR);                                                    \
        }                                                                                                    \
        OVER_REST {                                                                                          \
            SINGLE_STEP(type, LOAD_SINGLE, STORE_SINGLE);                                                    \
        }                                                                                                    \
    }
DEFINE_ADAMW(float)
DEFINE_ADAMW(bfloat16)
DEFINE_ADAMW(float16)

static void double_adamw(void *const operands[], int64_t numel, const struct adam_numbers *numbers) {
    ADAMW_NUMBERS(double, double, double);
    ELEMENTWISE for (int64_t i = 0; i < numel; i++) {
        ADAMW_STEP(double, double, SINGLE, LOAD_SINGLE, STORE_SINGLE, SINGLE_FUSED_double, sqrt,
                   SINGLE_LARGER);
    }
}

/* The compiler finds the vectors. */
static void join_masters(void *masters, const void *params, const int16_t *lows, int64_t numel) {
    ELEMENTWISE for (int64_t i = 0; i < numel; i++) {
        ((float *)masters)[i] = float_of_bits(master_joined(((const bfloat16 *)params)[i].bits, lows[i]));
    }
}

static void split_masters(void *params, int16_t *lows, const void *masters, int64_t numel) {
    ELEMENTWISE for (int64_t i = 0; i < numel; i++) {
        uint32_t kept = master_kept(bits_of_float(((const float *)masters)[i]));
        ((bfloat16 *)params)[i].bits = master_high(kept);
        lows[i] = master_low(kept);
    }
}

/* ---- stochastic rounding ---- */

DEFINE_PERMUTED(float_bits, draws_permuted)

/* As draw_rounded(): what is not finite has no exponent left to be added to. */
static inline void draws_store(bfloat16 *output, floats values, float_bits drawn) {
    float_bits bits = floats_kept(values);
    bits_store_halves(output, (bits + bits_smaller(drawn, ~bits & 0x7f800000u)) >> 16);
}

#define OPERAND_params                    ADAM_PARAM
#define OPERAND_averages                  ADAM_EXP_AVG
#define OPERAND_squares                   ADAM_EXP_AVG_SQ
#define OPERAND_maxima                    ADAM_MAX_EXP_AVG_SQ
#define STORE_DRAWN(element, name, value) draws_store(name + i, value, DRAW_BITS(word, OPERAND_##name))
#define STORE_DRAWN_SINGLE(element, name, value)                                                             \
    name[i].bits = draw_rounded(bits_of_float(value), DRAW_BITS(word, OPERAND_##name))

/* draw_word() of the elements from `i` on. */
static inline float_bits draws_words(int64_t first_index, int64_t i, uint64_t key) {
    float_bits indices = {0};
    for (int lane = 0; lane < FLOATS; lane++)
        indices[lane] = (uint32_t)(first_index + lane);
    float_bits word = draws_permuted((indices + (uint32_t)i) ^ (uint32_t)key);
    return draws_permuted(word + (uint32_t)((key ^ (uint64_t)first_index) >> 32));
}

#define DRAW_SINGLE                                                                                          \
    uint32_t word = draw_word((uint32_t)(first_index + i), (uint32_t)((uint64_t)first_index >> 32), key)

/* The compiler finds the vectors. */
static void draw_bfloat16(void *output, const void *input, int numel, int64_t first_index, uint64_t key,
                          int operand) {
    const uint32_t low = (uint32_t)first_index, high = (uint32_t)((uint64_t)first_index >> 32);
    const uint32_t factor = DRAW_FACTOR(operand);
    const float *source = input;
    bfloat16 *target = output;
    ELEMENTWISE for (int i = 0; i < numel; i++) {
        uint32_t drawn = (draw_word(low + (uint32_t)i, high, key) * factor) >> 16;
        target[i].bits = draw_rounded(bits_of_float(source[i]), drawn);
    }
}

static void adamw_drawn(void *const operands[], int64_t numel, const struct adam_numbers *numbers,
                        int64_t first_index, uint64_t key) {
    ADAMW_NUMBERS(bfloat16, bfloat16, float);
    OVER_VECTORS {
        PREFETCH_OPERANDS;
        float_bits word = draws_words(first_index, i, key);
        VECTOR_STEP(bfloat16, LOAD_VECTOR, STORE_DRAWN);
    }
    OVER_REST {
        DRAW_SINGLE;
        SINGLE_STEP(bfloat16, LOAD_SINGLE, STORE_DRAWN_SINGLE);
    }
}

/* ---- states in 8 bits ---- */

/* By the last three bits of a number's exponent: its decade's cells. Those below 2 stand for zero, and those
 * from 256 on for 1. */
static const float state_widths[] = {STATE_DECADES(STATE_WIDTH) 0};
static const float state_befores[] = {STATE_DECADES(STATE_BEFORE) 0};

static const float state_lines[][8] = {
    {STATE_UPPER(STATE_CELLS)},
    {STATE_UPPER(STATE_BEFORE)},
    {STATE_LOWER(STATE_CELLS)},
    {STATE_LOWER(STATE_BEFORE)},
};

static inline floats states_load(const uint8_t *codes, float scale, bool has_sign) {
    float_bits code = bits_load_codes(codes);
    float_bits is_most = (float_bits)(code == (has_sign ? 128u : 255u));
    float_bits count = has_sign ? (code << 1 | 1u) & 255u : code;
    floats number = __builtin_convertvector((float_ints)count, floats);
    if (!has_sign)
        number += floats_of(1.5f);
    float_bits decade = (float_bits)number >> 23;
    floats magnitude = number - table_pick(table_of(state_befores), decade);
    magnitude *= table_pick(table_of(state_widths), decade); /* none of the most */
    float_bits sign = has_sign ? (code << 24) & 0x80000000u : code ^ code;
    float_bits rest = (is_most & bits_of_float(1.0f)) | (~is_most & sign);
    return (floats)((float_bits)magnitude | rest) * floats_of(scale);
}

static inline float_bits states_code(floats values, floats inverse, bool has_sign) {
    floats quotients = values * inverse;
    const float_bits most = (float_bits)floats_of(0.999f);
    float_bits magnitude = bits_smaller((float_bits)quotients & 0x7fffffffu, most);
    float_bits third = (bits_larger(magnitude >> 23, most - most + 105u) * 43u) >> 7;
    table lines[4];
    for (int line = 0; line < 4; line++)
        lines[line] = table_of(state_lines[line]);
    floats upper = (floats)magnitude * table_pick(lines[0], third) + table_pick(lines[1], third);
    floats lower = (floats)magnitude * table_pick(lines[2], third) + table_pick(lines[3], third);
    floats number = (floats)bits_smaller((float_bits)upper, (float_bits)lower);
    float_bits cell = (float_bits) __builtin_convertvector(number, float_ints);
    cell -= (float_bits)((float_ints)magnitude > (int32_t)bits_of_float(0.998f)); /* 256 then */
    const float_bits ones = most - most + 1u;
    if (!has_sign)
        return bits_larger(cell - 1u, bits_smaller((float_bits)values, ones));
    float_bits is_negative = (float_bits)(quotients < 0.0f);
    float_bits half = bits_smaller(cell >> 1, is_negative + 128u);
    return half + ((bits_smaller(half, ones) << 7) & is_negative);
}

/* Of a block's elements that have these highest ranks. */
static inline float states_scale(float_bits ranks) {
    uint32_t highest = 0;
    for (int lane = 0; lane < FLOATS; lane++)
        highest = ranks[lane] > highest ? ranks[lane] : highest;
    return float_of_bits(state_scale(highest));
}

static inline void states_store(uint8_t *codes, const float *values, float scale, bool has_sign) {
    const floats inverse = floats_of(state_inverse(scale));
    for (int i = 0; i < STATE_BLOCK_NUMEL; i += FLOATS)
        bits_store_codes(codes + i, states_code(floats_load_float(values + i), inverse, has_sign));
}

#define LOAD_CODED(element, name)            LOAD_CODED_##name(element)
#define LOAD_CODED_params(element)           LOAD_VECTOR(element, params)
#define LOAD_CODED_grads(element)            LOAD_VECTOR(element, grads)
#define LOAD_CODED_averages(element)         states_load(averages + i, *scales[ADAM_EXP_AVG], true)
#define LOAD_CODED_squares(element)          states_load(squares + i, *scales[ADAM_EXP_AVG_SQ], false)
#define LOAD_CODED_maxima(element)           states_load(maxima + i, *scales[ADAM_MAX_EXP_AVG_SQ], false)
#define STORE_CODED(element, name, value)    STORE_CODED_##name(element, value)
#define STORE_CODED_params(element, value)   STORE_VECTOR(element, params, value)
#define STORE_CODED_averages(element, value) KEEP_STATE(ADAM_EXP_AVG, value)
#define STORE_CODED_squares(element, value)  KEEP_STATE(ADAM_EXP_AVG_SQ, value)
#define STORE_CODED_maxima(element, value)   KEEP_STATE(ADAM_MAX_EXP_AVG_SQ, value)
#define KEEP_STATE(operand, value)                                                                           \
    do {                                                                                                     \
        float_bits bits = (float_bits)(value);                                                               \
        ranks[operand] = bits_larger(ranks[operand], (bits << 1 | bits >> 31) ^ 1u); /* state_rank() */      \
        floats_store_float(values[operand] + i, value);                                                      \
    } while (0)

#define DEFINE_ADAMW_CODED(type)                                                                             \
    static void type##_adamw_coded(void *const operands[], float *const scales[],                            \
                                   const struct adam_numbers *numbers) {                                     \
        ADAMW_NUMBERS(type, uint8_t, float);                                                                 \
        _Alignas(64) float values[ADAM_OPERANDS][STATE_BLOCK_NUMEL];                                         \
        float_bits ranks[ADAM_OPERANDS] = {{0}};                                                             \
        for (int i = 0; i < STATE_BLOCK_NUMEL; i += FLOATS) {                                                \
            PREFETCH_OPERANDS;                                                                               \
            VECTOR_STEP(type, LOAD_CODED, STORE_CODED);                                                      \
        }                                                                                                    \
        for (int operand = ADAM_EXP_AVG; operand < (maxima ? ADAM_OPERANDS : ADAM_MAX_EXP_AVG_SQ);           \
             operand++)                                                                                      \
            *scales[operand] = states_scale(ranks[operand]);                                                 \
        states_store(averages, values[ADAM_EXP_AVG], *scales[ADAM_EXP_AVG], true);                           \
        states_store(squares, values[ADAM_EXP_AVG_SQ], *scales[ADAM_EXP_AVG_SQ], false);                     \
        if (maxima)                                                                                          \
            states_store(maxima, values[ADAM_MAX_EXP_AVG_SQ], *scales[ADAM_MAX_EXP_AVG_SQ], false);          \
    }
DEFINE_ADAMW_CODED(float)
DEFINE_ADAMW_CODED(bfloat16)

/* ---- checksum ---- */

static uint64_t checksum(const void *data, int64_t first_word, int64_t num_words) {
    uint64_t lanes[WORDS];
    uint64_t sum = 0;
    words keys;
    words sums = words_of(0);
    int64_t i = 0;
    for (int lane = 0; lane < WORDS; lane++)
        lanes[lane] = (uint64_t)(first_word + lane + 1) * CHECKSUM_STEP;
    memcpy(&keys, lanes, sizeof keys);
    for (; i + WORDS <= num_words; i += WORDS) {
        words values = words_load((const char *)data + i * (int64_t)sizeof *lanes) ^ keys;
        sums += values + words_multiply_halves(values);
        keys += words_of(WORDS * CHECKSUM_STEP);
    }
    memcpy(lanes, &sums, sizeof sums);
    for (int lane = 0; lane < WORDS; lane++)
        sum += lanes[lane];
    for (; i < num_words; i++) {
        uint64_t word;
        memcpy(&word, (const char *)data + i * (int64_t)sizeof word, sizeof word);
        sum += checksum_term(word, first_word + i);
    }
    return sum;
}

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
    .adamw = {float_adamw, double_adamw, bfloat16_adamw, float16_adamw},
    .join_masters = join_masters,
    .split_masters = split_masters,
    .draw_bfloat16 = draw_bfloat16,
    .adamw_drawn = adamw_drawn,
    .adamw_coded = {[DTYPE_FLOAT32] = float_adamw_coded, [DTYPE_BFLOAT16] = bfloat16_adamw_coded},
    .checksum = checksum,
};
