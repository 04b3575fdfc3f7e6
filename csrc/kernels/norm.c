/* kernel_norms: the norms of many contiguous tensors, the 2-norm in the order of addition that torch's CPU reduction has.
 *
 *   x0 .. x7 | x8 .. x15 | ... | tail     each lane sums the squares of its column, the lanes are added from left to right,
 *   lane 0 .. lane 7                      then the tail element by element; bf16 and fp16 are converted to fp32 first
 *
 * [Note: fused tail] A compiler that may fuse does so in torch's loop over the tail, but not where it takes four elements at
 * once: there the products are rounded before they are added. A probe in the torch layer finds out which build this is.
 *
 * [Note: other norms] Other sums are made in an order of their own, which depends on p, the dtype and the number of elements
 * alone: blocks in the arithmetic type, their sums in fp64, chunk by chunk. torch adds element by element, slower and less exactly. */
#include <math.h>
#include <string.h>

#include "kernels/blocks.h"
#include "kernels/loops.h"

enum {
    VECTOR_NBYTES = 32,
    TAIL_GROUP = 4,
    AT_ONCE = 4,
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
    if (view->dtype == arithmetic_of(view->dtype))
        return input;
    cast_block(scratch->bytes, DTYPE_FLOAT32, input, view->dtype, numel);
    return scratch->bytes;
}

/* One tensor on the way to its 2-norm. */
struct two_norm {
    int64_t tensor;
    int64_t position; /* elements that are in the lanes already */
    int64_t vectored; /* that go there */
    union {
        double as_double[double_lanes];
        float as_float[float_lanes];
    } lanes;
};

/* The tensors of a range of which the 2-norm is made of more than one magnitude, in order. */
struct two_norms {
    const struct norms *norms;
    int64_t next;
    int64_t end;
};

static bool two_norm_begin(struct two_norm *norm, struct two_norms *range) {
    const int64_t *numels = range->norms->numels;
    while (range->next < range->end && numels[range->next] <= 1)
        range->next++;
    if (range->next == range->end)
        return false;
    enum dtype dtype = range->norms->tensors[range->next].dtype;
    int64_t num_lanes = dtype == DTYPE_FLOAT64 ? (int64_t)double_lanes : (int64_t)float_lanes;
    int64_t numel = numels[range->next];
    *norm = (struct two_norm){.tensor = range->next++, .vectored = numel - numel % num_lanes};
    return true;
}

static void two_norm_finish(const struct norms *norms, const struct two_norm *norm) {
    const struct tensor_view *view = &norms->tensors[norm->tensor];
    int64_t rest = norms->numels[norm->tensor] - norm->vectored;
    bool fused_tail = norms->stream && norms->stream->fused_tail;
    union block scratch;
    const void *tail = load_block(&scratch, view, norm->vectored, rest);
    char *output = norms->output + norm->tensor * dtype_nbytes(arithmetic_of(view->dtype));
    if (view->dtype == DTYPE_FLOAT64)
        double_finish(output, norm->lanes.as_double, tail, rest, fused_tail);
    else
        float_finish(output, norm->lanes.as_float, tail, rest, fused_tail);
}

static enum dtype dtype_of(const struct norms *norms, const struct two_norm *norm) {
    return norms->tensors[norm->tensor].dtype;
}

/* What of the input has not been added. */
static const char *input_of(const struct norms *norms, const struct two_norm *norm) {
    const struct tensor_view *view = &norms->tensors[norm->tensor];
    return (const char *)view->data + norm->position * dtype_nbytes(view->dtype);
}

/* Add as many elements of all four as the shortest of them has left. */
static void two_norms_add_four(const struct norms *norms, struct two_norm *current) {
    void *lanes[AT_ONCE];
    const void *inputs[AT_ONCE];
    int64_t count = INT64_MAX;
    for (int i = 0; i < AT_ONCE; i++) {
        int64_t left = current[i].vectored - current[i].position;
        lanes[i] = &current[i].lanes;
        inputs[i] = input_of(norms, &current[i]);
        count = left < count ? left : count;
    }
    loops_active()->squares_of_four[dtype_of(norms, current)](lanes, inputs, count);
    for (int i = 0; i < AT_ONCE; i++)
        current[i].position += count;
}

/* Add all that each of them has left. */
static void two_norms_add_each(const struct norms *norms, struct two_norm *current, int num_current) {
    for (int i = 0; i < num_current; i++) {
        struct two_norm *norm = &current[i];
        loops_active()->squares[dtype_of(norms, norm)](&norm->lanes, input_of(norms, norm),
                                                       norm->vectored - norm->position);
        norm->position = norm->vectored;
    }
}

static bool is_alike(const struct norms *norms, const struct two_norm *current) {
    for (int i = 1; i < AT_ONCE; i++)
        if (dtype_of(norms, &current[i]) != dtype_of(norms, current))
            return false;
    return true;
}

/* [Note: four at once] The additions of one norm wait for each other, those of several tensors do not. */
static void two_norms_range(const struct norms *norms, int64_t begin, int64_t end) {
    struct two_norms range = {norms, begin, end};
    struct two_norm current[AT_ONCE];
    int num_current = 0;
    for (;;) {
        while (num_current < AT_ONCE && two_norm_begin(&current[num_current], &range))
            num_current++;
        if (num_current == 0)
            return;
        if (num_current == AT_ONCE && is_alike(norms, current))
            two_norms_add_four(norms, current);
        else
            two_norms_add_each(norms, current, num_current);
        for (int i = num_current - 1; i >= 0; i--) {
            if (current[i].position == current[i].vectored) {
                two_norm_finish(norms, &current[i]);
                current[i] = current[--num_current];
            }
        }
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

static void raise_block(void *output, const void *input, bool is_double, int64_t numel, double p) {
    for (int64_t i = 0; i < numel; i++)
        if (is_double)
            ((double *)output)[i] = pow(fabs(((const double *)input)[i]), p);
        else
            ((float *)output)[i] = powf(fabsf(((const float *)input)[i]), (float)p);
}

static void sum_chunks(int64_t begin, int64_t end, void *context) {
    struct power_sum *power = context;
    const struct loops *loops = loops_active();
    enum dtype arithmetic = arithmetic_of(power->view->dtype);
    bool is_whole = power->p == floor(power->p) && power->p <= MOST_WHOLE_POWER;
    bool as_it_is = is_whole && power->view->dtype == arithmetic;
    int64_t most = as_it_is ? LEAST_CHUNK_NUMEL / 4 : BLOCK_NUMEL;
    union block loaded;
    union block raised;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        int64_t past = chunk * power->chunk_numel + power->chunk_numel;
        past = past < power->numel ? past : power->numel;
        power->sums[chunk] = 0;
        for (int64_t i = chunk * power->chunk_numel; i < past; i += most) {
            int64_t count = past - i < most ? past - i : most;
            const void *input = load_block(&loaded, power->view, i, count);
            if (!is_whole) {
                raise_block(raised.bytes, input, arithmetic == DTYPE_FLOAT64, count, power->p);
                input = raised.bytes;
            }
            power->sums[chunk] += loops->sum[arithmetic](input, count, is_whole ? (int64_t)power->p : 1);
        }
    }
}

/* See [Note: other norms]. */
static void norm_power(void *norm, const struct tensor_view *view, int64_t numel, double p,
                       const struct kernel_stream *stream) {
    struct power_sum power = {.view = view, .numel = numel, .chunk_numel = LEAST_CHUNK_NUMEL, .p = p};
    while (power.chunk_numel * MOST_CHUNKS < numel)
        power.chunk_numel *= 2;
    int64_t num_chunks = (numel + power.chunk_numel - 1) / power.chunk_numel;
    double sum = 0;
    stream_for(stream, num_chunks, 1, sum_chunks, &power);
    for (int64_t chunk = 0; chunk < num_chunks; chunk++)
        sum += power.sums[chunk];
    sum = p == 1.0 ? sum : pow(sum, 1.0 / p);
    if (view->dtype == DTYPE_FLOAT64)
        memcpy(norm, &sum, sizeof sum);
    else
        memcpy(norm, &(float){(float)sum}, sizeof(float));
}

/* torch takes the magnitude of a single element, whose power might overflow. */
static void norms_range(int64_t begin, int64_t end, void *context) {
    const struct norms *norms = context;
    for (int64_t i = begin; i < end; i++) {
        const struct tensor_view *view = &norms->tensors[i];
        int64_t nbytes = dtype_nbytes(arithmetic_of(view->dtype));
        void *norm = norms->output + i * nbytes;
        memset(norm, 0, (size_t)nbytes);
        if (norms->p == (double)INFINITY || norms->numels[i] == 1)
            norm_largest(norm, view, norms->numels[i]);
        else if (norms->p != 2.0)
            norm_power(norm, view, norms->numels[i], norms->p, norms->stream);
    }
    if (norms->p == 2.0)
        two_norms_range(norms, begin, end);
}

/* An infinity norm over nothing is an error in torch, and so none of ours. */
static bool norm_is_supported(const struct tensor_view *view, int64_t numel, double p,
                              const struct kernel_stream *stream) {
    if (!dtype_is_known(view->dtype))
        return false;
    if (p == 2.0)
        return numel <= 1 || (stream && stream->vector_nbytes == VECTOR_NBYTES);
    return p < (double)INFINITY || numel > 0;
}

enum status kernel_norms(void *norms, const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                         double p, const struct kernel_stream *stream) {
    struct norms context = {norms, tensors, numels, p, stream};
    int64_t total = 0;
    if (!(p > 0))
        return STATUS_UNSUPPORTED;
    for (int64_t i = 0; i < num_tensors; i++) {
        if (!norm_is_supported(&tensors[i], numels[i], p, stream))
            return STATUS_UNSUPPORTED;
        if (arithmetic_of(tensors[i].dtype) != arithmetic_of(tensors[0].dtype))
            return STATUS_INVALID;
        total += numels[i];
    }
    stream_for(stream, num_tensors, total < GRAIN_NUMEL ? num_tensors : 1, norms_range, &context);
    return STATUS_OK;
}
