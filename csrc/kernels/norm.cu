/* The norms of many contiguous tensors, with the same bits in every run and on every device.
 *
 *   tensor -> chunks of CHUNK_NUMEL -> a partial sum each, in scratch -> one block per tensor adds them up and takes the root
 *
 * The order of addition depends on the element's place in its tensor alone: not on the grid, the alignment or the timing. */
#include <math.h>

#include "kernels/cuda_elementwise.h"
#include "kernels/cuda_join.h"
#include "kernels/cuda_kernels.h"

enum {
    CHUNK_NUMEL = 8 * 1024, /* so few that 16 MiB have work for every processor */
    VECTORS_AT_ONCE = 4,    /* of a thread: they hide the latency */
};

/* One tensor of a launch, and where its partial sums lie in scratch. */
struct norm_input {
    const void *input;
    int64_t numel;
    int64_t first_chunk; /* in the launch */
};

enum { NORM_INPUTS = TABLE_NBYTES / sizeof(struct norm_input) - 2 };

struct norm_table {
    void *norms;   /* of the table's first tensor */
    void *partial; /* of the table's first chunk */
    int64_t num_chunks;
    int32_t count;
    struct norm_input inputs[NORM_INPUTS];
};

/* ---- what is summed: |x|^p for each element, added; or the largest magnitude ---- */

__device__ inline float power(float base, float exponent) {
    return powf(base, exponent);
}
__device__ inline double power(double base, double exponent) {
    return pow(base, exponent);
}
__device__ inline float magnitude_of(float value) {
    return fabsf(value);
}
__device__ inline double magnitude_of(double value) {
    return fabs(value);
}
__device__ inline float root_of(float value) {
    return sqrtf(value);
}
__device__ inline double root_of(double value) {
    return sqrt(value);
}

template <typename A> struct sum_of_squares {
    __device__ A term(A value) const {
        return value * value;
    }
    __device__ A joined(A left, A right) const {
        return left + right;
    }
    __device__ A finished(A sum) const {
        return root_of(sum);
    }
};

template <typename A> struct sum_of_magnitudes {
    __device__ A term(A value) const {
        return magnitude_of(value);
    }
    __device__ A joined(A left, A right) const {
        return left + right;
    }
    __device__ A finished(A sum) const {
        return sum;
    }
};

template <typename A> struct sum_of_powers {
    A p;
    __device__ A term(A value) const {
        return power(magnitude_of(value), p);
    }
    __device__ A joined(A left, A right) const {
        return left + right;
    }
    __device__ A finished(A sum) const {
        return power(sum, (A)1 / p);
    }
};

/* NaN is above everything. */
template <typename A> struct largest_magnitude {
    __device__ A term(A value) const {
        return magnitude_of(value);
    }
    __device__ A joined(A left, A right) const {
        return left > right || left != left ? left : right;
    }
    __device__ A finished(A largest) const {
        return largest;
    }
};

/* ---- the kernels ---- */

/* Vectors' worths of elements that lie THREADS apart, added one after the other; every load is issued before the first sum. */
template <typename In, typename A, typename Kind>
__device__ A join_vectors(A result, const In *input, bool aligned, const Kind &kind) {
    constexpr int WIDTH = VECTOR_NBYTES / sizeof(In);
    In values[VECTORS_AT_ONCE][WIDTH];
#pragma unroll
    for (int v = 0; v < VECTORS_AT_ONCE; v++)
        load<In, WIDTH>(values[v], input + (int64_t)v * THREADS * WIDTH, aligned);
#pragma unroll
    for (int v = 0; v < VECTORS_AT_ONCE; v++) {
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
            result = kind.joined(result, kind.term((A)element<In>::load(values[v][j])));
    }
    return result;
}

/* One thread's share of a chunk: every THREADS-th vector's worth of elements, by place and not by address. */
template <typename In, typename A, typename Kind>
__device__ A join_chunk(const In *input, int64_t begin, int64_t end, const Kind &kind) {
    constexpr int WIDTH = VECTOR_NBYTES / sizeof(In);
    constexpr int64_t AT_ONCE = (int64_t)VECTORS_AT_ONCE * THREADS * WIDTH;
    bool aligned = is_aligned(input);
    A result = 0;
    for (; end - begin >= AT_ONCE; begin += AT_ONCE)
        result = join_vectors<In, A>(result, input + begin + (int64_t)threadIdx.x * WIDTH, aligned, kind);
    for (int64_t i = begin + (int64_t)threadIdx.x * WIDTH; i < end; i += THREADS * WIDTH)
        for (int64_t j = i; j < end && j < i + WIDTH; j++)
            result = kind.joined(result, kind.term((A)element<In>::load(input[j])));
    return result;
}

template <typename In, typename A, typename Kind>
__global__ void __launch_bounds__(THREADS) partial_norms(const __grid_constant__ struct norm_table table, Kind kind) {
    for (int64_t chunk = blockIdx.x; chunk < table.num_chunks; chunk += gridDim.x) {
        const struct norm_input &of = item_of(table.inputs, table.count, chunk);
        int64_t begin = (chunk - of.first_chunk) * CHUNK_NUMEL;
        int64_t end = begin + CHUNK_NUMEL < of.numel ? begin + CHUNK_NUMEL : of.numel;
        A joined = join_block(join_chunk<In, A>((const In *)of.input, begin, end, kind), kind);
        if (threadIdx.x == 0)
            ((A *)table.partial)[chunk] = joined;
    }
}

/* Block i finishes tensor i; nothing is rooted where a single element's magnitude is exact. */
template <typename In, typename A, typename Kind>
__global__ void __launch_bounds__(THREADS) finish_norms(const __grid_constant__ struct norm_table table, Kind kind) {
    for (int32_t i = (int32_t)blockIdx.x; i < table.count; i += (int32_t)gridDim.x) {
        const struct norm_input &of = table.inputs[i];
        int64_t chunks = (of.numel + CHUNK_NUMEL - 1) / CHUNK_NUMEL;
        A result = 0;
        for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += THREADS)
            result = kind.joined(result, ((const A *)table.partial)[of.first_chunk + chunk]);
        result = join_block(result, kind);
        if (threadIdx.x == 0) {
            bool is_single = of.numel == 1;
            ((A *)table.norms)[i] =
                is_single ? magnitude_of((A)element<In>::load(*(const In *)of.input)) : kind.finished(result);
        }
    }
}

/* ---- launches ---- */

struct norms {
    char *norms;
    const struct tensor_view *tensors;
    const int64_t *numels;
    int64_t num_tensors;
    char *scratch;
    const struct kernel_stream *stream;
};

static int64_t chunks_in(int64_t numel) {
    return (numel + CHUNK_NUMEL - 1) / CHUNK_NUMEL;
}

/* As many tensors of one dtype as a table holds, from `begin` on; returns where the next table begins. */
static int64_t fill_table(struct norm_table *table, const struct norms *norms, int64_t begin, int64_t nbytes,
                          int64_t *scratch_used) {
    int64_t i = begin;
    table->norms = norms->norms + begin * nbytes;
    table->partial = norms->scratch + *scratch_used * nbytes;
    table->count = 0;
    table->num_chunks = 0;
    for (; i < norms->num_tensors && table->count < (int32_t)NORM_INPUTS; i++) {
        if (norms->tensors[i].dtype != norms->tensors[begin].dtype)
            break;
        table->inputs[table->count++] = {norms->tensors[i].data, norms->numels[i], table->num_chunks};
        table->num_chunks += chunks_in(norms->numels[i]);
    }
    *scratch_used += table->num_chunks;
    return i;
}

template <typename In, typename A, typename Kind>
static enum status enqueue(const struct norm_table &table, const Kind &kind, const struct kernel_stream *stream) {
    static_assert(sizeof(struct norm_table) + sizeof(Kind) <= 4096, "a launch takes 4 KiB by value");
    if (table.num_chunks > 0)
        ENQUEUE_WITH_BARRIERS((partial_norms<In, A, Kind>), cuda_blocks(table.num_chunks), stream, table, kind);
    enum status status = cuda_status(cudaGetLastError());
    if (status == STATUS_OK && table.count > 0) {
        ENQUEUE_WITH_BARRIERS((finish_norms<In, A, Kind>), table.count, stream, table, kind);
        status = cuda_status(cudaGetLastError());
    }
    return status;
}

template <typename In>
static enum status enqueue_kind(const struct norm_table &table, double p, const struct kernel_stream *stream) {
    using A = arithmetic_of<In>;
    if (p == 2.0)
        return enqueue<In, A>(table, sum_of_squares<A>(), stream);
    if (p == 1.0)
        return enqueue<In, A>(table, sum_of_magnitudes<A>(), stream);
    if (p == (double)INFINITY)
        return enqueue<In, A>(table, largest_magnitude<A>(), stream);
    return enqueue<In, A>(table, sum_of_powers<A>{(A)p}, stream);
}

static enum status check(const struct norms *norms, double p) {
    if (!(p > 0))
        return STATUS_UNSUPPORTED;
    for (int64_t i = 0; i < norms->num_tensors; i++) {
        if ((unsigned)norms->tensors[i].dtype >= DTYPE_COUNT)
            return STATUS_UNSUPPORTED;
        if (p == (double)INFINITY && norms->numels[i] <= 0)
            return STATUS_UNSUPPORTED; /* over nothing: an error in torch */
        if ((norms->tensors[i].dtype == DTYPE_FLOAT64) != (norms->tensors[0].dtype == DTYPE_FLOAT64))
            return STATUS_INVALID;
    }
    return STATUS_OK;
}

extern "C" int64_t cuda_norms_scratch_nbytes(const int64_t *numels, int64_t num_tensors) {
    int64_t chunks = 0;
    for (int64_t i = 0; i < num_tensors; i++)
        chunks += chunks_in(numels[i]);
    return chunks * (int64_t)sizeof(double);
}

extern "C" enum status cuda_norms(void *output, const struct tensor_view *tensors, const int64_t *numels,
                                  int64_t num_tensors, double p, void *scratch, const struct kernel_stream *stream) {
    struct norms norms = {(char *)output, tensors, numels, num_tensors, (char *)scratch, stream};
    struct norm_table table;
    int64_t scratch_used = 0;
    enum status status = check(&norms, p);
    device_guard guard(stream);
    status = status == STATUS_OK ? guard.status : status;
    for (int64_t next = 0; next < num_tensors && status == STATUS_OK;) {
        enum dtype dtype = tensors[next].dtype;
        int64_t nbytes = dtype == DTYPE_FLOAT64 ? (int64_t)sizeof(double) : (int64_t)sizeof(float);
        next = fill_table(&table, &norms, next, nbytes, &scratch_used);
        status = with_type(dtype, [&](auto type) { return enqueue_kind<decltype(type)>(table, p, stream); });
    }
    return status;
}
