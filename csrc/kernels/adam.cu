/* AdamW over many tensors, in one pass over each, by the formula of adam.c. The learning rate and the counts of steps may lie on
 * the device: the host waits for neither, and what is captured in a graph goes on counting.
 *
 * The bits are the CPU's but for the powers of the betas, which CUDA rounds its own way in fp64. */
#include "kernels/adam.h"
#include "kernels/cuda_elementwise.h"
#include "kernels/cuda_kernels.h"

enum {
    ADAM_WIDTH = 8, /* elements of a thread at once: whole vectors of any dtype */
    ADAM_CHUNK_NUMEL = THREADS * ADAM_WIDTH * 4,
};

struct adam_item {
    void *operands[ADAM_OPERANDS];
    float *step;
    int64_t numel;
    int64_t first_chunk;
    uint8_t dtypes[ADAM_OPERANDS];
    bool aligned; /* all operands, to 16 bytes */
};

enum { ADAM_ITEMS = (TABLE_NBYTES - sizeof(struct adamw_options)) / sizeof(struct adam_item) - 1 };

struct adam_table {
    struct adamw_options options;
    int64_t num_chunks;
    int32_t count;
    struct adam_item items[ADAM_ITEMS];
};

/* ---- operands of any dtype ---- */

/* Call body(type) with a value of the type of a known dtype. */
template <typename Body> __device__ inline void with_known_type(int dtype, Body body) {
    switch (dtype) {
    case DTYPE_FLOAT32:
        return body(float());
    case DTYPE_FLOAT64:
        return body(double());
    case DTYPE_BFLOAT16:
        return body(bfloat16());
    default:
        return body(float16());
    }
}

template <typename A, int COUNT>
__device__ void load_operand(A *values, const struct adam_item &item, int operand, int64_t i) {
    with_known_type(item.dtypes[operand], [&](auto type) {
        using T = decltype(type);
        T loaded[COUNT];
        load<T, COUNT>(loaded, (const T *)item.operands[operand] + i, COUNT > 1);
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            values[j] = converted<A>(loaded[j]);
        }
    });
}

template <typename A, int COUNT>
__device__ void store_operand(const A *values, const struct adam_item &item, int operand, int64_t i) {
    with_known_type(item.dtypes[operand], [&](auto type) {
        using T = decltype(type);
        T *memory = (T *)item.operands[operand] + i;
        T stored[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            stored[j] = converted<T>(values[j]);
        }
        if constexpr (COUNT > 1) {
            store_aligned<T, COUNT>(memory, stored);
        } else {
            *memory = stored[0];
        }
    });
}

/* ---- a step ---- */

__device__ inline float fused(float sum, float a, float b) {
    return fmaf(a, b, sum);
}
__device__ inline double fused(double sum, double a, double b) {
    return fma(a, b, sum);
}
__device__ inline float root(float value) {
    return sqrtf(value);
}
__device__ inline double root(double value) {
    return sqrt(value);
}

template <typename A> struct adam_coefficients {
    A sign, grad_weight, beta2, square_weight, correction, eps, decay, step_size;
};

template <typename A>
__device__ adam_coefficients<A> coefficients_of(const struct adamw_options &options, const struct adam_item &item) {
    double lr = options.lr_memory ? read_number(options.lr_memory, options.lr_dtype) : options.lr;
    struct adam_numbers numbers = adam_numbers_of(&options, lr, (double)*item.step + 1.0);
    return {(A)(numbers.maximize ? -1 : 1), (A)numbers.grad_weight, (A)numbers.beta2, (A)numbers.square_weight,
            (A)numbers.correction2_sqrt,    (A)numbers.eps,         (A)numbers.decay, (A)numbers.step_size};
}

/* COUNT elements from i on: a vector's worth of aligned operands, or one. */
template <typename A, int COUNT>
__device__ void step_elements(const struct adam_item &item, int64_t i, const adam_coefficients<A> &by) {
    bool is_small = by.grad_weight < (A)0.5;
    A weight = is_small ? by.grad_weight : by.grad_weight - 1;
    A param[COUNT], grad[COUNT], average[COUNT], square[COUNT], largest[COUNT];
    bool has_largest = item.operands[ADAM_MAX_EXP_AVG_SQ] != nullptr;
    load_operand<A, COUNT>(param, item, ADAM_PARAM, i);
    load_operand<A, COUNT>(grad, item, ADAM_GRAD, i);
    load_operand<A, COUNT>(average, item, ADAM_EXP_AVG, i);
    load_operand<A, COUNT>(square, item, ADAM_EXP_AVG_SQ, i);
    if (has_largest) {
        load_operand<A, COUNT>(largest, item, ADAM_MAX_EXP_AVG_SQ, i);
    }
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        A signed_grad = grad[j] * by.sign;
        average[j] = fused(is_small ? average[j] : signed_grad, weight, signed_grad - average[j]);
        square[j] = fused(square[j] * by.beta2, signed_grad * by.square_weight, signed_grad);
        A old = has_largest ? largest[j] : square[j];
        largest[j] = old > square[j] || old != old ? old : square[j];
        A denominator = root(largest[j]) / by.correction + by.eps;
        param[j] = param[j] * by.decay + average[j] * by.step_size / denominator;
    }
    store_operand<A, COUNT>(average, item, ADAM_EXP_AVG, i);
    store_operand<A, COUNT>(square, item, ADAM_EXP_AVG_SQ, i);
    if (has_largest) {
        store_operand<A, COUNT>(largest, item, ADAM_MAX_EXP_AVG_SQ, i);
    }
    store_operand<A, COUNT>(param, item, ADAM_PARAM, i);
}

template <typename A>
__device__ void step_chunk(const struct adam_item &item, int64_t begin, int64_t end, const adam_coefficients<A> &by) {
    int64_t vectored = item.aligned ? begin + (end - begin) / ADAM_WIDTH * ADAM_WIDTH : begin;
    for (int64_t i = begin + (int64_t)threadIdx.x * ADAM_WIDTH; i < vectored; i += THREADS * ADAM_WIDTH) {
        step_elements<A, ADAM_WIDTH>(item, i, by);
    }
    for (int64_t i = vectored + threadIdx.x; i < end; i += THREADS) {
        step_elements<A, 1>(item, i, by);
    }
}

/* Thread 0 raises the powers of a tensor for the whole block. */
template <typename A>
__global__ void __launch_bounds__(THREADS) step_tensors(const __grid_constant__ struct adam_table table) {
    __shared__ adam_coefficients<A> by;
    const struct adam_item *known = nullptr;
    for (int64_t chunk = blockIdx.x; chunk < table.num_chunks; chunk += gridDim.x) {
        const struct adam_item &item = item_of(table.items, table.count, chunk);
        if (&item != known) {
            __syncthreads(); /* the last tensor's have been read */
            if (threadIdx.x == 0) {
                by = coefficients_of<A>(table.options, item);
            }
            __syncthreads();
            known = &item;
        }
        int64_t begin = (chunk - item.first_chunk) * ADAM_CHUNK_NUMEL;
        int64_t end = begin + ADAM_CHUNK_NUMEL;
        step_chunk<A>(item, begin, end < item.numel ? end : item.numel, by);
    }
}

__global__ void __launch_bounds__(THREADS) count_steps(const __grid_constant__ struct adam_table table) {
    for (int32_t i = (int32_t)threadIdx.x; i < table.count; i += THREADS) {
        *table.items[i].step += 1.0f;
    }
}

/* ---- launches ---- */

template <typename A> static enum status enqueue(struct adam_table *table, const struct kernel_stream *stream) {
    static_assert(sizeof(struct adam_table) <= 4096, "a launch takes 4 KiB by value");
    if (table->num_chunks > 0) {
        ENQUEUE_WITH_BARRIERS((step_tensors<A>), cuda_blocks(table->num_chunks), stream, *table);
    }
    if (table->count > 0) {
        ENQUEUE(count_steps, 1, stream, *table);
    }
    table->count = 0;
    table->num_chunks = 0;
    return cuda_status(cudaGetLastError());
}

static void add_item(struct adam_table *table, const struct adam_tensor *tensor) {
    struct adam_item *item = &table->items[table->count++];
    item->step = tensor->step;
    item->numel = tensor->numel;
    item->first_chunk = table->num_chunks;
    item->aligned = true;
    for (int i = 0; i < ADAM_OPERANDS; i++) {
        item->operands[i] = tensor->operands[i].data;
        item->dtypes[i] = (uint8_t)tensor->operands[i].dtype;
        item->aligned = item->aligned && is_aligned(item->operands[i]);
    }
    table->num_chunks += (tensor->numel + ADAM_CHUNK_NUMEL - 1) / ADAM_CHUNK_NUMEL;
}

/* The tensors whose parameters are in fp64, or all others. */
template <typename A>
static enum status step_those_in(const struct adam_tensor *tensors, int64_t num_tensors,
                                 const struct adamw_options *options, const struct kernel_stream *stream) {
    struct adam_table table;
    enum status status = STATUS_OK;
    table.options = *options;
    table.count = 0;
    table.num_chunks = 0;
    for (int64_t i = 0; i < num_tensors && status == STATUS_OK; i++) {
        bool is_double = tensors[i].operands[ADAM_PARAM].dtype == DTYPE_FLOAT64;
        if (is_double == is_same_type<A, double>::value) {
            add_item(&table, &tensors[i]);
        }
        if (table.count == (int32_t)ADAM_ITEMS) {
            status = enqueue<A>(&table, stream);
        }
    }
    return status == STATUS_OK ? enqueue<A>(&table, stream) : status;
}

extern "C" enum status cuda_adamw(const struct adam_tensor *tensors, int64_t num_tensors,
                                  const struct adamw_options *options, const struct kernel_stream *stream) {
    enum status status = adam_check(tensors, num_tensors, options);
    if (status != STATUS_OK || num_tensors == 0) {
        return status;
    }
    device_guard guard(stream);
    status = guard.status == STATUS_OK ? step_those_in<float>(tensors, num_tensors, options, stream) : guard.status;
    return status == STATUS_OK ? step_those_in<double>(tensors, num_tensors, options, stream) : status;
}
