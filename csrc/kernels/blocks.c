/* The loops behind every elementwise kernel: cast, divide, add and scale of contiguous elements, one clone per instruction set. */
#include "kernels/blocks.h"

#include <stdbool.h>

#include "kernels/convert.h"

/* clang-format off */
/*             enumerator       C type    arithmetic  load to arithmetic       store from arithmetic */
#define EACH_DTYPE(X)                                                                                  \
    X(DTYPE_FLOAT32,  float,    float,  float_from_float,    float_from_float)                         \
    X(DTYPE_FLOAT64,  double,   double, ,                    )                                         \
    X(DTYPE_BFLOAT16, bfloat16, float,  float_from_bfloat16, bfloat16_from_float)                      \
    X(DTYPE_FLOAT16,  float16,  float,  float_from_float16,  float16_from_float)

#define EACH_CAST(X)                                                      \
    X(float, double, float_from_double)                                   \
    X(float, bfloat16, float_from_bfloat16)                               \
    X(float, float16, float_from_float16)                                 \
    X(double, float, double_from_float)                                   \
    X(double, bfloat16, float_from_bfloat16)                              \
    X(double, float16, float_from_float16)                                \
    X(bfloat16, float, bfloat16_from_float)                               \
    X(bfloat16, double, bfloat16_from_double)                             \
    X(bfloat16, float16, bfloat16_from_float16)                           \
    X(float16, float, float16_from_float)                                 \
    X(float16, double, float16_from_double)                               \
    X(float16, bfloat16, float16_from_bfloat16)
/* clang-format on */

static inline bfloat16 bfloat16_from_double(double value) {
    return bfloat16_from_float((float)value);
}
static inline bfloat16 bfloat16_from_float16(float16 value) {
    return bfloat16_from_float(float_from_float16(value));
}
static inline float16 float16_from_double(double value) {
    return float16_from_float((float)value);
}
static inline float16 float16_from_bfloat16(bfloat16 value) {
    return float16_from_float(float_from_bfloat16(value));
}

#define DEFINE_CAST(to, from, convert)                                                                                 \
    CLONED static void to##_cast_##from(void *output_bytes, const void *input_bytes, int64_t numel) {                  \
        to *restrict output = output_bytes;                                                                            \
        const from *restrict input = input_bytes;                                                                      \
        for (int64_t i = 0; i < numel; i++) {                                                                          \
            output[i] = convert(input[i]);                                                                             \
        }                                                                                                              \
    }
EACH_CAST(DEFINE_CAST)

/* The input may be the output: no restrict, and the same index on both sides. */
#define DEFINE_ARITHMETIC(dtype, type, arith, load, store)                                                             \
    CLONED static void type##_divide(type *output, const type *input, int64_t numel, arith divisor) {                  \
        for (int64_t i = 0; i < numel; i++) {                                                                          \
            output[i] = store(load(input[i]) / divisor);                                                               \
        }                                                                                                              \
    }                                                                                                                  \
    CLONED static void type##_add(type *restrict output, const type *restrict input, int64_t numel) {                  \
        for (int64_t i = 0; i < numel; i++) {                                                                          \
            output[i] = store(load(output[i]) + load(input[i]));                                                       \
        }                                                                                                              \
    }                                                                                                                  \
    CLONED static void type##_scale(type *output, int64_t numel, arith coefficient) {                                  \
        for (int64_t i = 0; i < numel; i++) {                                                                          \
            output[i] = store(load(output[i]) * coefficient);                                                          \
        }                                                                                                              \
    }
EACH_DTYPE(DEFINE_ARITHMETIC)

typedef void (*cast_loop)(void *output, const void *input, int64_t numel);

static const cast_loop cast_loops[DTYPE_COUNT][DTYPE_COUNT] = {
    [DTYPE_FLOAT32] = {[DTYPE_FLOAT64] = float_cast_double,
                       [DTYPE_BFLOAT16] = float_cast_bfloat16,
                       [DTYPE_FLOAT16] = float_cast_float16},
    [DTYPE_FLOAT64] = {[DTYPE_FLOAT32] = double_cast_float,
                       [DTYPE_BFLOAT16] = double_cast_bfloat16,
                       [DTYPE_FLOAT16] = double_cast_float16},
    [DTYPE_BFLOAT16] = {[DTYPE_FLOAT32] = bfloat16_cast_float,
                        [DTYPE_FLOAT64] = bfloat16_cast_double,
                        [DTYPE_FLOAT16] = bfloat16_cast_float16},
    [DTYPE_FLOAT16] = {[DTYPE_FLOAT32] = float16_cast_float,
                       [DTYPE_FLOAT64] = float16_cast_double,
                       [DTYPE_BFLOAT16] = float16_cast_bfloat16},
};

void cast_block(void *output, enum dtype output_dtype, const void *input, enum dtype input_dtype, int64_t numel) {
    if (numel <= 0 || (output == input && output_dtype == input_dtype)) {
        return;
    }
    if (output_dtype == input_dtype) {
        memcpy(output, input, (size_t)(numel * dtype_nbytes(output_dtype)));
        return;
    }
    cast_loops[output_dtype][input_dtype](output, input, numel);
}

#define CASE_DIVIDE(dtype, type, arith, load, store)                                                                   \
    case dtype:                                                                                                        \
        type##_divide(output, input, numel, (arith)divisor);                                                           \
        break;
void divide_block(void *output, const void *input, enum dtype dtype, int64_t numel, double divisor) {
    switch (dtype) {
        EACH_DTYPE(CASE_DIVIDE)
    default:
        break;
    }
}

#define CASE_ADD(dtype, type, arith, load, store)                                                                      \
    case dtype:                                                                                                        \
        type##_add(accumulator, input, numel);                                                                         \
        break;
void add_block(void *accumulator, const void *input, enum dtype dtype, int64_t numel) {
    switch (dtype) {
        EACH_DTYPE(CASE_ADD)
    default:
        break;
    }
}

/* The coefficient is first rounded to the dtype, as a 0-dim tensor of it would be. */
#define CASE_SCALE(dtype, type, arith, load, store)                                                                    \
    case dtype:                                                                                                        \
        type##_scale(tensor, numel, load(store((arith)coefficient)));                                                  \
        break;
void scale_block(void *tensor, enum dtype dtype, int64_t numel, double coefficient) {
    switch (dtype) {
        EACH_DTYPE(CASE_SCALE)
    default:
        break;
    }
}

int64_t dtype_nbytes(enum dtype dtype) {
    static const int64_t nbytes[DTYPE_COUNT] = {
        [DTYPE_FLOAT32] = 4, [DTYPE_FLOAT64] = 8, [DTYPE_BFLOAT16] = 2, [DTYPE_FLOAT16] = 2};
    return dtype_is_known(dtype) ? nbytes[dtype] : 0;
}
