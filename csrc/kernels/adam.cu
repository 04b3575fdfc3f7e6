/* AdamW over many tensors, in one pass over each, by the formula of adam.c. The learning rate and the counts
 * of steps may lie on the device: the host waits for neither, and what is captured in a graph goes on
 * counting.
 *
 * The bits are the CPU's but for the powers of the betas, which CUDA rounds its own way in fp64. */
#include "kernels/adam.h"
#include "kernels/cuda_elementwise.h"

enum {
    ADAM_NBYTES = 2 * VECTOR_NBYTES, /* of a thread at once, in the arithmetic's type */
    ADAM_WORDS = ADAM_NBYTES / 4,
    ADAM_CHUNK_NUMEL = THREADS * ADAM_NBYTES, /* four steps of a block in fp32 */
};

struct adam_item {
    void *operands[ADAM_OPERANDS];
    float *step;
    int16_t *master_low; /* where the kernel is one of masters */
    uint64_t stream;     /* of stochastic rounding */
    int64_t first_index;
    float *scales[ADAM_OPERANDS]; /* where the kernel is one of averages in 8 bits */
    int64_t numel;
    int64_t first_chunk;
    uint8_t dtypes[ADAM_OPERANDS];
    uint8_t nbytes[ADAM_OPERANDS]; /* of an element */
    bool aligned;                  /* all operands can be moved in whole vectors */
};

enum { ADAM_ITEMS = (TABLE_NBYTES - sizeof(struct adamw_options)) / sizeof(struct adam_item) - 1 };

struct adam_table {
    struct adamw_options options;
    int64_t num_chunks;
    int32_t count;
    struct adam_item items[ADAM_ITEMS];
};

/* What a kernel does with bf16: rounds it to nearest, has masters, or rounds it stochastically. */
enum adam_kind { ADAM_NEAREST, ADAM_MASTERS, ADAM_STOCHASTIC };

static enum adam_kind kind_of(const struct adam_tensor *tensor) {
    return tensor->master_low ? ADAM_MASTERS : tensor->is_stochastic ? ADAM_STOCHASTIC : ADAM_NEAREST;
}

/* ---- operands of any dtype ---- */

/* What a thread steps over at once in arithmetic A. */
template <typename A> struct adam_width {
    static constexpr int VALUE = ADAM_NBYTES / (int)sizeof(A);
};

/* A width of an operand of this dtype is two vectors, or one. */
template <typename A> __host__ __device__ static constexpr bool fills_vectors(size_t nbytes) {
    return nbytes <= sizeof(A) && adam_width<A>::VALUE * nbytes % VECTOR_NBYTES == 0;
}

template <typename A>
__device__ static void load_operand(unsigned *words, const struct adam_item &item, int operand, int64_t i) {
    size_t nbytes = item.nbytes[operand];
    const uint4 *memory = (const uint4 *)((const char *)item.operands[operand] + (size_t)i * nbytes);
    uint4 first = __ldcg(memory), second = {};
    if (nbytes == sizeof(A))
        second = __ldcg(memory + 1);
    const unsigned loaded[ADAM_WORDS] = {first.x,  first.y,  first.z,  first.w,
                                         second.x, second.y, second.z, second.w};
    memcpy(words, loaded, sizeof loaded);
}

template <typename A> __device__ static void convert_operand(A *values, const unsigned *words, int dtype) {
    with_known_type(dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (fills_vectors<A>(sizeof(T))) {
            constexpr int PER_VECTOR = VECTOR_NBYTES / (int)sizeof(T);
            T loaded[adam_width<A>::VALUE];
#pragma unroll
            for (int v = 0; v < adam_width<A>::VALUE / PER_VECTOR; v++)
                from_words(loaded + v * PER_VECTOR, words + v * 4);
#pragma unroll
            for (int j = 0; j < adam_width<A>::VALUE; j++)
                values[j] = converted<A>(loaded[j]);
        }
    });
}

/* Of the element at `index` in the whole. */
template <typename T, enum adam_kind kind, typename A>
__device__ static T rounded(A value, int operand, int64_t index, uint64_t key) {
    if constexpr (kind == ADAM_STOCHASTIC && is_same_type<T, bfloat16>::value) {
        uint32_t word = draw_word((uint32_t)index, (uint32_t)((uint64_t)index >> 32), key);
        return {draw_rounded(bits_of_float(value), draw_bits(word, operand))};
    } else {
        return converted<T>(value);
    }
}

template <typename A, enum adam_kind kind>
__device__ static void store_operand(const A *values, const struct adam_item &item, int operand, int64_t i,
                                     uint64_t key) {
    with_known_type(item.dtypes[operand], [&](auto type) {
        using T = decltype(type);
        if constexpr (fills_vectors<A>(sizeof(T))) {
            T stored[adam_width<A>::VALUE];
#pragma unroll
            for (int j = 0; j < adam_width<A>::VALUE; j++)
                stored[j] = rounded<T, kind>(values[j], operand, item.first_index + i + j, key);
            store_aligned<T, adam_width<A>::VALUE>((T *)item.operands[operand] + i, stored);
        }
    });
}

/* ---- masters: [Note: masters] ---- */

__device__ inline float join_master(bfloat16 param, int16_t low) {
    return float_of_bits(master_joined(param.bits, low));
}

__device__ inline void split_master(bfloat16 *param, int16_t *low, float master) {
    uint32_t kept = master_kept(bits_of_float(master));
    param->bits = master_high(kept);
    *low = master_low(kept);
}

/* An element of an operand as the arithmetic has it, the master of a parameter that has one. */
template <typename A, enum adam_kind kind>
__device__ static A load_one(const struct adam_item &item, int operand, int64_t i) {
    if constexpr (kind == ADAM_MASTERS)
        if (operand == ADAM_PARAM)
            return join_master(((const bfloat16 *)item.operands[operand])[i], item.master_low[i]);
    return with_known_type(item.dtypes[operand], [&](auto type) {
        return converted<A>(((const decltype(type) *)item.operands[operand])[i]);
    });
}

template <typename A, enum adam_kind kind>
__device__ static void store_one(A value, const struct adam_item &item, int operand, int64_t i,
                                 uint64_t key) {
    if constexpr (kind == ADAM_MASTERS)
        if (operand == ADAM_PARAM)
            return split_master((bfloat16 *)item.operands[operand] + i, item.master_low + i, value);
    with_known_type(item.dtypes[operand], [&](auto type) {
        using T = decltype(type);
        ((T *)item.operands[operand])[i] = rounded<T, kind>(value, operand, item.first_index + i, key);
    });
}

/* The width from i on, of which the parameters' words have come. */
__device__ static void join_masters(float *masters, const unsigned *params, const struct adam_item &item,
                                    int64_t i) {
    constexpr int WIDTH = adam_width<float>::VALUE;
    uint4 words = __ldcg((const uint4 *)(const void *)(item.master_low + i));
    bfloat16 highs[WIDTH];
    int16_t lows[WIDTH];
    static_assert(sizeof lows == sizeof words, "a vector of low halves is a width");
    memcpy(highs, params, sizeof highs);
    memcpy(lows, &words, sizeof lows);
#pragma unroll
    for (int j = 0; j < WIDTH; j++)
        masters[j] = join_master(highs[j], lows[j]);
}

__device__ static void split_masters(const float *masters, const struct adam_item &item, int64_t i) {
    constexpr int WIDTH = adam_width<float>::VALUE;
    bfloat16 highs[WIDTH];
    int16_t lows[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; j++)
        split_master(&highs[j], &lows[j], masters[j]);
    store_aligned<bfloat16, WIDTH>((bfloat16 *)item.operands[ADAM_PARAM] + i, highs);
    store_aligned<int16_t, WIDTH>(item.master_low + i, lows);
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
    uint64_t key; /* of stochastic rounding */
};

template <typename A, enum adam_kind kind>
__device__ adam_coefficients<A> coefficients_of(const struct adamw_options &options,
                                                const struct adam_item &item) {
    double lr = options.lr_memory ? read_number(options.lr_memory, options.lr_dtype) : options.lr;
    struct adam_numbers numbers = adam_numbers_of(&options, lr, (double)*item.step + 1.0);
    adam_coefficients<A> by = {(A)(numbers.maximize ? -1 : 1),
                               (A)numbers.grad_weight,
                               (A)numbers.beta2,
                               (A)numbers.square_weight,
                               (A)numbers.correction2_sqrt,
                               (A)numbers.eps,
                               (A)numbers.decay,
                               (A)numbers.step_size,
                               0};
    if (kind == ADAM_STOCHASTIC)
        by.key = draw_key(item.stream, (double)*item.step);
    return by;
}

/* The operands of some elements become what they are after the step; without amsgrad the last is not looked
 * at. */
template <typename A, int NUMEL>
__device__ static void step_elements(A (&values)[ADAM_OPERANDS][NUMEL], bool has_largest,
                                     const adam_coefficients<A> &by) {
    bool is_small = by.grad_weight < (A)0.5;
    A weight = is_small ? by.grad_weight : by.grad_weight - 1;
#pragma unroll
    for (int j = 0; j < NUMEL; j++) {
        A grad = values[ADAM_GRAD][j] * by.sign, average = values[ADAM_EXP_AVG][j];
        average = fused(is_small ? average : grad, weight, grad - average);
        A square = fused(values[ADAM_EXP_AVG_SQ][j] * by.beta2, grad * by.square_weight, grad);
        A old = has_largest ? values[ADAM_MAX_EXP_AVG_SQ][j] : square;
        A largest = old > square || old != old ? old : square;
        A denominator = root(largest) / by.correction + by.eps;
        values[ADAM_PARAM][j] = values[ADAM_PARAM][j] * by.decay + average * by.step_size / denominator;
        values[ADAM_EXP_AVG][j] = average;
        values[ADAM_EXP_AVG_SQ][j] = square;
        values[ADAM_MAX_EXP_AVG_SQ][j] = largest;
    }
}

__device__ static bool is_read(int operand, bool has_largest) {
    return operand != ADAM_MAX_EXP_AVG_SQ || has_largest;
}

__device__ static bool is_written(int operand, bool has_largest) {
    return operand != ADAM_GRAD && is_read(operand, has_largest);
}

/* A width of aligned operands from i on: all are on their way before the first is looked at. */
template <typename A, enum adam_kind kind>
__device__ static void step_vectors(const struct adam_item &item, int64_t i, const adam_coefficients<A> &by) {
    constexpr int WIDTH = adam_width<A>::VALUE;
    bool has_largest = item.operands[ADAM_MAX_EXP_AVG_SQ] != nullptr;
    unsigned words[ADAM_OPERANDS][ADAM_WORDS] = {};
    A values[ADAM_OPERANDS][WIDTH] = {};
#pragma unroll
    for (int of = 0; of < ADAM_OPERANDS; of++)
        if (is_read(of, has_largest))
            load_operand<A>(words[of], item, of, i);
#pragma unroll
    for (int of = 0; of < ADAM_OPERANDS; of++)
        if (kind != ADAM_MASTERS || of != ADAM_PARAM)
            convert_operand<A>(values[of], words[of], item.dtypes[of]);
    if constexpr (kind == ADAM_MASTERS)
        join_masters(values[ADAM_PARAM], words[ADAM_PARAM], item, i);
    step_elements(values, has_largest, by);
#pragma unroll
    for (int of = 0; of < ADAM_OPERANDS; of++)
        if (is_written(of, has_largest) && (kind != ADAM_MASTERS || of != ADAM_PARAM))
            store_operand<A, kind>(values[of], item, of, i, by.key);
    if constexpr (kind == ADAM_MASTERS)
        split_masters(values[ADAM_PARAM], item, i);
}

template <typename A, enum adam_kind kind>
__device__ static void step_one(const struct adam_item &item, int64_t i, const adam_coefficients<A> &by) {
    bool has_largest = item.operands[ADAM_MAX_EXP_AVG_SQ] != nullptr;
    A values[ADAM_OPERANDS][1] = {};
#pragma unroll
    for (int of = 0; of < ADAM_OPERANDS; of++)
        if (is_read(of, has_largest))
            values[of][0] = load_one<A, kind>(item, of, i);
    step_elements(values, has_largest, by);
#pragma unroll
    for (int of = 0; of < ADAM_OPERANDS; of++)
        if (is_written(of, has_largest))
            store_one<A, kind>(values[of][0], item, of, i, by.key);
}

template <typename A, enum adam_kind kind>
__device__ void step_chunk(const struct adam_item &item, int64_t begin, int64_t end,
                           const adam_coefficients<A> &by) {
    constexpr int WIDTH = adam_width<A>::VALUE;
    int64_t vectored = item.aligned ? begin + (end - begin) / WIDTH * WIDTH : begin;
    for (int64_t i = begin + (int64_t)threadIdx.x * WIDTH; i < vectored; i += THREADS * WIDTH)
        step_vectors<A, kind>(item, i, by);
    for (int64_t i = vectored + threadIdx.x; i < end; i += THREADS)
        step_one<A, kind>(item, i, by);
}

/* ---- averages in 8 bits: [Note: states in 8 bits] ---- */

enum { LANES = 32, LANE_NUMEL = STATE_BLOCK_NUMEL / LANES }; /* a warp has a block in its registers */

/* What a lane has of a block of `item`: every LANES-th element from `first` on, where there is one. */
struct lane {
    const struct adam_item &item;
    int64_t block, first;

    __device__ bool has(int64_t i) const {
        return i >= 0 && i < item.numel;
    }
    __device__ bool has_block() const {
        return block < adam_num_blocks(item.first_index, item.numel);
    }

    template <enum adam_kind kind> __device__ void load(float *values, int operand) const {
        const uint8_t *codes = (const uint8_t *)item.operands[operand];
        float scale = item.scales[operand] && has_block() ? item.scales[operand][block] : 0.0f;
#pragma unroll
        for (int j = 0; j < LANE_NUMEL; j++) {
            int64_t i = first + j * LANES;
            if (!has(i))
                values[j] = 0.0f;
            else if (item.scales[operand])
                values[j] = state_value(codes[i], adam_has_sign(operand)) * scale;
            else
                values[j] = load_one<float, kind>(item, operand, i);
        }
    }

    template <enum adam_kind kind>
    __device__ void store(const float *values, int operand, uint64_t key) const {
        uint8_t *codes = (uint8_t *)item.operands[operand];
        float scale = item.scales[operand] ? scale_of_warp(values) : 0.0f, inverse = state_inverse(scale);
#pragma unroll
        for (int j = 0; j < LANE_NUMEL; j++) {
            int64_t i = first + j * LANES;
            if (has(i) && item.scales[operand])
                codes[i] = state_code(values[j], inverse, adam_has_sign(operand));
            else if (has(i))
                store_one<float, kind>(values[j], item, operand, i, key);
        }
        if (item.scales[operand] && has_block() && threadIdx.x % LANES == 0)
            item.scales[operand][block] = scale;
    }

    __device__ static float scale_of_warp(const float *values) {
        uint32_t highest = 0;
#pragma unroll
        for (int j = 0; j < LANE_NUMEL; j++) {
            uint32_t rank = state_rank(bits_of_float(values[j]));
            highest = rank > highest ? rank : highest;
        }
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2) {
            uint32_t rank = __shfl_xor_sync(0xffffffffu, highest, other);
            highest = rank > highest ? rank : highest;
        }
        return float_of_bits(state_scale(highest));
    }
};

template <enum adam_kind kind>
__device__ static void step_blocks(const struct adam_item &item, int64_t chunk,
                                   const adam_coefficients<float> &by) {
    bool has_largest = item.operands[ADAM_MAX_EXP_AVG_SQ] != nullptr;
    constexpr int64_t BLOCKS = ADAM_CHUNK_NUMEL / STATE_BLOCK_NUMEL;
    for (int64_t i = threadIdx.x / LANES; i < BLOCKS; i += THREADS / LANES) {
        int64_t block = chunk * BLOCKS + i;
        int64_t begin = block * STATE_BLOCK_NUMEL - item.first_index % STATE_BLOCK_NUMEL;
        const struct lane own = {item, block, begin + threadIdx.x % LANES};
        float values[ADAM_OPERANDS][LANE_NUMEL] = {};
#pragma unroll
        for (int of = 0; of < ADAM_OPERANDS; of++)
            if (is_read(of, has_largest))
                own.load<kind>(values[of], of);
        step_elements(values, has_largest, by);
#pragma unroll
        for (int of = 0; of < ADAM_OPERANDS; of++)
            if (is_written(of, has_largest))
                own.store<kind>(values[of], of, by.key);
    }
}

/* Thread 0 raises the powers of a tensor for the whole block. */
template <typename A, enum adam_kind kind, bool is_coded>
__global__ void __launch_bounds__(THREADS) step_tensors(const __grid_constant__ struct adam_table table) {
    __shared__ adam_coefficients<A> by;
    const struct adam_item *known = nullptr;
    for (int64_t chunk = blockIdx.x; chunk < table.num_chunks; chunk += gridDim.x) {
        const struct adam_item &item = item_of(table.items, table.count, chunk);
        if (&item != known) {
            __syncthreads(); /* the last tensor's have been read */
            if (threadIdx.x == 0)
                by = coefficients_of<A, kind>(table.options, item);
            __syncthreads();
            known = &item;
        }
        int64_t begin = (chunk - item.first_chunk) * ADAM_CHUNK_NUMEL;
        int64_t end = begin + ADAM_CHUNK_NUMEL;
        if constexpr (is_coded)
            step_blocks<kind>(item, chunk - item.first_chunk, by);
        else
            step_chunk<A, kind>(item, begin, end < item.numel ? end : item.numel, by);
    }
}

__global__ void __launch_bounds__(THREADS) count_steps(const __grid_constant__ struct adam_table table) {
    for (int32_t i = (int32_t)threadIdx.x; i < table.count; i += THREADS)
        *table.items[i].step += 1.0f;
}

/* ---- launches ---- */

template <typename A, enum adam_kind kind, bool is_coded>
static enum status enqueue(struct adam_table *table, const struct kernel_stream *stream) {
    static_assert(sizeof(struct adam_table) <= 4096, "a launch takes 4 KiB by value");
    if (table->num_chunks > 0)
        ENQUEUE_WITH_BARRIERS((step_tensors<A, kind, is_coded>), cuda_blocks(table->num_chunks), stream,
                              *table);
    enum status status = cuda_status(cudaGetLastError());
    if (table->count > 0 && status == STATUS_OK) {
        ENQUEUE(count_steps, 1, stream, *table);
        status = cuda_status(cudaGetLastError());
    }
    table->count = 0;
    table->num_chunks = 0;
    return status;
}

template <typename A> static void add_item(struct adam_table *table, const struct adam_tensor *tensor) {
    struct adam_item *item = &table->items[table->count++];
    item->step = tensor->step;
    item->master_low = tensor->master_low;
    item->stream = tensor->stream;
    item->first_index = tensor->first_index;
    item->numel = tensor->numel;
    item->first_chunk = table->num_chunks;
    item->aligned = is_aligned(item->master_low);
    for (int i = 0; i < ADAM_OPERANDS; i++) {
        item->operands[i] = tensor->operands[i].data;
        item->dtypes[i] = (uint8_t)tensor->operands[i].dtype;
        item->nbytes[i] = (uint8_t)dtype_nbytes(tensor->operands[i].dtype);
        bool is_vectored = is_aligned(item->operands[i]) && fills_vectors<A>(item->nbytes[i]);
        item->aligned = item->aligned && (is_vectored || !item->operands[i]);
        item->scales[i] = tensor->scales[i];
    }
    int64_t before = tensor->scales[ADAM_EXP_AVG] ? tensor->first_index % STATE_BLOCK_NUMEL : 0;
    int64_t total = tensor->numel > 0 ? before + tensor->numel : 0;
    table->num_chunks += (total + ADAM_CHUNK_NUMEL - 1) / ADAM_CHUNK_NUMEL;
}

/* The tensors of that kind whose parameters are in fp64, or those of all others. */
template <typename A, enum adam_kind kind, bool is_coded>
static enum status step_those_in(const struct adam_tensor *tensors, int64_t num_tensors,
                                 const struct adamw_options *options, const struct kernel_stream *stream) {
    struct adam_table table;
    enum status status = STATUS_OK;
    table.options = *options;
    table.count = 0;
    table.num_chunks = 0;
    for (int64_t i = 0; i < num_tensors && status == STATUS_OK; i++) {
        bool is_double = tensors[i].operands[ADAM_PARAM].dtype == DTYPE_FLOAT64;
        if (is_double == is_same_type<A, double>::value && kind == kind_of(&tensors[i]) &&
            is_coded == (tensors[i].scales[ADAM_EXP_AVG] != nullptr))
            add_item<A>(&table, &tensors[i]);
        if (table.count == (int32_t)ADAM_ITEMS)
            status = enqueue<A, kind, is_coded>(&table, stream);
    }
    return status == STATUS_OK ? enqueue<A, kind, is_coded>(&table, stream) : status;
}

extern "C" enum status cuda_adamw(const struct adam_tensor *tensors, int64_t num_tensors,
                                  const struct adamw_options *options, const struct kernel_stream *stream) {
    enum status status = adam_check(tensors, num_tensors, options);
    if (status != STATUS_OK || num_tensors == 0)
        return status;
    device_guard guard(stream);
    using step = enum status (*)(const struct adam_tensor *, int64_t, const struct adamw_options *,
                                 const struct kernel_stream *);
    const step steps[] = {
        step_those_in<float, ADAM_NEAREST, false>,    step_those_in<float, ADAM_NEAREST, true>,
        step_those_in<float, ADAM_MASTERS, false>,    step_those_in<float, ADAM_MASTERS, true>,
        step_those_in<float, ADAM_STOCHASTIC, false>, step_those_in<float, ADAM_STOCHASTIC, true>,
        step_those_in<double, ADAM_NEAREST, false>,
    };
    status = guard.status;
    for (size_t i = 0; i < sizeof steps / sizeof steps[0] && status == STATUS_OK; i++)
        status = steps[i](tensors, num_tensors, options, stream);
    return status;
}
