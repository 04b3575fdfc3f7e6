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

/* What is drawn for the element at `index` in the whole. */
template <enum adam_kind kind> __device__ static uint32_t drawn_word(int64_t index, uint64_t key) {
    return kind == ADAM_STOCHASTIC ? draw_word((uint32_t)index, (uint32_t)((uint64_t)index >> 32), key) : 0;
}

template <typename T, enum adam_kind kind, typename A>
__device__ static T rounded(A value, int operand, uint32_t drawn) {
    if constexpr (kind == ADAM_STOCHASTIC && is_same_type<T, bfloat16>::value)
        return {draw_rounded(bits_of_float(value), draw_bits(drawn, operand))};
    else
        return converted<T>(value);
}

template <typename A, enum adam_kind kind>
__device__ static void store_operand(const A *values, const struct adam_item &item, int operand, int64_t i,
                                     const uint32_t *drawn) {
    with_known_type(item.dtypes[operand], [&](auto type) {
        using T = decltype(type);
        if constexpr (fills_vectors<A>(sizeof(T))) {
            T stored[adam_width<A>::VALUE];
#pragma unroll
            for (int j = 0; j < adam_width<A>::VALUE; j++)
                stored[j] = rounded<T, kind>(values[j], operand, drawn[j]);
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
                                 uint32_t drawn) {
    if constexpr (kind == ADAM_MASTERS)
        if (operand == ADAM_PARAM)
            return split_master((bfloat16 *)item.operands[operand] + i, item.master_low + i, value);
    with_known_type(item.dtypes[operand], [&](auto type) {
        using T = decltype(type);
        ((T *)item.operands[operand])[i] = rounded<T, kind>(value, operand, drawn);
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
    uint32_t drawn[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; j++)
        drawn[j] = drawn_word<kind>(item.first_index + i + j, by.key);
#pragma unroll
    for (int of = 0; of < ADAM_OPERANDS; of++)
        if (is_written(of, has_largest) && (kind != ADAM_MASTERS || of != ADAM_PARAM))
            store_operand<A, kind>(values[of], item, of, i, drawn);
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
    uint32_t drawn = drawn_word<kind>(item.first_index + i, by.key);
#pragma unroll
    for (int of = 0; of < ADAM_OPERANDS; of++)
        if (is_written(of, has_largest))
            store_one<A, kind>(values[of][0], item, of, i, drawn);
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

__device__ static constexpr bool is_average(int operand) {
    return operand >= ADAM_EXP_AVG;
}

/* What threads look up: the quotient by its code, without signs and with them, and by a third of its exponent
 * both lines that may be the lowest. */
struct state_tables {
    float quotients[2][256];
    float lines[8][4];

    __device__ void fill() {
        const float upper[][8] = {{STATE_UPPER(STATE_CELLS)}, {STATE_UPPER(STATE_BEFORE)}};
        const float lower[][8] = {{STATE_LOWER(STATE_CELLS)}, {STATE_LOWER(STATE_BEFORE)}};
        for (int i = (int)threadIdx.x; i < 256; i += THREADS) {
            quotients[0][i] = quotient_of(i, 1.5f, i == 255);
            quotients[1][i] = copysignf(quotient_of(2 * (i & 127), 1.0f, i == 128), i > 128 ? -1.0f : 1.0f);
        }
        for (int i = (int)threadIdx.x; i < 16; i += THREADS) {
            lines[i / 2][i % 2] = upper[i % 2][i / 2];
            lines[i / 2][i % 2 + 2] = lower[i % 2][i / 2];
        }
    }

    /* The middle of the cell, which is where the highest line over the cells' numbers is. */
    __device__ static float quotient_of(int count, float middle, bool is_most) {
        const float widths[] = {STATE_DECADES(STATE_WIDTH)}, befores[] = {STATE_DECADES(STATE_BEFORE)};
        float quotient = 0.0f;
        for (int i = 0; i < 7 && count > 0; i++) {
            float line = ((float)count + middle - befores[i]) * widths[i];
            quotient = line > quotient ? line : quotient;
        }
        return is_most ? 1.0f : quotient;
    }

    /* Of a value and its quotient by the scale; as the CPU's states_code(). */
    __device__ uint8_t code_of(float value, float quotient, bool has_sign) const {
        uint32_t magnitude = smaller(bits_of_float(quotient) & 0x7fffffffu, bits_of_float(0.999f));
        const float *line = lines[state_third(magnitude >> 23) & 7];
        float upper = float_of_bits(magnitude) * line[0] + line[1];
        float lower = float_of_bits(magnitude) * line[2] + line[3];
        uint32_t cell = truncated(upper < lower ? upper : lower) + (magnitude > bits_of_float(0.998f));
        if (!has_sign) {
            uint32_t least = smaller(bits_of_float(value), 1); /* of what is not zero */
            return (uint8_t)(cell - 1 > least ? cell - 1 : least);
        }
        uint32_t is_negative = quotient < 0.0f, half = smaller(cell >> 1, 128 - is_negative);
        return (uint8_t)(half + (half && is_negative ? 128 : 0));
    }

    __device__ static uint32_t smaller(uint32_t a, uint32_t b) {
        return a < b ? a : b;
    }

    /* Of a number below 2^23, by the adder: conversions are eight times slower. */
    __device__ static uint32_t truncated(float number) {
        return bits_of_float(__fadd_rz(number, 8388608.0f)) & 0x7fffffu;
    }
};

/* What a lane has of a block of `item`: neighbours from `first` on where the block is whole and aligned,
 * otherwise every LANES-th element, where there is one. */
template <enum adam_kind kind, bool is_whole> struct lane {
    const struct adam_item &item;
    const struct state_tables &tables;
    int64_t block, first;

    static constexpr int STRIDE = is_whole ? 1 : LANES;

    __device__ int64_t at(int j) const {
        return first + j * STRIDE;
    }
    __device__ bool has(int j) const {
        return is_whole || (at(j) >= 0 && at(j) < item.numel);
    }
    __device__ bool has_block() const {
        return is_whole || block < adam_num_blocks(item.first_index, item.numel);
    }

    /* Words of neighbours, or of one element each. */
    __device__ void load_codes(unsigned *words, int operand) const {
        const uint8_t *codes = (const uint8_t *)item.operands[operand];
        if constexpr (is_whole) {
            uint2 loaded = __ldcg((const uint2 *)(const void *)(codes + first));
            words[0] = loaded.x;
            words[1] = loaded.y;
        } else {
#pragma unroll
            for (int j = 0; j < LANE_NUMEL; j++)
                words[j] = has(j) ? codes[at(j)] : 0;
        }
    }
    __device__ void values_of_codes(float *values, const unsigned *words, int operand, float scale) const {
        const float *quotients = tables.quotients[adam_has_sign(operand)];
#pragma unroll
        for (int j = 0; j < LANE_NUMEL; j++)
            values[j] = quotients[is_whole ? words[j / 4] >> (j % 4 * 8) & 255 : words[j]] * scale;
    }
    __device__ void store_codes(const float *values, int operand) const {
        uint8_t *codes = (uint8_t *)item.operands[operand];
        float scale = scale_of_warp(values), inverse = state_inverse(scale);
        unsigned words[LANE_NUMEL / 4] = {};
#pragma unroll
        for (int j = 0; j < LANE_NUMEL; j++) {
            unsigned code = tables.code_of(values[j], values[j] * inverse, adam_has_sign(operand));
            words[j / 4] |= code << (j % 4 * 8);
            if (!is_whole && has(j))
                codes[at(j)] = (uint8_t)code;
        }
        if (is_whole)
            __stwb((uint2 *)(void *)(codes + first), uint2{words[0], words[1]});
        if (has_block() && threadIdx.x % LANES == 0)
            item.scales[operand][block] = scale;
    }

    __device__ void load(float (&values)[ADAM_OPERANDS][LANE_NUMEL], bool has_largest) const {
        unsigned words[ADAM_OPERANDS][LANE_NUMEL] = {};
        float scales[ADAM_OPERANDS] = {};
#pragma unroll
        for (int of = 0; of < ADAM_OPERANDS; of++) {
            if (is_average(of) && is_read(of, has_largest)) {
                load_codes(words[of], of);
                scales[of] = has_block() ? item.scales[of][block] : 0.0f;
            } else if (!is_average(of) && is_whole) {
                load_operand<float>(words[of], item, of, first);
            }
        }
#pragma unroll
        for (int of = 0; of < ADAM_OPERANDS; of++) {
            if (is_average(of)) {
                values_of_codes(values[of], words[of], of, scales[of]);
            } else if (!is_whole) {
#pragma unroll
                for (int j = 0; j < LANE_NUMEL; j++)
                    values[of][j] = has(j) ? load_one<float, kind>(item, of, at(j)) : 0.0f;
            } else if (kind == ADAM_MASTERS && of == ADAM_PARAM) {
                join_masters(values[of], words[of], item, first);
            } else {
                convert_operand<float>(values[of], words[of], item.dtypes[of]);
            }
        }
    }

    __device__ void store(const float (&values)[ADAM_OPERANDS][LANE_NUMEL], bool has_largest,
                          uint64_t key) const {
        uint32_t drawn[LANE_NUMEL];
#pragma unroll
        for (int j = 0; j < LANE_NUMEL; j++)
            drawn[j] = drawn_word<kind>(item.first_index + at(j), key);
        if constexpr (is_whole && kind == ADAM_MASTERS)
            split_masters(values[ADAM_PARAM], item, first);
        else if constexpr (is_whole)
            store_operand<float, kind>(values[ADAM_PARAM], item, ADAM_PARAM, first, drawn);
#pragma unroll
        for (int j = 0; j < LANE_NUMEL && !is_whole; j++)
            if (has(j))
                store_one<float, kind>(values[ADAM_PARAM][j], item, ADAM_PARAM, at(j), drawn[j]);
#pragma unroll
        for (int of = ADAM_EXP_AVG; of < ADAM_OPERANDS; of++)
            if (is_read(of, has_largest))
                store_codes(values[of], of);
    }

    __device__ void step(const adam_coefficients<float> &by) const {
        bool has_largest = item.operands[ADAM_MAX_EXP_AVG_SQ] != nullptr;
        float values[ADAM_OPERANDS][LANE_NUMEL];
        load(values, has_largest);
        step_elements(values, has_largest, by);
        store(values, has_largest, by.key);
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
                                   const adam_coefficients<float> &by, const struct state_tables &tables) {
    constexpr int64_t BLOCKS = ADAM_CHUNK_NUMEL / STATE_BLOCK_NUMEL;
    static_assert(LANE_NUMEL == adam_width<float>::VALUE, "a lane has a width of a block");
    int64_t before = item.first_index % STATE_BLOCK_NUMEL, place = threadIdx.x % LANES;
    for (int64_t i = threadIdx.x / LANES; i < BLOCKS; i += THREADS / LANES) {
        int64_t block = chunk * BLOCKS + i, begin = block * STATE_BLOCK_NUMEL - before;
        bool is_whole = begin >= 0 && begin + STATE_BLOCK_NUMEL <= item.numel;
        if (item.aligned && before % LANE_NUMEL == 0 && is_whole)
            lane<kind, true>{item, tables, block, begin + place * LANE_NUMEL}.step(by);
        else
            lane<kind, false>{item, tables, block, begin + place}.step(by);
    }
}

/* Thread 0 raises the powers of a tensor for the whole block. */
template <typename A, enum adam_kind kind, bool is_coded>
__global__ void __launch_bounds__(THREADS) step_tensors(const __grid_constant__ struct adam_table table) {
    __shared__ adam_coefficients<A> by;
    __shared__ struct state_tables tables;
    if constexpr (is_coded)
        tables.fill();
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
            step_blocks<kind>(item, chunk - item.first_chunk, by, tables);
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
        bool is_vectored =
            is_aligned(item->operands[i]) && (tensor->scales[i] || fills_vectors<A>(item->nbytes[i]));
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
