/* kernel_norms: the norms of many contiguous tensors, in the order of addition that torch's own CPU reduction has.
 *
 *   x0 .. x7 | x8 .. x15 | ... | tail     each lane sums the squares of its column, the lanes are added from left to right,
 *   lane 0 .. lane 7                      then the tail element by element; bf16 and fp16 are converted to fp32 first
 *
 * [Note: fused tail] A compiler that may fuse does so in torch's loop over the tail, but not where it takes four elements at
 * once: there the products are rounded before they are added. A probe in the torch layer finds out which build this is. */
#include <math.h>
#include <string.h>

#include "kernels/blocks.h"
#include "kernels/convert.h"

enum {
    VECTOR_NBYTES = 32,
    TAIL_GROUP = 4,
};

/* squares: adds a multiple of the lanes. finish: adds the lanes and the tail, takes the root. largest: of the magnitudes as
 * integers, whose order is that of the numbers with NaN above infinity. */
#define DEFINE_NORM(type, integer, magnitude_mask, fused, root)                                                        \
    typedef type type##_vector __attribute__((vector_size(VECTOR_NBYTES)));                                            \
    enum { type##_lanes = VECTOR_NBYTES / sizeof(type) };                                                              \
    CLONED static void type##_squares(void *lanes, const void *input, int64_t numel) {                                 \
        type##_vector sums;                                                                                            \
        memcpy(&sums, lanes, sizeof sums);                                                                             \
        for (int64_t i = 0; i < numel; i += type##_lanes) {                                                            \
            type##_vector values;                                                                                      \
            memcpy(&values, (const type *)input + i, sizeof values);                                                   \
            sums += values * values;                                                                                   \
        }                                                                                                              \
        memcpy(lanes, &sums, sizeof sums);                                                                             \
    }                                                                                                                  \
    static void type##_finish(void *norm, const type *lanes, const type *tail, int64_t numel, bool fused_tail) {       \
        int64_t rounded = fused_tail ? numel - numel % TAIL_GROUP : numel;                                             \
        type sum = lanes[0];                                                                                           \
        for (int lane = 1; lane < type##_lanes; lane++) {                                                              \
            sum += lanes[lane];                                                                                        \
        }                                                                                                              \
        for (int64_t i = 0; i < numel; i++) {                                                                          \
            sum = i < rounded ? sum + tail[i] * tail[i] : fused(tail[i], tail[i], sum);                                \
        }                                                                                                              \
        sum = root(sum);                                                                                               \
        memcpy(norm, &sum, sizeof sum);                                                                                \
    }                                                                                                                  \
    CLONED static void type##_largest(void *largest, const void *input, int64_t numel) {                               \
        integer bits;                                                                                                  \
        memcpy(&bits, largest, sizeof bits);                                                                           \
        for (int64_t i = 0; i < numel; i++) {                                                                          \
            integer value;                                                                                             \
            memcpy(&value, (const type *)input + i, sizeof value);                                                     \
            value &= magnitude_mask;                                                                                   \
            bits = value > bits ? value : bits;                                                                        \
        }                                                                                                              \
        memcpy(largest, &bits, sizeof bits);                                                                           \
    }
DEFINE_NORM(float, uint32_t, 0x7fffffffu, fmaf, sqrtf)
DEFINE_NORM(double, uint64_t, 0x7fffffffffffffffu, fma, sqrt)

struct norms {
    char *output;
    const struct tensor_view *tensors;
    const int64_t *numels;
    bool largest; /* p is infinity */
    bool fused_tail;
};

static enum dtype arithmetic_of(enum dtype dtype) {
    return dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
}

/* Elements from `begin` on, at most a block, in the arithmetic type. */
static const void *load_block(union block *scratch, const struct tensor_view *view, int64_t begin, int64_t numel) {
    const char *input = (const char *)view->data + begin * dtype_nbytes(view->dtype);
    if (view->dtype == arithmetic_of(view->dtype)) {
        return input;
    }
    cast_block(scratch->bytes, DTYPE_FLOAT32, input, view->dtype, numel);
    return scratch->bytes;
}

static void norm_two(void *norm, const struct tensor_view *view, int64_t numel, bool fused_tail) {
    bool is_double = view->dtype == DTYPE_FLOAT64;
    int64_t num_lanes = is_double ? (int64_t)double_lanes : (int64_t)float_lanes;
    int64_t vectored = numel - numel % num_lanes;
    union {
        double as_double[double_lanes];
        float as_float[float_lanes];
    } lanes = {{0}};
    union block scratch;
    for (int64_t i = 0; i < vectored; i += BLOCK_NUMEL) {
        int64_t count = vectored - i < BLOCK_NUMEL ? vectored - i : BLOCK_NUMEL;
        const void *input = load_block(&scratch, view, i, count);
        (is_double ? double_squares : float_squares)(&lanes, input, count);
    }
    const void *tail = load_block(&scratch, view, vectored, numel - vectored);
    if (is_double) {
        double_finish(norm, lanes.as_double, tail, numel - vectored, fused_tail);
    } else {
        float_finish(norm, lanes.as_float, tail, numel - vectored, fused_tail);
    }
}

/* `norm` holds 0 on entry. */
static void norm_largest(void *norm, const struct tensor_view *view, int64_t numel) {
    union block scratch;
    for (int64_t i = 0; i < numel; i += BLOCK_NUMEL) {
        int64_t count = numel - i < BLOCK_NUMEL ? numel - i : BLOCK_NUMEL;
        const void *input = load_block(&scratch, view, i, count);
        (view->dtype == DTYPE_FLOAT64 ? double_largest : float_largest)(norm, input, count);
    }
}

/* torch takes the magnitude of a single element, whose square might overflow. */
static void norms_range(int64_t begin, int64_t end, void *context) {
    const struct norms *norms = context;
    for (int64_t i = begin; i < end; i++) {
        const struct tensor_view *view = &norms->tensors[i];
        int64_t nbytes = dtype_nbytes(arithmetic_of(view->dtype));
        void *norm = norms->output + i * nbytes;
        memset(norm, 0, (size_t)nbytes);
        if (norms->largest || norms->numels[i] == 1) {
            norm_largest(norm, view, norms->numels[i]);
        } else if (norms->numels[i] > 0) {
            norm_two(norm, view, norms->numels[i], norms->fused_tail);
        }
    }
}

/* An infinity norm over nothing is an error in torch, and so none of ours. */
static bool norm_is_supported(const struct tensor_view *view, int64_t numel, double p,
                              const struct kernel_stream *stream) {
    if (!dtype_is_known(view->dtype)) {
        return false;
    }
    return p == 2.0 ? numel <= 1 || (stream && stream->vector_nbytes == VECTOR_NBYTES) : numel > 0;
}

enum status kernel_norms(void *norms, const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                         double p, const struct kernel_stream *stream) {
    struct norms context = {norms, tensors, numels, p == (double)INFINITY, stream && stream->fused_tail};
    int64_t total = 0;
    if (p != 2.0 && !context.largest) {
        return STATUS_UNSUPPORTED;
    }
    for (int64_t i = 0; i < num_tensors; i++) {
        if (!norm_is_supported(&tensors[i], numels[i], p, stream)) {
            return STATUS_UNSUPPORTED;
        }
        if (arithmetic_of(tensors[i].dtype) != arithmetic_of(tensors[0].dtype)) {
            return STATUS_INVALID;
        }
        total += numels[i];
    }
    stream_for(stream, num_tensors, total < GRAIN_NUMEL ? num_tensors : 1, norms_range, &context);
    return STATUS_OK;
}
