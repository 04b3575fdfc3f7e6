/* kernel_norms: the norms of many contiguous tensors, the 2-norm in the order of addition that torch's CPU reduction has.
 *
 *   x0 .. x7 | x8 .. x15 | ... | tail     each lane sums the squares of its column, the lanes are added from left to right,
 *   lane 0 .. lane 7                      then the tail element by element; bf16 and fp16 are converted to fp32 first
 *
 * [Note: fused tail] A compiler that may fuse does so in torch's loop over the tail, but not where it takes four elements at
 * once: there the products are rounded before they are added. A probe in the torch layer finds out which build this is.
 *
 * [Note: other norms] Other sums are made in an order of their own, which depends on the number of elements alone: blocks in
 * the arithmetic type, their sums in fp64, chunk by chunk. torch adds element by element, slower and less exactly. */
#include <math.h>
#include <string.h>

#include "kernels/blocks.h"
#include "kernels/loops.h"

enum {
    VECTOR_NBYTES = 32,
    TAIL_GROUP = 4,
    MOST_WHOLE_POWER = 8, /* powers up to here are products */
};

#define DEFINE_FINISH(type, fused, root)                                                                               \
    enum { type##_lanes = VECTOR_NBYTES / sizeof(type) };                                                              \
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
    }
DEFINE_FINISH(float, fmaf, sqrtf)
DEFINE_FINISH(double, fma, sqrt)

struct norms {
    char *output;
    const struct tensor_view *tensors;
    const int64_t *numels;
    double p;
    const struct kernel_stream *stream;
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
        loops_active()->squares[arithmetic_of(view->dtype)](&lanes, input, count);
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
        loops_active()->largest[arithmetic_of(view->dtype)](norm, input, count);
    }
}

/* The chunks that the sum of powers of one tensor is made of: at most so many, each at least so long. */
enum { MOST_CHUNKS = 64, LEAST_CHUNK_NUMEL = GRAIN_NUMEL };

struct power_sum {
    const struct tensor_view *view;
    int64_t numel;
    int64_t chunk_numel;
    double p;
    double sums[MOST_CHUNKS];
};

/* Magnitudes to the p-th power, in place. */
static void raise_block(void *magnitudes, bool is_double, int64_t numel, double p) {
    if (p == floor(p) && p <= MOST_WHOLE_POWER) {
        loops_active()->whole_power[is_double](magnitudes, numel, (int64_t)p);
        return;
    }
    for (int64_t i = 0; i < numel; i++) {
        if (is_double) {
            ((double *)magnitudes)[i] = pow(((double *)magnitudes)[i], p);
        } else {
            ((float *)magnitudes)[i] = powf(((float *)magnitudes)[i], (float)p);
        }
    }
}

static void sum_chunks(int64_t begin, int64_t end, void *context) {
    struct power_sum *power = context;
    const struct loops *loops = loops_active();
    enum dtype arithmetic = arithmetic_of(power->view->dtype);
    union block loaded;
    union block raised;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        int64_t past = chunk * power->chunk_numel + power->chunk_numel;
        past = past < power->numel ? past : power->numel;
        power->sums[chunk] = 0;
        for (int64_t i = chunk * power->chunk_numel; i < past; i += BLOCK_NUMEL) {
            int64_t count = past - i < BLOCK_NUMEL ? past - i : BLOCK_NUMEL;
            loops->magnitudes[arithmetic](raised.bytes, load_block(&loaded, power->view, i, count), count);
            if (power->p != 1.0) {
                raise_block(raised.bytes, arithmetic == DTYPE_FLOAT64, count, power->p);
            }
            power->sums[chunk] += loops->sum[arithmetic](raised.bytes, count);
        }
    }
}

/* See [Note: other norms]. */
static void norm_power(void *norm, const struct tensor_view *view, int64_t numel, double p,
                       const struct kernel_stream *stream) {
    struct power_sum power = {.view = view, .numel = numel, .chunk_numel = LEAST_CHUNK_NUMEL, .p = p};
    while (power.chunk_numel * MOST_CHUNKS < numel) {
        power.chunk_numel *= 2;
    }
    int64_t num_chunks = (numel + power.chunk_numel - 1) / power.chunk_numel;
    double sum = 0;
    stream_for(stream, num_chunks, 1, sum_chunks, &power);
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        sum += power.sums[chunk];
    }
    sum = p == 1.0 ? sum : pow(sum, 1.0 / p);
    if (view->dtype == DTYPE_FLOAT64) {
        memcpy(norm, &sum, sizeof sum);
    } else {
        memcpy(norm, &(float){(float)sum}, sizeof(float));
    }
}

/* torch takes the magnitude of a single element, whose power might overflow. */
static void norms_range(int64_t begin, int64_t end, void *context) {
    const struct norms *norms = context;
    for (int64_t i = begin; i < end; i++) {
        const struct tensor_view *view = &norms->tensors[i];
        int64_t nbytes = dtype_nbytes(arithmetic_of(view->dtype));
        void *norm = norms->output + i * nbytes;
        memset(norm, 0, (size_t)nbytes);
        if (norms->p == (double)INFINITY || norms->numels[i] == 1) {
            norm_largest(norm, view, norms->numels[i]);
        } else if (norms->p == 2.0 && norms->numels[i] > 0) {
            norm_two(norm, view, norms->numels[i], norms->stream && norms->stream->fused_tail);
        } else {
            norm_power(norm, view, norms->numels[i], norms->p, norms->stream);
        }
    }
}

/* An infinity norm over nothing is an error in torch, and so none of ours. */
static bool norm_is_supported(const struct tensor_view *view, int64_t numel, double p,
                              const struct kernel_stream *stream) {
    if (!dtype_is_known(view->dtype)) {
        return false;
    }
    if (p == 2.0) {
        return numel <= 1 || (stream && stream->vector_nbytes == VECTOR_NBYTES);
    }
    return p < (double)INFINITY || numel > 0;
}

enum status kernel_norms(void *norms, const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                         double p, const struct kernel_stream *stream) {
    struct norms context = {norms, tensors, numels, p, stream};
    int64_t total = 0;
    if (!(p > 0)) {
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
