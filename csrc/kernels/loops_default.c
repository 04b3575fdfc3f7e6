/* The loops for any processor of the architecture: an element at a time, as wide as the compiler makes it. */
#include "kernels/loops_versions.h"

#include <math.h>
#include <string.h>

#include "kernels/convert.h"
#include "kernels/squares.h"

enum { FLOATS = 1, WORDS = 1 };
typedef float floats;
typedef uint64_t words;

static inline floats floats_of(float value) {
    return value;
}

static inline floats floats_load_float(const float *input) {
    return *input;
}

static inline floats floats_load_bfloat16(const bfloat16 *input) {
    return float_from_bfloat16(*input);
}

static inline floats floats_load_float16(const float16 *input) {
    return float_from_float16(*input);
}

static inline floats floats_round_bfloat16(floats value) {
    return float_from_bfloat16(bfloat16_from_float(value));
}

static inline floats floats_round_float16(floats value) {
    return float_from_float16(float16_from_float(value));
}

static inline void floats_store_float(float *output, floats value) {
    *output = value;
}

static inline void floats_store_bfloat16(bfloat16 *output, floats value) {
    *output = bfloat16_from_float(value);
}

static inline void floats_store_float16(float16 *output, floats value) {
    *output = float16_from_float(value);
}

static inline floats floats_add_product(floats sum, floats a, floats b) {
    return sum + a * b;
}

#define PREFETCH(address, for_writing) (void)(address) /* would keep the compiler from finding the vectors */

#define DEFINE_SQUARE_LOAD(type)                                                                                       \
    static inline void square_load_##type(square_floats *values, const type *input) {                                  \
        float lanes[SQUARE_NBYTES / sizeof(float)];                                                                    \
        for (size_t lane = 0; lane < SQUARE_NBYTES / sizeof(float); lane++) {                                          \
            lanes[lane] = type##_load(input[lane]);                                                                    \
        }                                                                                                              \
        memcpy(values, lanes, sizeof *values);                                                                         \
    }
DEFINE_SQUARE_LOAD(bfloat16)
DEFINE_SQUARE_LOAD(float16)

static inline words words_of(uint64_t value) {
    return value;
}

static inline words words_load(const void *input) {
    words value;
    memcpy(&value, input, sizeof value);
    return value;
}

static inline words words_multiply_halves(words value) {
    return (value & 0xffffffffu) * (value >> 32);
}

#define LOOPS_TABLE loops_default
#define LOOPS_NAME  "default"
#include "kernels/loops_body.h"
